"""Servers of tests: nothing of them outlives the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from tests.emulators.fastflowlm import Emulator
from tests.listening import killed, listening


def sockets() -> AbstractAsyncContextManager[str]:
    """One of raw sockets; its handler never ends by itself."""

    async def handler(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    return listening(handler)


@asynccontextmanager
async def pages() -> AsyncIterator[str]:
    """One of aiohttp."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await killed(runner)


@asynccontextmanager
async def emulated() -> AsyncIterator[str]:
    """The emulated FastFlowLM."""
    async with Emulator() as emu:
        yield emu.url


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("kind", [sockets, pages, emulated])
async def test_every_connection_ends_with_the_server(
    kind: Callable[[], AbstractAsyncContextManager[str]], turns: int
) -> None:
    """However far it has come: not seen, accepted, its handler not begun, or waiting for ever."""
    with socket.socket() as late:
        async with kind() as url:
            late.connect(("127.0.0.1", urlsplit(url).port))  # the loop has no turn meanwhile
            for _ in range(turns):
                await asyncio.sleep(0)
        late.settimeout(10)
        try:
            assert late.recv(1) == b""
        except ConnectionResetError:
            assert turns < 2 or kind is not sockets  # not accepted, or killed


async def test_what_a_handler_raises_fails_the_test() -> None:
    """Not only the connection's end tells of it."""

    async def handler(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        raise LookupError("a mistake in a test's server")

    async def told() -> None:
        async with listening(handler) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    with pytest.raises(LookupError, match="a mistake"):
        await told()
