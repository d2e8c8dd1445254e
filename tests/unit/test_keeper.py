"""The background: judging the backend, idle saves, pre-warming, the drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from proxy.backends.base import Facts, Verdict
from proxy.core.placement import Need
from proxy.core.prefix import PrefixIndex
from proxy.core.records import Mode, Snapshot
from proxy.core.routing import Routing
from proxy.core.slots import Content, SlotState
from proxy.errors import BackendTimeoutError, BackendUnreachableError, SlotkeeperError
from proxy.keeper import RETRY_SECONDS, Keeper, Saver
from proxy.proof import BEING_TRIED
from proxy.scheduler import Scheduler
from proxy.telemetry.metrics import Cause, Metrics
from tests.unit.doubles import Clock, FakeBackend, FakeEffects
from tests.unit.factories import chat, content, costs, need, snapshot

PROVED = Verdict(Mode.EXCLUSIVE, "proved", fingerprint="f" * 32)
REFUSED = Verdict(Mode.FORWARD, "the RAM cache is on", "start it with --cache-ram 0")


@dataclass
class FakeTransfer(FakeEffects):
    """Effects with an index, as the saver sees them."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    adopted: list[str] = field(default_factory=list)
    retired: bool = False
    barring: frozenset[str] = frozenset()
    remembered: bool = False
    saves: bool = True
    on_removed: Callable[[Cause | None], None] = field(default=lambda _: None)
    disk: int | None = None  # so many tokens are left on it

    fingerprint: str = ""
    instance: str = ""

    async def adopt(self, fingerprint: str, instance: str) -> None:
        """Recorded."""
        self.adopted.append(fingerprint)
        self.fingerprint, self.instance = fingerprint, instance

    def barred(self, snapshot_id: str) -> bool:
        """As the test says."""
        return snapshot_id in self.barring

    def on_disk(self, content: Content) -> Content:
        """As the test says."""
        left = content.n_saved if self.disk is None else self.disk
        return replace(content, n_saved=min(content.n_saved, left))

    async def remember(self) -> None:
        """Recorded."""
        self.remembered = True

    async def save(
        self, slot: int, content: Content, keep: frozenset[str] = frozenset()
    ) -> Content:
        """Everything is saved, or nothing."""
        after = await super().save(slot, content, keep)
        return after if self.saves else content


class Bench:
    """A keeper over two slots."""

    def __init__(self, verdict: Verdict | None = PROVED, *, prewarm: bool = True) -> None:
        self.clock = Clock()
        self.backend = FakeBackend()
        self.backend.occupy(0, 0)
        self.transfer = FakeTransfer(costs())
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.backend,  # type: ignore[arg-type]
            self.transfer,
            self.metrics,
            self.clock,
            max_queue=8,
            queue_timeout=60.0,
        )
        self.saver = Saver(
            self.scheduler,
            self.transfer,  # type: ignore[arg-type]
            self.clock,
            idle_seconds=3.0,
            prewarm=prewarm,
        )
        self.verdict = verdict
        self.probes = 0
        self.during: Callable[[], None] = lambda: None
        self.error: SlotkeeperError | None = None
        self.keeper = Keeper(
            self.backend,  # type: ignore[arg-type]
            self.scheduler,
            self.saver,
            self.metrics,
            self.prober,
        )

    async def prober(self, facts: Facts) -> Verdict | None:
        """As the test says."""
        assert facts.instance == self.backend.name
        self.probes += 1
        self.during()
        if self.error is not None:
            raise self.error
        return self.verdict

    def fill(self, slot: int, n_tokens: int, **other: object) -> None:
        """The slot was used just now."""
        made = content(chat(f"c{slot}"), n_tokens, used=self.clock.now)
        self.scheduler.table.hold(slot, replace(made, **other))  # type: ignore[arg-type]


async def test_a_proved_backend_is_driven_and_probed_once() -> None:
    """The same instance is not probed again."""
    bench = Bench()
    for _ in range(3):
        await bench.keeper.step()
    assert bench.probes == 1
    assert bench.scheduler.mode is Mode.EXCLUSIVE
    assert len(bench.scheduler.table) == 2
    assert bench.transfer.adopted == ["f" * 32]
    assert bench.keeper.up


