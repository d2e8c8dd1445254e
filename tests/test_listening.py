"""Servers of tests: nothing of them outlives the test."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from tests.listening import listening


@pytest.mark.parametrize("turns", range(6))
async def test_every_connection_ends_with_the_server(turns: int) -> None:
    """However far its handler has come: accepted, not begun, or waiting for ever."""

    async def handler(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with listening(handler) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        for _ in range(turns):
            await asyncio.sleep(0)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    await writer.wait_closed()
