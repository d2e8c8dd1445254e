"""Conversations on disk, and the writer that brings them there behind the requests."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.ledger import Conversation, Line
from proxy.store import files
from proxy.store.files import StoreBusyError, StoreError
from proxy.store.ledger import LONGEST_PAUSE, LedgerStore, LedgerWriter
from proxy.telemetry.metrics import Metrics
from tests.unit.store.test_packing import CONVERSATIONS

posix = pytest.mark.skipif(os.name == "nt", reason="modes as POSIX has them")
CANARY = "canary-7f3a"


def talk(name: str, used: float = 1.0, text: str = "hello") -> Conversation:
    """A conversation of one message."""
    data = text.encode()
    return Conversation(name, b"n", lines=(Line(data, data, b"k"),), used=used, title=text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Not made yet."""
    return tmp_path / "state" / "ledger"


def modes(folder: Path) -> dict[str, tuple[bool, int]]:
    """Of it and of all that is in it, by name: whether it is a folder, and its mode."""
    paths = [folder, *folder.rglob("*")]
    return {str(p): (p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in paths}


async def kept(folder: Path) -> list[Conversation]:
    """What the next process finds."""
    store = LedgerStore(folder)
    try:
        return await store.open()
    finally:
        await store.close()


async def test_conversations_survive_a_restart_the_last_used_first(folder: Path) -> None:
    """What was written is found, as it was written last; what is gone is not."""
    store = LedgerStore(folder)
    assert await store.open() == []
    await store.write([talk("a", 1.0), talk("b", 3.0), talk("c", 2.0), talk("d")], [])
    await store.write([talk("a", 4.0, "newer")], ["d", "unknown"])
    await store.close()
    await store.close()
    assert await kept(folder) == [talk("a", 4.0, "newer"), talk("b", 3.0), talk("c", 2.0)]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(CONVERSATIONS, max_size=5, unique_by=lambda c: c.id))
async def test_any_conversation_survives(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[Conversation]
) -> None:
    """Whatever clients send."""
    folder = tmp_path_factory.mktemp("ledger")
    store = LedgerStore(folder)
    await store.open()
    await store.write(conversations, [])
    await store.close()
    found = await kept(folder)
    assert set(found) == set(conversations)
    assert [c.used for c in found] == sorted((c.used for c in found), reverse=True)


async def test_what_conversations_share_is_in_memory_once(folder: Path) -> None:
    """Many begin with the same tools and system text."""
    store = LedgerStore(folder)
    await store.open()
    await store.write([replace(talk(n, text="same"), tools=(b"tool",)) for n in "ab"], [])
    await store.close()
    one, other = await kept(folder)
    assert one.lines[0].came is one.lines[0].went is other.lines[0].came
    assert one.tools[0] is other.tools[0]


async def test_a_second_proxy_is_told_so(folder: Path) -> None:
    """One folder, one proxy; the next may have it afterwards."""
    first, second = LedgerStore(folder), LedgerStore(folder)
    await first.open()
    with pytest.raises(StoreBusyError, match=r"normalise\.ledger"):
        await second.open()
    await first.close()
    assert await second.open() == []
    await second.close()


@posix
async def test_others_can_read_nothing(folder: Path) -> None:
    """Folders 0700, files 0600, whatever the umask, and names that say nothing."""
    before = os.umask(0)
    try:
        store = LedgerStore(folder)
        await store.open()
        await store.write([talk(CANARY, text=CANARY)], [])
        found = modes(folder)
        assert set(found.values()) == {(True, 0o700), (False, 0o600)}
        assert CANARY not in " ".join(found)
        await store.close()
    finally:
        os.umask(before)


@posix
async def test_a_folder_of_the_users_keeps_its_mode(folder: Path) -> None:
    """It was there before us; what is ours in it is closed all the same."""
    files.make_dir(folder, shared=False)
    await asyncio.to_thread(folder.chmod, 0o755)
    await kept(folder)
    found = modes(folder)
    assert found.pop(str(folder)) == (True, 0o755)
    assert set(found.values()) == {(True, 0o700), (False, 0o600)}


