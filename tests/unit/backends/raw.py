"""A backend made of raw sockets: it says exactly the bytes a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson

from tests.listening import Handler, listening


@dataclass
class RawServer:
    """Speaks by ``handler``, once per connection; the connection ends when that returns."""

    handler: Handler
    url: str = ""
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        await self.handler(reader, writer)


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[RawServer]:
    """Listening on a free port of the loopback interface."""
    raw = RawServer(handler)
    async with listening(raw.serve) as raw.url:
        yield raw


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
