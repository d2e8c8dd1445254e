"""Why a request was cold: looked into after its answer, off its path.

First what was sent is compared with what the conversation sent last; if the one extends the other,
both are rendered once more, to see what the template made of them; then it was the slot.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from proxy.core.explain import Why, first_difference, lost, rendered_difference
from proxy.core.records import Mode, Reason
from proxy.core.why import told
from proxy.effects import Tasks
from proxy.telemetry.metrics import Where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import date
    from typing import Any

    from proxy.core.ledger import Conversation
    from proxy.core.queue import Lease
    from proxy.core.template import Traits
    from proxy.scheduler import Scheduler
    from proxy.server.normaliser import Normaliser
    from proxy.server.record import Exchange
    from proxy.telemetry.history import History
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.explain")

TAIL_TOKENS = 16  # the end of a prompt, where the template opens the answer, is never sent again
_RESTED = (
    "The rules were off for this request (its X-Slotkeeper-Normalise header, or caching was"
    " paused), so it went out as it came."
)


class Renderer(Protocol):
    """The backend, as far as prompts are concerned."""

    async def render(self, body: Mapping[str, Any]) -> str:
        """The prompt text a chat request becomes."""


class Served(Protocol):
    """What the backend serves, and since when (unix seconds; 0: since before we looked)."""

    traits: Traits
    restarted: float


class Explainer:
    """Finds the cause and puts it into the decision log, the metrics and one line of the log."""

    def __init__(
        self,
        normaliser: Normaliser,
        scheduler: Scheduler,
        backend: Renderer,
        served: Served,
        metrics: Metrics,
        history: History,
        evicted: Callable[[str], bool],
    ) -> None:
        """All are asked only after a cold answer.

        ``evicted``: whether a snapshot of this conversation was lately removed to make room.
        """
        self._normaliser = normaliser
        self._scheduler = scheduler
        self._backend = backend
        self._served = served
        self._metrics = metrics
        self._history = history
        self._evicted = evicted
        self._tasks = Tasks(lambda: None)

    def look(self, exchange: Exchange) -> Why | None:
        """Why it reused less than its conversation's last prompt, if it did. Never raises.

        None too where that takes a closer look, which then goes on by itself. Nothing is quoted of
        what is not remembered.
        """
        turn, lease = exchange.turn, exchange.lease
        before = turn.before if turn else None
        if turn is None or turn.row is None or before is None or before.prompt_n is None:
            return None
        if lease is None or lease.cache_n is None or lease.prompt_n is None:
            return None
        if not exchange.call.cache:  # the client wanted nothing reused
            return None
        missing = min(before.prompt_n, lease.prompt_n) - lease.cache_n
        if missing <= TAIL_TOKENS:
            return None
        try:
            why = first_difference(before, turn.row, self._served.traits)
        except Exception as error:  # noqa: BLE001 - rule 10
            self._fault(error)
            return None
        if why is None:
            slot = partial(self._slot, before, turn.row, missing, lease)
            look = self._look_closer(exchange, before, turn.row, slot)
            self._tasks.spawn(look, "explain")
            return None
        self._metrics.cold(why.cause)
        if turn.rested:
            why = replace(why, advice=_RESTED)
        return self._discreet(why, turn.row)

    async def _look_closer(
        self,
        exchange: Exchange,
        before: Conversation,
        now: Conversation,
        slot: Callable[[], Why],
    ) -> None:
        why = None
        try:
            if self._scheduler.mode is not Mode.ROUTED:  # there nothing can be rendered
                old, new = [
                    await self._backend.render(self._normaliser.body(row)) for row in (before, now)
                ]
                why = rendered_difference(old, new, self._served.traits)
        except Exception as error:  # noqa: BLE001 - what the template does remains unknown
            self._fault(error)
        why = why or slot()
        self._metrics.cold(why.cause)
        self._history.explain(exchange.seq, told(self._discreet(why, now)))
        log.info("cold", request_id=exchange.request_id, conversation=now.id, cause=str(why.cause))

    def _discreet(self, why: Why, row: Conversation) -> Why:
        known = self._normaliser.known(row.id)
        return why if known else replace(why, before="", after="")

    def _slot(self, before: Conversation, now: Conversation, missing: int, lease: Lease) -> Why:
        restarted = self._served.restarted > before.used
        driven = self._scheduler.mode is not Mode.FORWARD
        chosen = lease.reason in (Reason.PINNED, Reason.WIDE)  # not where it would have been
        expected = max((option.hit for option in lease.weighed), default=lease.option.hit)
        held = chosen or expected + TAIL_TOKENS >= (before.prompt_n or 0)
        return lost(
            rolled_over=self._rolled_over(before, now),
            forward=not driven,
            restarted=restarted,
            evicted=driven and not held and self._evicted(now.id),
            displaced=driven and not held,
            missing=missing,
        )

    def _rolled_over(self, before: Conversation, now: Conversation) -> bool:
        """The template writes the day by itself, and it was another one."""
        if not self._served.traits.writes_date or b'"date_string"' in now.settings:
            return False
        return _day(before.used) != _day(now.used)

    def _fault(self, error: Exception) -> None:
        self._metrics.fault(Where.EXPLAIN)
        log.warning("explain.fault", error=type(error).__name__)


def _day(at: float) -> date:
    return datetime.fromtimestamp(at).astimezone().date()
