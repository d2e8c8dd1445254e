"""Slots as processes: what is believed of them, and where requests go."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from proxy.board import MOST_LEFT, Board
from proxy.core import hold
from proxy.core.placement import Need, Option
from proxy.core.queue import Grant, Kind, Lease
from proxy.core.records import Mode, Prompt, Reason, Reuse
from proxy.core.routing import Routing
from proxy.core.slots import Content
from tests.unit.doubles import Clock, FakeBackend, FakeEffects
from tests.unit.factories import chat, costs

BESIDE = "/v1/embeddings"


class Bench:
    """A board over two processes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.backend = FakeBackend()
        self.effects = FakeEffects(costs())
        self.running: list[Lease] = []
        self.board = Board(self.backend, self.effects, self.clock, self.running)  # type: ignore[arg-type]
        self.board.route(2, Routing(serial=True, beside=frozenset({BESIDE})))
        self.displaced: list[tuple[int, Content]] = []
        self.board.on_displaced = lambda slot, content: self.displaced.append((slot, content))

    def begin(self, prompt: Prompt, slot: int = 0, *, path: str = "") -> Lease:
        """A request has its slot."""
        need, kind = self.board.admit(Need(prompt, path=path))
        option = Option(slot=slot, reason=Reason.COLD, hit=0, n_tokens=10)
        self.board.take(kind, Grant(option))
        return Lease(
            option, kind, prompt, Reason.COLD, queued=0.0, started=self.clock.now,
            beside=need.beside, body=b"{}",
        )  # fmt: skip

    def answer(self, prompt: Prompt, slot: int = 0) -> None:
        """And is answered."""
        lease = self.begin(prompt, slot)
        lease.observed(0, 900)
        self.board.answered(lease, 950)
        self.board.release(lease.kind, slot)

    async def left(
        self, prompt: Prompt, slot: int = 0, *, path: str = "", after: float = 0.0
    ) -> None:
        """Or its client goes, ``after`` seconds."""
        lease = self.begin(prompt, slot, path=path)
        self.clock.now += after
        await self.board.settle(lease)
        self.board.release(lease.kind, slot)

    def held(self) -> list[Content | None]:
        """What is believed."""
        return [row.content for row in self.board.table]


@pytest.fixture
def bench() -> Bench:
    """Two processes."""
    return Bench()


def test_an_answer_is_believed(bench: Bench) -> None:
    """Whatever its length: the context is not known there, and does not shift."""
    bench.answer(chat("s", "q"))
    held = bench.held()[0]
    assert held is not None
    assert (held.n_tokens, held.n_prompt, held.reuse) == (950, 900, Reuse.EXTENSION)
    assert (held.storable, held.sent) == (False, b"{}")
    assert bench.board.kept(bench.clock.now) == pytest.approx(1.0)
    bench.clock.now += 2
    assert bench.board.kept(bench.clock.now) is None
    assert bench.effects.costs.text < 4.0  # a few bytes were 900 tokens


async def test_another_process_takes_over(bench: Bench) -> None:
    """It holds the conversation then, and what it held is displaced; the dead one holds nothing."""
    board = bench.board
    bench.answer(chat("s", "q"), 0)
    bench.answer(chat("x"), 1)
    lease = bench.begin(chat("s", "q", "a", "r"), 0)
    bench.running[:] = [bench.begin(chat("y"), 1), lease]
    board.release(Kind.NARROW, 1)
    board._moved(0, 1)
    assert (lease.slot, lease.option.slot, bench.running[0].slot) == (1, 0, 1)
    assert bench.held() == [None, None]
    assert [(slot, content.prompt.chain) for slot, content in bench.displaced] == [
        (1, chat("x").chain)
    ]
    lease.observed(0, 1900)
    board.answered(lease, 1950)
    board.release(lease.kind, lease.option.slot)
    empty, held = bench.held()
    assert empty is None
    assert held is not None
    assert held.prompt is lease.prompt
    assert board.table.all_free()


async def test_one_takes_over_that_has_a_request(bench: Bench) -> None:
    """What that left is displaced when the other one ends behind it; who leaves left it there."""
    board = bench.board
    bench.answer(chat("x"), 1)
    other = bench.begin(chat("x", "a", "y"), 1)
    lease = bench.begin(chat("s", "q"), 0)
    bench.running[:] = [other, lease]
    board._moved(0, 1)
    assert not bench.displaced
    other.observed(900, 950)
    board.answered(other, 960)
    await board.settle(lease)
    assert bench.held() == [None, None]
    assert [content.prompt for _, content in bench.displaced] == [other.prompt]
    assert board.admit(Need(lease.prompt))[0].wanted == 1


async def test_what_takes_over_and_changes_nothing(bench: Bench) -> None:
    """Embeddings; what the pool placed itself; what is not placed at all."""
    board = bench.board
    bench.answer(chat("x"), 1)
    before = bench.held()
    lease = bench.begin(chat(), 0, path=BESIDE)
    bench.running[:] = [lease]
    board._moved(None, 1)
    assert lease.slot == 0
    board._moved(0, 1)
    assert lease.slot == 1
    await board.settle(lease)
    assert bench.held() == before
    board.forward(2)
    board._moved(1, 0)
    assert lease.slot == 1


async def test_who_leaves_leaves_nothing(bench: Bench) -> None:
    """What was held before is lost too, and nobody asks the server for its slots."""
    bench.answer(chat("s", "q"))
    await bench.left(chat("s", "q", "a", "r"))
    assert bench.held() == [None, None]
    assert not bench.displaced  # by its own conversation
    assert not bench.backend.asked.is_set()


