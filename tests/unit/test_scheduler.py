"""Leases: one holder per slot, nothing lost when clients leave, nothing pinned when unproven."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from proxy.backends.base import SlotView
from proxy.core.placement import Need
from proxy.core.queue import Lease, next_up
from proxy.core.records import Mode, Prompt, Reason
from proxy.core.routing import Routing
from proxy.core.slots import SlotState
from proxy.errors import (
    BackendUnreachableError,
    BadRequestError,
    DrainingError,
    OverloadedError,
)
from proxy.scheduler import Scheduler
from proxy.telemetry.metrics import Metrics
from tests.unit.doubles import Clock, FakeBackend, FakeEffects
from tests.unit.factories import chat, costs, need, snapshot


async def unresolved() -> Prompt:
    """For requests that are exact already."""
    raise AssertionError("nobody should look")


class Bench:
    """A scheduler over two proved slots, and what it talks to."""

    def __init__(self, total: int = 2, *, max_queue: int = 8, queue_timeout: float = 60.0) -> None:
        self.clock = Clock()
        self.backend = FakeBackend()
        self.backend.occupy(*([0] * total))
        self.effects = FakeEffects(costs())
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.backend,  # type: ignore[arg-type]
            self.effects,
            self.metrics,
            self.clock,
            max_queue=max_queue,
            queue_timeout=queue_timeout,
        )
        if total:
            self.scheduler.drive(total, 4096)
        self.table = self.scheduler.table

    def lease(self, request: Need, resolve: Callable[[], Awaitable[Prompt]] = unresolved) -> object:
        """``async with`` it."""
        return self.scheduler.lease(request, resolve)

    async def turn(self, request: Need, cached: int, n_prompt: int, n_tokens: int) -> Lease:
        """A whole answer."""
        async with self.scheduler.lease(request, unresolved) as lease:
            lease.sent = True
            self.scheduler.observed(lease, cached, n_prompt)
            lease.finish(n_tokens)
        return lease

    async def broken_off(self, request: Need, *, sent: bool = True, seen: int = 0) -> None:
        """A client that leaves, after ``seen`` prompt tokens were announced if any."""
        with suppress(ConnectionError):
            async with self.scheduler.lease(request, unresolved) as lease:
                lease.sent = sent
                if seen:
                    self.scheduler.observed(lease, 0, seen)
                raise ConnectionError


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Two slots; at the end nothing may be left over."""
    made = Bench()
    yield made
    made.backend.occupy(*[view.n_tokens or 0 for view in made.backend.views])
    await made.scheduler.quiet()
    assert all(row.state is SlotState.FREE for row in made.scheduler.table)
    assert made.scheduler.quiescent()


def q(text: str = "q", n: int = 50) -> Need:
    """A small request."""
    return need(chat(text, tokens=range(n)))


