"""Several servers of one kind as one backend.

Of servers that hold one conversation each, every process is a slot: the lease says which. Of
others the pool chooses by itself: the one that served the conversation last, else the least busy.

A request that meets a dead server goes to another, once, if that can do no harm: it was never
taken, or only asks, or is a client's with the lease of a slot, which leaves nothing behind but a
cache. (The proxy's own work, which fills a slot's cache, is of no use elsewhere.)

One that was taken may be what killed its server. It goes on only if no server was lost to this body
before, and another answers when it is asked: so it costs two servers at most, however often it is
sent, but for those that its client's own retries are sent to.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

import orjson
import structlog

from proxy.backends.base import Backend, Facts, Moved, Upstream
from proxy.backends.transport import OWNER, Headers
from proxy.backends.undriven import Undriven
from proxy.core.sticky import Sticky, landmarks
from proxy.errors import BackendAbsentError, BackendUnreachableError, SlotkeeperError

log = structlog.get_logger("slotkeeper.pool")

T = TypeVar("T")

LOOK_SECONDS = 5.0  # in which a server that is there says so
MOST_FATAL = 1000  # bodies that are remembered; 16 bytes each
_DIGEST = 16


class Pool(Undriven):
    """A ``Backend`` (see base.py) of several, all of one kind."""

    name = "a pool of servers"

    def __init__(self, drivers: Sequence[Backend], *, serial: bool) -> None:
        """``serial``: they share what computes, so that one runs at a time."""
        self._drivers = drivers
        self._serial = serial
        self._busy: Counter[int] = Counter()
        self._sticky = Sticky()
        self._used: Counter[int] = Counter()  # when last: the larger, the later
        self._absent: frozenset[int] = frozenset()
        self._closed = False
        self._fatal: Counter[bytes] = Counter()  # servers lost to a body, the first lost at first
        self._tell: list[Moved] = []
        self.moved = 0  # requests that another server answered than the one they were for

    @property
    def absent(self) -> frozenset[int]:
        """See ``Backend``."""
        return self._absent

    def primes(self, slot: int, body: bytes) -> bool:
        """See ``Backend``."""
        return self._drivers[slot].primes(0, body)

    def on_moved(self, tell: Moved) -> None:
        """See ``Backend``."""
        self._tell.append(tell)

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        *,
        slot: int | None = None,
    ) -> AbstractAsyncContextManager[Upstream]:
        """Forward a request to the slot's server, without one to that of its conversation."""
        return self._sent(method, target, headers, body, slot)

    @asynccontextmanager
    async def _sent(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        slot: int | None,
    ) -> AsyncIterator[Upstream]:
        """Once more with another server if this one turns out to be gone before it answered."""
        index = self._choose(body) if slot is None else slot
        async with AsyncExitStack() as stack:
            try:
                at = self._at(index, method, target, headers, body)
                upstream = await stack.enter_async_context(at)
            except BackendUnreachableError as error:
                owned = any(name == OWNER for name, _ in headers)
                absent = isinstance(error, BackendAbsentError)
                again = method == "GET" or (owned if slot is not None else absent)
                if not again:
                    raise
                if not (absent or method == "GET" or await self._harmless(index, body)):
                    raise
                if (other := self._other(index)) is None:
                    raise
                self._takes_over(index, other, slot, body)
                at = self._at(other, method, target, headers, body)
                upstream = await stack.enter_async_context(at)
            yield upstream

    @asynccontextmanager
    async def _at(
        self,
        index: int,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
    ) -> AsyncIterator[Upstream]:
        self._busy[index] += 1
        self._used[index] = max(self._used.values(), default=0) + 1
        try:
            async with self._drivers[index].send(method, target, headers, body) as upstream:
                yield upstream
        except BackendUnreachableError as error:
            self._absent |= {index}  # until it is looked at again
            if body and not isinstance(error, BackendAbsentError):
                self._lost_to(body)
            raise
        finally:
            self._busy[index] -= 1

    def _other(self, index: int) -> int | None:
        """Who answers in its place: nobody, when there is nobody or all are being closed."""
        others = [one for one in self._here() if one != index]
        if self._closed or not others:
            return None
        return min(others, key=lambda one: (self._busy[one], self._used[one]))

    def _takes_over(self, index: int, other: int, slot: int | None, body: bytes | None) -> None:
        """Whoever goes by where a request is hears that it is there now."""
        self.moved += 1
        log.warning("pool.moved", process=index, to=other, times=self.moved)
        if slot is None:
            self._sticky.put(_marks(body), other)
        for tell in self._tell:
            tell(slot, other)

    def _lost_to(self, body: bytes) -> None:
        """A server took it, and was gone."""
        self._fatal[_mark(body)] += 1
        while len(self._fatal) > MOST_FATAL:
            del self._fatal[next(iter(self._fatal))]

    async def _harmless(self, index: int, body: bytes | None) -> bool:
        """Whether what just lost a server may be tried elsewhere; then it is known who is there.

        The one at ``index`` is left to the next look at all: it may be back, with nothing in it.
        """
        if self._fatal[_mark(body or b"")] > 1:
            return False
        others = [one for one in range(len(self._drivers)) if one not in {*self._absent, index}]
        there = await asyncio.gather(*(self._answers(one) for one in others))
        self._absent |= {one for one, answers in zip(others, there, strict=True) if not answers}
        return any(there)

    async def _answers(self, index: int) -> bool:
        with suppress(SlotkeeperError, TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._drivers[index].instance()
                return True
        return False

    async def facts(self) -> Facts:
        """Those of the first that is there, as many slots as all have. Raises when none is."""
        told = await self._ask(lambda driver: driver.facts())
        first = next(iter(told.values()))
        for index, facts in told.items():
            if (facts.model, facts.identity) != (first.model, first.identity):
                log.warning("pool.differs", process=index, why="another version or model")
        routing = first.routing and replace(first.routing, serial=self._serial)
        total = first.total_slots * len(self._drivers)
        return replace(first, total_slots=total, routing=routing)

    async def instance(self) -> str:
        """``""``; raises only when none is there. Who comes back is asked who it is now."""
        before = self._absent
        there = await self._ask(lambda driver: driver.instance())
        for index in before & there.keys():
            with suppress(SlotkeeperError):
                await self._drivers[index].facts()
        return ""

    async def lacks(self) -> frozenset[str]:
        """See ``Backend``."""
        return await self._drivers[self._here()[0]].lacks()

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        await asyncio.gather(*(driver.close() for driver in self._drivers))

    async def _ask(self, question: Callable[[Backend], Awaitable[T]]) -> dict[int, T]:
        """All of them, by index those that answered. Raises the first one's error if none did."""
        before = self._absent
        asked = (question(driver) for driver in self._drivers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        told: dict[int, T] = {}
        failed: dict[int, BaseException] = {}
        for index, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                failed[index] = answer
            else:
                told[index] = answer
        for error in failed.values():
            if not told or not isinstance(error, SlotkeeperError):
                raise error
        for index in failed.keys() - self._absent:
            log.warning("pool.missing", process=index, why="it does not answer")
        # what requests found meanwhile may be later than the answer
        self._absent = frozenset(failed) | (self._absent - before)
        return told

    def _here(self) -> Sequence[int]:
        """Who is there; all, if none is known to be."""
        everyone = range(len(self._drivers))
        return [index for index in everyone if index not in self._absent] or everyone

    def _choose(self, body: bytes | None) -> int:
        here, marks = self._here(), _marks(body)
        known = self._sticky.find(marks)
        least = min(here, key=lambda index: (self._busy[index], index))
        index = known if known is not None and known in here else least
        self._sticky.put(marks, index)
        return index


def _mark(body: bytes) -> bytes:
    """Of what a client sent, whatever slot it was given."""
    try:
        value = orjson.loads(body)
        if isinstance(value, dict) and value.pop("id_slot", None) is not None:
            body = orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass  # its own bytes will do
    return blake2b(body, digest_size=_DIGEST).digest()


def _marks(body: bytes | None) -> Sequence[bytes]:
    """What a chat's next turn will be known by; nothing for any other body."""
    if body is None or b'"messages"' not in body:
        return ()
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ()
    return landmarks(value.get("messages")) if isinstance(value, dict) else ()