async def test_an_unproved_backend_is_forwarded_to() -> None:
    """With as many permits as it has slots, and the reason at hand."""
    bench = Bench(REFUSED)
    await bench.keeper.step()
    await bench.keeper.step()
    assert bench.probes == 1
    assert bench.scheduler.mode is Mode.FORWARD
    assert bench.scheduler.total_slots == 2
    assert bench.keeper.verdict == REFUSED


async def test_a_backend_that_cannot_be_judged_now_is_looked_at_again() -> None:
    """All its slots were busy."""
    bench = Bench(None)
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.FORWARD
    bench.verdict = PROVED
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.EXCLUSIVE


async def test_a_probe_that_breaks_off_is_tried_again_and_holds_nobody_up() -> None:
    """The hold is given back."""
    bench = Bench()
    bench.error = BackendTimeoutError("slow")
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.FORWARD
    async with bench.scheduler.lease(need(chat("q", tokens=range(5))), chat) as lease:  # type: ignore[arg-type]
        assert lease.slot is None
    bench.error = None
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.EXCLUSIVE


async def test_nothing_is_probed_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe has the backend to itself, or does not happen."""
    bench = Bench()
    monkeypatch.setattr("proxy.keeper.PATIENCE_SECONDS", 0.01)
    async with bench.scheduler.lease(need(chat("q", tokens=range(5))), chat):  # type: ignore[arg-type]
        await bench.keeper.step()
        assert bench.probes == 0
    await bench.keeper.step()
    assert bench.probes == 1


async def test_clients_that_never_pause_do_not_keep_a_backend_unproved() -> None:
    """New requests wait for the proof, the running one ends first; then all go on, pinned."""
    bench = Bench()
    async with bench.scheduler.lease(need(chat("q", tokens=range(5))), chat) as first:  # type: ignore[arg-type]
        step = asyncio.get_running_loop().create_task(bench.keeper.step())
        await asyncio.wait({step}, timeout=0.01)
        assert first.slot is None
        second = bench.scheduler.lease(need(chat("r", tokens=range(5))), chat)  # type: ignore[arg-type]
        entering = asyncio.get_running_loop().create_task(second.__aenter__())
        await asyncio.wait({entering}, timeout=0.01)
        assert not entering.done()
    await step
    lease = await entering
    assert lease.slot is not None
    lease.finish(5)
    await second.__aexit__(None, None, None)


async def test_a_backend_that_stays_busy_is_asked_again_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Soon, as an answer may take longer than others may wait; but it must not become a habit."""
    monkeypatch.setattr("proxy.keeper.PATIENCE_SECONDS", 0.001)
    bench = Bench()
    asked: list[int] = []
    look = 0
    hold = bench.scheduler.hold

    async def counted(patience: float) -> bool:
        asked.append(look)
        return await hold(patience)

    monkeypatch.setattr(bench.scheduler, "hold", counted)
    async with bench.scheduler.lease(need(chat("q", tokens=range(5))), chat):  # type: ignore[arg-type]
        while look < 200:
            await bench.keeper.step()
            look += 1
    assert (asked, bench.probes) == ([0, 5, 15, 35, 75, 135, 195], 0)


async def test_another_instance_means_empty_slots_and_a_new_proof() -> None:
    """Beliefs do not survive a restart of the backend."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900)
    bench.backend.name = "two"
    await bench.keeper.step()
    assert bench.probes == 2
    assert bench.scheduler.table[0].content is None
    assert b"backend_restarts_total 1.0" in bench.metrics.render()[0]


async def test_a_backend_that_is_down_is_said_to_be_down() -> None:
    """Requests are forwarded, and fail with the backend's error, until it is back."""
    bench = Bench()
    await bench.keeper.step()
    bench.backend.down = True
    await bench.keeper.step()
    await bench.keeper.step()
    assert not bench.keeper.up
    assert bench.scheduler.mode is Mode.FORWARD
    assert "does not answer" in bench.keeper.verdict.why
    bench.backend.down = False
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.EXCLUSIVE


async def test_what_is_said_meanwhile() -> None:
    """Down: what to do; while it is tried out: that it is, not what was before."""
    bench = Bench()
    said: list[Verdict] = []
    bench.during = lambda: said.append(bench.keeper.verdict)
    bench.backend.down = True
    await bench.keeper.step()
    assert "notices by itself" in bench.keeper.verdict.advice
    bench.backend.down = False
    await bench.keeper.step()
    assert said == [BEING_TRIED]
    assert bench.keeper.verdict.mode is Mode.EXCLUSIVE