async def start(bench: Bench, request: Need) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A request that holds its lease until the event is set."""
    release, held = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with bench.scheduler.lease(request, unresolved) as lease:
            held.set()
            await release.wait()
            lease.finish(10)

    task = asyncio.get_running_loop().create_task(run())
    waiter = asyncio.get_running_loop().create_task(held.wait())
    await asyncio.wait({task, waiter}, timeout=0.05)
    waiter.cancel()
    return task, release


async def test_an_answer_leaves_its_conversation_in_the_slot(bench: Bench) -> None:
    """The next turn finds it there."""
    first = await bench.turn(need(chat("sys", "q1")), 0, 100, 130)
    second = await bench.turn(need(chat("sys", "q1", "a1", "q2")), 130, 160, 190)
    assert (first.slot, second.slot) == (0, 0)
    assert (first.reason, second.reason) == (Reason.COLD, Reason.SLOT_HIT)
    held = bench.table[0].content
    assert held is not None
    assert (held.n_tokens, held.n_prompt) == (190, 160)


async def test_a_context_that_shifted_is_not_believed_in(bench: Bench) -> None:
    """More tokens than fit: the KV is no function of the tokens any more."""
    await bench.turn(need(chat("long")), 0, 4000, 4097)
    assert bench.table[0].content is None


async def test_two_conversations_live_in_two_slots(bench: Bench) -> None:
    """Neither throws the other out."""
    slots = [
        (await bench.turn(need(chat(*name)), 0, 500, 520)).slot
        for name in (("a",), ("b",), ("a", "x"), ("b", "x"))
    ]
    assert slots == [0, 1, 0, 1]


async def test_a_request_waits_until_a_slot_is_free(bench: Bench) -> None:
    """And gets it at once when the holder ends."""
    first, release = await start(bench, q("a"))
    second, release2 = await start(bench, q("b"))
    third, release3 = await start(bench, q("c"))
    assert bench.scheduler.table[0].state is bench.scheduler.table[1].state is SlotState.LEASED
    assert "1 queued | 2 running" in repr(bench.scheduler)
    for event in (release, release2, release3):
        event.set()
    await asyncio.gather(first, second, third)


async def test_a_client_that_leaves_the_queue_is_forgotten(bench: Bench) -> None:
    """The slot goes to the next in line."""
    holders = [await start(bench, q(str(i))) for i in range(2)]
    left, _ = await start(bench, q("left"))
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    for task, release in holders:
        release.set()
        await task
    assert (await bench.turn(q("next"), 0, 50, 60)).slot in (0, 1)


async def test_a_slot_granted_to_a_client_that_just_left_is_not_lost(bench: Bench) -> None:
    """Grant and departure in the same turn of the loop."""
    (a, release_a), (b, release_b) = [await start(bench, q(str(i))) for i in range(2)]
    left, _ = await start(bench, q("left"))
    release_a.set()
    await a
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    release_b.set()
    await b


async def test_the_prompt_is_looked_at_before_a_cold_slot_is_taken(bench: Bench) -> None:
    """A snapshot found by the exact tokens is restored first."""
    state = snapshot(range(1000), "on-disk")
    bench.effects.found = ((state, 1000),)

    async def resolve() -> Prompt:
        return chat("q", tokens=range(1010))

    async with bench.scheduler.lease(Need(chat("q")), resolve) as lease:
        assert bench.effects.done == [("restore", 0, "on-disk")]
        assert lease.reason is Reason.RESTORED
        bench.scheduler.observed(lease, 1000, 1010)
        lease.finish(1020)
    assert bench.effects.done[-1] == ("judge", 1000, 1000)
    held = bench.table[0].content
    assert held is not None
    assert held.n_saved == 1000


async def test_a_prompt_that_cannot_be_looked_at_is_served_all_the_same(bench: Bench) -> None:
    """Rule 10: a fault of the cache fails no request."""

    async def resolve() -> Prompt:
        raise RuntimeError("tokenizer on fire")

    async with bench.scheduler.lease(Need(chat("q")), resolve) as lease:
        assert lease.reason is Reason.COLD
        lease.finish(10)
    assert b'faults_total{where="prompt"} 1.0' in bench.metrics.render()[0]


async def test_a_fault_in_weighing_costs_no_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any free slot will do; the wide request behind it is not confused by it."""

    def broken(*_: object) -> None:
        raise RuntimeError("weights")

    monkeypatch.setattr("proxy.scheduler.next_up", broken)
    lease = await bench.turn(q(), 0, 50, 60)
    assert (lease.slot, lease.reason) == (0, Reason.SLOT_HIT if lease.cache_n else Reason.BYPASS)
    assert b'faults_total{where="placement"}' in bench.metrics.render()[0]


@pytest.mark.parametrize("refused_from", [math.inf, 0])
async def test_unsaved_work_is_saved_before_another_conversation_takes_the_slot(
    refused_from: float,
) -> None:
    """One slot, two conversations; where the last save was refused, this one is tried."""
    bench = Bench(total=1)
    bench.effects.refused_from = refused_from
    await bench.turn(need(chat("old")), 0, 3000, 3100)
    bench.clock.now += 5000
    lease = await bench.turn(q("new"), 0, 50, 60)
    assert bench.effects.done == [("save", 0)]
    assert lease.reason is Reason.COLD


