"""Wiring: what is built for which configuration, and that an end is always possible."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from proxy.app import App
from proxy.config import Backend, Cache, Config, Server
from proxy.core.records import Mode
from proxy.effects import Nothing
from proxy.engine import free_port
from proxy.store.snapshots import StoreBusyError
from tests.unit.factories import chat, content, snapshot


def config(folder: Path | None = None, **server: object) -> Config:
    """In front of a backend that is not there."""
    url = f"http://127.0.0.1:{free_port()}"
    slots = "" if folder is None else str(folder)
    return Config(
        server=Server.model_validate({"port": 0, **server}),
        backend=Backend(url=url, slot_save_path=slots),
    )


async def test_without_a_slot_directory() -> None:
    """Nothing is stored; the page says what would lift it."""
    app = App(config())
    assert (app.store, app.transfer) == (None, None)
    assert await app.start()
    assert app.scheduler.mode is Mode.FORWARD
    await app.stop()


async def test_switched_off(tmp_path: Path) -> None:
    """With cache.enabled = false a slot directory is not touched."""
    given = config(tmp_path).model_copy(update={"cache": Cache(enabled=False)})
    app = App(given)
    assert app.store is None
    await app.start()
    await app.stop()
    assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []


async def test_a_backend_that_is_not_there(tmp_path: Path) -> None:
    """The proxy starts, says that it is not ready, and ends."""
    app = App(config(tmp_path))
    assert (await app.start()).startswith("http://127.0.0.1:")
    assert app.keeper.up is False
    await app.stop()
    assert (tmp_path / "slotkeeper").is_dir()


async def test_stop_before_start(tmp_path: Path) -> None:
    """An app that never started can be stopped, twice even."""
    app = App(config(tmp_path))
    await app.stop()
    await app.stop()


async def test_a_store_that_is_taken(tmp_path: Path) -> None:
    """The second app is refused and leaves the first one alone; later it may have the store."""
    first, second, third = (App(config(tmp_path)) for _ in range(3))
    await first.start()
    with pytest.raises(StoreBusyError):
        await second.start()
    await second.stop()
    await first.stop()
    await third.start()
    await third.stop()


async def test_an_address_that_is_taken(tmp_path: Path) -> None:
    """The store is given back."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        app = App(config(tmp_path, port=taken.getsockname()[1]))
        with pytest.raises(OSError, match="address already in use"):
            await app.start()
        await app.stop()
    again = App(config(tmp_path))
    await again.start()
    await again.stop()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6() -> None:
    """An IPv6 address is in brackets in the URL."""
    app = App(config(host="::1"))
    try:
        url = await app.start()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    finally:
        await app.stop()
    assert url.startswith("http://[::1]:")


async def test_nothing_does_nothing() -> None:
    """The effects of a proxy without a store keep nothing and refuse nothing."""
    nothing = Nothing()
    prompt = chat("x", tokens=range(9))
    held = content(prompt, 9)
    assert nothing.matches(prompt) == ()
    assert await nothing.save(0, held) is held
    assert await nothing.restore(0, snapshot(range(9))) is False
    assert nothing.judge(5, 5)