async def test_a_lost_connection_wakes_the_keeper() -> None:
    """It looks at once, not at the next tick."""
    bench = Bench()
    task = asyncio.get_running_loop().create_task(bench.keeper.run())
    while bench.scheduler.mode is not Mode.EXCLUSIVE:
        bench.backend.asked.clear()
        await bench.backend.asked.wait()
    bench.backend.asked.clear()
    bench.scheduler.lost()
    assert bench.scheduler.mode is Mode.FORWARD
    await asyncio.wait_for(bench.backend.asked.wait(), 0.5)
    bench.keeper.stop()
    await task


async def test_an_idle_slot_is_saved_once() -> None:
    """After a few seconds, when it is worth it, and not again while nothing changed."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900)
    bench.fill(1, 5)
    await bench.keeper.step()
    assert bench.transfer.done == []
    bench.clock.now += 4
    for _ in range(2):
        await bench.keeper.step()
    assert bench.transfer.done == [("save", 0)]
    held = bench.scheduler.table[0].content
    assert held is not None
    assert held.n_saved == 900


async def test_what_was_removed_by_hand_is_saved_before_it_is_lost() -> None:
    """Not while the slot idles on, or removing would do nothing; at the drain, or when changed."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900)
    bench.fill(1, 900, n_saved=100)
    bench.clock.now += 4
    await bench.saver.save(0)
    bench.transfer.disk, bench.transfer.done = 200, []
    bench.transfer.on_removed(Cause.REMOVED)
    held = [slot.content.n_saved for slot in bench.scheduler.table if slot.content]
    assert held == [200, 100]
    await bench.keeper.step()
    assert bench.transfer.done == [("save", 1)], "its own unsaved work is still saved"
    bench.transfer.disk = None
    await bench.keeper.drain(1.0)
    assert bench.transfer.done == [("save", 1), ("save", 0)]


async def test_what_was_removed_and_goes_on_is_saved_again() -> None:
    """A turn later it is a state like any other."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900, n_saved=900)
    bench.transfer.disk = 0
    bench.transfer.on_removed(Cause.REMOVED)
    bench.clock.now += 4
    await bench.keeper.step()
    assert bench.transfer.done == []
    bench.fill(0, 950)
    bench.clock.now += 4
    await bench.keeper.step()
    assert bench.transfer.done == [("save", 0)]


async def test_what_was_found_damaged_is_saved_again_at_idle() -> None:
    """Nobody wished it away."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900, n_saved=900)
    bench.transfer.disk = 0
    bench.transfer.on_removed(None)
    bench.clock.now += 4
    await bench.keeper.step()
    assert bench.transfer.done == [("save", 0)]


async def test_nothing_is_saved_that_may_not_be() -> None:
    """The client said so, or the KV is no function of the tokens."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900, storable=False)
    bench.clock.now += 100
    await bench.keeper.step()
    await bench.keeper.drain(1.0)
    assert bench.transfer.done == []


async def test_a_slot_that_changed_while_another_was_saved_is_judged_anew() -> None:
    """A request that must not be stored may have ended there meanwhile."""
    for end in ("idle", "drain"):
        bench = Bench()
        await bench.keeper.step()
        bench.fill(0, 900)
        bench.fill(1, 900)
        bench.clock.now += 4
        bench.transfer.gate = asyncio.Event()
        work = bench.keeper.step() if end == "idle" else bench.keeper.drain(0.01)
        task = asyncio.get_running_loop().create_task(work)
        await bench.transfer.begun.wait()
        bench.fill(1, 900, storable=False)
        bench.transfer.gate.set()
        await task
        assert bench.transfer.done == [("save", 0)]


async def test_another_lora_set_in_the_same_process_empties_every_slot() -> None:
    """Their KV belongs to other weights."""
    bench = Bench()
    await bench.keeper.step()
    bench.verdict = replace(PROVED, fingerprint="e" * 32)
    bench.scheduler.lost()
    await bench.keeper.step()
    assert bench.backend.calls == [("erase", 0), ("erase", 1)]


async def test_slots_that_hold_something_are_not_warmed() -> None:
    """It may be worth more than the snapshot."""
    bench = Bench()
    stored(bench, "a")
    bench.backend.occupy(500, 500)
    await bench.keeper.step()
    assert bench.transfer.done == []


async def test_a_proof_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests must not wait for it for ever."""
    monkeypatch.setattr("proxy.keeper.PROOF_SECONDS", 0.01)
    bench = Bench()

    async def never(_facts: Facts) -> Verdict | None:
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(bench.keeper, "_prober", never)
    await bench.keeper.step()
    assert "took too long" in bench.keeper.verdict.why
    async with bench.scheduler.lease(need(chat("q", tokens=range(5))), chat) as lease:  # type: ignore[arg-type]
        assert lease.slot is None