async def test_a_restore_that_fails_leaves_an_empty_slot_and_a_cold_request(bench: Bench) -> None:
    """The request goes on without it."""
    bench.effects.found = ((snapshot(range(1000)), 1000),)
    bench.effects.restores = False
    async with bench.scheduler.lease(q(n=1010), unresolved) as lease:
        assert lease.reason is Reason.COLD
        assert bench.table[0].content is None
        lease.finish(1010)


async def test_a_client_that_leaves_during_a_restore_does_not_break_it(bench: Bench) -> None:
    """The restore runs to its end, then the slot is free and holds what was restored."""
    bench.effects.found = ((snapshot(range(1000)), 1000),)
    bench.effects.gate = asyncio.Event()
    task, _ = await start(bench, q(n=1010))
    await bench.effects.begun.wait()
    assert bench.table[0].state is SlotState.RESTORING
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.table[0].state is SlotState.RESTORING
    bench.effects.gate.set()
    await bench.scheduler.quiet()
    assert bench.table[0].state is SlotState.FREE
    held = bench.table[0].content
    assert held is not None
    assert held.n_tokens == 1000


async def test_a_backend_lost_during_a_restore_is_believed_in_no_more(bench: Bench) -> None:
    """The request gets the error, the mode is forward until the keeper has looked."""
    bench.effects.found = ((snapshot(range(1000)), 1000),)
    bench.effects.error = BackendUnreachableError("gone")
    lost = []
    bench.scheduler.on_lost = lambda: lost.append(1)
    with pytest.raises(BackendUnreachableError):
        async with bench.scheduler.lease(q(n=1010), unresolved):
            raise AssertionError("must not be sent")
    assert lost
    assert bench.scheduler.mode is Mode.FORWARD


async def test_an_interrupted_answer_frees_its_slot_when_the_engine_is_idle(bench: Bench) -> None:
    """Not before: a cancelled request runs on until the end of its batch."""
    bench.backend.occupy(0, 0, busy=frozenset({0}))
    await bench.broken_off(need(chat("long")), seen=2000)
    bench.backend.asked.clear()
    await bench.backend.asked.wait()
    assert bench.table[0].state is SlotState.LEASED
    bench.backend.occupy(700, 0)
    await bench.scheduler.quiet()
    held = bench.table[0].content
    assert held is not None
    assert (held.n_tokens, held.n_prompt) == (700, 700)


async def test_a_lease_never_sent_changes_nothing(bench: Bench) -> None:
    """What the slot held, it still holds; the backend is not asked."""
    await bench.turn(need(chat("sys")), 0, 500, 500)
    before = bench.table[0].content
    await bench.broken_off(need(chat("sys", "more")), sent=False)
    await bench.scheduler.quiet()
    assert bench.table[0].content is before
    assert not bench.backend.asked.is_set()


async def test_an_engine_that_is_gone_when_asked_is_lost(bench: Bench) -> None:
    """The slot is freed, nothing is believed."""
    bench.backend.down = True
    await bench.broken_off(q())
    await bench.scheduler.quiet()
    assert bench.scheduler.mode is Mode.FORWARD
    bench.backend.down = False


async def test_a_backend_with_fewer_slots_than_before_is_lost() -> None:
    """It is another one."""
    bench = Bench()
    bench.backend.views = []
    await bench.broken_off(q())
    await bench.scheduler.quiet()
    assert bench.scheduler.mode is Mode.FORWARD


async def test_a_wide_request_has_every_slot_to_itself(bench: Bench) -> None:
    """Afterwards only slots that provably did not change are believed in."""
    await bench.turn(need(chat("a")), 0, 500, 500)
    await bench.turn(need(chat("b")), 0, 600, 600)
    wide = Need(chat(), exact=True, wide=True)
    async with bench.scheduler.lease(wide, unresolved) as lease:
        assert (lease.slot, lease.reason) == (None, Reason.WIDE)
        lease.sent = True
        waiting, release = await start(bench, q())
        assert bench.table.all_free()
    bench.backend.occupy(500, 600, ran=frozenset({1}))  # as many tokens, but others
    release.set()
    await waiting
    await bench.scheduler.quiet()
    held = [row.content.n_tokens if row.content else None for row in bench.table]
    assert 500 in held or 10 in held
    assert 600 not in held


