"""A small fake of the proxy's own API: enough for the page, and a test decides what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from tests.dashboard import sample
from tests.dashboard.files import CSP, DASHBOARD

OWN = "/_slotkeeper"
SPANS = {"1h": 3600, "6h": 6 * 3600, "24h": 24 * 3600}


class FakeApi:
    """The API at ``url``. ``state``: what its pages answer; ``calls``: what changed something."""

    def __init__(self, key: str = "") -> None:
        """``key``: the admin key that is asked for, ``""`` for none."""
        now = time.time()
        self.key = key
        self.state: dict[str, Any] = {
            "status": sample.status(now),
            "slots": sample.slots(now),
            "running": sample.running(now),
            "requests": [sample.request(number, now) for number in range(30)],
            "snapshots": sample.snapshots(now),
            "conversations": sample.conversations(now),
            "logs": sample.logs(now),
        }
        self.calls: list[tuple[str, str, Any]] = []
        self.fails: dict[str, int] = {}
        self.url = ""
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        """It listens."""
        app = web.Application(middlewares=[self._check])
        app.add_routes(
            [
                web.get(f"{OWN}/api/events", self._events),
                web.get(f"{OWN}/api/history", self._history),
                web.get(f"{OWN}/api/{{name}}", self._read),
                web.route("*", f"{OWN}/api/{{tail:.+}}", self._change),
                web.get(f"{OWN}/{{name:.*}}", self._file),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """No more."""
        self.hang_up()
        assert self._runner
        await self._runner.cleanup()

    async def listen(self, port: int = 0) -> None:
        """Answer at a port of this machine."""
        assert self._runner
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}{OWN}/"

    def push(self, kind: str, data: Any) -> None:
        """Tell all who follow the events."""
        for queue in self._listeners:
            queue.put_nowait(b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(data)))

    def hang_up(self) -> None:
        """End every stream of events."""
        for queue in self._listeners:
            queue.put_nowait(None)

    @property
    def listeners(self) -> int:
        """How many follow the events."""
        return len(self._listeners)

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        path = request.path.removeprefix(f"{OWN}/")
        sent = request.headers.get("Authorization", "")
        if path.startswith("api/") and self.key and sent != f"Bearer {self.key}":
            return _refuse(401, "The admin key is needed here, as 'Authorization: Bearer'.")
        if path in self.fails:
            return _refuse(self.fails[path], "It went wrong.", "Try again.")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _read(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        rows = self.state[name]
        return _json(rows if name == "status" else {name: rows})

    async def _history(self, request: web.Request) -> web.Response:
        return _json(sample.history(SPANS[request.query["span"]], time.time()))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        await answer.write(b": hello\n\n")
        self._listeners.add(queue)
        try:
            while (event := await queue.get()) is not None:
                await answer.write(event)
        finally:
            self._listeners.discard(queue)
        return answer

    async def _change(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json", "a form could have sent this"
        body = orjson.loads(await request.read())
        path = request.match_info["tail"]
        self.calls.append((request.method, path, body))
        kind, _, rest = path.partition("/")
        one, _, verb = rest.partition("/")
        rows = self.state.get(kind, [])
        if kind in {"pause", "resume"}:
            self.state["status"] |= {"paused": kind == "pause"}
            return _json({"paused": kind == "pause"})
        if verb == "pin":
            next(row for row in rows if row["id"] == one)["pinned"] = body["pinned"]
        else:
            rows[:] = [row for row in rows if row["id"] != one]
        return _json({})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        answer = web.FileResponse(DASHBOARD / (request.match_info["name"] or "index.html"))
        answer.headers["Content-Security-Policy"] = CSP
        return answer


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _refuse(status: int, message: str, hint: str = "") -> web.Response:
    body = orjson.dumps({"error": {"message": message, "hint": hint}, "src": "slotkeeper"})
    return web.Response(status=status, body=body, content_type="application/json")
