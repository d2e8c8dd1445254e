"""What an owner does to the store by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.core.prefix import PrefixIndex
from proxy.core.records import Snapshot
from proxy.core.retention import Limits
from proxy.curator import Curator, Place
from proxy.store.files import StoreError
from proxy.telemetry.metrics import Metrics
from proxy.transfer import Budget
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


class FakeTransfer:
    """The index of one fingerprint."""

    def __init__(self, rows: Iterable[Snapshot]) -> None:
        self.index = PrefixIndex()
        self.costs = costs()
        self.calls: Counter[str] = Counter()
        for row in rows:
            self.index.add(row)

    def barred(self, snapshot_id: str) -> bool:
        """One."""
        return snapshot_id == "b"

    def gauge(self) -> None:
        """Counted."""
        self.calls["gauge"] += 1


class Bench:
    """A store of two fingerprints: ``a`` and ``b`` of ours, ``x`` of another."""

    def __init__(self, limits: Limits | None = None) -> None:
        ours = [snapshot(range(100), "a", used=900.0), snapshot(range(500, 600), "b", used=990.0)]
        self.store = FakeStore(*ours, replace(snapshot(range(9), "x"), fingerprint="other"))
        self.transfer = FakeTransfer(ours)
        self.metrics = Metrics()
        store: Any = self.store
        transfer: Any = self.transfer
        place = Place(Path("p"), limits or Limits(10**9, 9, 10**9), Budget(7, 8))
        self.curator = Curator(store, transfer, self.metrics, Clock(), place)

    def left(self) -> tuple[set[str], set[str]]:
        """On disk, and in the index."""
        return set(self.store.rows), {row.id for row in self.transfer.index}


async def test_what_is_there() -> None:
    """Sizes, limits, and each snapshot with its worth, the last used first."""
    bench = Bench()
    await bench.curator.look()
    assert bench.curator.usage() == {
        "path": "p", "used": 209_000, "limit": 10**9, "free": 10**9, "snapshots": 3, "keep_free": 7,
    }  # fmt: skip
    rows = bench.curator.snapshots()
    assert [row.id for row, _ in rows] == ["b", "a"]
    assert all(worth > 0 for _, worth in rows)
    assert bench.curator.barred("b")


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
    assert bench.transfer.calls["gauge"] == 2


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
    assert await bench.curator.prune() == ([], 0)
    await bench.curator.pin("a", pinned=False)
    assert await bench.curator.prune() == (["a"], 100_000)
