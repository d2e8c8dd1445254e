"""One HTTP client for one backend: bytes in, bytes out, every failure named once.

As style-and-reliability.md 2.5 wants it: nothing is decompressed, redirected, remembered in a
cookie jar, invented, sent twice or taken from the environment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
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
NOT_FORWARDED = HOP_BY_HOP | {
    "host",
    "content-length",
    "expect",
    "x-conversation-id",
    OWNER,
    WHOLE,
}
WITH_BODY = frozenset({"PATCH", "POST", "PUT"})  # a length is said even if there is none
INFORMATIONAL = frozenset({100, *range(102, 200)})  # another answer follows
READ_AHEAD = 2**16  # bytes of an answer before the backend has to wait for a slow client
COPIED = 2**18  # bytes of a body that go out with the head in one piece


def forward_headers(headers: Iterable[tuple[str, str]], drop: Collection[str] = ()) -> Headers:
    """The client's headers that go on to the backend, order and repetitions kept.

    Taken out: hop-by-hop headers and those ``Connection`` names (RFC 9110 7.6.1),
    ``Content-Length`` (set anew from the body), ``NOT_FORWARDED``, and the names in ``drop``.
    """
    gone = NOT_FORWARDED.union([name.lower() for name in drop]) if drop else NOT_FORWARDED
    return _without(list(headers), gone)


def answer_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """The backend's end-to-end headers, ``Content-Length`` and ``Content-Encoding`` included.

    Whoever sends on another body than the one received must drop ``Content-Length``.
    """
    return _without(list(headers), HOP_BY_HOP)


def _without(headers: Headers, drop: frozenset[str]) -> Headers:
    """Without what ``Connection`` names, too."""
    named = [value for name, value in headers if name.lower() == "connection"]
    if named:
        drop = drop.union([token.strip().lower() for token in ",".join(named).split(",")])
    return [(name, value) for name, value in headers if name.lower() not in drop]


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
        bodiless = method == "HEAD"
        return _Sent(self._connections, head, body or b"", self._silence, bodiless, keep)

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


@dataclass(slots=True, eq=False)
class _Sent:
    """One request and its connection; ``bodiless``: its answer has no body (HEAD)."""

    connections: Connections
    head: bytes = field(repr=False)
    body: bytes = field(repr=False)
    silence: float
    bodiless: bool
    keep: bool
    connection: Connection = field(init=False, repr=False)

    async def __aenter__(self) -> Answer:
        connection = self.connection = await self.connections.take()
        try:
            self._write(connection)
            while True:
                message, content = await connection.read()
                if message.code not in INFORMATIONAL:
                    return Answer(message, content)
                connection.start_timeout()  # what came so far is no answer
        except BaseException as error:
            # One whose answer is still to come would give it to the next request.
            self.connections.give(connection, keep=False)
            if isinstance(error, FAILURES):
                raise _named(error) from error
            raise

    async def __aexit__(self, *_: object) -> None:
        self.connections.give(self.connection, keep=self.keep)

    def _write(self, connection: Connection) -> None:
        connection.set_response_params(
            skip_payload=self.bodiless,
            read_until_eof=True,
            auto_decompress=False,
            read_timeout=self.silence,
            read_bufsize=READ_AHEAD,
        )
        writer = connection.transport
        if writer is None:
            raise ConnectionResetError
        if len(self.body) <= COPIED:
            writer.write(self.head + self.body)
        else:
            writer.write(self.head)
            writer.write(self.body)
        connection.start_timeout()


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
