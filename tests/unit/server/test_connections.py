"""The deadline for a request's headers."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.server import envelope
from proxy.server.connections import HeaderDeadline


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: h\r\nX: "])
async def test_silent_connections_are_closed(sent: bytes) -> None:
    """Who does not get a request out is closed; a request that takes longer than that is not."""
    guard = HeaderDeadline(0.05)
    finish = asyncio.Event()

    async def slow(_request: web.Request) -> web.StreamResponse:
        await finish.wait()
        return web.Response(text="done")

    app = web.Application()
    envelope.install(app, guard.heard)
    app.router.add_get("/", slow)
    async with TestServer(app, host="127.0.0.1") as server:
        assert server.runner is not None
        assert server.runner.server is not None
        watching = asyncio.create_task(guard.watch(server.runner.server))
        busy_reader, busy = await asyncio.open_connection("127.0.0.1", server.port)
        busy.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert await reader.read() == b""  # ends only because the guard closes it
        finish.set()
        assert (await busy_reader.read()).endswith(b"done")
        for one in (busy, writer):
            one.close()
            await one.wait_closed()
        watching.cancel()
        await asyncio.wait([watching])
