"""One answer on its way from the backend to the client: back-pressure, pings, errors in place.

Nothing is gathered for a client that streams: an event goes out when it is complete. What only
exists because the proxy asked for it (progress) is taken out by the dialect's filter.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.core.sse import Parser, encode
from proxy.errors import BackendBrokenError, SlotkeeperError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from proxy.backends.base import Upstream
    from proxy.dialects.base import Assembler, EventFilter
    from proxy.core.queue import Lease
    from proxy.scheduler import Scheduler

OK = 200


class Client:
    """The client's side of a streamed answer: headers leave once, late enough to tell the reuse."""

    def __init__(self, request: web.Request, headers: list[tuple[str, str]], note: Callable[[], str]) -> None:
        """``note`` gives the value of ``X-Slotkeeper`` at the moment the headers leave."""
        self._request = request
        self._headers = headers
        self._note = note
        self.response: web.StreamResponse | None = None

    async def end(self) -> web.StreamResponse:
        """The answer is complete; an empty one still gets its headers."""
        await self.write(b"")
        if self.response is None:
            raise BackendBrokenError("unreachable")
        return self.response

    async def write(self, data: bytes) -> None:
        """Send bytes, the headers first if need be. Waits while the client reads slowly."""
        if self.response is None:
            self.response = web.StreamResponse(status=OK)
            self.response.headers.extend(self._headers)
            self.response.headers["X-Accel-Buffering"] = "no"
            self.response.headers["X-Slotkeeper"] = self._note()
            await self.response.prepare(self._request)
        await self.response.write(data)


class Relay:
    """Moves one backend answer. ``scheduler`` is told what the engine says of the reuse."""

    def __init__(self, scheduler: Scheduler, lease: Lease, ping_interval: float, on_ping: Callable[[], None]) -> None:
        """``ping_interval`` in seconds, 0: never."""
        self._scheduler = scheduler
        self._lease = lease
        self._ping_interval = ping_interval
        self._on_ping = on_ping

    async def stream(self, client: Client, upstream: Upstream, events: EventFilter) -> None:
        """Events to a client that streams. After the headers left, a fault becomes an SSE error."""
        try:
            await self._events(client, upstream, events)
        except SlotkeeperError as error:
            if client.response is None:
                raise
            await client.write(encode(orjson.dumps(error.envelope())))

    async def _events(self, client: Client, upstream: Upstream, events: EventFilter) -> None:
        parser = Parser()
        while True:
            try:
                async with asyncio.timeout(self._ping_interval or None):
                    chunk = await upstream.read_some()
            except TimeoutError:
                ping = events.ping()
                if ping is not None:
                    self._on_ping()
                    await client.write(encode(ping))
                continue
            if not chunk:
                break
            out = bytearray()
            for event in parser.feed(chunk):
                data = event.data if event.comment_only else events.feed(event.data)
                if data is not None:
                    out += event.raw if data is event.data else encode(data)
            self._observe(events)
            if out:
                await client.write(bytes(out))
        self._finish(events.timings, truncated=events.truncated)

    async def assemble(self, upstream: Upstream, events: EventFilter, assembler: Assembler) -> tuple[int, bytes]:
        """The whole answer for a client that does not stream: status and JSON body."""
        parser = Parser()
        while chunk := await upstream.read_some():
            for event in parser.feed(chunk):
                if not event.comment_only:
                    events.feed(event.data)
                    assembler.feed(event.data)
            self._observe(events)
        if (error := assembler.error()) is not None:
            return _status(error), error
        try:
            answer = assembler.answer()
        except ValueError as error:
            msg = f"the answer ended early: {error}"
            raise BackendBrokenError(msg, hint="see the backend's log") from error
        self._finish(events.timings, truncated=events.truncated)
        return OK, answer

    async def whole(self, upstream: Upstream) -> bytes:
        """An answer that was not streamed by the backend: its bytes, its timings noted."""
        body = await upstream.read()
        if upstream.status == OK:
            try:
                answer = orjson.loads(body)
            except orjson.JSONDecodeError:
                return body
            if isinstance(answer, dict) and isinstance(answer.get("timings"), dict):
                timings = answer["timings"]
                cached = int(timings.get("cache_n", 0))
                self._scheduler.observed(self._lease, cached, cached + int(timings.get("prompt_n", 0)))
                self._finish(timings, truncated=bool(answer.get("truncated")))
        return body

    def _observe(self, events: EventFilter) -> None:
        if events.cache_n is not None and events.prompt_n is not None:
            self._scheduler.observed(self._lease, events.cache_n, events.prompt_n)
        if events.prefilled:
            self._scheduler.prefilled(self._lease)

    def _finish(self, timings: Mapping[str, Any] | None, *, truncated: bool) -> None:
        """Tokens in the slot: prompt and generated ones but the last, which is never decoded."""
        if timings is None:
            return
        cached, computed, generated = (int(timings.get(k, 0)) for k in ("cache_n", "prompt_n", "predicted_n"))
        if cached + computed == 0:
            return
        self._scheduler.measured(cached, computed, float(timings.get("prompt_ms", 0.0)) / 1000)
        self._lease.finish(cached + computed + max(0, generated - 1), storable=not truncated)


def without_length(headers: list[tuple[str, str]], drop: Collection[str] = ()) -> list[tuple[str, str]]:
    """Headers for a body that is not the one received."""
    return [(name, value) for name, value in headers if name.lower() not in {"content-length", *drop}]


def _status(error: bytes) -> int:
    """The HTTP status an error object asks for; 500 when it does not say."""
    try:
        code = orjson.loads(error)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code <= 599 else 500  # noqa: PLR2004 - HTTP's own bounds


async def passed(request: web.Request, upstream: Upstream, extra: Mapping[str, str]) -> web.StreamResponse:
    """Any answer, byte for byte, with its end-to-end headers."""
    response = web.StreamResponse(status=upstream.status)
    response.headers.extend(upstream.headers)
    response.headers.update(extra)
    await response.prepare(request)
    while chunk := await upstream.read_some():
        await response.write(chunk)
    await response.write_eof()
    return response
