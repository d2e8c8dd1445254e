"""One request at a time for a server that does not bear two, nor a client that leaves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.backends.flm_work import Work
from proxy.backends.transport import Headers
from proxy.errors import SlotkeeperError


class Lane:
    """The NPU. In order of arrival; after an error or a cancel the next one waits a moment.

    FastFlowLM gives its lock back before it has cleared up after those (fastflowlm.md 1.2): who
    starts at once may have the context wiped under it.
    """

    def __init__(self) -> None:
        """Free."""
        self._lock = asyncio.Lock()
        self._not_before = 0.0
        self._waiting = 0
        self.on_wanted: list[Callable[[], None]] = []  # whoever keeps it for nobody makes way

    @property
    def wanted(self) -> bool:
        """Somebody waits for the turn."""
        return self._waiting > 0

    async def enter(self) -> None:
        """Wait for the turn. Whoever has it must ``leave``, in whichever task."""
        self._waiting += 1
        for make_way in self.on_wanted:
            make_way()
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        try:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
        except BaseException:
            self._lock.release()
            raise

    def leave(self, settle: float) -> None:
        """The turn is over; the next begins in ``settle`` seconds at the earliest."""
        self._not_before = asyncio.get_running_loop().time() + settle
        self._lock.release()


class Job:
    """An ``Upstream`` (see base.py) that is written by a task of the driver's own.

    So a reader can go at any time: the connection behind it is read to its end all the same.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.status = 0
        self.headers: Headers = []
        self.ended = asyncio.Event()
        self._news = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._error: SlotkeeperError | None = None

    def begin(self, status: int, headers: Headers) -> None:
        """The answer's head is there."""
        self.status, self.headers = status, headers
        self._news.set()

    def put(self, data: bytes) -> None:
        """Some of the body."""
        if data:
            self._pieces.append(data)
            self._news.set()

    def end(self, error: SlotkeeperError | None = None) -> None:
        """The body is complete, or breaks off with ``error``. Only the first end counts."""
        if not self.ended.is_set():
            self._error = error
            self.ended.set()
            self._news.set()

    async def begun(self) -> None:
        """Wait for the head. Raises what came instead of it."""
        await self.begins()
        if not self.status and self._error is not None:
            raise self._error

    async def read_some(self) -> bytes:
        """See ``Upstream``."""
        while not self._pieces:
            if self.ended.is_set():
                if self._error is not None:
                    raise self._error
                return b""
            self._news.clear()
            await self._news.wait()
        return self._pieces.popleft()

    async def read(self) -> bytes:
        """See ``Upstream``."""
        out = bytearray()
        while piece := await self.read_some():
            out += piece
        return bytes(out)

    async def begins(self) -> None:
        """Wait for the head, or for what comes instead."""
        await self._news.wait()


@dataclass(slots=True)
class Running:
    """A request in the lane.

    ``hurry``: it has ended, or nobody has patience with it any more. ``left``: its end is wanted.
    """

    work: Work
    job: Job
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False


@dataclass(slots=True)
class Orphan:
    """A job whose client left before anything had come; a task waits for that client's return."""

    name: str
    job: Job
    waiting: asyncio.Task[None]


class Orphans:
    """Answers whose clients left before anything had come, by what identifies a request."""

    def __init__(self) -> None:
        """None."""
        self._waiting: dict[bytes, Orphan] = {}

    def keep(self, key: bytes, orphan: Orphan) -> None:
        """Until it is claimed, or its task gives it up."""
        self._waiting[key] = orphan

    def claim(self, key: bytes) -> Orphan | None:
        """The answer of this very request, unless it failed. Nobody waits for it any more."""
        mine = self.drop(key)
        return mine if mine and (mine.job.status or not mine.job.ended.is_set()) else None

    def drop(self, key: bytes) -> Orphan | None:
        """It is not waited for any longer."""
        orphan = self._waiting.pop(key, None)
        if orphan is not None and orphan.waiting is not asyncio.current_task():
            orphan.waiting.cancel()
        return orphan

    def running(self) -> list[Orphan]:
        """Take out those that still keep the lane: another request wants it."""
        keys = [key for key, one in self._waiting.items() if not one.job.ended.is_set()]
        return [orphan for key in keys if (orphan := self.drop(key)) is not None]

    def forget(self) -> None:
        """Nobody will come back any more."""
        for key in [*self._waiting]:
            self.drop(key)
