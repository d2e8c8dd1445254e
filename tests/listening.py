"""Servers in a test's own event loop that leave no connection open behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

LATE_TURNS = 8  # of the event loop: asyncio's own steps from accept to our call-back, and to spare


async def arrived() -> None:
    """What was just being accepted when a server stopped listening has reached it."""
    for _ in range(LATE_TURNS):
        await asyncio.sleep(0)


def abort(server: web.Server) -> None:
    """Break every connection of it."""
    for connection in list(server.connections):
        if connection.transport is not None:
            connection.transport.abort()


async def cleaned(runner: web.AppRunner) -> None:
    """As ``runner.cleanup()``; what arrives only after that is closed, too."""
    server = runner.server
    assert server is not None
    await runner.cleanup()
    await arrived()
    abort(server)


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """The URL of a free loopback port where ``handler`` speaks, once per connection.

    A connection ends with its handler. Until Python 3.12 asyncio leaves it open if the handler's
    task is cancelled, even before its first step, which is why this does it.
    """
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client left
            await handler(reader, writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(serve(reader, writer)))
        tasks[-1].add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await arrived()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
