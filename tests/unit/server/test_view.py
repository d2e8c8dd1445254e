"""What the pages show of the live objects."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.backends.base import Verdict
from proxy.core.ledger import Answer, Conversation, Line
from proxy.core.records import Mode, Reason, Snapshot
from proxy.core.retention import Refusal, Worth
from proxy.core.slots import SlotState, SlotTable
from proxy.errors import SlotkeeperError
from proxy.server.record import Recorder
from proxy.server.status import About
from proxy.server.view import Sources, View
from proxy.telemetry.history import Decision, History
from proxy.telemetry.logs import Ring
from proxy.telemetry.metrics import Cause, Metrics, Outcome, PathClass
from proxy.telemetry.series import Series
from tests.unit.doubles import Clock
from tests.unit.factories import chat, content, snapshot


class Bench:
    """A view of parts that are set by the test."""

    def __init__(self, *, store: bool = True, ledger: bool = True, hide: bool = False) -> None:
        self.scheduler = SimpleNamespace(
            table=SlotTable(2), mode=Mode.EXCLUSIVE, draining=False, total_slots=2
        )
        self.keeper = SimpleNamespace(
            up=True, verdict=Verdict(Mode.EXCLUSIVE, "proved", "advice"), paused=False, facts=None
        )
        self.transfer = SimpleNamespace(retired=False, refused=None, forget=self._forget)
        self.curator = SimpleNamespace(
            snapshots=lambda: self.stored, barred=lambda i: i == "b", usage=lambda: {"used": 5}
        )
        self.stored: list[tuple[Snapshot, Worth]] = []
        self.talks: dict[str, Conversation] = {}
        self.snapshots = {"a": 2, "old": 1}  # by conversation
        self.disk: list[bool | OSError] = []  # how it answers; then well
        self.history = History()
        self.metrics = Metrics()
        self.clock = Clock(5000.0)
        parts: Any = {"scheduler": self.scheduler, "keeper": self.keeper, "talks": self}
        if store:
            parts |= {"transfer": self.transfer, "curator": self.curator}
        recorder = Recorder(self.metrics, self.history, self.clock)
        sources = Sources(
            history=self.history,
            metrics=self.metrics,
            recorder=recorder,
            series=Series(),
            ring=Ring(),
            ledger=self if ledger else None,
            **parts,
        )
        self.view = View(sources, About("1.2", "http://x", 1.0, hide, "/slots"), self.clock)

    def conversation(self, conversation: str) -> Conversation | None:
        """By id."""
        return self.talks.get(conversation)

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
    """State and content of each; of what a slot holds only figures and the title are told."""
    bench.talks["a"] = Conversation("a", b"n", "aider", title="Rivers")
    bench.scheduler.table.begin(0, SlotState.LEASED, 1.0)
    prompt = replace(chat("secret text"), conversation="a")
    bench.scheduler.table.hold(0, content(prompt, 40, n_saved=30, used=5.0))
    first, second = bench.view.slots()
    assert first == {
        "index": 0, "state": "leased", "conversation": "a", "title": "Rivers", "client": "aider",
        "tokens": 40, "saved_tokens": 30, "used": 5.0, "since": 1.0, "storable": True,
    }  # fmt: skip
    assert second == {
        "index": 1, "state": "free", "conversation": None, "title": None, "client": None,
        "tokens": None, "saved_tokens": 0, "used": None, "since": None, "storable": True,
    }  # fmt: skip


def test_snapshots(bench: Bench) -> None:
    """Figures, what they are worth, whose they are; the barred and the pinned ones are marked."""
    bench.talks["a"] = Conversation("a", b"n", title="Rivers")
    mine = replace(snapshot(range(10), "a", used=1.0), conversation="a", pinned=True)
    bench.stored = [
        (mine, Worth(2.0, 0.5)),
        (snapshot(range(10), "b", used=3.0), Worth(1.0, 0.25)),
    ]
    first, second = bench.view.snapshots()
    assert first == {
        "id": "a", "fingerprint": "f" * 32, "tokens": 10, "prompt_tokens": 10, "bytes": 10_000,
        "created": 1.0, "last_used": 1.0, "restores": 0, "barred": False, "pinned": True,
        "conversation": "a", "title": "Rivers", "value": 0.5, "seconds_saved": 2.0,
    }  # fmt: skip
    assert (second["barred"], second["pinned"], second["conversation"]) == (True, False, None)
    assert Bench(store=False).view.snapshots() == []


def test_status_before_anything_is_known() -> None:
    """What cannot be known is null; nothing has been counted."""
    told = Bench(store=False).view.status()
    assert told["backend"] == {
        "kind": None, "url": "http://x", "up": True, "model": None, "n_ctx": None,
        "total_slots": 2, "version": None, "restarts": 0,
    }  # fmt: skip
    assert told["store"] is None
    assert told["totals"] == {
        "requests": 0, "prompt_tokens": {"slot": 0, "snapshot": 0, "computed": 0},
        "seconds_saved": 0, "saves": 0, "restores": 0, "evictions": 0,
    }  # fmt: skip
    assert told["first_token"] == {"p50": None, "p95": None, "count": 0}
    assert (told["version"], told["started"], told["now"]) == ("1.2", 1.0, 5000.0)


def test_status_counts(bench: Bench) -> None:
    """Requests that compute, tokens by source, good saves and restores, evictions for room."""
    metrics = bench.metrics
    for kind in (PathClass.CHAT, PathClass.COMPUTE, PathClass.OWN, PathClass.PLAIN):
        metrics.request(kind, Reason.COLD, 200, total=1.0)
    metrics.prompt(reused=7, computed=3, restored=True, saved=2.5)
    metrics.saved(Outcome.OK)
    metrics.saved(Outcome.FAILED)
    metrics.restored(Outcome.OK)
    metrics.evicted(Cause.SPACE, 2)
    metrics.evicted(Cause.SUPERSEDED, 9)
    metrics.queue_length.set(4)
    metrics.leases_active.set(2)
    for at, first in ((1000.0, 9.0), (4000.0, 2.0), (4500.0, 1.0)):
        row = Decision("r", at, "/", Reason.COLD, 200, 1.0, first_token=first)
        bench.history.add(row)
    told = bench.view.status()
    assert told["totals"] == {
        "requests": 2, "prompt_tokens": {"slot": 0, "snapshot": 7, "computed": 3},
        "seconds_saved": 2.5, "saves": 1, "restores": 1, "evictions": 2,
    }  # fmt: skip
    assert told["queue"] == {"waiting": 4, "running": 2}
    assert told["first_token"] == {"p50": 1.0, "p95": 2.0, "count": 2}, "of the last hour"
    assert told["store"] == {"used": 5, "slot_dir": "/slots"}
    rows = bench.view.history(3600.0)["rows"]
    assert len(rows) == 1
    assert rows[0][3] == 7


def test_hidden_titles() -> None:
    """No page has one."""
    bench = Bench(hide=True)
    bench.talks["a"] = Conversation("a", b"n", title="secret")
    prompt = replace(chat("x"), conversation="a")
    bench.scheduler.table.hold(0, content(prompt, 40))
    bench.stored = [(replace(snapshot(range(10)), conversation="a"), Worth(1.0, 0.5))]
    bench.history.add(Decision("r", 0.0, "/", Reason.COLD, 200, 1.0, title="secret"))
    view = bench.view
    shown = [*view.slots(), *view.snapshots(), *view.conversations(), *view.requests(9)]
    shown += [view.request("r") or {}]
    assert "secret" not in str(shown)
    assert {row["title"] for row in shown} == {None}


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
    assert (second["bytes"], second["prompt_n"], second["title"]) == (6 + 2, None, None)
    assert "secret" not in str(second)


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
    assert await Bench(store=False, ledger=False).view.forget("a") is None


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
    assert [row["request_id"] for row in bench.view.requests(9, after="1")] == ["2"]
    assert (bench.view.request("1") or {})["title"] is None
    assert bench.view.request("9") is None


def test_requests_of_one_id(bench: Bench) -> None:
    """The newest is told, and that there are more; what was noted before stays."""
    for status, note in ((200, ""), (201, "noted"), (202, "")):
        bench.history.add(Decision("mine", 0.0, "/", Reason.COLD, status, 1.0, note=note))
    bench.history.add(Decision("other", 0.0, "/", Reason.COLD, 200, 1.0))
    found = bench.view.request("mine") or {}
    many = "one of 3 requests with this id, which the client chose"
    assert (found["status"], found["note"]) == (202, many)
    notes = [row["note"] for row in bench.view.requests(9)]
    assert notes == ["", many, f"noted; {many}", many]


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
    restores = "in use" if up else "not used"
    assert bench.view.ready() == (
        ready,
        {"mode": "exclusive", "why": why, "advice": "advice", "restores": restores},
    )


def test_why_nothing_is_saved(bench: Bench) -> None:
    """Where the backend's verdict advises nothing, the store may."""
    bench.keeper.verdict = Verdict(Mode.EXCLUSIVE, "proved")
    assert bench.view.ready()[1]["advice"] == ""
    bench.transfer.refused = Refusal.PINS_FULL
    assert bench.view.ready()[1]["advice"] == Refusal.PINS_FULL.advice
    bench.scheduler.mode = Mode.FORWARD
    assert bench.view.ready()[1]["advice"] == "", "there the mode is why"


def test_retired(bench: Bench) -> None:
    """Restores that were given up are told."""
    bench.transfer.retired = True
    assert bench.view.ready()[1]["restores"] == "retired"


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.ROUTED])
def test_restores_where_nothing_is_driven(bench: Bench, mode: Mode) -> None:
    """They are not used; nor where nothing is ever saved."""
    bench.scheduler.mode = mode
    assert bench.view.ready()[1]["restores"] == "not used"
    assert Bench(store=False).view.ready()[1]["restores"] == "not used"


def test_metrics(bench: Bench) -> None:
    """The exposition with its type."""
    body, kind = bench.view.metrics()
    assert b"slotkeeper_requests_total" in body
    assert kind.startswith("text/plain")