async def test_a_save_that_comes_to_nothing_is_not_tried_every_second() -> None:
    """A full disk is looked at again after a while."""
    bench = Bench()
    await bench.keeper.step()
    bench.transfer.saves = False
    bench.fill(0, 900)
    bench.clock.now += 4
    for _ in range(3):
        await bench.keeper.step()
    assert bench.transfer.done == [("save", 0)]
    bench.clock.now += RETRY_SECONDS
    await bench.keeper.step()
    assert bench.transfer.done == [("save", 0)] * 2


async def test_a_save_waits_for_running_answers_but_not_for_ever() -> None:
    """It would stop every slot; unsaved work must not wait for hours either."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(1, 900)
    async with bench.scheduler.lease(need(chat("q", tokens=range(5))), chat) as lease:  # type: ignore[arg-type]
        assert lease.slot == 0
        bench.clock.now += 10
        await bench.keeper.step()
        assert bench.transfer.done == []
        bench.clock.now += 60
        await bench.keeper.step()
        assert bench.transfer.done == [("save", 1)]


async def test_a_slot_being_saved_belongs_to_nobody_else() -> None:
    """A request that wants it waits for the save."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900)
    bench.clock.now += 4
    bench.transfer.gate = asyncio.Event()
    step = asyncio.get_running_loop().create_task(bench.keeper.step())
    await bench.transfer.begun.wait()
    assert bench.scheduler.table[0].state is SlotState.SAVING
    bench.transfer.gate.set()
    await step
    assert bench.scheduler.table[0].state is SlotState.FREE


async def test_a_backend_lost_while_saving_is_looked_at_again() -> None:
    """The slot is freed and the mode is forward."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900)
    bench.clock.now += 4
    bench.transfer.error = BackendUnreachableError("gone")
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.FORWARD
    assert bench.scheduler.table[0].state is SlotState.FREE


def stored(bench: Bench, *names: str) -> list[Snapshot]:
    """Snapshots on disk, the first used last."""
    made = [
        replace(
            snapshot([n * 1000 + i for i in range(200)], name, used=500.0 - n),
            conversation=f"talk of {name}",
        )
        for n, name in enumerate(names)
    ]
    for state in made:
        bench.transfer.index.add(state)
    return made


async def test_free_slots_are_warmed_with_what_was_used_last() -> None:
    """Not with what is barred, and not more than there are slots."""
    bench = Bench()
    stored(bench, "bad", "b", "c", "d")
    bench.transfer.barring = frozenset({"bad"})
    await bench.keeper.step()
    assert bench.transfer.done == [("restore", 0, "b"), ("restore", 1, "c")]
    held = bench.scheduler.table[1].content
    assert held is not None
    assert (held.n_tokens, held.used) == (200, 498.0)
    assert held.prompt.conversation == "talk of c"


async def test_one_conversation_is_warmed_once() -> None:
    """Two states of one, a branch: the other slot is for the next conversation."""
    bench = Bench()
    _, branch, _ = stored(bench, "a", "b", "c")
    bench.transfer.index.remove("b")
    bench.transfer.index.add(replace(branch, conversation="talk of a"))
    await bench.keeper.step()
    assert [name for _, _, name in bench.transfer.done] == ["a", "c"]


@pytest.mark.parametrize("how", ["off", "retired", "refused"])
async def test_nothing_is_warmed_when_it_should_not_be(how: str) -> None:
    """Switched off; restores proved useless; or the backend refuses the state."""
    bench = Bench(prewarm=how != "off")
    bench.transfer.retired = how == "retired"
    bench.transfer.restores = how != "refused"
    stored(bench, "a")
    await bench.keeper.step()
    assert all(slot.content is None for slot in bench.scheduler.table)
    assert all(slot.state is SlotState.FREE for slot in bench.scheduler.table)


async def test_a_warm_up_that_takes_the_backend_down_stops() -> None:
    """The others are not tried on the next instance's back."""
    bench = Bench()
    stored(bench, "a", "b")
    bench.transfer.error = BackendUnreachableError("gone")
    await bench.keeper.step()
    assert bench.transfer.done == [("restore", 0, "a")]
    assert bench.scheduler.mode is Mode.FORWARD