async def test_rows_that_cannot_be_read_are_dropped_and_counted(folder: Path) -> None:
    """A damaged row, one of another version, one under another's key: gone, the rest is there."""
    store = LedgerStore(folder)
    await store.open()
    await store.write([talk("a"), talk("b"), talk("c"), talk("d")], [])
    rows = store._rows
    worker = store._worker
    row: Any = await worker.call(rows.get, "conversation", "a")
    await worker.call(rows.put, "conversation", "a", row | {"data": row["data"][:-9]})
    await worker.call(rows.put, "conversation", "b", row | {"v": 9})
    await worker.call(rows.put, "conversation", "c", row)
    await store.close()
    again = LedgerStore(folder)
    assert await again.open() == [talk("d")]
    assert again.dropped == 3
    await again.close()
    third = LedgerStore(folder)
    assert await third.open() == [talk("d")]
    assert third.dropped == 0
    await third.close()


async def test_a_corrupt_database_is_moved_aside(folder: Path) -> None:
    """It costs the ledger, not the start."""
    await kept(folder)
    (folder / "catalogue.d" / "cache.db").write_bytes(b"no database" * 1000)
    store = LedgerStore(folder)
    assert await store.open() == []
    assert store.aside == "cache.db.corrupt-0"
    await store.close()


async def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    """It names no path, and leaves nothing locked."""
    (tmp_path / "file").write_text("")
    store = LedgerStore(tmp_path / "file" / "ledger")
    with pytest.raises(StoreError) as caught:
        await store.open()
    assert "file" not in str(caught.value)
    await store.close()


async def test_a_start_that_fails_half_way_unlocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try may succeed."""
    store = LedgerStore(folder)

    def broken() -> str:
        raise StoreError("the catalogue cannot be opened")

    with monkeypatch.context() as patch:
        patch.setattr(store._rows, "open", broken)
        with pytest.raises(StoreError):
            await store.open()
    assert await kept(folder) == []
    await store.close()


# The writer


class Disk(LedgerStore):
    """A store that notes what it is told to write, holds it up, or fails."""

    def __init__(self) -> None:
        self.rows: dict[str, Conversation] = {}
        self.batches: list[tuple[list[str], set[str]]] = []
        self.errors: list[Exception] = []
        self.go = asyncio.Event()
        self.go.set()
        self.begun = asyncio.Event()
        self.written = asyncio.Event()

    async def write(self, changed: Sequence[Conversation], gone: Collection[str]) -> None:
        """As set."""
        self.begun.set()
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.batches.append(([c.id for c in changed], set(gone)))
        self.rows |= {c.id: c for c in changed}
        for key in gone:
            self.rows.pop(key, None)
        self.written.set()


@pytest.fixture
def disk() -> Disk:
    """One that works."""
    return Disk()


@pytest.fixture
async def writer(disk: Disk) -> AsyncIterator[LedgerWriter]:
    """One that writes by itself only after an hour."""
    made = LedgerWriter(disk, Metrics(), interval=3600)
    yield made
    await made.close()


def faults(writer: LedgerWriter) -> float:
    """How often the store failed, by the metric."""
    text = writer._metrics.render()[0].decode()
    (line,) = [row for row in text.splitlines() if 'faults_total{where="store"}' in row]
    return float(line.split()[-1])


async def test_changes_are_gathered(disk: Disk, writer: LedgerWriter) -> None:
    """Only the newest state of each is written, and what came and went is only deleted."""
    writer.changed(talk("a", 1.0))
    writer.changed(talk("a", 2.0))
    writer.changed(talk("b"))
    writer.gone("b")
    writer.gone("c")
    writer.changed(talk("c", 5.0))
    assert disk.batches == []
    assert await writer.flush()
    assert disk.batches == [(["a", "c"], {"b"})]
    assert disk.rows == {"a": talk("a", 2.0), "c": talk("c", 5.0)}
    assert await writer.flush()
    assert len(disk.batches) == 1


async def test_changes_are_written_without_being_asked(disk: Disk) -> None:
    """Behind the request, again and again."""
    writer = LedgerWriter(disk, Metrics(), interval=0)
    for name in "ab":
        disk.written.clear()
        writer.changed(talk(name))
        await disk.written.wait()
    assert set(disk.rows) == {"a", "b"}
    await writer.close()


async def test_what_changes_during_a_write_is_written_by_the_next(disk: Disk) -> None:
    """One write at a time; none is forgotten, none is overtaken."""
    writer = LedgerWriter(disk, Metrics(), interval=0)
    disk.go.clear()
    writer.changed(talk("a", 1.0))
    await disk.begun.wait()
    writer.changed(talk("a", 2.0))
    writer.gone("z")
    disk.go.set()
    await writer.close()
    assert disk.rows == {"a": talk("a", 2.0)}
    assert disk.batches == [(["a"], set()), (["a"], {"z"})]


async def test_a_flush_answers_for_what_it_wrote(disk: Disk, writer: LedgerWriter) -> None:
    """What changed meanwhile is the next one's business."""
    disk.go.clear()
    writer.changed(talk("a"))
    write = asyncio.create_task(writer.flush())
    await disk.begun.wait()
    writer.changed(talk("b"))
    disk.go.set()
    assert await write
    assert set(disk.rows) == {"a"}


