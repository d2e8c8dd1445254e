"""Server-sent events for whoever watches: what the own pages show, as it changes.

One beat a quarter of a second for all listeners together, and none while nobody listens. A listener
that does not read is let go: nothing is gathered for it without bound, it can ask anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import structlog
from aiohttp import web

from proxy.errors import OverloadedError

if TYPE_CHECKING:
    from proxy.telemetry.history import Decision

log = structlog.get_logger("slotkeeper.events")

BEAT = 0.25  # seconds: at most four events per kind and second
ALIVE = 15.0  # seconds of silence before a comment
PATIENCE = 10.0  # seconds one write may take
LISTENERS = 16
DEPTH = 32  # beats a listener may be behind
ROWS = 64  # rows of a log per beat; whoever must see all asks the page with ``after``
FIRST = 50  # rows of each log that a new listener is told

_EVERY = {"status": 4, "slots": 1, "running": 1, "snapshots": 4}  # looked at every so many beats
_COMMENT = b": alive\n\n"
_CLOCKS: Mapping[str, tuple[str, ...]] = {
    "status": ("now",),
    "snapshots": ("value", "seconds_saved"),
}
"""Fields that always change: alone they are no news."""

_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


class Watched(Protocol):
    """What is told (``server.view.View``)."""

    def status(self) -> Mapping[str, Any]:
        """The headline."""

    def slots(self) -> Sequence[Mapping[str, Any]]:
        """One row per slot."""

    def running(self) -> Sequence[Mapping[str, Any]]:
        """Requests under way."""

    def snapshots(self) -> Sequence[Mapping[str, Any]]:
        """One row per snapshot."""

    def requests(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The decision log, newest first."""

    def decided(self, decision: Decision) -> Mapping[str, Any]:
        """One row of it."""

    def logs(self, limit: int, level: str = "debug", after: int = 0) -> Sequence[Mapping[str, Any]]:
        """Lines of the log, oldest first."""


class Listener:
    """One open connection: what it has still to be sent."""

    def __init__(self, first: bytes) -> None:
        """``first``: everything as it is now."""
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(DEPTH)
        self._queue.put_nowait(first)
        self._ended = False

    def tell(self, data: bytes) -> None:
        """Send this next. Too far behind: it is let go."""
        if self._ended:
            return
        try:
            self._queue.put_nowait(data)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """Nothing more is sent, not even what waits."""
        self._ended = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def next(self) -> bytes | None:
        """What to send; a comment after a long silence; None at the end."""
        try:
            async with asyncio.timeout(ALIVE):
                return await self._queue.get()
        except TimeoutError:
            return _COMMENT


class Hub:
    """Tells all listeners."""

    def __init__(self, view: Watched) -> None:
        """Nobody listens yet."""
        self._view = view
        self._listeners: list[Listener] = []
        self._somebody = asyncio.Event()
        self._told: dict[str, bytes] = {}
        self._decided: dict[int, Decision] = {}
        self._seq = 0
        self._beats = 0
        self._closed = False

    def decided(self, decision: Decision, new: bool) -> None:  # noqa: FBT001 - History's signature
        """A row of the decision log is new, or newer."""
        del new
        if self._listeners:
            self._decided.pop(decision.seq, None)
            self._decided[decision.seq] = decision

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._somebody.wait()
            await asyncio.sleep(BEAT)
            try:
                self.beat()
            except Exception as error:  # one bad row is not the end of all live pages
                log.exception("events.fault", error=type(error).__name__)

    def beat(self) -> None:
        """Tell what changed since the last beat."""
        self._beats += 1
        data = b"".join([*self._changed(), *self._rows()])
        for listener in tuple(self._listeners) if data else ():
            listener.tell(data)

    def dismiss(self) -> None:
        """End all connections; whoever still may listens again."""
        for listener in self._listeners:
            listener.end()

    def close(self) -> None:
        """End all connections, and let no new one in."""
        self._closed = True
        self.dismiss()

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """Be told. Raises ``OverloadedError`` when too many are."""
        if self._closed or len(self._listeners) >= LISTENERS:
            msg = f"{LISTENERS} listeners are all there may be"
            raise OverloadedError(msg, hint="close a dashboard", retry_after=30)
        if not self._listeners:
            self._seq = self._newest()
            self._told.clear()
            self._decided.clear()
        listener = Listener(self._everything())
        self._listeners.append(listener)
        self._somebody.set()
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
            if not self._listeners:
                self._somebody.clear()

    def _everything(self) -> bytes:
        kinds = [_event(kind, _named(kind, self._ask(kind)())) for kind in _EVERY]
        requests = reversed(self._view.requests(FIRST))
        logs = self._view.logs(FIRST)
        rows = [("request", row) for row in requests], [("log", row) for row in logs]
        return b"".join([*kinds, *(_event(kind, row) for part in rows for kind, row in part)])

    def _changed(self) -> Iterator[bytes]:
        for kind, every in _EVERY.items():
            if self._beats % every:
                continue
            found = self._ask(kind)()
            mark = orjson.dumps(_still(kind, found))
            if self._told.get(kind) != mark:
                self._told[kind] = mark
                yield _event(kind, _named(kind, found))

    def _rows(self) -> Iterator[bytes]:
        decided, self._decided = list(self._decided.values())[-ROWS:], {}
        for decision in decided:
            yield _event("request", self._view.decided(decision))
        for row in self._view.logs(ROWS, after=self._seq):
            self._seq = row["seq"]
            yield _event("log", row)

    def _newest(self) -> int:
        newest = self._view.logs(1)
        return int(newest[0]["seq"]) if newest else 0

    def _ask(self, kind: str) -> Callable[[], Any]:
        view = self._view
        return {
            "status": view.status,
            "slots": view.slots,
            "running": view.running,
            "snapshots": view.snapshots,
        }[kind]


async def serve(hub: Hub, request: web.Request) -> web.StreamResponse:
    """The page: open until the client leaves, falls behind, or the proxy ends."""
    if request.method == "HEAD":
        return web.Response(headers=_HEADERS)
    with hub.listen() as listener:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        try:
            while (data := await listener.next()) is not None:
                async with asyncio.timeout(PATIENCE):
                    await response.write(data)
        except TimeoutError:  # it does not read: what is buffered for it is not waited for either
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass
        return response


def _event(kind: str, data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _named(kind: str, found: Any) -> Any:
    """As the page of that name shows it."""
    return found if kind == "status" else {kind: found}


def _still(kind: str, found: Any) -> Any:
    """``found`` without what changes by itself."""
    names = _CLOCKS.get(kind, ())
    if isinstance(found, Mapping):
        return {name: value for name, value in found.items() if name not in names}
    return [{name: value for name, value in row.items() if name not in names} for row in found]
