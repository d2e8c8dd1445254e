"""A backend made of raw sockets: it says exactly the bytes a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """``handler`` speaks, once per connection; the connection ends when it returns."""

    handler: Handler
    url: str = ""
    connections: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by asyncio for each connection."""
        self.connections += 1
        self.tasks.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left, which many tests are about
        finally:
            writer.close()


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[RawServer]:
    """Listening on a free port of the loopback interface."""
    raw = RawServer(handler)
    server = await asyncio.start_server(raw.accept, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        server.close()
        for task in raw.tasks:
            task.cancel()
        await asyncio.gather(*raw.tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request, head and body as they came over the wire."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if b"content-length" in fields:
        return head + await reader.readexactly(int(fields[b"content-length"]))
    if b"transfer-encoding" in fields:
        return head + await reader.readuntil(b"0\r\n\r\n")
    return head


def saying(raw: bytes, seen: list[bytes] | None = None) -> Handler:
    """A handler that gives these bytes to each request and notes the requests in ``seen``."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            if seen is not None:
                seen.append(request)
            writer.write(raw)
            await writer.drain()

    return handle


def http(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """An HTTP/1.1 answer with a length."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def by_path(answers: dict[str, object], seen: list[bytes] | None = None) -> Handler:
    """A handler that answers each path with JSON; bytes are sent as they are, 404 otherwise."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            if seen is not None:
                seen.append(request)
            found = answers.get(request.split(b" ", 2)[1].decode())
            if found is None:
                writer.write(http(b"{}", "404 Not Found"))
            else:
                writer.write(found if isinstance(found, bytes) else http(orjson.dumps(found)))
            await writer.drain()

    return handle
