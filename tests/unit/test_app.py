"""Wiring: what is built for which configuration, and that an end is always possible."""

from __future__ import annotations

import asyncio
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from proxy.app import App
from proxy.backends import choose
from proxy.backends.base import Backend as Driver
from proxy.config import Backend, Cache, Config, Normalise, Server
from proxy.core.ledger import Conversation, Line
from proxy.core.records import Mode
from proxy.effects import Nothing
from proxy.engine import free_port
from proxy.reload import LIVE
from proxy.store.ledger import LedgerStore
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


async def test_who_watches_hears_of_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live pages go on until the last answer has ended: they show that it shuts down."""
    app = App(config())
    await app.start()
    assert app._hub is not None
    with app._hub.listen() as listener:

        async def drain(_patience: float) -> None:
            app.scheduler.draining = True
            async with asyncio.timeout(30):
                while b'"draining":true' not in (await listener.next() or b""):
                    pass

        monkeypatch.setattr(app.keeper, "drain", drain)
        await app.stop()
        assert await listener.next() is None


async def test_another_admin_key_ends_what_the_old_one_opened() -> None:
    """Whoever listens must ask again, with the new key; other changes disturb nobody."""
    given = config(admin_key="old")
    app = App(given)
    await app.start()
    assert app._hub is not None
    with app._hub.listen() as listener:
        await listener.next()
        for name, ends in (("max_queue", False), ("admin_key", True)):
            value = SecretStr("new") if name == "admin_key" else 5
            server = given.server.model_copy(update={name: value})
            app.reload(given.model_copy(update={"server": server}))
            listener.tell(b"")  # what has ended takes no more
            assert (await listener.next() is None) is ends
    with app._hub.listen():
        pass
    await app.stop()


async def test_a_background_that_failed_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    """Slots are saved and the store is closed all the same; the log says what failed."""

    async def failing() -> None:
        raise RuntimeError

    app = App(config(tmp_path))
    await app.start()
    app._tasks.append(asyncio.create_task(failing(), name="odd"))
    with capture_logs() as logged:
        await app.stop()
    assert [line["task"] for line in logged if line["event"] == "background.fault"] == ["odd"]
    again = App(config(tmp_path))
    await again.start()
    await again.stop()


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


def talk(name: str, used: float) -> Conversation:
    """A conversation of one message."""
    line = b'{"role":"user","content":"%b"}' % name.encode()
    return Conversation(name, b"n" * 16, lines=(Line(line, line, name.encode()),), used=used)


async def remembering(folder: Path, *rows: Conversation, **settings: object) -> App:
    """An app whose ledger has these rows."""
    ledger = LedgerStore(folder / "ledger")
    await ledger.open()
    await ledger.write(rows, ())
    await ledger.close()
    given = Normalise.model_validate({"ledger": str(folder / "ledger"), **settings})
    return App(config().model_copy(update={"normalise": given}))


async def test_conversations_survive(tmp_path: Path) -> None:
    """Those of the last run are in the book, the last used last; the gauge tells how many."""
    app = await remembering(tmp_path, talk("one", 2.0), talk("two", 1.0))
    await app.start()
    assert [row.id for row in app._book] == ["two", "one"]
    assert b"slotkeeper_conversations 2.0" in app.metrics.render()[0]
    await app.stop()


async def test_more_conversations_than_are_allowed(tmp_path: Path) -> None:
    """The oldest are dropped, on disk too."""
    app = await remembering(tmp_path, talk("one", 2.0), talk("two", 1.0), max_conversations=1)
    await app.start()
    assert [row.id for row in app._book] == ["one"]
    await app.stop()
    ledger = LedgerStore(tmp_path / "ledger")
    assert [row.id for row in await ledger.open()] == ["one"]
    await ledger.close()


async def test_switched_off_reads_no_ledger(tmp_path: Path) -> None:
    """With normalise.mode = "off" the ledger is left alone."""
    app = await remembering(tmp_path, talk("one", 1.0), mode="off")
    await app.start()
    assert (len(app._book), app._written) == (0, None)
    await app.stop()


async def test_a_ledger_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second app starts all the same and remembers in memory alone, also what it learns."""
    made: list[Callable[[], Path | None]] = []

    def build(*args: Any, learned: Callable[[], Path | None], **more: Any) -> Driver:
        made.append(learned)
        return choose.build(*args, learned=learned, **more)

    monkeypatch.setattr("proxy.app.build", build)
    first = await remembering(tmp_path, talk("one", 1.0))
    second = App(first._config)
    assert [learned() for learned in made] == [None, None]  # neither has it yet
    await first.start()
    await second.start()
    assert second._written is None
    assert [learned() for learned in made] == [tmp_path / "ledger" / "models.json", None]
    await second.stop()
    await first.stop()