async def test_the_drain_waits_for_answers_then_saves_all() -> None:
    """And remembers what was learned."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(1, 900)
    async with bench.scheduler.lease(need(chat("q")), chat) as lease:  # type: ignore[arg-type]
        drain = asyncio.get_running_loop().create_task(bench.keeper.drain(5.0))
        await asyncio.sleep(0)
        assert bench.scheduler.draining
        assert not drain.done()
        bench.scheduler.observed(lease, 0, 800)
        lease.finish(800)
    await drain
    assert bench.transfer.done == [("save", 0), ("save", 1)]
    assert bench.transfer.remembered


async def test_the_drain_does_not_wait_for_ever() -> None:
    """What is unsaved is saved all the same."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(1, 900)
    async with bench.scheduler.lease(need(chat("q")), chat):  # type: ignore[arg-type]
        await bench.keeper.drain(0.01)
    assert bench.transfer.done == [("save", 1)]


async def test_a_backend_that_is_gone_at_the_end_is_no_error() -> None:
    """What was learned is remembered all the same."""
    bench = Bench()
    await bench.keeper.step()
    bench.fill(0, 900)
    bench.fill(1, 900)
    bench.transfer.error = BackendUnreachableError("gone")
    await bench.keeper.drain(1.0)
    assert bench.transfer.done == [("save", 0)]
    assert bench.transfer.remembered


async def test_without_a_slot_directory_nothing_is_saved() -> None:
    """The keeper only looks whether the backend is there."""
    bench = Bench(REFUSED)
    keeper = Keeper(
        bench.backend,  # type: ignore[arg-type]
        bench.scheduler,
        None,
        bench.metrics,
        bench.prober,
    )
    await keeper.step()
    await keeper.drain(1.0)
    assert keeper.up
    assert bench.transfer.done == []


ROUTED = Verdict(Mode.ROUTED, "it holds one conversation")


class Processes(FakeBackend):
    """Two that hold one conversation each."""

    missing: frozenset[int] = frozenset()
    back = False  # who was missing answers again when it is asked

    async def instance(self) -> str:
        """Asked for, all are back, if the test says so."""
        if self.back:
            self.missing = frozenset()
        return await super().instance()

    @property
    def absent(self) -> frozenset[int]:
        """As the test says."""
        return self.missing

    async def facts(self) -> Facts:
        """What a pool says."""
        return replace(await super().facts(), total_slots=2, routing=Routing())


def routed_bench() -> tuple[Bench, Processes]:
    """A keeper over them, without a place to save to."""
    bench, backend = Bench(ROUTED), Processes()
    bench.backend = backend
    bench.scheduler.board._backend = backend  # type: ignore[assignment]
    bench.keeper._backend = backend  # type: ignore[assignment]
    return bench, backend


async def test_processes_are_routed_to() -> None:
    """Nothing is saved or asked for; a broken connection does not stop everybody."""
    bench, _ = routed_bench()
    await bench.keeper.step()
    assert (bench.scheduler.mode, bench.scheduler.total_slots) == (Mode.ROUTED, 2)
    bench.fill(0, 5000)
    bench.clock.now += 100
    bench.scheduler.lost()
    await bench.keeper.step()
    assert bench.probes == 1
    assert bench.transfer.done == []
    assert bench.scheduler.table[0].content is not None
    await bench.keeper.drain(1.0)
    assert bench.transfer.done == []


async def test_a_missing_process_is_told() -> None:
    """With its number, until it is back; what it held is gone."""
    bench, backend = routed_bench()
    await bench.keeper.step()
    bench.fill(0, 5000)
    bench.fill(1, 5000)
    backend.missing = frozenset({1})
    await bench.keeper.step()
    assert "no answer from the servers 1 " in bench.keeper.verdict.advice
    held = [row.content is not None for row in bench.scheduler.table]
    assert held == [True, False]
    backend.missing = frozenset()
    await bench.keeper.step()
    assert bench.keeper.verdict == ROUTED


