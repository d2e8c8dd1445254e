"""The cached path: one completion request from its bytes to the last byte of its answer.

    bytes -> dialect.parse -> normalise -> prefix chain -> scheduler.lease -> backend.send
          -> relay -> observe

A fault in what is only there to save time (normalise, chain, tokens, placement, snapshots) is
counted and the request goes on as if there were no cache.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from proxy.backends.transport import WHOLE
from proxy.core.normalise.clients import Side
from proxy.core.placement import Need
from proxy.core.records import Mode, Prompt
from proxy.dialects import DIALECTS, TRANSLATIONS
from proxy.dialects.base import Unreadable
from proxy.errors import BackendUnreachableError, SlotkeeperError
from proxy.server import keys
from proxy.server.record import CLIENT_LEFT, Exchange, why_refused
from proxy.server.relay import OK, Relay, without

if TYPE_CHECKING:
    from proxy.backends.base import Backend, Upstream
    from proxy.core.queue import Lease
    from proxy.dialects.base import Call, Dialect
    from proxy.scheduler import Scheduler
    from proxy.server.explainer import Explainer
    from proxy.server.normaliser import Normaliser, Turn
    from proxy.server.passthrough import Passthrough
    from proxy.server.record import Recorder
    from proxy.tokens import Counter

NO_STORE = "X-Slotkeeper-No-Store"
NORMALISE = "X-Slotkeeper-Normalise"  # "off": this request goes on as it came
OURS = ("content-type", "accept-encoding")  # the body goes on as JSON, the answer is read here
BODY_HEADERS = ("content-length", "content-type")
REFUSED, FAILED = 400, 500  # a template that cannot render it; 500 from older builds
TOO_LONG = b"exceed_context_size_error"


class Chat:
    """Handlers of the cached paths."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        counter: Counter,
        normaliser: Normaliser,
        explainer: Explainer,
        passthrough: Passthrough,
        recorder: Recorder,
        *,
        ping_interval: float,
    ) -> None:
        """``ping_interval`` in seconds."""
        self._scheduler = scheduler
        self._backend = backend
        self._counter = counter
        self._normaliser = normaliser
        self._explainer = explainer
        self._passthrough = passthrough
        self._recorder = recorder
        self.ping_interval = ping_interval

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request; the story of the product."""
        dialect = await self.dialect(request.path)
        if dialect is None:
            return await self._passthrough.handle(request)
        raw = await self._passthrough.body(request)
        try:
            call = dialect.parse(raw)
        except Unreadable:
            return await self._passthrough.computing(request, raw)
        if call.settled:
            events = dialect.filter(call, created=int(self._recorder.now()))
            whole = events.whole(OK, call.settled)
            return web.Response(body=whole, content_type="application/json", charset="utf-8")
        return await self.run(Exchange(request, dialect, call, self._recorder.now()))

    async def run(self, exchange: Exchange) -> web.StreamResponse:
        """From a parsed request to the last byte of its answer."""
        call = self._normalised(exchange) if exchange.call.chat else exchange.call
        prompt = self._prompt(exchange)
        need = Need(prompt, wanted=call.id_slot, wide=call.wide, cache=call.cache)
        try:
            return await self._leased(exchange, need)
        except SlotkeeperError as error:
            exchange.status, exchange.failure = error.status, error.message
            if not exchange.client.begun:
                raise
            failed = exchange.events.fail(orjson.dumps(error.envelope()))
            return await exchange.client.write(failed)
        except asyncio.CancelledError:
            exchange.status = CLIENT_LEFT
            raise
        finally:
            self._done(exchange)

    async def _leased(self, exchange: Exchange, need: Need) -> web.StreamResponse:
        """Wait for a slot, and use it."""
        call, client = exchange.call, exchange.client
        exact = partial(self._exact, exchange, need.prompt)
        if call.stream:  # from its arrival on: a queue is silent too
            client.ping_in_silence(exchange.events, self.ping_interval, self._recorder.ping)
        try:
            async with self._scheduler.lease(need, exact, exchange.grant) as lease:
                exchange.lease = lease
                lease.tainted = not call.store and call.cache
                lease.storable = call.store and NO_STORE not in exchange.request.headers
                try:
                    return await self._send(exchange, lease)
                finally:
                    if exchange.turn and self._normaliser.forgotten(exchange.turn):
                        lease.storable = False
        finally:
            await client.quiet()

    async def dialect(self, path: str) -> Dialect | None:
        """By which the path is read; None for what the backend alone understands."""
        if path in TRANSLATIONS and path in await self._backend.lacks():
            return TRANSLATIONS[path]
        return DIALECTS.get(path)

    def _normalised(self, exchange: Exchange) -> Call:
        """Byte-stable, as far as the ledger and the client allow."""
        headers = exchange.request.headers
        exchange.turn = self._normaliser.prepare(
            exchange.call,
            headers,
            exchange.namespace,
            keep=NO_STORE not in headers,
            off=headers.get(NORMALISE, "").lower() == "off",
        )
        exchange.call = exchange.turn.call
        return exchange.call

    def _prompt(self, exchange: Exchange) -> Prompt:
        """The prefix chain; without it (a fault of ours) the request is simply cold."""
        call, namespace = exchange.call, exchange.namespace
        row = exchange.turn.row if exchange.turn else None
        try:
            prompt = exchange.dialect.prompt(call, namespace)
        except Exception as error:  # noqa: BLE001 - rule 10
            self._recorder.fault(error)
            prompt = Prompt(seed=namespace, chain=(), ends=(), size=len(call.raw))
        side = exchange.turn is not None and exchange.turn.side is not Side.MAIN
        return replace(prompt, conversation=row.id if row else "", side=side)

    def _done(self, exchange: Exchange) -> None:
        """Whatever became of it: remembered, written down, and explained if it was cold."""
        lease, turn = exchange.lease, exchange.turn
        if turn is not None and lease is not None:
            self._normaliser.answered(turn, exchange.generated(), lease.prompt_n)
        exchange.why = self._explainer.look(exchange)
        self._recorder.request(exchange)

    async def _exact(self, exchange: Exchange, prompt: Prompt) -> Prompt:
        """The same prompt with the tokens the backend will see."""
        tokens = await self._counter.exact(exchange.dialect.rendered(exchange.call))
        return replace(prompt, tokens=tokens)

    async def _send(self, exchange: Exchange, lease: Lease) -> web.StreamResponse:
        """Send the request into its slot and relay the answer in the form the client asked for."""
        request = exchange.request
        body = exchange.dialect.upstream(exchange.call, lease.slot, fresh=self._doubtful(lease))
        headers = keys.upstream(request, OURS, whose=exchange.namespace)
        headers.append(("Content-Type", "application/json"))
        headers += [] if exchange.call.stream else [(WHOLE, "1")]
        target = exchange.call.path or request.raw_path
        lease.sent, lease.ended = True, False
        lease.body = body if exchange.call.chat else None
        try:
            async with self._backend.send(
                "POST", target, headers, body, slot=lease.slot
            ) as upstream:
                exchange.status = upstream.status
                return await self._relay(exchange, lease, upstream)
        except BackendUnreachableError:
            self._scheduler.lost()
            raise

    def _doubtful(self, lease: Lease) -> bool:
        held = None if lease.slot is None else self._scheduler.table[lease.slot].content
        return self._normaliser.adapters.doubtful(lease.prompt.adapters, held)

    async def _relay(
        self, exchange: Exchange, lease: Lease, upstream: Upstream
    ) -> web.StreamResponse:
        call = exchange.call
        relay = Relay(self._scheduler, lease, exchange.payloads if call.keep else None)
        if upstream.status != OK:
            return await self._refused(exchange, lease, upstream)
        if call.stream:
            return await relay.stream(exchange.client, upstream, exchange.events)
        if not call.streamable:
            return self._complete(exchange, upstream, OK, await relay.whole(upstream))
        assembler = exchange.dialect.assembler(call)
        status, answer = await relay.assemble(upstream, exchange.events, assembler)
        # llama-server shows such a text only in an answer it does not stream. Where slots are
        # processes nothing is kept back, and the same again would be a whole prefill.
        if assembler.lossy and self._scheduler.mode is not Mode.ROUTED:
            exchange.call = replace(call, streamable=False)
            return await self._send(exchange, lease)
        return self._complete(exchange, upstream, status, answer)

    async def _refused(
        self, exchange: Exchange, lease: Lease, upstream: Upstream
    ) -> web.StreamResponse:
        """The backend said no: its own words, as an event where the headers have left already.

        Read whole first: meanwhile a ping may send the headers. If it was the rules' doing, the
        client's own request has its chance.
        """
        body = await upstream.read()
        exchange.failure = why_refused(body)
        if exchange.turn and exchange.turn.altered and _may_be_ours(exchange, upstream, body):
            return await self._unaltered(exchange, lease, exchange.turn)
        await exchange.client.quiet()  # no ping between this look and the headers
        if exchange.client.begun:
            return await exchange.client.write(exchange.events.fail(body))
        refusal = exchange.events.whole(upstream.status, body)
        if refusal is not body:
            return _answer(exchange, upstream, refusal)
        response = web.Response(status=upstream.status, body=body)
        response.headers.update({"X-Slotkeeper": exchange.note()})
        response.headers.extend(without(upstream.headers, ("content-length",)))
        return response

    async def _unaltered(self, exchange: Exchange, lease: Lease, turn: Turn) -> web.StreamResponse:
        exchange.call = self._normaliser.revert(turn)
        lease.prompt = self._prompt(exchange)
        exchange.failure = ""
        answer = await self._send(exchange, lease)
        if exchange.status == OK:
            self._normaliser.refused(turn)
        return answer

    def _complete(
        self, exchange: Exchange, upstream: Upstream, status: int, body: bytes
    ) -> web.Response:
        exchange.status = status
        return _answer(exchange, upstream, exchange.events.whole(status, body))


def _may_be_ours(exchange: Exchange, upstream: Upstream, body: bytes) -> bool:
    """Whether the rules may be why: a template refuses before anything is computed."""
    streamed = exchange.call.stream or exchange.call.streamable
    return TOO_LONG not in body and (
        upstream.status == REFUSED or (streamed and upstream.status == FAILED)
    )


def _answer(exchange: Exchange, upstream: Upstream, body: bytes) -> web.Response:
    response = web.Response(status=exchange.status, body=body)
    response.headers.extend(without(upstream.headers, BODY_HEADERS))
    response.headers["Content-Type"] = "application/json; charset=utf-8"
    response.headers["X-Slotkeeper"] = exchange.note()
    return response
