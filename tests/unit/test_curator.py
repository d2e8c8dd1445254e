"""What an owner does to the store by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from proxy.core.records import Snapshot
from proxy.core.retention import Limits, Refusal
from proxy.curator import Curator, Place
from proxy.store.files import StoreError
from proxy.telemetry.metrics import Cause, Metrics
from proxy.transfer import Budget, Transfer
from tests.unit.doubles import Clock
from tests.unit.factories import costs, snapshot


class FakeStore:
    """Rows in memory; the disk may refuse."""

    def __init__(self, *rows: Snapshot) -> None:
        self.rows = {row.id: row for row in rows}
        self.bad: set[str] = set()
        self.unreadable: set[str] = set()
        self.quarantine: set[str] = set()
        self.refuses = False

    def all_snapshots(self) -> list[Snapshot]:
        """Of every fingerprint."""
        return list(self.rows.values())

    def usage(self) -> tuple[int, int]:
        """Bytes and files."""
        return sum(row.size for row in self.rows.values()), len(self.rows)

    def quarantined(self, snapshot_id: str) -> bool:
        """As the test says."""
        return snapshot_id in self.quarantine

    async def free_bytes(self) -> int:
        """Plenty."""
        return 10**9

    async def check(self, snapshot_id: str) -> str:
        """As the test says."""
        if snapshot_id in self.unreadable:
            raise StoreError
        return "damaged" if snapshot_id in self.bad else ""

    async def pin(self, snapshot_id: str, *, pinned: bool) -> Snapshot | None:
        """In memory."""
        row = self.rows.get(snapshot_id)
        if row is not None:
            self.rows[snapshot_id] = row = replace(row, pinned=pinned)
        return row

    async def delete(self, ids: Iterable[str], cause: str) -> None:
        """All or nothing."""
        del cause
        if self.refuses:
            raise StoreError
        for name in ids:
            del self.rows[name]


class Bench:
    """A store of two fingerprints: ``a`` and ``b`` of ours, ``x`` of another."""

    def __init__(self, limits: Limits | None = None) -> None:
        ours = [snapshot(range(100), "a", used=900.0), snapshot(range(500, 600), "b", used=990.0)]
        other = replace(snapshot(range(9), "x", used=800.0), fingerprint="other")
        self.store = FakeStore(*ours, other)
        self.metrics, store, backend = Metrics(), cast("Any", self.store), cast("Any", None)
        limits, budget = limits or Limits(10**9, 9, 10**9), Budget(7, 8)
        clock = Clock()
        self.transfer = Transfer(backend, store, self.metrics, clock, limits, budget)
        self.transfer.fingerprint, self.transfer.costs = ours[0].fingerprint, costs()
        for row in ours:
            self.transfer.index.add(row)
        self.told = 0
        self.transfer.on_removed = self.tell
        place = Place(Path("p"), limits, budget)
        self.curator = Curator(store, self.transfer, self.metrics, clock, place)

    def tell(self, _: Cause | None) -> None:
        """Slots are told that snapshots went."""
        self.told += 1

    def left(self) -> tuple[set[str], set[str]]:
        """On disk, and in the index."""
        return set(self.store.rows), {row.id for row in self.transfer.index}


async def test_what_is_there() -> None:
    """Sizes, limits, and each snapshot with its worth, the last used first."""
    bench = Bench()
    await bench.curator.look()
    assert bench.curator.usage() == {
        "path": "p", "used": 209_000, "limit": 10**9, "free": 10**9, "snapshots": 3, "keep_free": 7,
        "refused": None, "advice": "",
    }  # fmt: skip
    rows = bench.curator.snapshots()
    assert [row.id for row, _ in rows] == ["b", "a"]
    assert all(worth.value > 0 and worth.seconds > 0 for _, worth in rows)
    bench.store.quarantine = {"b"}
    assert bench.curator.barred("b")


async def test_what_is_barred_takes_no_value_from_others() -> None:
    """A longer state of the same beginning that is never restored spares nobody anything."""
    bench = Bench()
    bench.transfer.index.add(snapshot(range(120), "c", used=950.0))
    seconds = {row.id: worth.seconds for row, worth in bench.curator.snapshots()}
    assert seconds["a"] == 0.0
    bench.store.quarantine = {"c"}
    bench.transfer.index.remove("b")  # values are kept for a moment; not for another set
    seconds = {row.id: worth.seconds for row, worth in bench.curator.snapshots()}
    assert seconds["a"] > 0.0


async def test_pin() -> None:
    """The index knows at once; one that is not there is told."""
    bench = Bench()
    assert await bench.curator.pin("a", pinned=True)
    found = bench.transfer.index.get("a")
    assert found is not None
    assert found.pinned
    assert not await bench.curator.pin("z", pinned=True)


async def test_remove() -> None:
    """Also one of another fingerprint, and one that is pinned; counted as done by hand."""
    bench = Bench()
    await bench.curator.pin("a", pinned=True)
    assert await bench.curator.remove("a")
    assert await bench.curator.remove("x")
    assert bench.left() == ({"b"}, {"b"})
    assert not await bench.curator.remove("a")
    assert bench.metrics.read("evictions_total")["evictions_total", "removed"] == 2
    assert bench.told == 2
    assert bench.metrics.read("store_bytes")["store_bytes",] == 100_000


async def test_a_disk_that_refuses_keeps_the_index() -> None:
    """What may still be there is still used."""
    bench = Bench()
    bench.store.refuses = True
    with pytest.raises(StoreError):
        await bench.curator.remove("a")
    assert bench.left() == ({"a", "b", "x"}, {"a", "b"})


async def test_verify() -> None:
    """All are read, of every fingerprint, whatever one of them is; nothing is deleted."""
    bench = Bench()
    assert await bench.curator.verify() == (3, [])
    bench.store.bad = {"b", "x"}
    assert await bench.curator.verify() == (3, ["b", "x"])
    bench.store.unreadable = {"a"}
    assert await bench.curator.verify() == (3, ["a", "b", "x"])
    assert len(bench.store.rows) == 3


async def test_prune() -> None:
    """What is too old or too much, and what is never restored again; not what is pinned."""
    bench = Bench(Limits(10**9, 9, max_age=50.0))
    await bench.curator.pin("a", pinned=True)
    assert await bench.curator.prune() == (["x"], 9000)
    bench.store.quarantine = {"a", "b"}
    assert await bench.curator.prune() == (["b"], 100_000)
    assert bench.left() == ({"a"}, {"a"})
    assert bench.told == 2
    assert await bench.curator.prune() == ([], 0)
    await bench.curator.pin("a", pinned=False)
    assert await bench.curator.prune() == (["a"], 100_000)


@pytest.mark.parametrize(
    ("most_bytes", "most_files", "gone"),
    [
        (209_000, 3, []),
        (208_999, 3, ["x"]),
        (209_000, 2, ["x"]),
        (199_999, 3, ["x", "a"]),
        (209_000, 1, ["x", "a"]),
    ],
)
async def test_prune_is_of_the_whole_store(
    most_bytes: int, most_files: int, gone: list[str]
) -> None:
    """Other models' snapshots count against the limits, and go before those in use."""
    bench = Bench(Limits(most_bytes, most_files, 10**9))
    assert (await bench.curator.prune())[0] == gone


async def test_prune_leaves_room_for_what_others_have_pinned() -> None:
    """A pinned snapshot of another model stays; what is in use has so much less."""
    bench = Bench(Limits(208_000, 9, 10**9))
    await bench.curator.pin("x", pinned=True)
    assert await bench.curator.prune() == (["a"], 100_000)


@pytest.mark.parametrize("way", ["unpin", "remove"])
async def test_advice_ends_when_its_cause_does(way: str) -> None:
    """Why the last save was refused is said until its owner did something about it."""
    bench = Bench()
    bench.transfer.refused = Refusal.PINS_FULL
    usage = bench.curator.usage()
    assert usage["refused"] == "pins-full"
    assert "unpin" in usage["advice"]
    if way == "unpin":
        await bench.curator.pin("a", pinned=False)
    else:
        await bench.curator.remove("a")
    assert (bench.curator.usage()["refused"], bench.curator.usage()["advice"]) == (None, "")
