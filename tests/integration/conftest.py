"""The fake llama-server with its slot folder, proxies in front of it, a client for both."""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
import structlog

from proxy.app import App
from proxy.core.records import Mode
from proxy.telemetry import logs
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import Proxy, settings


class Serve(Protocol):
    """Starts a proxy in front of the fake (or of ``url``); settings by name."""

    async def __call__(self, **changes: Any) -> Proxy:
        """It listens and has looked at the backend once."""


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


@pytest.fixture
async def serve(
    fake: FakeLlamaServer,
    slot_dir: Path,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Serve]:
    """Starts proxies; they are stopped at the end, the fake released from whatever holds it."""
    started: list[Proxy] = []

    async def start(**changes: Any) -> Proxy:
        folder = changes.pop("slot_dir", slot_dir)
        if folder is None:  # else the ledger lies beside the snapshots
            ledger = {"ledger": str(slot_dir.with_name("ledger"))}
            changes["normalise"] = ledger | changes.get("normalise", {})
        app = App(settings(**{"url": fake.url, "slot_dir": folder, **changes}))
        monkeypatch.setattr(app.keeper, "run", _never)
        started.append(Proxy(app, "", client))
        started[-1].url = await app.start()
        return started[-1]

    yield start
    fake.go.set()
    for fault in fake.faults:
        fault.times = 0
        fault.release.set()
    fake.faults.clear()
    for proxy in started:
        await proxy.stop()


async def _never() -> None:
    """The keeper's loop: tests say when it looks."""


@pytest.fixture
async def proxy(serve: Serve) -> Proxy:
    """A proxy that may pin and save, in front of the fake; what the probe asked is forgotten."""
    started = await serve()
    assert started.app.scheduler.mode is Mode.EXCLUSIVE
    return started


@pytest.fixture(autouse=True)
def log() -> Iterator[io.StringIO]:
    """Everything that is logged, down to debug."""
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.setup("debug", "json", stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:], root.level = before
