"""A client that hides nothing: what came over the wire, and how the connection ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson


async def until(condition: Callable[[], object], rounds: int = 100_000) -> None:
    """Let others run until something holds.

    Raises:
        AssertionError: it does not come to hold.
    """
    for _ in range(rounds):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("waited in vain")


@dataclass(slots=True)
class Reply:
    """An answer. ``status`` 0: the connection closed without a byte."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)  # HTTP chunks, if it was a stream
    complete: bool = False  # the stream had its last, empty chunk

    @property
    def json(self) -> Any:
        """The body read as JSON."""
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without ``[DONE]``."""
        texts = [chunk.removeprefix(b"data: ").strip() for chunk in self.chunks]
        return [orjson.loads(text) for text in texts if text != b"[DONE]"]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        """What each event adds."""
        return [e["choices"][0]["delta"] for e in self.events if e["choices"]]

    @property
    def text(self) -> str:
        """The content of a stream."""
        return "".join(delta.get("content") or "" for delta in self.deltas)

    @property
    def finish(self) -> str:
        """The last reason given."""
        reasons = [e["choices"][0]["finish_reason"] for e in self.events if e["choices"]]
        return str(reasons[-1])

    @property
    def usage(self) -> dict[str, Any]:
        """The usage given last."""
        found = [e["usage"] for e in self.events if e.get("usage")]
        return dict(found[-1]) if found else {}


def _head(block: bytes) -> Reply:
    lines = block.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Reply(int(lines[0].split(" ")[1]), headers)


def parse(data: bytes) -> Reply:
    """All that was received until the connection closed."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return Reply()
    reply = _head(head)
    if reply.headers.get("transfer-encoding") != "chunked":
        reply.body = rest
        return reply
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            reply.complete = True
            break
        reply.chunks.append(rest[:length])
        rest = rest[length + 2 :]
    return reply


class Wire:
    """One connection, and the bytes of one request."""

    def __init__(self, url: str) -> None:
        """``url``: the server's; paths come with each request."""
        self._host = urlsplit(url).hostname or ""
        self._port = urlsplit(url).port or 0
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def open(self) -> None:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection(self._host, self._port)

    async def send(
        self, method: str, target: str, body: bytes = b"", kind: str = "application/json"
    ) -> None:
        """Write a request, with the headers a frugal client sends."""
        head = f"{method} {target} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: {kind}\r\n"
        self.writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with suppress(ConnectionError):
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything up to the end of the connection, however it ends."""
        data = bytearray()
        with suppress(ConnectionError):
            while piece := await self.reader.read(65536):
                data += piece
        return bytes(data)

    async def close(self) -> None:
        """Leave."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


async def ask(
    url: str, target: str, body: Any = None, *, method: str = "", kind: str = "application/json"
) -> Reply:
    """One request on its own connection, closed also when the caller gives up.

    ``body`` None is a GET; bytes are sent as they are.
    """
    wire = Wire(url)
    await wire.open()
    data = body if isinstance(body, bytes) else orjson.dumps(body) if body is not None else b""
    try:
        await wire.send(method or ("GET" if body is None else "POST"), target, data, kind)
        return parse(await wire.rest())
    finally:
        await wire.close()