async def test_where_nothing_is_proved_leases_only_count() -> None:
    """As many run at once as the backend has slots, no slot is named, nothing is remembered."""
    bench = Bench(total=0)
    bench.scheduler.forward(3)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            lease = await stack.enter_async_context(bench.scheduler.lease(q(), unresolved))
            assert (lease.slot, lease.reason) == (None, Reason.FORWARD)
            lease.finish(10)
        waiting, release = await start(bench, q())
        assert not waiting.done()
        assert "1 queued | 3 running" in repr(bench.scheduler)
    release.set()
    await waiting


async def test_who_waits_when_the_mode_changes_waits_for_the_other_thing(bench: Bench) -> None:
    """Forward turns slots into permits; proved again, permits become slots."""
    holders = [await start(bench, q(str(i))) for i in range(2)]
    waiting, release = await start(bench, q("w"))
    release.set()
    bench.scheduler.forward(4)
    await waiting
    for task, event in holders:
        event.set()
        await task
    assert await bench.scheduler.hold(1.0)
    late, event = await start(bench, q("late"))
    wide, event2 = await start(bench, Need(chat(), exact=True, wide=True))
    bench.scheduler.drive(2, 4096)
    bench.table = bench.scheduler.table
    event.set()
    event2.set()
    bench.scheduler.unhold()
    await asyncio.gather(late, wide)
    bench.backend.occupy(0, 0)


async def test_who_waited_through_a_proof_is_looked_at_afterwards() -> None:
    """Queued for a permit, then for a slot: its prompt was never looked at, it must not hang."""
    bench = Bench(total=0)
    bench.scheduler.forward(1)
    holder, release = await start(bench, q("holder"))

    async def resolve() -> Prompt:
        return chat("w", tokens=range(20))

    async def waits(wanted: int | None) -> int | None:
        async with bench.scheduler.lease(Need(chat("w"), wanted=wanted), resolve) as lease:
            lease.finish(20)
            return lease.slot

    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(waits(None)), loop.create_task(waits(9))]
    await asyncio.wait(tasks, timeout=0.01)
    hold = loop.create_task(bench.scheduler.hold(5.0))
    await asyncio.wait({hold}, timeout=0.01)
    release.set()
    await holder
    assert await hold
    bench.scheduler.drive(2, 4096)
    bench.backend.occupy(0, 0)
    bench.scheduler.unhold()
    assert {await asyncio.wait_for(task, 1.0) for task in tasks} <= {0, 1}


async def test_nothing_is_pinned_on_a_backend_lost_while_preparing(bench: Bench) -> None:
    """The request goes on without a slot, and no state is restored on the unknown instance."""
    await bench.turn(need(chat("old")), 0, 3000, 3100)
    await bench.turn(need(chat("other")), 0, 3000, 3100)
    bench.clock.now += 5000
    bench.effects.found = ((snapshot(range(1000)), 1000),)
    bench.effects.gate = asyncio.Event()

    async def run() -> int | None:
        async with bench.scheduler.lease(q(n=1010), unresolved) as lease:
            return lease.slot

    task = asyncio.get_running_loop().create_task(run())
    await bench.effects.begun.wait()
    bench.scheduler.lost()
    bench.effects.gate.set()
    assert await task is None
    assert [what for what, *_ in bench.effects.done] == ["save"]


async def test_the_keeper_has_everything_only_when_nothing_runs(bench: Bench) -> None:
    """``hold`` says no while a request runs."""
    task, release = await start(bench, q())
    assert not await bench.scheduler.hold(0.01)
    release.set()
    await task
    assert await bench.scheduler.hold(1.0)
    bench.scheduler.unhold()


async def test_a_slot_that_does_not_exist_is_refused(bench: Bench) -> None:
    """llama-server would wrap the number around."""
    with pytest.raises(BadRequestError, match="id_slot 2 does not exist"):
        async with bench.scheduler.lease(need(chat("q"), wanted=2), unresolved):
            raise AssertionError


