"""What a user of FastFlowLM can do about it, said once, when it is seen to matter."""

from __future__ import annotations

from enum import StrEnum

import aiohttp
import structlog

from proxy.backends.flm_memory import Cache, Memory
from proxy.backends.flm_work import Work

log = structlog.get_logger("slotkeeper.fastflowlm")


class Hint(StrEnum):
    """Each a whole sentence."""

    STATELESS = (
        "releases before 0.9.24 keep no conversation at all: upgrade FastFlowLM to 0.9.43 or later"
    )
    LEGACY = (
        "releases before 0.9.43 insert one message at a time and compare neither answers nor "
        "tools: whatever is not such a step is computed anew; upgrade to 0.9.43 or later"
    )
    BLIND = "this model's template shows no tools, so they are not sent: they only spoil the cache"
    UNREAD = "the server does not read these fields; answers are not what they ask for"
    SINGLE = (
        "requests of one question each begin alike, and the server reuses nothing of that: it goes "
        "on from a whole conversation only, in a request of more than two messages"
    )
    MISSED = (
        "a turn that should have been found in the cache was not: its template may be an old one; "
        "'flm check' tells, 'flm pull MODEL' fetches the repaired one"
    )
    CROWDED = (
        "the server closed the connection without a word: it may have lost all its connection "
        "slots to clients that left (its issue 680); restart it, with --socket 40 for more room"
    )
    SHARED = (
        "the server's own queue is full, so others use it beside this proxy; point them here, or "
        "start it with a larger --q-len"
    )


class Advice:
    """One server's."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._said: set[tuple[Hint, str]] = set()

    def once(self, hint: Hint, about: str = "") -> None:
        """Log it, the first time; ``about``: names of fields or models, no text of a prompt."""
        if (hint, about) not in self._said:
            self._said.add((hint, about))
            more = {"about": about} if about else {}
            log.warning("fastflowlm.advice", advice=str(hint), **more)

    def release(self, cache: Cache) -> None:
        """What is to be said of this release."""
        if cache is not Cache.WHOLE:
            self.once(Hint.STATELESS if cache is Cache.NONE else Hint.LEGACY)

    def request(self, work: Work, memory: Memory) -> None:
        """What is to be said of a request, before it is sent; ``memory``: of those before."""
        if work.blind:
            self.once(Hint.BLIND, work.model)
        if work.unread:
            self.once(Hint.UNREAD, ", ".join(work.unread))
        if memory.last is None or work.prompt is None or memory.cache is Cache.NONE:
            return
        if work.prompt.begins_as(memory.last):
            self.once(Hint.SINGLE)

    def failed(self, error: Exception) -> None:
        """What is to be said of a failure: here, of a connection that was taken, then closed."""
        cause = error.__cause__
        closed = isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        if closed and not isinstance(cause, aiohttp.ClientConnectorError):
            self.once(Hint.CROWDED)
