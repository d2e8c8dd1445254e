"""The emulated process: its sockets, its one model, its lock, and what the tests see of them.

    async with Emulator(Options(model="qwen3.5:4b")) as emu:
        ...                     # any client, at emu.url
        emu.records[-1].kept    # what the last request found in the cache
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import orjson

from tests.emulators.fastflowlm.cache import Checksums, Delta
from tests.emulators.fastflowlm.call import Call, wait_for_client
from tests.emulators.fastflowlm.clock import Clock
from tests.emulators.fastflowlm.debug import DEBUG
from tests.emulators.fastflowlm.engine import Engine
from tests.emulators.fastflowlm.errors import Crash, Interrupted, UndefinedBehaviour
from tests.emulators.fastflowlm.lane import LOCKED, CancelToken, Npu, QueueFull
from tests.emulators.fastflowlm.models import load_seconds, resolve
from tests.emulators.fastflowlm.options import PROFILES, Options
from tests.emulators.fastflowlm.records import Hold, Point, Record
from tests.emulators.fastflowlm.routes import ROUTES
from tests.emulators.fastflowlm.script import Answer, Fault, FaultKind, echo
from tests.emulators.fastflowlm.transport import Connection, Request, TooLarge, watching

NO_MODEL = "model-faker"
KEPT_RECORDS = 10_000
PARSE_ERROR = (
    "[json.exception.parse_error.101] parse error at line 1, column 1: syntax error while "
    "parsing value - unexpected end of input"
)
Script = Callable[[Record, Engine], Answer | None]


class Emulator:
    """See the module. ``answers``, ``script``, ``faults`` and holds may be set at any time."""

    def __init__(
        self,
        options: Options | None = None,
        *,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        date: str = "2026-01-01",
    ) -> None:
        """``wall``: seconds since 1970, for ids. ``date``: what gpt-oss's template writes."""
        self.options = options or Options()
        self.profile = PROFILES[self.options.profile]
        self.clock = clock or Clock(self.options.time_scale)
        self.date = date
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self.answers: deque[Answer] = deque()
        self.script: Script | None = None
        self.faults: list[Fault] = []
        self.holds: list[Hold] = []
        self.counters: Counter[str] = Counter()
        self.port = self.options.port
        self._wall = wall
        self._random = random.Random(self.options.seed)
        self._numbers = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._boot()

    def _boot(self) -> None:
        """The state of a process that has just started."""
        self.engine: Engine | None = None
        self.current_tag = NO_MODEL
        self.last_model = NO_MODEL
        self.layer: Checksums | Delta = self._new_layer()
        self.npu = Npu(self.clock, self.options.q_len)
        self.cancellable: dict[str, CancelToken] = {}
        self.tool_index = 0
        self.chunk_len = max(self.options.prefill_chunk_len, 512)
        self.active = 0  # connection slots in use, those that leaked included
        self.crashed = False
        self.stopping = asyncio.Event()
        if self.options.model != NO_MODEL:
            self._load(self.options.model)

    def _new_layer(self) -> Checksums | Delta:
        harmony = self.engine is not None and self.engine.model.family.template == "harmony"
        return Delta(harmony=harmony) if self.profile.cache == "delta" else Checksums()

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
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def restart(self) -> None:
        """A new process in the place of one that crashed, or was to go."""
        await self.stop()
        self._boot()
        await self.start()

    # --- what tests use -------------------------------------------------------------------

    def hold(self, at: Point, after: int = 0) -> Hold:
        """Stop the next request that comes to this point; set ``release`` to let it go on."""
        hold = Hold(at, after)
        self.holds.append(hold)
        return hold

    def fault(self, kind: FaultKind, after: int = 0, times: int = 1) -> None:
        """Let something go wrong (see ``Fault``)."""
        self.faults.append(Fault(kind, after, times))

    @property
    def prefill_seconds(self) -> float:
        """Emulated seconds of prefill of all requests."""
        return sum(record.prefill_seconds for record in self.records)

    def chats(self) -> list[Record]:
        """The requests that had to do with the model."""
        return [record for record in self.records if record.prompt]

    def as_json(self) -> dict[str, Any]:
        """The state, for the debug route."""
        engine = self.engine
        return {
            "version": self.profile.version,
            "now": self.clock.now,
            "model": self.current_tag,
            "last_model": self.last_model,
            "history": len(engine.history) if engine else 0,
            "checkpoint": len(engine.checkpoint) if engine and engine.checkpoint else None,
            "sampling": engine.sampling if engine else {},
            "npu": {"busy": self.npu.busy, "waiting": self.npu.waiting},
            "poisoned": self.npu.poisoned,
            "active": self.active,
            "counters": dict(self.counters),
            "prefill_seconds": self.prefill_seconds,
        }

    # --- what handlers use ----------------------------------------------------------------

    def unix_time(self) -> int:
        """Whole seconds."""
        return int(self._wall())

    def random_hex(self, length: int) -> str:
        """For ids."""
        return f"{self._random.getrandbits(length * 4):0{length}x}"

    def take(self, kind: FaultKind) -> bool:
        """Use up a fault of this kind."""
        for fault in self.faults:
            if fault.kind == kind and fault.times > 0:
                fault.times -= 1
                return True
        return False

    def strike(self, call: Call) -> None:
        """Faults in the middle of an answer."""
        for fault in self.faults:
            if fault.times > 0 and fault.after == call.record.completion:
                if fault.kind == "hang":
                    fault.times -= 1
                    raise Interrupted("emulated exception")
                if fault.kind == "crash":
                    fault.times -= 1
                    raise Crash
                if fault.kind == "drop":
                    fault.times -= 1
                    call.connection.abort()

    def plan(self, body: dict[str, Any], record: Record, engine: Engine) -> list[str]:
        """The tokens of the answer: scripted, or an echo."""
        answer = self.script(record, engine) if self.script else None
        if answer is None and self.answers:
            answer = self.answers.popleft()
        if answer is None:
            given = body.get("messages") or [{"content": body.get("prompt", "")}]
            answer = echo(given, self.options.seed)
        return answer.tokens(engine)

    async def ensure_model(self, name: str, record: Record) -> Engine | None:
        """Load unless the name is, letter by letter, the loaded tag (section 2)."""
        if self.take("load"):
            self.engine, self.current_tag = None, NO_MODEL
            return None
        if self.engine is None or name != self.current_tag:
            record.loaded = True
            record.load_seconds = load_seconds(resolve(name))
            self.counters["loads"] += 1
            await self.clock.sleep(record.load_seconds)
            self._load(name)
        record.model = self.current_tag
        return self.engine

    def _load(self, name: str) -> None:
        model = resolve(name)
        limit = model.context if self.options.ctx_len < 0 else max(self.options.ctx_len, 512)
        if self.options.prefill_chunk_len < 0:
            self.chunk_len = 4096
        self.engine = Engine(
            model,
            self.clock,
            model.context if model.family.flash else limit,
            self.chunk_len,
            self.date,
            self.options.strict_restore,
        )
        self.current_tag = model.tag
        if isinstance(self.layer, Delta):
            self.layer.harmony = model.family.template == "harmony"

    async def linger(self, connection: Connection) -> None:
        """Keep a connection that nothing more is written to."""
        await wait_for_client(connection, self.stopping)

    async def _gate(self, record: Record, point: Point) -> None:
        for hold in self.holds:
            if hold.at == point and record.completion >= hold.after and not hold.reached.is_set():
                hold.reached.set()
                await hold.release.wait()
                return

    # --- connections ----------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.active >= self.options.socket:
            self.counters["refused"] += 1
            writer.close()
            return
        self.active += 1
        self.counters["connections"] += 1
        connection = Connection(reader, writer, self.options.max_body)
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

        self._connections.add(connection)
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

    def _call(
        self, connection: Connection, request: Request, free: Callable[[], None]
    ) -> Call:
        try:
            value = orjson.loads(request.body) if request.body else None
            is_json = bool(request.body)
        except orjson.JSONDecodeError:
            value, is_json = None, False
        self._numbers += 1
        body = value if isinstance(value, dict) else {}
        record = Record(self._numbers, request.target, body, arrived=self.clock.now)
        record.gate = self._gate
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
            await self._crash()
        except UndefinedBehaviour as error:
            if self.options.ub == "crash":
                await self._crash()
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
        self.npu.poisoned = call.locked
        await self.linger(call.connection)

    async def _crash(self) -> None:
        self.crashed = True
        self.counters["crashes"] += 1
        await self.stop()

