"""The sockets of the emulator: connections, dispatch, and the ways a process can die.

``async with Emulator(Options(model="qwen3.5:4b")) as emu``: any client may talk to ``emu.url``;
``emu.records[-1].kept`` is what the last request found in the cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import orjson

from tests.emulators.fastflowlm.call import Call, wait_for_client
from tests.emulators.fastflowlm.clock import Clock
from tests.emulators.fastflowlm.debug import DEBUG
from tests.emulators.fastflowlm.errors import Crash, UndefinedBehaviour
from tests.emulators.fastflowlm.lane import LOCKED, QueueFull
from tests.emulators.fastflowlm.options import Options
from tests.emulators.fastflowlm.process import Process
from tests.emulators.fastflowlm.records import Record
from tests.emulators.fastflowlm.routes import ROUTES
from tests.emulators.fastflowlm.transport import Connection, Request, TooLarge, watching
from tests.listening import unlisten

PARSE_ERROR = (
    "[json.exception.parse_error.101] parse error at line 1, column 1: syntax error while "
    "parsing value - unexpected end of input"
)


class Emulator(Process):
    """See the module."""

    def __init__(
        self,
        options: Options | None = None,
        *,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        date: str = "2026-01-01",
    ) -> None:
        """See ``Process``."""
        super().__init__(options, clock=clock, wall=wall, date=date)
        self.port = self.options.port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.options.host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.stop()

    async def start(self) -> None:
        """Listen; a second start takes the same port."""
        self._server = await asyncio.start_server(self._accept, self.options.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End as a killed process does."""
        self.stopping.set()
        for connection in list(self._connections):
            connection.abort()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connections.clear()
        if self._server is not None:
            await unlisten(self._server)

    async def restart(self) -> None:
        """A new process in the place of one that crashed, or was to go."""
        await self.stop()
        self.boot()
        await self.start()

    async def settled(self) -> None:
        """Wait until nothing is being done: what comes after an answer, too."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def linger(self, connection: Connection) -> None:
        """Keep a connection that nothing more is written to."""
        await wait_for_client(connection, self.stopping)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.stopping.is_set():
            writer.transport.abort()
            return
        if self.active >= self.options.socket:
            self.counters["refused"] += 1
            writer.close()
            return
        self.active += 1
        self.counters["connections"] += 1
        connection = Connection(reader, writer, self.options.max_body)
        self._connections.add(connection)  # now: the task may be cancelled before it starts
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: Connection) -> None:
        freed = False

        def free() -> None:
            nonlocal freed
            if not freed:
                freed = True
                self.active -= 1

        leaked = False
        try:
            leaked = await self._requests(connection, free)
        finally:
            self._connections.discard(connection)
            await connection.close()
            if leaked:
                self.counters["leaked"] += 1
            else:
                free()

    async def _requests(self, connection: Connection, free: Callable[[], None]) -> bool:
        """Serve a connection; whether its slot is lost."""
        while True:
            try:
                request = await connection.read_request()
            except TooLarge:
                error = {"error": "Request payload too large", "max_bytes": self.options.max_body}
                call = self._call(connection, Request("", "", {}, b"{}"), free)
                await call.answer(error, 413)
                return False
            if request is None:
                return False
            if request.method == "OPTIONS" and self.options.cors:
                await connection.allow()
                continue
            call = self._call(connection, request, free)
            await self._dispatch(call)
            return call.record.leaked

    def _call(self, connection: Connection, request: Request, free: Callable[[], None]) -> Call:
        try:
            value = orjson.loads(request.body) if request.body else None
            is_json = bool(request.body)
        except orjson.JSONDecodeError:
            value, is_json = None, False
        self._numbers += 1
        body = value if isinstance(value, dict) else {}
        record = Record(self._numbers, request.target, body, arrived=self.clock.now)
        record.gate = self.gate
        if not request.target.startswith("/__emu/"):
            self.records.append(record)
        return Call(self, connection, request, record, body, is_json, free)

    async def _dispatch(self, call: Call) -> None:
        route = f"{call.request.method} {call.request.target}"
        handler = ROUTES.get(route) or DEBUG.get(route)
        if handler is None:
            await call.answer({"error": "Not Found"}, 404)
            return
        locks = call.request.method == "POST" and call.request.target in LOCKED
        if locks and not await self._lock(call):
            return
        try:
            await self._handle(call, handler)
        except Crash:
            await self._crash("emulated crash")
        except UndefinedBehaviour as error:
            if self.options.ub == "crash":
                await self._crash(str(error))
                return
            if self.engine is not None:
                self.engine.clear()
            self.layer.reset()
            await call.answer({"error": f"Handler exception: {error}"}, 500)

    async def _lock(self, call: Call) -> bool:
        try:
            await self.npu.acquire()
        except QueueFull:
            limit = self.options.q_len
            text = (
                f"NPU is in use and request queue is full (limit: {limit}). Please try again later."
            )
            await call.answer({"error": text}, 503)
            return False
        call.locked = True
        return True

    async def _handle(self, call: Call, handler: Callable[[Call], Any]) -> None:
        """Run a handler whose turn has come."""
        call.record.started = self.clock.now
        request = call.request
        if request.method == "POST" and not call.is_json:
            multipart = request.headers.get("content-type", "").startswith("multipart/")
            if not multipart:
                await call.answer({"error": f"Handler exception: {PARSE_ERROR}"}, 500)
                return
        name = call.body.get("request_id")
        named = "application/json" in request.headers.get("content-type", "") and name is not None
        if named and request.target != "/api/cancel":
            if not isinstance(name, str):
                await self._poison(call)
                return
            self.cancellable[name] = call.token
        try:
            await self._watched(call, handler)
        finally:
            if isinstance(name, str) and self.cancellable.get(name) is call.token:
                del self.cancellable[name]

    async def _watched(self, call: Call, handler: Callable[[Call], Any]) -> None:
        """A client that leaves cancels; one that left while it was queued may go unnoticed."""
        if self.profile.cache == "none":  # the monitor came with 0.9.40
            await handler(call)
            return
        if call.connection.left:
            call.record.disconnected = True
            call.token.cancel()
            await handler(call)
            return

        def left() -> None:
            if not call.finished:
                call.record.disconnected = True
                call.token.cancel()

        async with watching(call.connection, left):
            await handler(call)

    async def _poison(self, call: Call) -> None:
        """A thread dies with the lock in its hands; its client waits for ever."""
        self.npu.poisoned |= call.locked
        await self.linger(call.connection)

    async def _crash(self, why: str) -> None:
        self.crashed, self.died_of = True, why
        self.counters["crashes"] += 1
        await self.stop()