async def test_a_named_slot_is_waited_for(bench: Bench) -> None:
    """Even while another one is free."""
    first = await bench.turn(need(chat("q"), wanted=1), 0, 50, 60)
    assert (first.slot, first.reason) == (1, Reason.SLOT_HIT if first.cache_n else Reason.PINNED)
    holder, release = await start(bench, need(chat("a"), wanted=1))
    waiting, release2 = await start(bench, need(chat("b"), wanted=1))
    assert not waiting.done()
    assert bench.table[0].state is SlotState.FREE
    release.set()
    release2.set()
    await asyncio.gather(holder, waiting)


async def test_a_full_queue_is_refused_with_advice() -> None:
    """503 with Retry-After."""
    bench = Bench(total=1, max_queue=1)
    holder, release = await start(bench, q())
    waiting, release2 = await start(bench, q("w"))
    with pytest.raises(OverloadedError) as refusal:
        async with bench.scheduler.lease(q("x"), unresolved):
            raise AssertionError
    assert refusal.value.retry_after == 10
    release.set()
    release2.set()
    await asyncio.gather(holder, waiting)


async def test_the_deadline_of_the_queue_is_kept() -> None:
    """Nobody waits for ever."""
    bench = Bench(total=1, queue_timeout=0.01)
    holder, release = await start(bench, q())
    with pytest.raises(OverloadedError, match="no slot became free"):
        async with bench.scheduler.lease(q("x"), unresolved):
            raise AssertionError
    release.set()
    await holder


async def test_nothing_new_starts_while_draining(bench: Bench) -> None:
    """Shutting down is said, not hung on."""
    bench.scheduler.draining = True
    with pytest.raises(DrainingError):
        async with bench.scheduler.lease(q(), unresolved):
            raise AssertionError


async def test_a_large_prefill_lets_the_next_one_start_when_it_is_done(bench: Bench) -> None:
    """Not when the answer is."""
    first = need(chat("a", tokens=range(3000)))
    second, release = None, asyncio.Event()
    async with bench.scheduler.lease(first, unresolved) as lease:
        second, release = await start(bench, need(chat("b", tokens=range(3000))))
        assert bench.table[1].state is SlotState.FREE
        bench.scheduler.observed(lease, 0, 3000)
        assert bench.table[1].state is SlotState.FREE
        bench.scheduler.prefilled(lease)
        assert bench.table[1].state is SlotState.LEASED
        lease.finish(3000)
    release.set()
    await second


async def test_what_the_engine_measured_is_learned(bench: Bench) -> None:
    """Prefill seconds go into the curve, tokens into the metrics."""
    for _ in range(50):
        bench.scheduler.measured(100, 900, 90.0)
    assert bench.effects.costs.prefill(0, 1000) == pytest.approx(100, rel=0.2)
    assert b'prompt_tokens_total{source="slot"} 5000.0' in bench.metrics.render()[0]


async def test_time_alone_can_start_a_request(bench: Bench) -> None:
    """What was worth waiting for may not be any more."""
    await bench.turn(need(chat("sys")), 0, 900, 900)
    holder, release = await start(bench, need(chat("sys", "x")))
    waiting, release2 = await start(bench, need(chat("sys", "y")))
    assert not waiting.done()
    assert bench.table[1].state is SlotState.FREE
    bench.clock.now += 600
    bench.scheduler.tick()
    assert bench.table[1].state is SlotState.LEASED
    release.set()
    release2.set()
    await asyncio.gather(holder, waiting)


def test_views_are_plain_rows() -> None:
    """The double gives what the driver gives."""
    backend = FakeBackend()
    backend.occupy(5, busy=frozenset({0}))
    assert backend.views == [SlotView(0, 4096, is_processing=True, id_task=0, n_tokens=5)]


@pytest.fixture
async def routed() -> AsyncIterator[Bench]:
    """One process that holds one conversation."""
    made = Bench(total=0)
    made.scheduler.route(1, Routing())
    yield made
    await made.scheduler.quiet()
    assert made.scheduler.quiescent()


