"""The state of an emulated process: its one model, its lock, its faults, and its records."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from tests.emulators.fastflowlm.cache import Checksums, Delta
from tests.emulators.fastflowlm.clock import Clock
from tests.emulators.fastflowlm.engine import Engine
from tests.emulators.fastflowlm.errors import Crash, Interrupted
from tests.emulators.fastflowlm.lane import CancelToken, Npu
from tests.emulators.fastflowlm.models import load_seconds, resolve
from tests.emulators.fastflowlm.options import PROFILES, Options
from tests.emulators.fastflowlm.records import Hold, Point, Record
from tests.emulators.fastflowlm.script import Answer, Fault, FaultKind, echo
from tests.emulators.fastflowlm.transport import Connection

NO_MODEL = "model-faker"
KEPT_RECORDS = 10_000
Script = Callable[[Record, Engine], Answer | None]


class Process:
    """What is lost when it dies, and what tests see and set. ``answers``, ``script``, ``faults``
    and holds may be changed at any time.
    """

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
        self._wall = wall
        self._random = random.Random(self.options.seed)
        self._numbers = 0
        self.boot()

    def boot(self) -> None:
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
        self.died_of = ""
        self.stopping = asyncio.Event()
        if self.options.model != NO_MODEL:
            self._load(self.options.model)

    def _new_layer(self) -> Checksums | Delta:
        harmony = self.engine is not None and self.engine.model.family.template == "harmony"
        return Delta(harmony=harmony) if self.profile.cache == "delta" else Checksums()

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

    def strike(self, record: Record, connection: Connection) -> None:
        """Faults in the middle of an answer."""
        for fault in self.faults:
            if fault.times > 0 and fault.after == record.completion:
                if fault.kind == "hang":
                    fault.times -= 1
                    raise Interrupted("emulated exception")
                if fault.kind == "crash":
                    fault.times -= 1
                    raise Crash
                if fault.kind == "drop":
                    fault.times -= 1
                    connection.abort()

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

    async def gate(self, record: Record, point: Point) -> None:
        """Where a hold stops a request."""
        for hold in self.holds:
            if hold.at == point and record.completion >= hold.after and not hold.reached.is_set():
                hold.reached.set()
                await hold.release.wait()
                return
