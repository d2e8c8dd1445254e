"""One HTTP client for one backend: bytes in, bytes out, every failure named once.

Settings follow style-and-reliability.md 2.5: nothing is decompressed, redirected, remembered in a
cookie jar or taken from the environment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from proxy.errors import BackendBrokenError, BackendTimeoutError, BackendUnreachableError

Headers = list[tuple[str, str]]

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
OWNER = "x-slotkeeper-owner"  # of a request, for drivers; the proxy's own, never on the wire
WHOLE = "x-slotkeeper-whole"  # likewise: its client gets nothing before the answer's end
# Expect: answered where it arrives. X-Conversation-Id: makes llama-server go on generating after
# the connection is closed, so nothing could be cancelled (llama-server.md 1.13).
NOT_FORWARDED = frozenset({"host", "content-length", "expect", "x-conversation-id", OWNER, WHOLE})
# aiohttp adds these when the client sent none; a proxy must not invent them.
NOT_INVENTED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# llama-server closes an idle connection after 5 s. Dropping ours well before leaves no moment in
# which a POST meets a dying connection and nobody knows whether it was processed, so a POST is
# never sent twice (aiohttp repeats idempotent methods itself, once). A fresh connection for each
# request would be as safe, but measured 0.6 ms more on loopback (0.5 against 1.1 ms, /tokenize).
KEEPALIVE_SECONDS = 3.0


def forward_headers(headers: Iterable[tuple[str, str]], drop: Collection[str] = ()) -> Headers:
    """The client's headers that go on to the backend, order and repetitions kept.

    Taken out: hop-by-hop headers and those ``Connection`` names (RFC 9110 7.6.1),
    ``Content-Length`` (set anew from the body), ``NOT_FORWARDED``, and the names in ``drop``.
    """
    return _without(headers, NOT_FORWARDED.union(name.lower() for name in drop))


def answer_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """The backend's end-to-end headers, ``Content-Length`` and ``Content-Encoding`` included.

    Whoever sends on another body than the one received must drop ``Content-Length``.
    """
    return _without(headers, frozenset())


def _without(headers: Iterable[tuple[str, str]], drop: frozenset[str]) -> Headers:
    pairs = list(headers)
    named = {
        token.strip().lower()
        for name, value in pairs
        if name.lower() == "connection"
        for token in value.split(",")
    }
    drop = drop | HOP_BY_HOP | named
    return [(name, value) for name, value in pairs if name.lower() not in drop]


class Answer:
    """An ``Upstream`` (see base.py) over an aiohttp response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        """``response``: its headers have arrived."""
        self._response = response
        self.status: int = response.status
        self.headers: Headers = answer_headers(response.headers.items())

    async def read_some(self) -> bytes:
        """The next bytes of the body, ``b""`` at its end; cancelling loses none.

        Raises: ``BackendUnreachableError`` when the body breaks off, ``BackendTimeoutError``.
        """
        with _named_failures():
            return await self._response.content.readany()

    async def read(self) -> bytes:
        """The whole body. Raises what ``read_some`` raises."""
        with _named_failures():
            return await self._response.content.read()


class Transport:
    """Connections to one base URL."""

    def __init__(self, url: str, *, connect_timeout: float, silence_timeout: float) -> None:
        """Timeouts in seconds; ``silence_timeout`` counts between two bytes of the backend."""
        self._base = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout, sock_read=silence_timeout
        )
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by: may connections serve again

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        keep: bool = False,
    ) -> AbstractAsyncContextManager[Answer]:
        """Send one request; the context begins when the answer's headers are there.

        ``keep``: the connection may serve again. Not after a stream: llama-server ends those
        without saying so, and the next request could meet the dying connection.

        ``target`` is path and query, sent as it is. Leaving the context before the body's end
        closes the connection, which is how llama-server learns that nobody waits any more.

        Raises: ``BackendUnreachableError``, ``BackendTimeoutError``, ``BackendBrokenError``;
            ``ValueError`` for a target that is no path.
        """
        if not target.startswith("/") or not target.isprintable() or " " in target:
            raise ValueError("a request target starts with / and holds no blanks")
        url = URL(self._base + target, encoded=True)
        return self._send(method, url, headers, body, keep=keep)

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        url: URL,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        keep: bool,
    ) -> AsyncIterator[Answer]:
        with _named_failures():
            response = await self._open(keep=keep).request(
                method,
                url,
                headers=CIMultiDict(forward_headers(headers)),
                data=body,
                allow_redirects=False,
                skip_auto_headers=NOT_INVENTED,
            )
        try:
            yield Answer(response)
        finally:
            # at the body's end the connection is back in the pool already and this does nothing
            response.close()

    def _open(self, *, keep: bool) -> aiohttp.ClientSession:
        # not in __init__: a session belongs to the running loop
        if keep not in self._sessions:
            connector = (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
                if keep
                else aiohttp.TCPConnector(limit=0, force_close=True)
            )
            self._sessions[keep] = aiohttp.ClientSession(
                auto_decompress=False,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                connector=connector,
            )
        return self._sessions[keep]

    async def close(self) -> None:
        """Close all connections; what still runs over them fails."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()


@contextmanager
def _named_failures() -> Iterator[None]:
    """Every way a connection can fail, in the words of ``errors.py``."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise BackendUnreachableError(
            "the backend did not accept the connection in time", hint="is its address right?"
        ) from error
    except TimeoutError as error:
        raise BackendTimeoutError("the backend stayed silent for too long") from error
    except aiohttp.ClientConnectorError as error:
        raise BackendUnreachableError(
            f"no connection to the backend: {error.os_error.strerror or 'refused'}",
            hint="is it running, and is its address right?",
        ) from error
    except aiohttp.ClientPayloadError as error:
        raise BackendUnreachableError("the backend's answer broke off") from error
    except aiohttp.ClientResponseError as error:
        raise BackendBrokenError("the backend's answer is not HTTP") from error
    except (aiohttp.ClientError, OSError) as error:
        raise BackendUnreachableError("the connection to the backend broke") from error
