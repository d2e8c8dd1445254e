"""What is known of one request while it runs, and what is remembered of it afterwards."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from aiohttp import web

from proxy.core.normalise.clients import Side
from proxy.core.queue import Lease
from proxy.core.records import Reason
from proxy.core.why import told
from proxy.dialects.openai_chat import generated
from proxy.server import keys
from proxy.server.density import Density
from proxy.server.envelope import REQUEST_ID, Handler
from proxy.server.gate import OWN
from proxy.server.relay import Client
from proxy.telemetry.history import Decision
from proxy.telemetry.metrics import PathClass, Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.typedefs import Middleware

    from proxy.core.why import Why
    from proxy.dialects.base import Call, Dialect
    from proxy.server.normaliser import Turn
    from proxy.telemetry.history import History
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.request")

LEASE = web.RequestKey("lease", Lease)  # set where something computes outside the cached path
RECORDED = web.RequestKey("recorded", bool)
EVENTS = f"{OWN}/api/events"  # open for hours, which says nothing of how long requests take
CLIENT_LEFT = 499  # only in logs: nobody is there to read it
FIRST = "first request of a conversation"
_KIND = re.compile(r"[A-Za-z][\w.-]{0,60}")  # of a backend's error; its text may quote the prompt
FORESEEN = (Reason.SLOT_HIT, Reason.COLD, Reason.RESTORED)  # what only the engine can confirm
PATH_CLASSES = {
    "/v1/chat/completions": PathClass.CHAT,
    "/chat/completions": PathClass.CHAT,
    "/v1/messages": PathClass.CHAT,
    "/v1/responses": PathClass.CHAT,
    "/api/chat": PathClass.CHAT,
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
        self.namespace = keys.namespace(request.headers)
        self.started = now
        self.status = 0
        self.granted: Lease | None = None  # its slot may still have to be made ready
        self.lease: Lease | None = None
        self.turn: Turn | None = None  # chat only
        self.why: Why | None = None  # it was cold
        self.seq = 0  # of its row in the decision log
        self.failure = ""  # why there is no answer, in a sentence
        self.events = dialect.filter(call, f"slotkeeper-{self.request_id}", int(now))
        self.client = Client(request, self.note, self.events.media)
        self.payloads: list[bytes] = []  # what the backend sent, where ``call.keep``
        request[EXCHANGE] = self

    def grant(self, lease: Lease) -> None:
        """A slot was found."""
        self.granted = lease

    @property
    def title(self) -> str:
        """The conversation's, ``""`` for one that is not remembered."""
        turn = self.turn
        return turn.row.title if turn is not None and turn.row is not None and turn.kept else ""

    def generated(self) -> bytes | None:
        """The assistant message (JSON) of an answer that ran to its end, None without one."""
        return generated(self.payloads) if self.payloads else None

    def note(self) -> str:
        """The value of ``X-Slotkeeper``: the reason and the real reuse, as far as known by now."""
        lease = self.lease
        if lease is None:
            return str(Reason.PENDING)
        slot = f"; slot={lease.slot}" if lease.slot is not None else ""
        if lease.cache_n is None:
            return f"{Reason.PENDING if lease.reason in FORESEEN else lease.reason}{slot}"
        return f"{lease.reason}{slot}; reused={lease.cache_n}; prompt={lease.prompt_n}"


EXCHANGE = web.RequestKey("exchange", Exchange)  # set where a request is of the cached path


