"""The fake llama-server with its slot folder, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.fake_llama_server import FakeLlamaServer


@pytest.fixture
def slot_dir(tmp_path: Path) -> Path:
    """The backend's --slot-save-path."""
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
async def fake(slot_dir: Path) -> AsyncIterator[FakeLlamaServer]:
    """A running fake: 2 slots, RAM cache off, pins honoured; the probe finds it exclusive."""
    async with FakeLlamaServer(slot_dir) as server:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session
