"""One answer on its way from the backend to the client: back-pressure, pings, errors in place.

Nothing is gathered for a client that streams: an event goes out when it is complete. What only
exists because the proxy asked for it (progress) is taken out by the dialect's filter.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.core.records import Reason
from proxy.core.sse import Event, Parser
from proxy.errors import BackendBrokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from proxy.backends.base import Upstream
    from proxy.core.queue import Lease
    from proxy.dialects.base import Assembler, EventFilter
    from proxy.scheduler import Scheduler

OK = 200
CALLED = b'"finish_reason":"tool_calls"'  # quotes inside a text are escaped, so it is none


class Client:
    """The client's side of a streamed answer: headers leave once, late enough to tell the reuse."""

    def __init__(self, request: web.Request, note: Callable[[], str], media: str = "") -> None:
        """``note`` gives the value of ``X-Slotkeeper`` at the moment the headers leave.

        ``media``: the content type of what is written, ``""``: the backend's own.
        """
        self._request = request
        self._note = note
        self._media = media
        self._clock = asyncio.get_running_loop().time
        self._came = self._wrote = self._clock()
        self._first: float | None = None
        self._beginning = asyncio.Lock()
        self._response: web.StreamResponse | None = None
        self._prepared = False
        self._writers = 0
        self._timer: asyncio.TimerHandle | None = None  # for the next ping
        self._ping: asyncio.Task[None] | None = None
        self.headers: list[tuple[str, str]] = [("Content-Type", "text/event-stream")]

    @property
    def begun(self) -> bool:
        """The headers have left."""
        return self._response is not None

    def first_after(self) -> float | None:
        """Seconds until the backend's own first event (pings do not count)."""
        return None if self._first is None else self._first - self._came

    async def write(self, data: bytes) -> web.StreamResponse:
        """Send bytes, the headers first if need be. Waits while the client reads slowly.

        Events of several writers do not mix: once the headers have left, each is handed on whole
        before anything is waited for.
        """
        response = self._response if self._prepared else None
        self._writers += 1
        try:
            if response is None:
                response = await self._begin()
            if data:
                await response.write(data)
        finally:
            self._writers -= 1
        self._wrote = self._clock()
        return response

    async def _begin(self) -> web.StreamResponse:
        async with self._beginning:
            response = self._response
            if response is None:
                response = self._response = web.StreamResponse(status=OK)
                response.headers.extend(self.headers)
                if self._media:
                    response.headers["Content-Type"] = self._media
                response.headers["X-Accel-Buffering"] = "no"
                response.headers.setdefault("Cache-Control", "no-cache")
                response.headers["X-Slotkeeper"] = self._note()
            if not self._prepared:
                await response.prepare(self._request)
                self._prepared = True
            return response

    def answering(self) -> None:
        """The backend's own first event, or a later one, is about to be written."""
        if self._first is None:
            self._first = self._clock()

    def ping_in_silence(
        self, events: EventFilter, interval: float, on_ping: Callable[[], None]
    ) -> None:
        """An event of the client's own protocol per ``interval`` s of silence, until ``quiet``.

        Comments would not do: several clients do not count them (clients.md 5).
        """
        loop = asyncio.get_running_loop()

        def due() -> None:
            silent = self._clock() - self._wrote
            if silent >= interval:
                silent = 0.0
                if self._ping is not None and self._ping.done() and self._ping.exception():
                    return  # ``quiet`` will raise it
                if not self._writers:  # else it is the client that does not read
                    on_ping()
                    self._ping = loop.create_task(self._pinged(events), name="ping")
            self._timer = loop.call_later(interval - silent, due)

        self._timer = loop.call_later(interval, due)

    async def quiet(self) -> None:
        """No more pings. Raises what a ping raised, unless its client had left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()
            with suppress(asyncio.CancelledError):
                await self._ping

    async def _pinged(self, events: EventFilter) -> None:
        with suppress(ConnectionError):  # who answers will be told
            await self.write(events.ping())


class Relay:
    """Moves one backend answer; the scheduler is told what the engine says of the reuse."""

    def __init__(
        self, scheduler: Scheduler, lease: Lease, payloads: list[bytes] | None = None
    ) -> None:
        """``lease`` is finished here when the answer ran to its end.

        ``payloads`` is filled anew with what the backend sent: data of events, or one whole body.
        """
        self._scheduler = scheduler
        self._lease = lease
        self._payloads = payloads
        if payloads is not None:
            payloads.clear()

    async def stream(
        self, client: Client, upstream: Upstream, events: EventFilter
    ) -> web.StreamResponse:
        """Events to a client that streams, each as soon as it is complete."""
        client.headers = without(upstream.headers, ("content-length",))
        parser = Parser()
        while chunk := await upstream.read_some():
            out = b"".join([events.wire(event) for event in self._events(parser, chunk)])
            self._observe(events)
            if out:
                if events.prefilled:  # an opening that only tells the reuse is no first token
                    client.answering()
                await client.write(out)
            elif not client.begun and self._lease.cache_n is not None:
                await client.write(b"")  # the reuse is known: the headers travel while it computes
        if parser.pending:
            raise _broken("it ended in the middle of an event")
        self._finish(events.timings, truncated=events.truncated)
        return await client.write(b"")

    async def assemble(
        self, upstream: Upstream, events: EventFilter, assembler: Assembler
    ) -> tuple[int, bytes]:
        """The whole answer for a client that does not stream: status and JSON body."""
        parser = Parser()
        try:
            while chunk := await upstream.read_some():
                for event in self._events(parser, chunk):
                    if not event.comment_only:
                        events.feed(event.data)
                        assembler.feed(event.data)
                self._observe(events)
            if (error := assembler.error()) is not None:
                return _status(error), error
            answer = assembler.answer()
        except ValueError as error:
            raise _broken(str(error)) from error
        self._finish(events.timings, truncated=events.truncated)
        return OK, answer

    async def whole(self, upstream: Upstream) -> bytes:
        """An answer that was not streamed by the backend: its bytes, its timings noted."""
        body = await upstream.read()
        if upstream.status == OK:
            self._lease.expects |= CALLED in body
            if self._payloads is not None:
                self._payloads.append(body)
            try:
                answer = orjson.loads(body)
            except orjson.JSONDecodeError:
                return body
            if isinstance(answer, dict) and isinstance(answer.get("timings"), dict):
                timings = answer["timings"]
                cached = int(timings.get("cache_n", 0))
                self._scheduler.observed(
                    self._lease, cached, cached + int(timings.get("prompt_n", 0))
                )
                self._finish(timings, truncated=bool(answer.get("truncated")))
        return body

    def _events(self, parser: Parser, chunk: bytes) -> list[Event]:
        try:
            events = parser.feed(chunk)
        except ValueError as error:
            raise _broken(str(error)) from error
        for event in events:
            if CALLED in event.data:
                self._lease.expects = True
            if self._payloads is not None and not event.comment_only:
                self._payloads.append(event.data)
        return events

    def _observe(self, events: EventFilter) -> None:
        if events.cache_n is not None and events.prompt_n is not None:
            self._scheduler.observed(self._lease, events.cache_n, events.prompt_n)
        if events.prefilled:
            self._scheduler.prefilled(self._lease)

    def _finish(self, timings: Mapping[str, Any] | None, *, truncated: bool) -> None:
        """Tokens in the slot: prompt and generated ones but the last, which is never decoded."""
        if timings is None:
            return
        cached, computed, generated = (
            int(timings.get(k, 0)) for k in ("cache_n", "prompt_n", "predicted_n")
        )
        if cached + computed == 0:
            return
        self._scheduler.measured(
            cached,
            computed,
            float(timings.get("prompt_ms", 0.0)) / 1000,
            restored=self._lease.reason is Reason.RESTORED,
        )
        self._lease.finish(cached + computed + max(0, generated - 1), storable=not truncated)


def without(headers: list[tuple[str, str]], names: Collection[str]) -> list[tuple[str, str]]:
    """``headers`` but those of the lower-case ``names``."""
    return [(name, value) for name, value in headers if name.lower() not in names]


def _broken(why: str) -> BackendBrokenError:
    return BackendBrokenError(f"the answer is broken: {why}", hint="see the backend's log")


def _status(error: bytes) -> int:
    """The HTTP status an error object asks for; 500 when it does not say."""
    try:
        code = orjson.loads(error)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code <= 599 else 500  # noqa: PLR2004 - HTTP's own bounds


async def passed(
    request: web.Request, upstream: Upstream, extra: Mapping[str, str]
) -> web.StreamResponse:
    """Any answer, byte for byte, with its end-to-end headers."""
    response = web.StreamResponse(status=upstream.status)
    response.headers.extend(upstream.headers)
    response.headers.update(extra)
    await response.prepare(request)
    while chunk := await upstream.read_some():
        await response.write(chunk)
    await response.write_eof()
    return response