async def test_a_failing_disk_loses_nothing_that_can_still_be_written(
    disk: Disk, writer: LedgerWriter
) -> None:
    """Counted each time; the newest state is written once the disk works again."""
    disk.errors = [StoreError("full"), StoreError("full")]
    writer.changed(talk("a", 1.0))
    writer.changed(talk("b", 1.0))
    writer.changed(talk("d", 1.0))
    writer.gone("c")
    disk.go.clear()
    write = asyncio.create_task(writer.flush())
    await disk.begun.wait()
    writer.changed(talk("a", 2.0))
    writer.changed(talk("c", 2.0))
    writer.gone("d")
    disk.go.set()
    assert not await write
    assert not await writer.flush()
    assert faults(writer) == 2
    assert await writer.flush()
    assert disk.rows == {"a": talk("a", 2.0), "b": talk("b", 1.0), "c": talk("c", 2.0)}
    assert [gone for _, gone in disk.batches] == [{"d"}]


async def test_a_failing_disk_is_tried_again_ever_more_seldom(
    disk: Disk, writer: LedgerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second, two, four ... a minute; at once a second again after a success."""
    writer._interval = 1.0
    pauses: list[float] = []
    loop = asyncio.get_running_loop()

    def later(pause: float, _work: object) -> asyncio.TimerHandle:
        pauses.append(pause)
        return asyncio.TimerHandle(loop.time() + 3600, print, (), loop)

    monkeypatch.setattr(loop, "call_later", later)
    disk.errors = [StoreError("full")] * 8
    writer.changed(talk("a"))
    while disk.errors:
        await writer.flush()
    await writer.flush()
    writer.changed(talk("a"))
    assert pauses == [
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        32.0,
        LONGEST_PAUSE,
        LONGEST_PAUSE,
        LONGEST_PAUSE,
        1.0,
    ]


async def test_a_fault_of_ours_is_not_tried_for_ever(disk: Disk, writer: LedgerWriter) -> None:
    """It would fail in the same way: counted, dropped, and the next change is written."""
    disk.errors = [TypeError(CANARY)]
    writer.changed(talk("a"))
    assert not await writer.flush()
    assert await writer.flush()
    assert faults(writer) == 1
    writer.changed(talk("b"))
    assert await writer.flush()
    assert set(disk.rows) == {"b"}


async def test_failures_are_logged_without_text(disk: Disk, writer: LedgerWriter) -> None:
    """Neither messages nor titles nor what an error quotes."""
    disk.errors = [StoreError("full"), ValueError(CANARY)]
    with structlog.testing.capture_logs() as logs:
        writer.changed(talk("a", text=CANARY))
        await writer.flush()
        await writer.flush()
    assert [row["event"] for row in logs] == ["ledger.unwritten", "ledger.fault"]
    assert CANARY not in str(logs)


async def test_a_flush_that_is_cancelled_forgets_nothing(disk: Disk, writer: LedgerWriter) -> None:
    """Nobody knows whether it was written, so it is written again."""
    disk.go.clear()
    writer.changed(talk("a"))
    write = asyncio.create_task(writer.flush())
    await disk.begun.wait()
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    disk.go.set()
    assert await writer.flush()
    assert set(disk.rows) == {"a"}


async def test_nothing_is_written_after_the_end(disk: Disk, writer: LedgerWriter) -> None:
    """The store is about to be closed; a late change starts no timer."""
    writer.changed(talk("a"))
    await writer.close()
    assert set(disk.rows) == {"a"}
    writer.changed(talk("b"))
    assert writer._timer is None


async def test_a_real_disk_that_fails_and_recovers(folder: Path) -> None:
    """The database is locked by somebody else for a while; then all is there."""
    store = LedgerStore(folder)
    await store.open()
    writer = LedgerWriter(store, Metrics(), interval=3600)
    database = folder / "catalogue.d" / "cache.db"
    await store._worker.call(lambda: store._rows._cache._sql("PRAGMA busy_timeout=1"))
    store._rows._cache._timeout = 0.001
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        writer.changed(talk("a"))
        assert not await writer.flush()
        other.execute("ROLLBACK")
    assert await writer.flush()
    await writer.close()
    await store.close()
    assert await kept(folder) == [talk("a")]
