"""A backend of a few lines that answers with the very bytes a test gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.listening import listening

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@dataclass
class RawServer:
    """Answers ``target`` with ``pieces`` and closes; everything else is not found.

    ``heads`` are the requests for ``target`` as they came, ``sent`` counts the bytes that went out.
    ``gate`` holds back all pieces but the first.
    """

    target: str = "/v1/chat/completions"
    pieces: Iterable[bytes] = ()
    heads: list[bytes] = field(default_factory=list)
    sent: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.partition(b":")[2]))
            if head.split()[1].decode() == self.target:
                self.heads.append(head)
                await self._answer(writer)
                break
            writer.write(NOT_FOUND)
            await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        for number, piece in enumerate(self.pieces):
            if number:
                await self.gate.wait()
            writer.write(piece)
            await writer.drain()
            self.sent += len(piece)


@asynccontextmanager
async def raw_server(pieces: Iterable[bytes], *, gated: bool = False) -> AsyncIterator[RawServer]:
    """A running one."""
    raw = RawServer(pieces=pieces)
    if not gated:
        raw.gate.set()
    try:
        async with listening(raw._serve) as raw.url:
            yield raw
    finally:
        raw.gate.set()


def chunked(*parts: bytes) -> bytes:
    """A whole stream of these parts, each a chunk."""
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