async def test_another_conversation_displaces(bench: Bench) -> None:
    """Whether it is answered or leaves; told with what was lost."""
    bench.answer(chat("s", "q"))
    bench.answer(chat("x"))
    await bench.left(chat("y"))
    assert [(slot, content.prompt.chain) for slot, content in bench.displaced] == [
        (0, chat("s", "q").chain),
        (0, chat("x").chain),
    ]


async def test_what_runs_beside_changes_nothing(bench: Bench) -> None:
    """Embeddings leave the belief as it is; an unknown path does not."""
    bench.answer(chat("s", "q"))
    before = bench.held()
    await bench.left(chat(), path=BESIDE)
    assert bench.held() == before
    assert not bench.displaced
    await bench.left(chat(), path="/v1/other")
    assert bench.held() == [None, None]
    assert len(bench.displaced) == 1


async def test_who_comes_back_goes_where_it_was_left(bench: Bench) -> None:
    """Its prefill goes on there; not when another request has had that process since."""
    prompt = chat("s", "q")
    await bench.left(prompt, 1)
    assert bench.board.admit(Need(prompt))[0].wanted == 1
    assert bench.board.admit(Need(chat("s", "r")))[0].wanted is None
    assert bench.board.admit(Need(chat()))[0].wanted is None
    bench.answer(chat("x"), 1)
    assert bench.board.admit(Need(prompt))[0].wanted is None


async def test_who_gave_up_late_is_waited_for(bench: Bench) -> None:
    """Its process is kept a moment, and known to it after others had it, for a while."""
    prompt = chat("s", "q")
    await bench.left(prompt, 1, after=hold.LONG_SECONDS)
    held = bench.held()[1]
    assert held is not None
    assert (held.prompt, held.n_tokens > 0, held.sent) == (prompt, True, None)
    assert bench.board.kept(bench.clock.now) == pytest.approx(hold.RETURN_SECONDS)
    bench.answer(chat("x"), 1)
    await bench.left(chat("y"), 1)
    assert bench.board.admit(Need(prompt))[0].wanted == 1
    bench.clock.now += hold.KEPT_SECONDS
    assert bench.board.admit(Need(prompt))[0].wanted is None


async def test_an_answer_is_not_come_back_for(bench: Bench) -> None:
    """Who got it goes anywhere again; and of many that left, the oldest are forgotten."""
    prompt = chat("s", "q")
    await bench.left(prompt, 1, after=hold.LONG_SECONDS)
    bench.answer(prompt, 1)
    assert bench.board.admit(Need(prompt))[0].wanted is None
    for number in range(MOST_LEFT + 1):
        await bench.left(chat(f"{number}"), 1, after=hold.LONG_SECONDS)
    wanted = [bench.board.admit(Need(chat(f"{n}")))[0].wanted for n in (0, 1, MOST_LEFT)]
    # the first ones had their time
    assert (wanted[0], wanted[-1], len(bench.board._left)) == (None, 1, MOST_LEFT)


def test_a_process_that_is_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is offered to nobody, and holds nothing when it is back."""
    bench.answer(chat("s", "q"), 0)
    bench.answer(chat("x"), 1)
    monkeypatch.setattr(FakeBackend, "absent", frozenset({0}))
    engine = bench.board.engine(large=False, typical=1.0)
    assert [row.index for row in engine.slots] == [1]
    assert bench.board.admit(Need(chat(), path=BESIDE))[0].wanted == 1
    bench.board.forget(frozenset({0}))
    held = bench.held()
    assert held[0] is None
    assert held[1] is not None


def test_all_processes_are_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are offered: a request that is sent fails at once, one that waits does not."""
    monkeypatch.setattr(FakeBackend, "absent", frozenset({0, 1}))
    assert len(bench.board.engine(large=False, typical=1.0).slots) == 2
    assert bench.board.admit(Need(chat(), path=BESIDE))[0].wanted == 0


def test_the_engine_is_told_what_the_driver_says(bench: Bench) -> None:
    """Only in this mode; a large prefill there is nobody's business."""
    engine = bench.board.engine(large=True, typical=1.0)
    assert (engine.reuse, engine.serial, engine.large) == (Reuse.EXTENSION, True, False)
    bench.board.drive(2, 4096)
    engine = bench.board.engine(large=True, typical=1.0)
    assert (engine.reuse, engine.serial, engine.large) == (Reuse.PREFIX, False, True)


@pytest.mark.parametrize("refused_from", [math.inf, 900_000])
def test_the_engine_is_told_which_saves_are_refused(bench: Bench, refused_from: float) -> None:
    """As the effects know it at the moment of the decision."""
    bench.board.drive(2, 4096)
    bench.effects.refused_from = refused_from
    assert bench.board.engine(large=False, typical=1.0).refused_from == refused_from


def test_forward_pins_nothing(bench: Bench) -> None:
    """A request takes a permit, and its need is its own."""
    bench.answer(chat("s", "q"))
    bench.board.forward(1)
    need = Need(chat("s", "q"), wanted=7, wide=True)
    assert bench.board.admit(need) == (need, Kind.PERMIT)
    assert (bench.board.mode, bench.board.pins, bench.held()) == (Mode.FORWARD, False, [None, None])
    assert not bench.board.taken()
    bench.board.take(Kind.PERMIT, Grant(Option(slot=-1, reason=Reason.FORWARD, hit=0, n_tokens=0)))
    assert bench.board.taken()


def test_a_side_request_is_another_conversation(bench: Bench) -> None:
    """Even where it goes on from what is held."""
    bench.answer(chat("s", "q"))
    bench.answer(replace(chat("s", "q", "a", "title?"), side=True))
    assert len(bench.displaced) == 1
