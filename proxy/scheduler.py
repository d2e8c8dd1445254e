"""Leases: who may make the backend compute, in which slot, and when.

One event loop, no locks. Every decision is a synchronous pass over queue and slot table (`_pump`),
taken again whenever something changed. What it needs done runs afterwards, in a marked slot.
The mutable state: the queue of waiting requests, what runs, and the board (slots, permits, mode).
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from proxy.board import Board
from proxy.core.placement import LARGE_SECONDS, Need
from proxy.core.queue import Grant, Kind, Lease, Waiting, any_start, next_up
from proxy.core.records import Mode, Prompt, Reason
from proxy.core.slots import SlotState
from proxy.effects import Tasks, carry_out
from proxy.errors import (
    BackendUnreachableError,
    BadRequestError,
    DrainingError,
    OverloadedError,
    SlotkeeperError,
)
from proxy.telemetry.metrics import Where

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proxy.backends.base import Backend
    from proxy.core.costs import Costs
    from proxy.core.routing import Routing
    from proxy.core.slots import SlotTable
    from proxy.effects import Effects
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.scheduler")

TYPICAL_SECONDS, TYPICAL_WEIGHT = 10.0, 0.2  # how long an answer takes, until some were seen


@dataclass(slots=True, eq=False)
class Waiter(Waiting):
    """A request in the queue and the future its handler waits for."""

    future: asyncio.Future[Grant]
    resolve: Callable[[], Awaitable[Prompt]]
    looked: bool = False  # its rendered prompt is being looked at, or was


class Scheduler:
    """Owns the queue, and decides about the board."""

    def __init__(
        self,
        backend: Backend,
        effects: Effects,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        max_queue: int,
        queue_timeout: float,
    ) -> None:
        """``clock`` gives unix seconds; ``queue_timeout`` in seconds."""
        self._backend = backend
        self._effects = effects
        self._metrics = metrics
        self._clock = clock
        self.max_queue = max_queue
        self.queue_timeout = queue_timeout
        self._queue: list[Waiter] = []
        self._running: dict[Lease, asyncio.Task[None] | None] = {}  # with what is done for it
        self._held = False  # the keeper has everything to itself
        self._large: Lease | Waiter | None = None  # who has the one large prefill
        self._typical = TYPICAL_SECONDS
        self._timer: asyncio.TimerHandle | None = None  # a slot is kept until then
        self._quiet = asyncio.Event()  # something ended
        self._tasks = Tasks(self._quiet.set)
        self.board = Board(backend, effects, clock, self._running)
        backend.on_moved(lambda *_: metrics.moved.inc())
        metrics.queue_length.set_function(lambda: len(self._queue))
        metrics.leases_active.set_function(lambda: len(self._running))
        self.draining = False
        self.active = 0.0  # when a request last came or ended
        self.on_lost: Callable[[], None] = lambda: None
        self.on_arrival: Callable[[Need], None] = lambda _: None

    def __repr__(self) -> str:  # answers the operator's question in one line
        counts = f"[{len(self._queue)} queued | {len(self._running)} running]"
        return f"<Scheduler {self.mode} {counts} {self.table!r}>"

    # Mode

    @property
    def mode(self) -> Mode:
        """What may be done to the backend now."""
        return self.board.mode

    @property
    def table(self) -> SlotTable:
        """What its slots do and hold."""
        return self.board.table

    @property
    def total_slots(self) -> int:
        """How many there are, 0: not known."""
        return self.board.total_slots

    @property
    def costs(self) -> Costs:
        """What was learned of its speed."""
        return self._effects.costs

    def forward(self, total_slots: int) -> None:
        """See ``Board.forward``; who waits needs a permit now."""
        self.board.forward(total_slots)
        for waiter in self._queue:
            waiter.kind = Kind.PERMIT
        self._pump()

    def drive(self, total_slots: int, n_ctx: int) -> None:
        """See ``Board.drive``; only while held."""
        self.board.drive(total_slots, n_ctx)

    def route(self, total_slots: int, routing: Routing) -> None:
        """See ``Board.route``; only while held."""
        self.board.route(total_slots, routing)

    def quiescent(self) -> bool:
        """No request runs or waits: a save would disturb nobody."""
        return not self._queue and self._still()

    async def hold(self, patience: float) -> bool:
        """Nothing new starts; True if what runs ends within ``patience`` s. Then ``unhold``."""
        self._held = True
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self.quiet()
                return True
        self.unhold()
        return False

    def unhold(self) -> None:
        """The keeper is done; what came meanwhile was queued for the mode before."""
        self._held = False
        for waiter in self._queue if self.board.pins else ():
            waiter.need, waiter.kind = self.board.admit(waiter.need)
            if waiter.need.wanted is not None and waiter.need.wanted >= self.total_slots:
                waiter.need = replace(waiter.need, wanted=None)  # too late to refuse it
            self._tasks.spawn(self._resolve(waiter), "resolve")
        self._pump()

    def lost(self) -> None:
        """The backend broke a connection: believe nothing until it was looked at again.

        In mode routed only the request's own slot is concerned, and that is settled.
        """
        if self.mode is not Mode.ROUTED:
            self.forward(self.total_slots)
        self.on_lost()

    # Leases

    @asynccontextmanager
    async def lease(
        self,
        need: Need,
        resolve: Callable[[], Awaitable[Prompt]],
        granted: Callable[[Lease], None] = lambda _: None,
    ) -> AsyncIterator[Lease]:
        """Hold a slot for one request; ``granted`` gets the lease before its slot is made ready.

        ``resolve`` gives the prompt with its exact tokens. Raises ``OverloadedError`` (queue full,
        deadline), ``DrainingError``, ``BadRequestError`` (no such slot), and what the backend
        raises while a snapshot is restored.
        """
        lease = await self._obtain(need, resolve)
        try:
            granted(lease)
            await self._prepare(lease)
            lease.pinned = self.board.pins  # a backend lost meanwhile is not proved
            yield lease
        finally:
            self._end(lease)

    async def _obtain(self, need: Need, resolve: Callable[[], Awaitable[Prompt]]) -> Lease:
        waiter = self._enqueue(need, resolve)
        if waiter.future.done():
            return self._open(waiter, waiter.future.result())
        try:
            async with asyncio.timeout(self.queue_timeout):
                if waiter.kind is Kind.NARROW or self._held:
                    await self._resolve(waiter)
                grant = await waiter.future
        except TimeoutError:
            self._leave(waiter)
            msg = f"no slot became free within {self.queue_timeout:.0f} s"
            hint = "try again, or raise server.queue_timeout"
            raise OverloadedError(msg, hint=hint, retry_after=10) from None
        except BaseException:
            self._leave(waiter)
            raise
        return self._open(waiter, grant)

    def _enqueue(self, need: Need, resolve: Callable[[], Awaitable[Prompt]]) -> Waiter:
        if self.draining:
            raise DrainingError("slotkeeper is shutting down", hint="try again soon", retry_after=5)
        exclusive = self.mode is Mode.EXCLUSIVE
        if exclusive and need.wanted is not None and need.wanted >= self.total_slots:
            msg = f"id_slot {need.wanted} does not exist: the backend has {self.total_slots} slots"
            raise BadRequestError(msg, hint="use a smaller number, or leave id_slot out")
        if len(self._queue) >= self.max_queue:
            msg = f"{len(self._queue)} requests are already waiting"
            raise OverloadedError(msg, hint="try again, or raise server.max_queue", retry_after=10)
        self.active = self._clock()
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        waiter = Waiter(*self.board.admit(need), self.active, future, resolve)
        self._queue.append(waiter)
        self._pump()
        if not need.idle:
            self.on_arrival(waiter.need)
        return waiter

    async def _resolve(self, waiter: Waiter) -> None:
        """Look at the rendered prompt; without it (a fault) placement makes do with the chain."""
        prompt = waiter.need.prompt
        if waiter.looked or waiter.need.exact or waiter.need.wide:
            return
        waiter.looked = True
        try:
            prompt = await waiter.resolve()
        except Exception as error:  # noqa: BLE001 - rule 10: no fault of the cache fails a request
            self._metrics.fault(Where.PROMPT)
            log.warning("prompt.unresolved", error=type(error).__name__)
        waiter.need = replace(waiter.need, prompt=prompt, exact=True)
        self._pump()

    def _leave(self, waiter: Waiter) -> None:
        """The client went while waiting, perhaps in the very moment its slot was granted."""
        if waiter in self._queue:
            self._queue.remove(waiter)
        elif waiter.future.done() and not waiter.future.cancelled():
            self._release(waiter.kind, waiter.future.result().option.slot)
            self._large = None if self._large is waiter else self._large
        self._pump()

    def _open(self, waiter: Waiter, grant: Grant) -> Lease:
        now = self._clock()
        lease = Lease(
            option=grant.option,
            kind=waiter.kind,
            prompt=waiter.need.prompt,
            reason=grant.option.reason,
            queued=max(0.0, now - waiter.queued),
            started=now,
            weighed=grant.weighed,
            beside=waiter.need.beside,
        )
        self._running[lease] = None
        if self._large is waiter:
            self._large = lease
        return lease

    # Deciding: synchronous, no await between reading and changing queue and table

    def _pump(self) -> None:
        """Grant whatever can start now. Called after every change."""
        now = self._clock()
        while self._queue and not self._held and (found := self._next(now)) is not None:
            waiter, grant = found
            self._queue.remove(waiter)
            if not waiter.future.done():  # else the client left in this very moment
                self.board.take(waiter.kind, grant)
                if grant.option.prefill > LARGE_SECONDS and self._large is None:
                    self._large = waiter
                waiter.future.set_result(grant)
        self._again(now)

    def _again(self, now: float) -> None:
        """Decide once more when a slot is not kept any longer: nothing else happens then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._queue and (seconds := self.board.kept(now)) is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._pump)

    def _next(self, now: float) -> tuple[Waiter, Grant] | None:
        engine = self.board.engine(large=self._large is not None, typical=self._typical)
        try:
            return next_up(self._queue, engine, self.costs, now, self._effects.matches)
        except Exception as error:  # rule 10: a fault in weighing costs time only
            self._metrics.fault(Where.PLACEMENT)
            log.exception("placement.fault", error=type(error).__name__)
            return any_start(self._queue, engine, now)

    def _release(self, kind: Kind, slot: int) -> None:
        self.board.release(kind, slot)
        self._quiet.set()

    # Doing: what a decision needs before the request may be sent

    async def _prepare(self, lease: Lease) -> None:
        if lease.kind is Kind.WIDE:
            with suppress(SlotkeeperError):
                lease.tasks = {view.index: view.id_task for view in await self._backend.slots()}
        if lease.option.snapshot or lease.option.save_first:
            task = self._tasks.spawn(self._effect(lease), "effect")
            self._running[lease] = task
            await asyncio.shield(task)  # a client that leaves must not break a save in two

    async def _effect(self, lease: Lease) -> None:
        try:
            await carry_out(
                self._effects, self.table, lease, self._clock, lambda: self.mode is Mode.EXCLUSIVE
            )
        except SlotkeeperError as error:
            self.lost()
            if isinstance(error, BackendUnreachableError):
                raise
        finally:
            self.table.become(lease.option.slot, SlotState.LEASED, self._clock())

    # Observing

    def observed(self, lease: Lease, cache_n: int, prompt_n: int) -> None:
        """The engine's own count of the reuse: the truth, beliefs follow it."""
        was_restored = lease.reason is Reason.RESTORED
        if not lease.observed(cache_n, prompt_n):
            return
        if was_restored:
            self._effects.judge(min(lease.option.hit, prompt_n - 1), cache_n)
        if self._effects.costs.prefill(cache_n, prompt_n) <= LARGE_SECONDS:
            self.prefilled(lease)

    def prefilled(self, lease: Lease) -> None:
        """The prompt is computed: the next large prefill may start."""
        if self._large is lease:
            self._large = None
            self._pump()

    def measured(
        self, cached: int, computed: int, seconds: float, *, restored: bool = False
    ) -> None:
        """The engine's own time for a prefill; ``restored``: what it reused came from disk."""
        costs = self._effects.costs
        costs.observe_prefill(cached, cached + computed, seconds)
        spared = costs.prefill(0, cached)
        self._metrics.prompt(reused=cached, computed=computed, restored=restored, saved=spared)

    # Ending

    def _end(self, lease: Lease) -> None:
        task = self._running.pop(lease)
        self.active = self._clock()
        self._quiet.set()
        self.prefilled(lease)
        if lease.kind is Kind.PERMIT:
            self._release(lease.kind, lease.option.slot)
            self._pump()
        elif lease.kind is Kind.NARROW and lease.ended and lease.n_tokens is not None:
            self._typical += TYPICAL_WEIGHT * (self.active - lease.started - self._typical)
            self.board.answered(lease, lease.n_tokens)
            self._release(lease.kind, lease.option.slot)
            self._pump()
        else:
            self._tasks.spawn(self._settle(lease, task), "settle")

    async def _settle(self, lease: Lease, task: asyncio.Task[None] | None) -> None:
        """An answer that did not end by itself: its slot is free once the engine is idle."""
        try:
            if task is not None:
                await asyncio.wait({task})
            if lease.sent:
                await self.board.settle(lease)
        except SlotkeeperError as error:
            log.warning("slot.unknown", slot=lease.option.slot, why=error.message)
            self.lost()
        finally:
            self._release(lease.kind, lease.option.slot)
            self._pump()

    def tick(self) -> None:
        """Time passed, or the keeper changed the table: decide again."""
        self._pump()

    async def quiet(self) -> None:
        """Wait until no lease is held and nothing is settling."""
        while not self._still():
            self._quiet.clear()
            await self._quiet.wait()

    def _still(self) -> bool:
        """Nothing runs, is granted, or settles."""
        return not (self._running or self._tasks or self.board.taken())
