"""Answers whose clients left before anything of them had come (FastFlowLM's issue 733).

A client whose time-out is shorter than the prefill sends the same again, and would for ever: the
server cannot go on from a prefill that was broken off. So what it left goes on, and the retry gets
it. Two such clients must not break off each other's: what was waited for long is computed to its
end though others want the NPU, and its answer is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from proxy.backends.flm_lane import Running
from proxy.backends.flm_work import Work
from proxy.core import hold

PREFILL_SECONDS = 900.0  # the most that is computed for nobody
GLANCE_SECONDS = 5.0  # who sees an answer that short has not read it: a time-out, too
MOST_KEPT = 16  # answers
MOST_KNOWN = 256  # requests that were broken off


@dataclass(slots=True)
class Visit:
    """A client and its answer, by the loop's clock: when it came, and when it was shown some."""

    since: float
    shown: float | None = None


@dataclass(slots=True, eq=False)
class Orphan:
    """One of them. ``firm``: it is finished whoever else wants the NPU."""

    running: Running
    firm: bool
    waiting: asyncio.Task[None] = field(init=False)


class Orphans:
    """One server's, by what identifies a request."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        cancel: Callable[[Running], Awaitable[None]],
    ) -> None:
        """None. ``spawn`` starts a task that is kept; ``cancel`` ends what runs for nobody."""
        self._spawn = spawn
        self._cancel = cancel
        self._left: dict[bytes, Orphan] = {}  # the oldest first
        self._broken: dict[bytes, None] = {}  # what was broken off: once, not again

    def keep(self, running: Running, visit: Visit, *, respite: float) -> bool:
        """Its client left; False: it does not come back for what it saw, or that failed.

        The prefill goes on, then the answer: for ``respite`` seconds, or as long as it took so
        far, if that is longer. Work of the proxy's own is not worth that when it is in the way.
        """
        work, now = running.work, asyncio.get_running_loop().time()
        silence = (visit.shown or now) - visit.since
        seen = 0.0 if visit.shown is None else now - visit.shown
        sent_away = silence >= hold.LONG_SECONDS and seen < GLANCE_SECONDS
        if running.job.failed or not (visit.shown is None or sent_away):
            return False
        self._drop(work.key)
        firm = work.owner is not None and (sent_away or work.key in self._broken)
        orphan = self._left[work.key] = Orphan(running, firm)
        orphan.waiting = self._spawn(self._wait(orphan, respite))
        whole = [key for key, one in self._left.items() if one.running.job.ended.is_set()]
        for key in whole[: max(0, len(whole) - MOST_KEPT)]:
            self._drop(key)
        return True

    def claim(self, work: Work) -> Running | None:
        """The answer of this very request, unless it failed. Nobody waits for it any more.

        A client that asks something else instead does not come back for what it left.
        """
        mine = self._drop(work.key)
        if mine is not None and not mine.running.job.failed:
            mine.running.job.rewind()
            return mine.running
        for other in self._computed():
            before = other.running.work
            replaced = work.prompt and before.prompt and work.prompt.replaces(before.prompt)
            if replaced and before.owner == work.owner:
                self._give_up(other)
        return None

    def make_way(self, wanted: Collection[bytes]) -> None:
        """Others want the NPU, ``wanted`` among them; whoever is not firm is cancelled."""
        for orphan in self._computed():
            key = orphan.running.work.key
            if not orphan.firm and key not in wanted:
                self._broken.pop(key, None)
                self._broken[key] = None
                self._give_up(orphan)
        for key in list(self._broken)[: max(0, len(self._broken) - MOST_KNOWN)]:
            del self._broken[key]

    def forget(self) -> None:
        """Nobody will come back any more."""
        for key in [*self._left]:
            self._drop(key)

    def _computed(self) -> list[Orphan]:
        return [one for one in self._left.values() if not one.running.job.ended.is_set()]

    def _give_up(self, orphan: Orphan) -> None:
        self._drop(orphan.running.work.key)
        self._spawn(self._end(orphan))

    async def _end(self, orphan: Orphan) -> None:
        await self._cancel(orphan.running)

    async def _wait(self, orphan: Orphan, respite: float) -> None:
        """Until nobody can be expected to come back."""
        running, loop = orphan.running, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PREFILL_SECONDS):
                await running.job.spoke.wait()
            async with asyncio.timeout(max(respite, loop.time() - running.started)):
                await running.job.ended.wait()
            await asyncio.sleep(hold.KEPT_SECONDS)  # others may be served meanwhile
        except TimeoutError:
            del self._left[running.work.key]  # first: what is being cancelled is no answer
            await self._cancel(running)
        else:
            del self._left[running.work.key]

    def _drop(self, key: bytes) -> Orphan | None:
        orphan = self._left.pop(key, None)
        if orphan is not None:
            orphan.waiting.cancel()
        return orphan
