"""One HTTP client for one backend: bytes in, bytes out, every failure named once.

As style-and-reliability.md 2.5 wants it: nothing is decompressed, redirected, remembered in a
cookie jar, invented, sent twice or taken from the environment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import ClientError, ClientPayloadError
from aiohttp.http import HttpProcessingError
from yarl import URL

from proxy.backends.connections import Connections
from proxy.errors import (
    BackendBrokenError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.http import RawResponseMessage

    from proxy.backends.connections import Connection

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
WITH_BODY = frozenset({"PATCH", "POST", "PUT"})  # a length is said even if there is none
INFORMATIONAL = frozenset({100, *range(102, 200)})  # another answer follows
READ_AHEAD = 2**16  # bytes of an answer before the backend has to wait for a slow client
COPIED = 2**18  # bytes of a body that go out with the head in one piece


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
    """An ``Upstream`` (see base.py): its headers have arrived."""

    def __init__(self, message: RawResponseMessage, content: StreamReader) -> None:
        """Both as aiohttp's parser gives them."""
        self._content = content
        self.status: int = message.code
        self.headers: Headers = answer_headers(message.headers.items())

    async def read_some(self) -> bytes:
        """The next bytes of the body, ``b""`` at its end; cancelling loses none.

        Raises: ``BackendUnreachableError`` when the body breaks off, ``BackendTimeoutError``.
        """
        try:
            return await self._content.readany()
        except FAILURES as error:
            raise _named(error) from error

    async def read(self) -> bytes:
        """The whole body. Raises what ``read_some`` raises."""
        try:
            return await self._content.read()
        except FAILURES as error:
            raise _named(error) from error


class Transport:
    """Requests to one base URL."""

    def __init__(
        self, url: str, *, connect_timeout: float, silence_timeout: float, ahead: bool = False
    ) -> None:
        """Timeouts in seconds; ``silence_timeout`` counts between two bytes of the backend.

        ``ahead``: after a request that is not kept, a connection is opened for the next one.
        """
        base = URL(url.rstrip("/"))
        self._prefix = base.raw_path.rstrip("/")
        self._host = base.host_port_subcomponent
        self._silence = silence_timeout
        self._connections = Connections(base, connect_timeout=connect_timeout, ahead=ahead)

    def send(
        self, method: str, target: str, headers: Headers, body: bytes | None, *, keep: bool = False
    ) -> AbstractAsyncContextManager[Answer]:
        """Send one request; the context begins when the answer's headers are there.

        ``keep``: the connection may serve again. Not after a stream: llama-server ends those
        without saying so, and the next request could meet the dying connection.

        ``target`` is path and query, sent as it is. Leaving the context before the body's end
        closes the connection, which is how llama-server learns that nobody waits any more.

        Raises: ``BackendUnreachableError``, ``BackendTimeoutError``, ``BackendBrokenError``;
            ``ValueError`` for a target that is no path, or a header that is two.
        """
        if not target.startswith("/") or not target.isprintable() or " " in target:
            raise ValueError("a request target starts with / and holds no blanks")
        head = self._head(method, target, headers, body, keep=keep)
        return self._send(method, head, body, keep=keep)

    @asynccontextmanager
    async def _send(
        self, method: str, head: bytes, body: bytes | None, *, keep: bool
    ) -> AsyncIterator[Answer]:
        connection = await self._connections.take()
        answered = False
        try:
            try:
                self._write(connection, method, head, body or b"")
                answer = await _answer(connection)
                answered = True
            except FAILURES as error:
                raise _named(error) from error
            yield answer
        finally:
            # One whose answer is still to come would give it to the next request.
            self._connections.give(connection, keep=keep and answered)

    def _write(self, connection: Connection, method: str, head: bytes, body: bytes) -> None:
        connection.set_response_params(
            skip_payload=method == "HEAD",
            read_until_eof=True,
            auto_decompress=False,
            read_timeout=self._silence,
            read_bufsize=READ_AHEAD,
        )
        writer = connection.transport
        if writer is None:
            raise ConnectionResetError
        if len(body) <= COPIED:
            writer.write(head + body)
        else:
            writer.write(head)
            writer.write(body)
        connection.start_timeout()

    def _head(
        self, method: str, target: str, headers: Headers, body: bytes | None, *, keep: bool
    ) -> bytes:
        lines = [f"{method} {self._prefix}{target} HTTP/1.1", f"Host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in forward_headers(headers)]
        if body is not None or method in WITH_BODY:
            lines.append(f"Content-Length: {len(body or b'')}")
        if not keep:
            lines.append("Connection: close")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
            raise ValueError("a header holds a line break")
        return f"{head}\r\n\r\n".encode("utf-8", "surrogateescape")

    async def close(self) -> None:
        """Close the connections that no request uses."""
        await self._connections.close()


async def _answer(connection: Connection) -> Answer:
    while True:
        message, content = await connection.read()
        if message.code not in INFORMATIONAL:
            return Answer(message, content)
        connection.start_timeout()  # what came so far is no answer


FAILURES = (ClientError, HttpProcessingError, OSError)


def _named(error: Exception) -> SlotkeeperError:
    """Every way an open connection can fail, in the words of ``errors.py``."""
    if isinstance(error, TimeoutError):
        return BackendTimeoutError("the backend stayed silent for too long")
    if isinstance(error, HttpProcessingError):
        return BackendBrokenError("the backend's answer is not HTTP")
    if isinstance(error, ClientPayloadError):
        return BackendUnreachableError(
            "the backend's answer broke off",
            hint="see its log: did it run out of memory?",
        )
    return BackendUnreachableError("the connection to the backend broke", hint="see its log")