async def test_nothing_does_nothing() -> None:
    """The effects of a proxy without a store keep nothing and refuse nothing."""
    nothing = Nothing()
    prompt = chat("x", tokens=range(9))
    held = content(prompt, 9)
    assert nothing.matches(prompt) == ()
    assert await nothing.save(0, held) is held
    assert await nothing.restore(0, snapshot(range(9))) is False
    assert nothing.judge(5, 5)


async def test_reload(tmp_path: Path) -> None:
    """What may change while it runs does so in each place that goes by it (``proxy.live``)."""
    app = App(config(tmp_path))
    url = await app.start()
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{url}/v1/models") as answer:
            assert answer.status == 502
        server = {"keys": ["k"], "max_queue": 3, "queue_timeout": 4, "ping_interval": 5}
        changed = app._config.model_copy(
            update={
                "server": Server.model_validate({"port": 0, "drain_timeout": 6, **server}),
                "cache": Cache(max_files=7, idle_seconds=8, keep_free=9),
                "normalise": Normalise(rules=("-clock",)),
            }
        )
        app.reload(changed)
        async with client.get(f"{url}/v1/models") as answer:
            assert answer.status == 401
    assert (app.scheduler.max_queue, app.scheduler.queue_timeout) == (3, 4)
    assert app.transfer is not None
    assert (app.transfer.limits.max_files, app.transfer.budget.keep_free) == (7, 9)
    assert app._live.saver is not None
    assert app._live.saver.idle_seconds == 8
    assert app._live.chat is not None
    assert app._live.chat.ping_interval == 5
    assert app._live.normaliser is not None
    assert "clock" not in app._live.normaliser.on
    assert app._config.server.drain_timeout == 6
    await app.stop()


def test_a_reload_that_fails_changes_nothing(tmp_path: Path) -> None:
    """Where the slot directory is gone the old settings stay, all of them."""
    slots = tmp_path / "slots"
    slots.mkdir()
    app = App(config(slots))
    before = app._config
    slots.rmdir()
    with pytest.raises(OSError, match="slots"):
        app.reload(before.model_copy(update={"server": Server(max_queue=3)}))
    assert app._config is before
    assert app.scheduler.max_queue == before.server.max_queue


async def test_reload_before_start() -> None:
    """Without a store, and before anything listens, there is less to change."""
    app = App(config())
    app.reload(config(None, max_queue=3))
    assert app.scheduler.max_queue == 3
    assert "server.max_queue" in LIVE
    await app.stop()


@pytest.mark.skipif(sys.platform == "win32", reason="modes mean nothing there")
async def test_two_users_of_one_group(tmp_path: Path) -> None:
    """A slot directory that its group may write to is shared with the backend's user."""
    for mode, kept in ((0o2770, 0o2770), (0o770, 0o700)):
        await asyncio.to_thread(tmp_path.chmod, mode)
        app = App(config(tmp_path))
        await app.start()
        await app.stop()
        assert stat.S_IMODE((tmp_path / "slotkeeper").stat().st_mode) == kept
