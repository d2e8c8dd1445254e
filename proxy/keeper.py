"""What happens while nobody waits: proving the backend, idle saves, pre-warming, the drain.

One loop, one step at a time. It takes slots by the same table as the requests do, and everything
at once (to probe) only when nothing runs and nothing waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from proxy.backends.base import Verdict
from proxy.core.records import Mode, Prompt
from proxy.core.retention import worth_saving
from proxy.core.slots import SlotState, restored
from proxy.errors import SlotkeeperError
from proxy.store.snapshots import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.backends.base import Backend, Facts
    from proxy.core.records import Snapshot
    from proxy.core.slots import Content, Slot
    from proxy.scheduler import Scheduler
    from proxy.telemetry.metrics import Metrics
    from proxy.transfer import Transfer

log = structlog.get_logger("slotkeeper.keeper")

TICK_SECONDS = 1.0
RETRY_SECONDS = 60.0  # after a save that did not work
BUSY_SECONDS = 60.0  # unsaved work this old is saved even while other slots run


class Keeper:
    """The background of one backend."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        transfer: Transfer | None,
        metrics: Metrics,
        clock: Callable[[], float],
        prober: Callable[[Facts], Awaitable[Verdict | None]],
        *,
        idle_seconds: float,
        prewarm: bool,
    ) -> None:
        """``transfer`` None: nothing is ever saved. ``prober`` proves a backend and adopts its
        snapshots (None: not possible now); called only while nothing else uses the backend."""
        self._backend = backend
        self._scheduler = scheduler
        self._transfer = transfer
        self._metrics = metrics
        self._clock = clock
        self._prober = prober
        self._idle_seconds = idle_seconds
        self._prewarm = prewarm
        self._wake = asyncio.Event()
        self._failed: dict[int, float] = {}  # slot -> when its save last came to nothing
        self._judged: str | None = None  # the instance the verdict belongs to
        self._instance = ""
        self.up = False
        self.verdict = Verdict(Mode.FORWARD, "the backend was not reached yet")
        scheduler.on_lost = self.lost

    def lost(self) -> None:
        """A connection broke: look at the backend now, not at the next tick."""
        self._judged = None
        self._wake.set()

    async def first(self) -> None:
        """One look before requests are taken; a backend that is not there yet is no error."""
        try:
            await self._look()
        except (SlotkeeperError, StoreError, OSError) as error:
            log.warning("keeper.step-failed", error=type(error).__name__, why=str(error))

    async def run(self) -> None:
        """Until cancelled. A step that fails is logged and tried again at the next tick."""
        while True:
            try:
                await self.step()
            except (SlotkeeperError, StoreError, OSError) as error:
                log.warning("keeper.step-failed", error=type(error).__name__, why=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
                    self._wake.clear()

    async def step(self) -> None:
        """One look at everything."""
        await self._look()
        if self._scheduler.mode is Mode.EXCLUSIVE:
            await self._save_idle()
        self._scheduler.tick()
        self._metrics.slots(Counter(slot.state for slot in self._scheduler.table))

    # Which backend is this, and what may be done to it

    async def _look(self) -> None:
        try:
            instance = await self._backend.instance()
        except SlotkeeperError as error:
            if self.up or self._judged is not None:
                log.warning("backend.unreachable", why=error.message)
            self._set_up(up=False)
            self._judge(None, Verdict(Mode.FORWARD, f"the backend does not answer: {error.message}"))
            self._scheduler.forward(self._scheduler.total_slots)
            return
        self._set_up(up=True)
        if self._instance and instance != self._instance:
            self._metrics.backend_restarts.inc()
            log.warning("backend.restarted", why="its slots are empty; snapshots will be restored")
            self._scheduler.forward(self._scheduler.total_slots)
            self._judged = None
        self._instance = instance
        if self._judged is None:
            await self._prove(instance)

    async def _prove(self, instance: str) -> None:
        """Probe this instance if nothing runs; until then requests are only forwarded."""
        if not self._scheduler.hold():
            return
        try:
            facts = await self._backend.facts()
            self._scheduler.total_slots = facts.total_slots
            verdict = await self._prober(facts)
            if verdict is None:
                self._judge(None, Verdict(Mode.FORWARD, "every slot is busy; it is looked at again"))
                return
            if verdict.mode is Mode.EXCLUSIVE and self._transfer is not None:
                await self._transfer.adopt(verdict.fingerprint)
                self._scheduler.drive(facts.total_slots)
            self._judge(instance, verdict)
        finally:
            self._scheduler.unhold()
        if verdict.mode is Mode.EXCLUSIVE and self._prewarm:
            await self._warm()

    def _judge(self, instance: str | None, verdict: Verdict) -> None:
        if verdict != self.verdict:
            say = log.info if verdict.mode is Mode.EXCLUSIVE else log.warning
            say("mode", mode=str(verdict.mode), why=verdict.why, advice=verdict.advice)
        self._judged, self.verdict = instance, verdict
        self._metrics.mode(verdict.mode)

    def _set_up(self, *, up: bool) -> None:
        self.up = up
        self._metrics.backend_up.set(up)

    # Idle work

    async def _save_idle(self) -> None:
        """Save what has been idle long enough and is worth it, oldest first, one at a time."""
        now = self._clock()
        for slot in sorted(self._scheduler.table, key=lambda s: s.since):
            content = slot.content
            if slot.state is not SlotState.FREE or content is None or not self._due(slot, content, now):
                continue
            await self._save(slot.index)

    def _due(self, slot: Slot, content: Content, now: float) -> bool:
        idle = now - content.used
        if idle < self._idle_seconds or now - self._failed.get(slot.index, 0.0) < RETRY_SECONDS:
            return False
        if not self._scheduler.quiescent() and idle < BUSY_SECONDS:
            return False  # a save stops all slots while it runs
        return content.storable and worth_saving(content.n_tokens, content.n_saved, self._transfer.costs)

    async def _save(self, index: int) -> None:
        table = self._scheduler.table
        slot = table[index]
        content = slot.content
        if slot.state is not SlotState.FREE or content is None:
            return
        table.begin(index, SlotState.SAVING, self._clock())
        try:
            after = await self._transfer.save(index, content)
            table.hold(index, after)
            if after.n_saved <= content.n_saved:
                self._failed[index] = self._clock()
        except SlotkeeperError:
            self._scheduler.lost()
            raise
        finally:
            table.end(index, self._clock())
            self._scheduler.tick()

    async def _warm(self) -> None:
        """Free slots get the most recently used snapshots, so that the first turn is hot."""
        recent = sorted(self._transfer.index, key=lambda s: s.last_used, reverse=True)
        wanted = [s for s in recent if not self._transfer.barred(s.id) and not self._transfer.retired]
        for slot in list(self._scheduler.table):
            if not wanted or self._scheduler.mode is not Mode.EXCLUSIVE:
                return
            if slot.state is SlotState.FREE and slot.content is None:
                await self._warm_one(slot.index, wanted.pop(0))

    async def _warm_one(self, index: int, snapshot: Snapshot) -> None:
        table = self._scheduler.table
        if table[index].state is not SlotState.FREE:
            return
        table.begin(index, SlotState.RESTORING, self._clock())
        try:
            if await self._transfer.restore(index, snapshot):
                prompt = Prompt(seed=snapshot.seed, chain=(), ends=(), size=0)
                table.hold(index, restored(snapshot, prompt, snapshot.last_used))
                log.info("slot.prewarmed", slot=index, tokens=snapshot.n_tokens)
        except SlotkeeperError:
            self._scheduler.lost()
            raise
        finally:
            table.end(index, self._clock())
            self._scheduler.tick()

    async def drain(self, timeout: float) -> None:
        """Let running answers end (at most ``timeout`` seconds), then save what is unsaved."""
        self._scheduler.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._scheduler.quiet()
        except TimeoutError:
            log.warning("drain.timeout", why="some answers were still running")
        if self._scheduler.mode is Mode.EXCLUSIVE:
            for slot in list(self._scheduler.table):
                content = slot.content
                if content and content.storable and worth_saving(content.n_tokens, content.n_saved, self._transfer.costs):
                    try:
                        await self._save(slot.index)
                    except SlotkeeperError as error:
                        log.warning("drain.unsaved", slot=slot.index, why=error.message)
                        break
        await self._transfer.remember()

