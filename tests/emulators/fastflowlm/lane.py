"""The NPU's lock and its queue, and the tokens by which a request is cancelled (1.2, 1.3)."""

from __future__ import annotations

import asyncio
from collections import deque

from tests.emulators.fastflowlm.clock import Clock

COOLDOWN = 0.333  # seconds the finishing request sleeps if others wait
LOCKED = frozenset({
    "/api/generate",
    "/api/chat",
    "/v1/chat/completions",
    "/v1/audio/transcriptions",
    "/v1/embeddings",
})  # fmt: skip


class QueueFull(Exception):  # noqa: N818  # an answer, and no error of the emulator
    """``--q-len`` requests are waiting already."""


class Npu:
    """One request at a time, the others in the order they came."""

    def __init__(self, clock: Clock, limit: int) -> None:
        """``limit``: how many may wait."""
        self._clock = clock
        self.limit = limit
        self.busy = False
        self.poisoned = False  # an I/O thread died holding the lock: it stays locked for ever
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def acquire(self) -> None:
        """Wait for the turn.

        Raises:
            QueueFull: nobody more may wait.
        """
        if not self.busy:
            self.busy = True
            return
        if len(self._waiting) >= self.limit:
            raise QueueFull
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    async def release(self) -> None:
        """Hand over to the next in the queue; the one that finishes sleeps first."""
        if self._waiting:
            await self._clock.sleep(COOLDOWN)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.busy = False


class CancelToken:
    """Set by ``/api/cancel``, by the client's leaving, and by a failed write."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """From now on the request ends as soon as it looks."""
        self.cancelled = True

    def reset(self) -> None:
        """The streaming handler forgets what happened while it was queued."""
        self.cancelled = False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.cancelled