class Recorder:
    """Observe: one row of the decision log, one line, the metrics."""

    def __init__(self, metrics: Metrics, history: History, clock: Callable[[], float]) -> None:
        """``clock`` gives unix seconds."""
        self._metrics = metrics
        self._history = history
        self._live: dict[int, tuple[web.Request, float]] = {}  # by identity, with when each came
        self.now = clock
        self.density = Density()

    def ping(self) -> None:
        """A ping was sent."""
        self._metrics.pings.inc()

    def fault(self, error: Exception) -> None:
        """The prefix chain could not be made; the request goes on without (DESIGN.md rule 10)."""
        self._metrics.fault(Where.PROMPT)
        log.error("prefix.fault", error=type(error).__name__)

    def live(self) -> list[tuple[web.Request, float]]:
        """Requests that are being served, and when each came (unix seconds), the oldest first."""
        return list(self._live.values())

    @property
    def observe(self) -> Middleware:
        """The outermost middleware: requests of the paths that are not cached leave a line too."""

        @web.middleware
        async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
            started, status, reason = self.now(), CLIENT_LEFT, Reason.REFUSED
            self._live[id(request)] = request, started
            try:
                response = await handler(request)
                status = response.status
                reason = Reason.PASS if "X-Slotkeeper" in response.headers else reason
                return response
            finally:
                del self._live[id(request)]
                if RECORDED not in request and request.path != EVENTS:
                    self._other(request, started, status, reason)

        return observed

    def _other(self, request: web.Request, started: float, status: int, reason: Reason) -> None:
        """Anything but the cached path. What only reads is not kept in the decision log."""
        lease = request.get(LEASE)
        decision = Decision(
            request_id=request[REQUEST_ID],
            at=started,
            path=request.path,
            reason=lease.reason if lease else reason,
            status=status,
            total=self.now() - started,
            queued=lease.queued if lease else 0.0,
        )
        if request.path.startswith(OWN):
            self._metrics.request(PathClass.OWN, Reason.PASS, status, total=decision.total)
            return
        self._close(decision, PathClass.COMPUTE if lease else PathClass.PLAIN, keep=bool(lease))

    def request(self, exchange: Exchange) -> None:
        """A request of the cached path is over."""
        exchange.request[RECORDED] = True
        now = self.now()
        lease = exchange.lease
        if lease and lease.prompt_n and exchange.call.chat and not exchange.call.extra["media"]:
            self.density.learn(lease.prompt.size, lease.prompt_n)
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
            **_conversation(exchange),
        )
        if exchange.failure:
            decision = replace(decision, note=exchange.failure)
        kind = PATH_CLASSES.get(decision.path, PathClass.COMPLETION)
        exchange.seq = self._close(decision, kind, keep=True)

    def _close(self, decision: Decision, kind: PathClass, *, keep: bool) -> int:
        seq = self._history.add(decision) if keep else 0
        self._metrics.request(
            kind,
            decision.reason,
            decision.status,
            total=decision.total,
            queued=decision.queued if keep else None,
            first_token=decision.first_token,
        )
        if decision.status == CLIENT_LEFT:
            self._metrics.disconnects.inc()
        log.info("request", **decision.for_log())
        return seq


def why_refused(body: bytes) -> str:
    """Why the backend refused, in a sentence; ``body`` is its answer."""
    try:
        error = orjson.loads(body)["error"]
        kind, length, room = (error.get(n) for n in ("type", "n_prompt_tokens", "n_ctx"))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        kind = length = room = None
    if isinstance(length, int) and isinstance(room, int):
        return f"the prompt has {length:,} tokens, its slot room for {room:,}"
    named = isinstance(kind, str) and _KIND.fullmatch(kind)
    return f"the backend refused it: {kind}" if named else "the backend refused it"


def _conversation(exchange: Exchange) -> dict[str, Any]:
    """What is known of the conversation, for its row in the decision log."""
    turn = exchange.turn
    if turn is None:
        return {}
    cold = exchange.lease is not None and exchange.lease.reason is Reason.COLD
    return {
        "conversation": turn.row.id if turn.row else "",
        "note": FIRST if cold and turn.row and not turn.before else "",
        "client": turn.client,
        "side": "" if turn.side is Side.MAIN else str(turn.side),
        "rules": [f"{name} (shadow)" if turn.shadow else name for name in turn.rules],
        "cold": told(exchange.why) if exchange.why else None,
        "title": exchange.title,
    }
