"""What the pages show of the live objects."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.backends.base import Verdict
from proxy.core.ledger import Answer, Conversation, Line
from proxy.core.prefix import PrefixIndex
from proxy.core.records import Mode, Reason
from proxy.core.slots import SlotState, SlotTable
from proxy.errors import SlotkeeperError
from proxy.server.view import View
from proxy.telemetry.history import Decision, History
from proxy.telemetry.metrics import Metrics
from tests.unit.factories import chat, content, snapshot


class Bench:
    """A view of parts that are set by the test."""

    def __init__(self, *, transfer: bool = True, ledger: bool = True) -> None:
        self.scheduler = SimpleNamespace(table=SlotTable(2), mode=Mode.EXCLUSIVE, draining=False)
        self.keeper = SimpleNamespace(up=True, verdict=Verdict(Mode.EXCLUSIVE, "proved", "advice"))
        self.transfer = SimpleNamespace(
            index=PrefixIndex(), retired=False, barred=lambda i: i == "b", forget=self._forget
        )
        self.talks: dict[str, Conversation] = {}
        self.snapshots = {"a": 2, "old": 1}  # by conversation
        self.disk: list[bool | OSError] = []  # how it answers; then well
        self.history = History()
        scheduler: Any = self.scheduler
        keeper: Any = self.keeper
        store: Any = self.transfer if transfer else None
        talks = self if ledger else None
        self.view = View(scheduler, keeper, store, self.history, Metrics(), talks, talks)

    def conversations(self) -> list[Conversation]:
        """The last used first."""
        return list(self.talks.values())

    def forget(self, conversation: str) -> bool:
        """From the book."""
        return self.talks.pop(conversation, None) is not None

    async def flush(self) -> bool:
        """To the ledger's disk."""
        answer = self.disk.pop(0) if self.disk else True
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def _forget(self, conversation: str) -> int:
        if self.disk and isinstance(self.disk[0], OSError):
            await self.flush()
        return self.snapshots.pop(conversation, 0)


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
    assert {row["conversation"] for row in rows} == {""}
    assert Bench(transfer=False).view.snapshots() == []


def test_conversations(bench: Bench) -> None:
    """One row each, sizes in bytes; messages are counted, only the title is shown."""
    lines = (Line(b"12345", b"123", b"k"), Line(bytes([49] * 4), bytes([49] * 4), b"k", "note"))
    came = b"secret"
    answers = (Answer(2, b"12", b"k"),)
    bench.talks["a"] = Conversation(
        "a", b"n", "aider", lines, tools=(b"123",), answers=answers, prompt_n=7, used=5.0, title="T"
    )
    bench.talks["b"] = Conversation("b", b"n", lines=(Line(came, came, b"k"),))
    first, second = bench.view.conversations()
    assert first == {
        "id": "a", "client": "aider", "messages": 2, "used": 5.0, "prompt_n": 7, "title": "T",
        "bytes": bench.talks["a"].size,
    }  # fmt: skip
    assert (second["bytes"], second["prompt_n"], second["title"]) == (6 + 2, None, "")
    assert "secret" not in str(second)
    assert Bench(ledger=False).view.conversations() == []


async def test_forget(bench: Bench) -> None:
    """The conversation, its snapshots, and what slots hold of it; None if nothing is known."""
    bench.talks = {name: Conversation(name, b"n") for name in "ab"}
    prompt = replace(chat("x"), conversation="a")
    bench.scheduler.table.hold(0, content(prompt, 40, n_saved=30))
    assert await bench.view.forget("a") == 2
    assert list(bench.talks) == ["b"]
    held = bench.scheduler.table[0].content
    assert (held.storable, held.n_saved) == (False, 0)
    assert await bench.view.forget("a") is None
    assert await bench.view.forget("b") == 0
    assert await bench.view.forget("old") == 1, "its snapshots outlived the ledger's row"
    assert await Bench(transfer=False, ledger=False).view.forget("a") is None


@pytest.mark.parametrize("fault", [False, OSError("no such file: secret")])
async def test_a_disk_that_forgets_nothing_is_told(bench: Bench, fault: bool | OSError) -> None:
    """Its owner must not believe it gone; the answer names no file."""
    bench.talks["a"] = Conversation("a", b"n")
    bench.disk = [fault]
    with pytest.raises(SlotkeeperError) as caught:
        await bench.view.forget("a")
    assert caught.value.status == 500
    assert "secret" not in str(caught.value.envelope())
    assert "a" not in bench.talks


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
