"""Conversations that were displaced are computed again while nobody waits (`core.priming`).

Only before a server that saves nothing and whose model goes on from the prompt alone. At most once
per turn of a conversation; a client's request that comes meanwhile breaks it off. It begins anew
after one that leaves the slot as it is (an embedding).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import structlog

from proxy.core.hold import same
from proxy.core.placement import Need
from proxy.core.priming import breaks_off, due, to_keep
from proxy.core.records import Mode, Prompt
from proxy.errors import BackendBrokenError, SlotkeeperError
from proxy.telemetry.metrics import Primed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from proxy.backends.base import Backend
    from proxy.board import Board
    from proxy.core.costs import Costs
    from proxy.core.queue import Lease
    from proxy.core.slots import Content
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.priming")

CHAT = "/v1/chat/completions"
OK = 200
TRIES = 3  # so often it begins: who asks every few seconds would never let it end


class Leases(Protocol):
    """Where leases come from (`scheduler.Scheduler`)."""

    board: Board
    active: float
    on_arrival: Callable[[Need], None]

    @property
    def costs(self) -> Costs:
        """What was learned of the backend's speed."""

    def quiescent(self) -> bool:
        """No request runs or waits."""

    def observed(self, lease: Lease, cache_n: int, prompt_n: int) -> None:
        """The engine's own count."""

    def lease(
        self, need: Need, resolve: Callable[[], Awaitable[Prompt]]
    ) -> AbstractAsyncContextManager[Lease]:
        """Hold a slot."""


class Primer:
    """Remembers what was displaced, per slot, and brings it back."""

    def __init__(
        self, leases: Leases, backend: Backend, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """``clock`` gives unix seconds."""
        self._leases = leases
        self._backend = backend
        self._metrics = metrics
        self._clock = clock
        self._gone: dict[int, Content] = {}  # by slot
        self._task: asyncio.Task[None] | None = None
        self._running: tuple[int, Content, float] | None = None  # its slot, and when it began
        self._broken: tuple[Content, int] | None = None  # what was last broken off, how often
        leases.on_arrival = self._arrived
        leases.board.on_displaced = self._displaced

    def look(self) -> None:
        """Begin with one, if it is time. Called again and again."""
        if self._task is not None or not self._leases.quiescent():
            return
        board, now = self._leases.board, self._clock()
        for slot, gone in [*self._gone.items()]:
            held = [row.content.prompt for row in board.table if row.content]
            if any(same(gone.prompt, prompt) for prompt in held):
                del self._gone[slot]  # it came back by itself
                continue
            there = board.mode is Mode.ROUTED and slot < len(board.table)
            if not there or slot in self._backend.absent:
                continue
            holds = board.table[slot].content
            if due(gone, holds, self._leases.costs, now, self._leases.active):
                del self._gone[slot]
                if gone.sent is not None and self._backend.primes(slot, gone.sent):
                    self._begin(slot, gone, gone.sent)
                    return

    async def stop(self) -> None:
        """Break off what runs, and forget the rest."""
        self._gone.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _displaced(self, slot: int, content: Content) -> None:
        kept = to_keep(self._gone.get(slot), content, self._leases.costs, self._clock())
        if kept is not None:
            self._gone[slot] = kept

    def _arrived(self, need: Need) -> None:
        if self._task is None or self._running is None:
            return
        slot, gone, began = self._running
        if breaks_off(gone, need.prompt, self._leases.costs, self._clock() - began):
            self._running = None  # whoever comes next finds it broken off
            self._task.cancel()
            before = self._broken[1] if self._broken and self._broken[0] is gone else 0
            self._broken = gone, before + 1
            if need.beside and before + 1 < TRIES:
                self._displaced(slot, gone)

    def _begin(self, slot: int, gone: Content, sent: bytes) -> None:
        self._running = slot, gone, self._clock()
        run = self._run(slot, gone.prompt, sent)
        self._task = asyncio.get_running_loop().create_task(run, name="priming")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = self._running = None
        self._metrics.primed(Primed.BROKEN_OFF if task.cancelled() else task_outcome(task))

    async def _run(self, slot: int, prompt: Prompt, sent: bytes) -> None:
        """One prefill, as a request of its own that gives way to every other."""
        async with self._leases.lease(Need(prompt, wanted=slot, idle=True), _unresolved) as lease:
            lease.sent = True
            timings = await self._compute(slot, again(sent))
            cached, computed = (int(timings[name]) for name in ("cache_n", "prompt_n"))
            seconds = float(timings["prompt_ms"]) / 1e3
            self._leases.costs.observe_prefill(cached, cached + computed, seconds)
            self._leases.observed(lease, cached, cached + computed)
            lease.finish(cached + computed, storable=False)
            log.info("slot.primed", slot=slot, tokens=cached + computed, seconds=round(seconds, 1))

    async def _compute(self, slot: int, body: bytes) -> dict[str, Any]:
        headers = [("Content-Type", "application/json")]
        async with self._backend.send("POST", CHAT, headers, body, slot=slot) as upstream:
            raw = await upstream.read()
        try:
            timings = orjson.loads(raw)["timings"]
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise BackendBrokenError("the answer tells no timings") from error
        if upstream.status != OK or not isinstance(timings, dict):
            raise BackendBrokenError(f"it was answered with {upstream.status}")
        return timings


def again(sent: bytes) -> bytes:
    """A request that was sent, for one token of answer and in one piece."""
    body = orjson.loads(sent)
    body.pop("max_completion_tokens", None)
    return orjson.dumps({**body, "stream": False, "max_tokens": 1})


def task_outcome(task: asyncio.Task[None]) -> Primed:
    """How one ended; why it failed goes to the log."""
    error = task.exception()
    if error is None:
        return Primed.DONE
    why = error.message if isinstance(error, SlotkeeperError) else type(error).__name__
    log.warning("priming.failed", why=why)
    return Primed.FAILED


async def _unresolved() -> Prompt:
    raise AssertionError("in mode routed nobody looks at a prompt")
