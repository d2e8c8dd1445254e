"""HTTP/1.1 by hand: what Boost.Beast and the server around it put on the wire (section 1.1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.emulators.fastflowlm.errors import Disconnected

HEADER_LIMIT = 8192
CORS = (
    b"Access-Control-Allow-Origin: *\r\n"
    b"Access-Control-Allow-Methods: GET, POST, OPTIONS\r\n"
    b"Access-Control-Allow-Headers: Content-Type, Authorization, X-Requested-With\r\n"
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n" + CORS + b"\r\n"
)
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    413: "Payload Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class TooLarge(Exception):  # noqa: N818  # answered with 413
    """The body is longer than the server takes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was read from a connection."""

    method: str
    target: str
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    max_body: int
    streaming: bool = False
    departed: asyncio.Event = field(default_factory=asyncio.Event)  # set while watched
    watched: bool = False
    _buffer: bytearray = field(default_factory=bytearray)

    async def _more(self) -> bool:
        with suppress(ConnectionError):
            data = await self.reader.read(65536)
            self._buffer += data
            return bool(data)
        return False

    async def read_request(self) -> Request | None:
        """The next request; None if there is none, or none that Beast would answer.

        Raises:
            TooLarge: see there.
        """
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEADER_LIMIT or not await self._more():
                return None
        if end + 4 > HEADER_LIMIT:
            return None
        head = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = head[0].split(" ")
        if len(words) != 3:
            return None
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        body = await self._read_body(headers)
        return None if body is None else Request(words[0], words[1], headers, body)

    async def _read_body(self, headers: dict[str, str]) -> bytes | None:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return await self._read_chunked()
        length = headers.get("content-length", "0")
        if not length.isdigit():
            return None
        if int(length) > self.max_body:
            raise TooLarge
        return await self._exactly(int(length))

    async def _exactly(self, size: int) -> bytes | None:
        while len(self._buffer) < size:
            if not await self._more():
                return None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _read_chunked(self) -> bytes | None:
        body = bytearray()
        while True:
            while (end := self._buffer.find(b"\r\n")) < 0:
                if not await self._more():
                    return None
            size = int(bytes(self._buffer[:end]).split(b";")[0], 16)
            del self._buffer[: end + 2]
            data = await self._exactly(size + 2)
            if data is None:
                return None
            body += data[:-2]
            if len(body) > self.max_body:
                raise TooLarge
            if size == 0:
                return bytes(body)

    async def gone(self) -> None:
        """Return when the client has closed its side; a byte more from it ends the watch."""
        with suppress(ConnectionError):
            if not await self.reader.read(1):
                return
            await asyncio.Event().wait()

    @property
    def left(self) -> bool:
        """Whether the client is known to have closed its side."""
        return self.reader.at_eof() or self.writer.transport.is_closing()

    async def _write(self, data: bytes) -> None:
        if self.writer.transport.is_closing():
            raise Disconnected
        self.writer.write(data)
        try:
            await self.writer.drain()
        except ConnectionError:
            raise Disconnected from None
        if self.writer.transport.is_closing():
            raise Disconnected

    async def respond(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """A whole answer: no Date, no Server, no Connection header.

        Raises:
            Disconnected: it could not be written.
        """
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n".encode()
        await self._write(head + CORS + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    async def allow(self) -> None:
        """The answer to OPTIONS; the only one after which the connection lives."""
        await self._write(b"HTTP/1.1 200 OK\r\n" + CORS + b"Content-Length: 0\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        """One piece of a stream; the first one brings the headers.

        Raises:
            Disconnected: the real server loses the connection's slot here.
        """
        if not self.streaming:
            self.streaming = True
            await self._write(STREAM_HEAD)
        await self._write(b"%x\r\n" % len(data) + data + b"\r\n")

    async def end_stream(self) -> None:
        """The last chunk, which is empty."""
        await self._write(b"0\r\n\r\n")

    async def close(self) -> None:
        """Both directions, at once."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def abort(self) -> None:
        """As a dying process does."""
        self.writer.transport.abort()


def to_json(value: Any, *, sort: bool = False) -> bytes:
    """As nlohmann::json dumps it: compact, not-a-number as null."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)


@asynccontextmanager
async def watching(connection: Connection, left: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``left`` when the client goes, as long as this is open."""

    async def watch() -> None:
        await connection.gone()
        connection.departed.set()
        left()

    connection.watched = True
    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        connection.watched = False
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