async def test_routed_places_without_looking(routed: Bench) -> None:
    """No rendered prompt, no slots asked for, and a lease names the process."""
    lease = await routed.turn(Need(chat("s", "q"), wanted=5), 0, 900, 950)
    assert (lease.slot, lease.reason) == (0, Reason.COLD)
    lease = await routed.turn(Need(chat("s", "q", "a", "r")), 900, 990, 1000)
    assert (lease.slot, lease.reason) == (0, Reason.SLOT_HIT)
    assert not routed.backend.asked.is_set()


async def test_the_next_step_of_a_tool_loop_is_waited_for(routed: Bench) -> None:
    """Another conversation stands back while it is expected, and comes after it."""
    async with routed.scheduler.lease(Need(chat("s", "q")), unresolved) as lease:
        routed.scheduler.observed(lease, 0, 5000)
        lease.expects = True
        lease.finish(5000)
    other, release = await start(routed, Need(chat("x")))
    step = await routed.turn(Need(chat("s", "q", "a", "tool")), 5000, 5100, 5200)
    assert step.reason is Reason.SLOT_HIT
    assert not other.done()
    routed.clock.now += 10
    routed.scheduler.tick()
    release.set()
    await other


async def test_a_kept_slot_is_given_up_by_itself() -> None:
    """Nobody has to come for it: a timer ends it."""
    bench = Bench(total=0)
    bench.scheduler._clock = bench.scheduler.board._clock = time.time
    bench.scheduler.route(1, Routing())
    async with bench.scheduler.lease(Need(chat("s", "q")), unresolved) as lease:
        bench.scheduler.observed(lease, 0, 50)
        lease.finish(4)  # a hold of 20 ms
    async with bench.scheduler.lease(Need(chat("x")), unresolved) as lease:
        assert lease.queued > 0.005
        lease.finish(4)
    await bench.scheduler.quiet()


async def test_a_hold_that_ends_while_it_is_decided(
    routed: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time goes on between the decision and the look at when to take it again."""
    async with routed.scheduler.lease(Need(chat("s", "q")), unresolved) as lease:
        routed.scheduler.observed(lease, 0, 50)
        lease.finish(4)  # a hold of 20 ms

    def slow(*args: Any) -> Any:
        found = next_up(*args)
        routed.clock.now += 10
        return found

    monkeypatch.setattr("proxy.scheduler.next_up", slow)
    async with routed.scheduler.lease(Need(chat("x")), unresolved) as lease:
        lease.finish(4)


async def test_a_broken_connection_costs_routed_only_its_slot(routed: Bench) -> None:
    """The keeper is told; requests go on."""
    told: list[bool] = []
    routed.scheduler.on_lost = lambda: told.append(True)
    await routed.turn(Need(chat("s", "q")), 0, 900, 950)
    routed.scheduler.lost()
    assert told == [True]
    assert routed.scheduler.mode is Mode.ROUTED
    assert routed.scheduler.table[0].content is not None
    await routed.broken_off(Need(chat("s", "q", "a", "r")))
    await routed.scheduler.quiet()
    assert routed.scheduler.table[0].content is None


async def test_arrivals_are_told(routed: Bench) -> None:
    """Not those of idle work itself."""
    seen: list[Need] = []
    routed.scheduler.on_arrival = seen.append
    await routed.turn(Need(chat("s", "q")), 0, 900, 950)
    routed.clock.now += 10
    await routed.turn(Need(chat("y"), wanted=0, idle=True), 0, 900, 950)
    assert [need.prompt.chain for need in seen] == [chat("s", "q").chain]


async def test_who_came_before_the_verdict_is_routed() -> None:
    """A request that waited while the backend was looked at is placed as all others."""
    bench = Bench(total=0)
    assert await bench.scheduler.hold(1.0)
    task, release = await start(bench, Need(chat("s", "q"), wanted=3, wide=True))
    bench.scheduler.route(1, Routing())
    bench.scheduler.unhold()
    release.set()
    await task
    assert bench.scheduler.table[0].content is not None
    await bench.scheduler.quiet()
