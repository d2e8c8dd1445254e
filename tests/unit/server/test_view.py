"""What the pages show of the live objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.backends.base import Verdict
from proxy.core.prefix import PrefixIndex
from proxy.core.records import Mode, Reason
from proxy.core.slots import SlotState, SlotTable
from proxy.server.view import View
from proxy.telemetry.history import Decision, History
from proxy.telemetry.metrics import Metrics
from tests.unit.factories import chat, content, snapshot


class Bench:
    """A view of parts that are set by the test."""

    def __init__(self, *, transfer: bool = True) -> None:
        self.scheduler = SimpleNamespace(table=SlotTable(2), mode=Mode.EXCLUSIVE, draining=False)
        self.keeper = SimpleNamespace(up=True, verdict=Verdict(Mode.EXCLUSIVE, "proved", "advice"))
        self.transfer = SimpleNamespace(
            index=PrefixIndex(), retired=False, barred=lambda i: i == "b"
        )
        self.history = History()
        scheduler: Any = self.scheduler
        keeper: Any = self.keeper
        store: Any = self.transfer if transfer else None
        self.view = View(scheduler, keeper, store, self.history, Metrics())


@pytest.fixture
def bench() -> Bench:
    """One with a store."""
    return Bench()


def test_slots(bench: Bench) -> None:
    """State and content of each; what a slot holds is told in figures, never in text."""
    bench.scheduler.table.begin(0, SlotState.LEASED, 1.0)
    bench.scheduler.table.hold(0, content(chat("secret text"), 40, n_saved=30, used=5.0))
    first, second = bench.view.slots()
    assert first == {
        "slot": 0, "state": "leased", "content": "known", "tokens": 40, "prompt": 40,
        "saved": 30, "storable": True, "used": 5.0,
    }  # fmt: skip
    assert (second["content"], second["tokens"], second["used"]) == ("unknown", None, None)


def test_snapshots(bench: Bench) -> None:
    """The last used first, the barred ones marked; tokens are counted, not shown."""
    for name, used in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        bench.transfer.index.add(snapshot(range(10), name, used=used))
    rows = bench.view.snapshots()
    assert [(row["id"], row["barred"]) for row in rows] == [("b", True), ("c", False), ("a", False)]
    assert {row["tokens"] for row in rows} == {10}
    assert Bench(transfer=False).view.snapshots() == []


def test_requests(bench: Bench) -> None:
    """The newest first, as many as asked for."""
    for n in range(3):
        bench.history.add(Decision(str(n), 0.0, "/", Reason.COLD, 200, 1.0))
    assert [row["request_id"] for row in bench.view.requests(2)] == ["2", "1"]


@pytest.mark.parametrize(
    ("up", "draining", "ready", "why"),
    [
        (True, False, True, "proved"),
        (False, False, False, "proved"),
        (True, True, False, "slotkeeper is shutting down"),
    ],
)
def test_ready(bench: Bench, up: bool, draining: bool, ready: bool, why: str) -> None:
    """Ready while the backend answers and nothing is shutting down."""
    bench.keeper.up, bench.scheduler.draining = up, draining
    assert bench.view.ready() == (
        ready,
        {"mode": "exclusive", "why": why, "advice": "advice", "restores": "in use"},
    )


def test_retired(bench: Bench) -> None:
    """Restores that were given up are told."""
    bench.transfer.retired = True
    assert bench.view.ready()[1]["restores"] == "retired"
    assert Bench(transfer=False).view.ready()[1]["restores"] == "in use"


def test_metrics(bench: Bench) -> None:
    """The exposition with its type."""
    body, kind = bench.view.metrics()
    assert b"slotkeeper_requests_total" in body
    assert kind.startswith("text/plain")
