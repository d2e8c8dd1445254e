"""Servers in a test's own event loop that leave no connection open behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

LATE_TURNS = 8  # of the event loop: asyncio's own steps from accept to our call-back, and to spare


async def unlisten(server: asyncio.Server, turn: Callable[[], None] = lambda: None) -> None:
    """Stop listening; what was just being accepted reaches its protocol first.

    Closed at once, asyncio (3.11) would leave open what it accepted one turn of the loop before.
    ``turn`` is called at each turn.
    """
    for listener in server.sockets:
        asyncio.get_running_loop().remove_reader(listener)
    for _ in range(LATE_TURNS):
        turn()
        await asyncio.sleep(0)
    server.close()


async def killed(runner: web.AppRunner) -> None:
    """Every connection breaks, as with kill -9; one that is just being accepted, too."""

    def abort() -> None:
        for connection in list(runner.server.connections) if runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()

    abort()
    for site in list(runner.sites):
        server = getattr(site, "_server", None)
        assert isinstance(server, asyncio.Server)
        await unlisten(server, abort)
    abort()
    await runner.cleanup()


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """The URL of a free loopback port where ``handler`` speaks, once per connection.

    A connection ends with its handler; what one raised is raised at the end. asyncio (3.11) leaves
    it open if the handler's task is cancelled, even before its first step.
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
        await unlisten(server)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in ended:
        if isinstance(failure, Exception):
            raise failure
