"""What is known of one request while it runs, and what is remembered of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from proxy.core.records import Reason
from proxy.server.envelope import REQUEST_ID
from proxy.server.relay import Client
from proxy.telemetry.history import Decision
from proxy.telemetry.metrics import PathClass, Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from proxy.core.queue import Lease
    from proxy.dialects.base import Call, Dialect
    from proxy.telemetry.history import History
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.request")

CLIENT_LEFT = 499  # only in logs: nobody is there to read it
FORESEEN = (Reason.SLOT_HIT, Reason.COLD, Reason.RESTORED)  # what only the engine can confirm
PATH_CLASSES = {
    "/v1/chat/completions": PathClass.CHAT,
    "/chat/completions": PathClass.CHAT,
    "/infill": PathClass.INFILL,
}


class Exchange:
    """What is known of one request while it runs; becomes its row in the decision log."""

    def __init__(self, request: web.Request, dialect: Dialect, call: Call, now: float) -> None:
        """``now``: unix seconds."""
        self.request = request
        self.request_id: str = request[REQUEST_ID]
        self.dialect = dialect
        self.call = call
        self.started = now
        self.status = 0
        self.lease: Lease | None = None
        self.events = dialect.filter(call, f"slotkeeper-{self.request_id}", int(now))
        self.client = Client(request, self.note)

    def note(self) -> str:
        """The value of ``X-Slotkeeper``: the reason and the real reuse, as far as known by now."""
        lease = self.lease
        if lease is None:
            return str(Reason.PENDING)
        slot = f"; slot={lease.slot}" if lease.slot is not None else ""
        if lease.cache_n is None:
            return f"{Reason.PENDING if lease.reason in FORESEEN else lease.reason}{slot}"
        return f"{lease.reason}{slot}; reused={lease.cache_n}; prompt={lease.prompt_n}"


class Recorder:
    """Observe: one row of the decision log, one line, the metrics."""

    def __init__(self, metrics: Metrics, history: History, clock: Callable[[], float]) -> None:
        """``clock`` gives unix seconds."""
        self._metrics = metrics
        self._history = history
        self.now = clock

    def ping(self) -> None:
        """A ping was sent."""
        self._metrics.pings.inc()

    def fault(self, error: Exception) -> None:
        """The prefix chain could not be made; the request goes on without (DESIGN.md rule 10)."""
        self._metrics.fault(Where.PROMPT)
        log.error("prefix.fault", error=type(error).__name__)

    def request(self, exchange: Exchange) -> None:
        """It is over."""
        now = self.now()
        lease = exchange.lease
        reason = lease.reason if lease else Reason.REFUSED
        decision = Decision(
            request_id=exchange.request_id,
            at=exchange.started,
            path=exchange.request.path,
            reason=reason,
            status=exchange.status,
            total=now - exchange.started,
            queued=lease.queued if lease else now - exchange.started,
            slot=lease.slot if lease else None,
            reused=lease.cache_n if lease else None,
            prompt=lease.prompt_n if lease else None,
            first_token=exchange.client.first_after(),
            costs=[option.explain() for option in lease.weighed] if lease else (),
        )
        self._history.add(decision)
        kind = PATH_CLASSES.get(exchange.request.path, PathClass.COMPLETION)
        self._metrics.request(
            kind, reason, exchange.status, total=decision.total, first_token=decision.first_token
        )
        if exchange.status == CLIENT_LEFT:
            self._metrics.disconnects.inc()
        line = {k: v for k, v in decision.as_json().items() if k not in {"costs", "note", "at"}}
        log.info("request", prompt_tokens=line.pop("prompt"), **line)
