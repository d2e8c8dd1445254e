"""One request at a time for a server that does not bear two, nor a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.backends.flm_work import Work
from proxy.backends.transport import Headers
from proxy.errors import BackendBrokenError, SlotkeeperError

ERRORS = 400


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

    So a reader can go at any time, and another take over: the connection behind it is read to its
    end all the same.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.status = 0
        self.headers: Headers = []
        self.ended = asyncio.Event()
        self.spoke = asyncio.Event()  # its prefill is over
        self._news = asyncio.Event()
        self._pieces: list[bytes] = []
        self._read = 0  # of them
        self._error: SlotkeeperError | None = None

    def begin(self, status: int, headers: Headers) -> None:
        """The answer's head is there."""
        self.status, self.headers = status, headers
        self.spoke.set()
        self._news.set()

    def put(self, data: bytes) -> None:
        """Some of the body."""
        if data:
            self._pieces.append(data)
            self._news.set()

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """All of it at once."""
        self.begin(status, headers)
        self.put(body)
        self.end()

    def end(self, error: SlotkeeperError | None = None) -> None:
        """The body is complete, or breaks off with ``error``. Only the first end counts."""
        if not self.ended.is_set():
            self._error = error
            self.ended.set()
            self.spoke.set()
            self._news.set()

    @property
    def failed(self) -> bool:
        """It broke off, or is a refusal."""
        return self._error is not None or self.status >= ERRORS

    def rewind(self) -> None:
        """Another reader takes over from the one before; it gets all of it."""
        self._read = 0

    async def begun(self) -> None:
        """Wait for the head. Raises what came instead of it."""
        while not self.status:
            if self.ended.is_set():
                raise self._error or BackendBrokenError("an answer without a head")
            await self._more()

    async def read_some(self) -> bytes:
        """See ``Upstream``."""
        while self._read == len(self._pieces):
            if self.ended.is_set():
                if self._error is not None:
                    raise self._error
                return b""
            await self._more()
        self._read += 1
        return self._pieces[self._read - 1]

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def read(self) -> bytes:
        """See ``Upstream``."""
        out = bytearray()
        while piece := await self.read_some():
            out += piece
        return bytes(out)


@dataclass(slots=True)
class Running:
    """A request in the lane.

    ``started``: when its turn came, by the loop's clock. ``hurry``: it has ended, or nobody has
    patience with it any more. ``left``: its end is wanted.
    """

    work: Work
    job: Job
    started: float
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False