async def test_a_process_that_was_away_between_two_looks() -> None:
    """What it held is gone all the same, and so is what was sent to it meanwhile."""
    bench, backend = routed_bench()
    await bench.keeper.step()
    bench.fill(0, 5000)
    bench.fill(1, 5000)

    async with bench.scheduler.lease(Need(chat("c1", "a")), chat) as lease:  # type: ignore[arg-type]
        lease.sent = True
        assert lease.slot == 1
        backend.missing, backend.back = frozenset({1}), True
        await bench.keeper.step()
        assert backend.missing == frozenset()
        bench.scheduler.observed(lease, 0, 5000)
        lease.finish(5000)
    await bench.scheduler.quiet()
    held = [row.content is not None for row in bench.scheduler.table]
    assert held == [True, False]
    async with bench.scheduler.lease(Need(chat("c1", "a")), chat) as lease:  # type: ignore[arg-type]
        lease.sent = True
        bench.scheduler.observed(lease, 0, 5000)
        lease.finish(5000)
    held = [row.content is not None for row in bench.scheduler.table]
    assert held == [True, True]


async def test_a_process_that_is_back_and_answers_during_a_look() -> None:
    """What it holds since then is believed."""
    bench, backend = routed_bench()
    await bench.keeper.step()
    backend.missing = frozenset({0})
    await bench.keeper.step()
    instance = backend.instance

    async def served() -> str:
        told = await instance()
        need = Need(chat("c0", "a"), wanted=0, idle=True)
        async with bench.scheduler.lease(need, chat) as lease:  # type: ignore[arg-type]
            assert lease.slot == 0
            lease.sent = True
            bench.scheduler.observed(lease, 0, 5000)
            lease.finish(5000)
        return told

    backend.back, backend.instance = True, served  # type: ignore[method-assign]
    await bench.keeper.step()
    assert bench.scheduler.table[0].content is not None
    assert bench.keeper.verdict == ROUTED


async def test_all_of_them_gone() -> None:
    """Forward, until one is there again; then it is judged anew."""
    bench, backend = routed_bench()
    await bench.keeper.step()
    backend.down = True
    await bench.keeper.step()
    assert (bench.scheduler.mode, bench.keeper.up) == (Mode.FORWARD, False)
    backend.down = False
    backend.missing = frozenset({0})
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.ROUTED
    assert "servers 0 " in bench.keeper.verdict.advice


async def test_idle_work_is_looked_after() -> None:
    """At every step in mode routed, and stopped before the drain."""
    bench, _ = routed_bench()
    seen: list[str] = []

    class Recording:
        """A primer."""

        def look(self) -> None:
            """Called."""
            seen.append("look")

        async def stop(self) -> None:
            """Called."""
            seen.append("stop")

    bench.keeper._primer = Recording()  # type: ignore[assignment]
    await bench.keeper.step()
    await bench.keeper.step()
    await bench.keeper.drain(1.0)
    assert seen == ["look", "look", "stop"]


async def test_paused_nothing_is_proved_and_resumed_it_is() -> None:
    """The backend is only forwarded to, and not probed, until its owner wants it again."""
    bench = Bench()
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.EXCLUSIVE
    bench.keeper.pause()
    assert bench.scheduler.mode is Mode.FORWARD
    probes = bench.probes
    bench.keeper.lost()
    await bench.keeper.step()
    assert (bench.scheduler.mode, bench.probes) == (Mode.FORWARD, probes)
    assert "paused" in bench.keeper.verdict.why
    bench.keeper.resume()
    assert "paused" not in bench.keeper.verdict.why
    await bench.keeper.step()
    assert (bench.scheduler.mode, bench.probes) == (Mode.EXCLUSIVE, probes + 1)
    before = bench.keeper.verdict
    bench.keeper.resume()
    assert bench.keeper.verdict == before, "nothing was paused"


async def test_paused_while_it_is_proved() -> None:
    """A verdict that comes too late drives nothing."""
    bench = Bench()
    bench.during = bench.keeper.pause
    await bench.keeper.step()
    assert bench.scheduler.mode is Mode.FORWARD
    assert "paused" in bench.keeper.verdict.why


async def test_paused_while_the_backend_is_away() -> None:
    """What is said follows what is: it does not answer, then it is paused again."""
    bench = Bench()
    bench.keeper.pause()
    bench.backend.down = True
    await bench.keeper.step()
    assert "does not answer" in bench.keeper.verdict.why
    bench.backend.down = False
    await bench.keeper.step()
    assert "paused" in bench.keeper.verdict.why
