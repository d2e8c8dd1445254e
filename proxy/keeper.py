"""What happens while nobody waits: proving the backend, idle saves, pre-warming, the drain.

`Keeper` is the loop and knows which backend this is; `Saver` moves states while slots are idle.
Both take slots by the same table as the requests do, and everything at once (to probe) only when
nothing runs and nothing waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import structlog

from proxy.backends.base import Verdict
from proxy.core.records import Mode, Prompt
from proxy.core.retention import worth_saving
from proxy.core.slots import SlotState, restored
from proxy.errors import BackendRefusedError, SlotkeeperError
from proxy.proof import ABSENT, BEING_TRIED, PAUSED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proxy.backends.base import Backend, Facts
    from proxy.board import Board
    from proxy.core.records import Snapshot
    from proxy.core.routing import Routing
    from proxy.core.slots import Content, Slot
    from proxy.priming import Primer
    from proxy.telemetry.metrics import Cause, Metrics
    from proxy.transfer import Transfer

log = structlog.get_logger("slotkeeper.keeper")

TICK_SECONDS = 1.0
KEY_DEMANDED = (401, 403)
PATIENCE_SECONDS = 10.0  # how long new requests may be held up for a proof
PROOF_SECONDS = 180.0  # the probe computes 360 tokens, on whatever machine
RETRY_TICKS, REST_TICKS = 5, 60  # looks until that is asked of a busy backend again, at first
RETRY_SECONDS = 60.0  # after a save that came to nothing
DRAIN_TOKENS = 16  # at the end nobody waits for a save: all but the last few tokens are kept
BUSY_SECONDS = 60.0  # unsaved work this old is saved even while other slots run


class Floor(Protocol):
    """Where requests get their leases (`scheduler.Scheduler`), as the background sees it."""

    board: Board
    draining: bool
    on_lost: Callable[[], None]

    def quiescent(self) -> bool:
        """No request runs or waits."""

    async def hold(self, patience: float) -> bool:
        """Take everything, if what runs ends in ``patience`` seconds."""

    def unhold(self) -> None:
        """Give it back."""

    def drive(self, total_slots: int, n_ctx: int) -> None:
        """Pins and snapshots from now on."""

    def route(self, total_slots: int, routing: Routing) -> None:
        """Placed from now on, and nothing saved."""

    def forward(self, total_slots: int) -> None:
        """Only permits from now on."""

    def lost(self) -> None:
        """The backend broke a connection."""

    def tick(self) -> None:
        """The table or the time changed: decide again."""

    async def quiet(self) -> None:
        """Until no lease is held."""


class Saver:
    """Moves states to and from disk in slots nobody uses at the moment."""

    def __init__(
        self,
        scheduler: Floor,
        transfer: Transfer,
        clock: Callable[[], float],
        *,
        idle_seconds: float,
        prewarm: bool,
    ) -> None:
        """``clock`` gives unix seconds; a slot idle for ``idle_seconds`` is saved."""
        self._scheduler = scheduler
        self._transfer = transfer
        self._clock = clock
        self.idle_seconds = idle_seconds
        self._prewarm = prewarm
        self._failed: dict[int, float] = {}  # slot -> when its save last came to nothing
        self._removed: dict[int, float] = {}  # slot -> of when the content is whose snapshot went
        transfer.on_removed = self._unsaved

    async def adopt(self, fingerprint: str, instance: str) -> bool:
        """The snapshots of ``fingerprint`` are in play; True if the same process had another."""
        same = bool(instance) and instance == self._transfer.instance
        changed = same and fingerprint != self._transfer.fingerprint
        await self._transfer.adopt(fingerprint, instance)
        self._failed.clear()
        return changed

    def _unsaved(self, wish: Cause | None) -> None:
        """Snapshots went, and with them what slots had saved: idle ones leave a ``wish`` be."""
        for slot in (table := self._scheduler.board.table):
            after = self._transfer.on_disk(slot.content) if slot.content else None
            if slot.content and after and after.n_saved < slot.content.n_saved:
                if wish:
                    self._removed[slot.index] = after.used
                table.hold(slot.index, after)

    async def save_idle(self) -> None:
        """Save what has been idle long enough and is worth it, longest idle first."""
        table = self._scheduler.board.table
        for index in [slot.index for slot in sorted(table, key=lambda s: s.since)]:
            slot = table[index]  # as it is now: others were saved meanwhile
            if slot.content is not None and self._due(slot, slot.content, self._clock()):
                await self.save(index)

    def _due(self, slot: Slot, content: Content, now: float) -> bool:
        quiet = self._scheduler.quiescent()  # a save stops all slots while it runs
        wait = self.idle_seconds if quiet else max(self.idle_seconds, BUSY_SECONDS)
        if now - content.used < wait or self._removed.get(slot.index) == content.used:
            return False
        if now - self._failed.get(slot.index, 0.0) < RETRY_SECONDS:
            return False
        costs = self._transfer.costs
        return content.storable and worth_saving(content.n_tokens, content.n_saved, costs)

    @asynccontextmanager
    async def _held(self, index: int, state: SlotState) -> AsyncIterator[None]:
        """The slot is ours for one step; a backend that fails in it is believed in no more."""
        table = self._scheduler.board.table
        table.begin(index, state, self._clock())
        try:
            yield
        except SlotkeeperError:
            self._scheduler.lost()
            raise
        finally:
            table.end(index, self._clock())
            self._scheduler.tick()

    async def save(self, index: int) -> None:
        """Save a slot, whatever that is worth, if nobody uses it and it may be stored."""
        table = self._scheduler.board.table
        content = table[index].content
        if table[index].state is not SlotState.FREE or content is None or not content.storable:
            return
        async with self._held(index, SlotState.SAVING):
            after = await self._transfer.save(index, content)
            table.hold(index, after)
            if after.n_saved <= content.n_saved:
                self._failed[index] = self._clock()

    async def warm(self, empty: frozenset[int]) -> None:
        """Empty slots get the most recently used snapshots, so that the first turn is hot."""
        if not self._prewarm or self._transfer.retired:
            return
        recent = sorted(self._transfer.index, key=lambda s: s.last_used, reverse=True)
        usable = [s for s in recent if not self._transfer.barred(s.id)]
        newest = {s.conversation or s.id: s for s in reversed(usable)}
        wanted = [s for s in usable if newest[s.conversation or s.id] is s]  # one of each
        for slot in list(self._scheduler.board.table):
            if wanted and slot.index in empty and self._scheduler.board.mode is Mode.EXCLUSIVE:
                await self._warm(slot.index, wanted.pop(0))

    async def _warm(self, index: int, snapshot: Snapshot) -> None:
        table = self._scheduler.board.table
        if table[index].state is not SlotState.FREE or table[index].content is not None:
            return
        async with self._held(index, SlotState.RESTORING):
            if await self._transfer.restore(index, snapshot):
                prompt = Prompt(snapshot.seed, (), (), 0, conversation=snapshot.conversation)
                held = restored(snapshot, prompt, snapshot.last_used)
                table.hold(index, self._transfer.on_disk(held))
                log.info("slot.prewarmed", slot=index, tokens=snapshot.n_tokens)

    async def save_all(self) -> None:
        """At the end: all unsaved work, as long as the backend is there."""
        try:
            for index in range(len(self._scheduler.board.table)):
                content = self._scheduler.board.table[index].content
                if content is not None and content.n_tokens - content.n_saved > DRAIN_TOKENS:
                    await self.save(index)
        except SlotkeeperError as error:
            log.warning("drain.unsaved", why=error.message)
        try:
            await self._transfer.remember()
        except OSError as error:
            log.warning("drain.forgotten", error=type(error).__name__)


class Keeper:
    """The background of one backend."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Floor,
        saver: Saver | None,
        metrics: Metrics,
        prober: Callable[[Facts], Awaitable[Verdict | None]],
        primer: Primer | None = None,
    ) -> None:
        """``saver`` None: nothing is ever saved. ``primer`` None: nothing is computed idly.

        ``prober`` says what may be done to a backend (None: it cannot be known now); it is called
        only while nothing else uses the backend.
        """
        self._backend = backend
        self._scheduler = scheduler
        self._saver = saver
        self._metrics = metrics
        self._prober = prober
        self._primer = primer
        self._absent: frozenset[int] = frozenset()
        self._wake = asyncio.Event()
        self._judged = False  # the verdict belongs to the instance as it is now
        self._instance = ""
        self._rest, self._next_rest = 0, RETRY_TICKS
        self._stopping = False
        self.up = False
        self.paused = False
        self.facts: Facts | None = None  # as the backend last introduced itself
        self.verdict = Verdict(Mode.FORWARD, "the backend was not reached yet")
        scheduler.on_lost = self.lost

    def stop(self) -> None:
        """``run`` returns after the step it is at."""
        self._stopping = True
        self._wake.set()

    def lost(self) -> None:
        """A connection broke: look at the backend now, not at the next tick."""
        self._judged = self._judged and self._scheduler.board.mode is Mode.ROUTED
        self._wake.set()

    def pause(self) -> None:
        """Only forward, until ``resume``: nothing is pinned, saved, restored or proved."""
        self.paused = True
        self._scheduler.forward(self._scheduler.board.total_slots)
        self._say(PAUSED)

    def resume(self) -> None:
        """Prove the backend again, then go on."""
        if self.paused:
            self.paused = False
            self._judged, self._rest, self._next_rest = False, 0, RETRY_TICKS
            self._say(Verdict(Mode.FORWARD, "caching was resumed; the backend is looked at again"))
            self._wake.set()

    async def run(self) -> None:
        """Until ``stop``; a step that has begun is finished, a save is not broken in two."""
        while not self._stopping:
            await self.step()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
                    self._wake.clear()

    async def step(self) -> None:
        """One look at everything. What fails is logged and tried again at the next tick."""
        try:
            await self._look()
            if self._saver is not None and self._scheduler.board.mode is Mode.EXCLUSIVE:
                await self._saver.save_idle()
            if self._primer is not None and self._scheduler.board.mode is Mode.ROUTED:
                self._primer.look()
        except (SlotkeeperError, OSError) as error:
            log.warning("keeper.step-failed", error=type(error).__name__, why=str(error))
        except Exception as error:  # a bug in one step must not end all later ones
            log.exception("keeper.fault", error=type(error).__name__)
        self._scheduler.tick()
        self._metrics.slots(Counter(slot.state for slot in self._scheduler.board.table))

    async def _look(self) -> None:
        """Which backend is this; if it is not the one that was judged, judge it."""
        self._scheduler.board.forget(self._backend.absent)  # not of who then is back, and asked
        try:
            instance = await self._backend.instance()
        except BackendRefusedError as error:
            self._gone(error, up=error.answer in KEY_DEMANDED)
            return
        except SlotkeeperError as error:
            self._gone(error, up=False)
            return
        if not self.up:
            self.verdict = BEING_TRIED
        self.up = True
        self._metrics.backend_up.set(1)
        if self._instance and instance != self._instance:
            self._metrics.backend_restarts.inc()
            log.warning("backend.restarted", why="its slots are empty; snapshots will be restored")
            self._scheduler.forward(self._scheduler.board.total_slots)
            self._judged, self._rest, self._next_rest = False, 0, RETRY_TICKS
        self._instance = instance
        self._rest = max(0, self._rest - 1)
        if self.paused:
            self._say(PAUSED)
        elif not self._judged and (not self._rest or self._scheduler.quiescent()):
            await self._prove()
        self._miss(self._backend.absent)

    def _miss(self, absent: frozenset[int]) -> None:
        """Say so when some of several processes are gone, or back; what they held is gone."""
        self._scheduler.board.forget(absent)
        if absent != self._absent:
            self._absent = absent
            which = ", ".join(str(index) for index in sorted(absent))
            advice = f"no answer from the servers {which} (counted from 0)" if absent else ""
            self._say(replace(self.verdict, advice=advice))

    async def _prove(self) -> None:
        """Judge with the backend to ourselves: new requests wait a moment, running ones end first.

        Without that, clients that never pause would keep a restarted backend in ``forward``; where
        an answer takes longer than they may wait, it is tried again soon, then seldom.
        """
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, REST_TICKS)
        if not await self._scheduler.hold(PATIENCE_SECONDS):
            return
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                await self._judge()
        except TimeoutError:
            self._say(Verdict(Mode.FORWARD, "the proof took too long; it will be tried again"))
        finally:
            self._scheduler.unhold()
        if self._saver is not None and self._scheduler.board.mode is Mode.EXCLUSIVE:
            self._rest, self._next_rest = 0, RETRY_TICKS
            views = await self._backend.slots()  # what others hold is not overwritten
            await self._saver.warm(frozenset(v.index for v in views if not v.n_tokens))

    def _gone(self, error: SlotkeeperError, *, up: bool) -> None:
        """It cannot be looked at; ``up``: only for want of a key, clients may well get through."""
        self.up = up
        self._metrics.backend_up.set(up)
        self._judged = False
        why, advice = ("demands a key", "set backend.key") if up else ("does not answer", ABSENT)
        self._say(Verdict(Mode.FORWARD, f"the backend {why}: {error.message}", advice))
        if self._scheduler.board.mode is not Mode.FORWARD:
            self._scheduler.forward(self._scheduler.board.total_slots)

    async def _judge(self) -> None:
        """Find out what may be done; until then, and if in doubt, requests are only forwarded."""
        facts = self.facts = await self._backend.facts()
        self._scheduler.forward(facts.total_slots)
        verdict = await self._prober(facts)
        if verdict is None:
            self._say(Verdict(Mode.FORWARD, "every slot is busy; it will be looked at again"))
            return
        if verdict.mode is Mode.EXCLUSIVE and self._saver is not None:
            if await self._saver.adopt(verdict.fingerprint, facts.instance):
                for slot in range(facts.total_slots):  # KV of another LoRA set
                    await self._backend.erase(slot)
            self._scheduler.drive(facts.total_slots, facts.n_ctx)
        if verdict.mode is Mode.ROUTED and facts.routing is not None:
            self._scheduler.route(facts.total_slots, facts.routing)
        if self.paused:  # while it was judged
            verdict = PAUSED
            self._scheduler.forward(facts.total_slots)
        self._absent = frozenset()  # the verdict does not speak of them
        self._judged = True
        self._say(verdict)

    def _say(self, verdict: Verdict) -> None:
        if verdict != self.verdict:
            whole = verdict.mode is Mode.ROUTED and not verdict.advice
            say = log.info if whole or verdict.mode is Mode.EXCLUSIVE else log.warning
            say("mode", mode=str(verdict.mode), why=verdict.why, advice=verdict.advice)
        self.verdict = verdict
        self._metrics.mode(verdict.mode)

    async def drain(self, patience: float) -> None:
        """Let running answers end (at most ``patience`` seconds), then save what is unsaved."""
        self._scheduler.draining = True
        if self._primer is not None:
            await self._primer.stop()
        try:
            async with asyncio.timeout(patience):
                await self._scheduler.quiet()
        except TimeoutError:
            log.warning("drain.timeout", why="some answers were still running")
        if self._saver is not None and self._scheduler.board.mode is Mode.EXCLUSIVE:
            await self._saver.save_all()
