"""The cached path: one completion request from its bytes to the last byte of its answer.

    bytes -> dialect.parse -> prefix chain -> scheduler.lease -> backend.send(slot) -> relay -> observe

A fault in what is only there to save time (chain, tokens, placement, snapshots) is counted and the
request goes on as if there were no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from proxy.core.placement import Need
from proxy.core.records import Prompt, Reason
from proxy.dialects import DIALECTS
from proxy.dialects.base import Unreadable
from proxy.errors import BackendUnreachableError
from proxy.server.relay import OK, Client, Relay, passed, without_length
from proxy.telemetry.history import Decision
from proxy.telemetry.metrics import PathClass, Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.backends.base import Backend, Upstream
    from proxy.dialects.base import Call, Dialect
    from proxy.core.queue import Lease
    from proxy.scheduler import Scheduler
    from proxy.server.keys import Keys
    from proxy.server.passthrough import Passthrough
    from proxy.telemetry.history import History
    from proxy.telemetry.metrics import Metrics
    from proxy.tokens import Counter

log = structlog.get_logger("slotkeeper.request")

NO_STORE = "X-Slotkeeper-No-Store"
PATH_CLASSES = {
    "/v1/chat/completions": PathClass.CHAT,
    "/chat/completions": PathClass.CHAT,
    "/infill": PathClass.INFILL,
}
CLIENT_LEFT = 499  # only in logs: nobody is there to read it


@dataclass(slots=True)
class Exchange:
    """What is known of one request while it runs; becomes its row in the decision log."""

    request_id: str
    path: str
    started: float
    status: int = 0
    first_token: float | None = None
    lease: Lease | None = None

    def note(self) -> str:
        """The value of ``X-Slotkeeper``: the reason and the real reuse, as far as known by now."""
        lease = self.lease
        if lease is None:
            return str(Reason.REFUSED)
        slot = f"; slot={lease.slot}" if lease.slot is not None else ""
        if lease.cache_n is None:
            reason = Reason.PENDING if lease.reason in (Reason.SLOT_HIT, Reason.COLD, Reason.RESTORED) else lease.reason
            return f"{reason}{slot}"
        return f"{lease.reason}{slot}; reused={lease.cache_n}; prompt={lease.prompt_n}"


class Chat:
    """Handlers of the cached paths."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        counter: Counter,
        passthrough: Passthrough,
        keys: Keys,
        metrics: Metrics,
        history: History,
        clock: Callable[[], float],
        *,
        ping_interval: float,
    ) -> None:
        """``clock`` gives unix seconds; ``ping_interval`` in seconds."""
        self._scheduler = scheduler
        self._backend = backend
        self._counter = counter
        self._passthrough = passthrough
        self._keys = keys
        self._metrics = metrics
        self._history = history
        self._clock = clock
        self._ping_interval = ping_interval

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request; the story of the product."""
        raw = await request.read()
        dialect = DIALECTS[request.path]
        try:
            call = dialect.parse(raw)
        except Unreadable:
            return await self._passthrough.computing(request, raw)
        exchange = Exchange(request["request_id"], request.path, self._clock())
        need = Need(self._prompt(dialect, call, request), wanted=call.id_slot, wide=call.wide, cache=call.cache)
        try:
            async with self._scheduler.lease(need, lambda: self._exact(dialect, call, need)) as lease:
                exchange.lease = lease
                lease.storable = call.store and NO_STORE not in request.headers
                return await self._send(request, dialect, call, exchange, lease)
        except BaseException as error:
            exchange.status = getattr(error, "status", CLIENT_LEFT)
            raise
        finally:
            self._record(exchange)

    def _prompt(self, dialect: Dialect, call: Call, request: web.Request) -> Prompt:
        """The prefix chain; without it (a fault of ours) the request is simply cold."""
        namespace = blake2b(self._keys.client_key(request).encode(), digest_size=16).digest()
        try:
            return dialect.prompt(call, namespace)
        except Exception as error:  # noqa: BLE001 - rule 10: no fault of the cache may fail a request
            self._metrics.fault(Where.PROMPT)
            log.error("prefix.fault", error=type(error).__name__)
            return Prompt(seed=namespace, chain=(), ends=(), size=len(call.raw))

    async def _exact(self, dialect: Dialect, call: Call, need: Need) -> Prompt:
        """The same prompt with the tokens the backend will see."""
        prompt = need.prompt
        tokens = await self._counter.exact(dialect.rendered(call))
        return Prompt(prompt.seed, prompt.chain, prompt.ends, prompt.size, tokens)

    async def _send(
        self, request: web.Request, dialect: Dialect, call: Call, exchange: Exchange, lease: Lease
    ) -> web.StreamResponse:
        """Send the request into its slot and relay the answer in the form the client asked for."""
        body = dialect.upstream(call, lease.slot)
        headers = [*self._keys.upstream(request), ("Content-Type", "application/json")]
        lease.sent = True
        try:
            async with self._backend.send("POST", request.raw_path, headers, body) as upstream:
                exchange.status = upstream.status
                return await self._relay(request, dialect, call, exchange, lease, upstream)
        except BackendUnreachableError:
            self._scheduler.lost()
            raise

    async def _relay(
        self,
        request: web.Request,
        dialect: Dialect,
        call: Call,
        exchange: Exchange,
        lease: Lease,
        upstream: Upstream,
    ) -> web.StreamResponse:
        relay = Relay(self._scheduler, lease, self._ping_interval, self._metrics.pings.inc)
        if upstream.status != OK:
            return await passed(request, upstream, {"X-Slotkeeper": exchange.note()})
        if not call.streamable:
            answer = await relay.whole(upstream)
            return self._complete(upstream, OK, answer, exchange)
        events = dialect.filter(call, f"chatcmpl-{exchange.request_id}", int(exchange.started))
        if not call.stream:
            status, answer = await relay.assemble(upstream, events, dialect.assembler(call))
            return self._complete(upstream, status, answer, exchange, kind="application/json; charset=utf-8")
        client = Client(request, without_length(upstream.headers), exchange.note)
        await relay.stream(client, upstream, events)
        exchange.first_token = client.first
        return await client.end()

    def _complete(
        self, upstream: Upstream, status: int, body: bytes, exchange: Exchange, kind: str = ""
    ) -> web.Response:
        exchange.status = status
        response = web.Response(status=status, body=body)
        response.headers.extend(without_length(upstream.headers, drop={"content-type"} if kind else ()))
        if kind:
            response.headers["Content-Type"] = kind
        response.headers["X-Slotkeeper"] = exchange.note()
        return response

    def _record(self, exchange: Exchange) -> None:
        """Observe: one row of the decision log, one line, the metrics."""
        now = self._clock()
        lease = exchange.lease
        reason = lease.reason if lease else Reason.REFUSED
        decision = Decision(
            request_id=exchange.request_id,
            at=exchange.started,
            path=exchange.path,
            reason=reason,
            status=exchange.status,
            total=now - exchange.started,
            queued=lease.queued if lease else now - exchange.started,
            slot=lease.slot if lease else None,
            reused=lease.cache_n if lease else None,
            prompt=lease.prompt_n if lease else None,
            first_token=exchange.first_token - exchange.started if exchange.first_token else None,
            costs=[option.explain() for option in lease.weighed] if lease else (),
        )
        self._history.add(decision)
        kind = PATH_CLASSES.get(exchange.path, PathClass.COMPLETION)
        self._metrics.request(
            kind, reason, exchange.status, total=decision.total, first_token=decision.first_token
        )
        if exchange.status == CLIENT_LEFT:
            self._metrics.disconnects.inc()
        line = {k: v for k, v in decision.as_json().items() if k not in {"costs", "note", "at"}}
        log.info("request", **line)
