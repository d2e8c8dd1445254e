"""Driver of FastFlowLM: one conversation in RAM, exact extension, and a server that breaks easily.

What it must not be done to, and what it says that is not so: fastflowlm.md, sections 1 and 5.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from proxy.backends import flm_answer, flm_request, flm_wire
from proxy.backends.base import Facts, Upstream
from proxy.backends.flm_advice import Advice, Hint
from proxy.backends.flm_answer import Repair
from proxy.backends.flm_lane import ERRORS, Job, Lane, Running
from proxy.backends.flm_memory import Cache, Memory, cache_of
from proxy.backends.flm_models import Memory as Kind
from proxy.backends.flm_models import goes_on_from_answer, memory, primes
from proxy.backends.flm_orphans import Orphans, Visit
from proxy.backends.flm_pace import Pace
from proxy.backends.flm_scribe import Scribe
from proxy.backends.flm_window import Window
from proxy.backends.flm_work import CHAT, FORGETTING, JSON, Release, Work, flush, prepare
from proxy.backends.transport import OWNER, WHOLE, Headers, Transport
from proxy.backends.undriven import Undriven
from proxy.core.records import Reuse
from proxy.core.routing import Routing
from proxy.errors import BackendBrokenError, BackendUnreachableError, SlotkeeperError

log = structlog.get_logger("slotkeeper.fastflowlm")

SAME_AS_CHAT = {CHAT, "/chat/completions"}
# Engines of their own: they leave the conversation alone (2).
BESIDE = frozenset({"/v1/embeddings", "/api/embeddings", "/v1/audio/transcriptions"})
REUSE = {Cache.NONE: Reuse.NONE, Cache.DELTA: Reuse.EXTENSION, Cache.WHOLE: Reuse.EXTENSION}
MODERN = (1, 0, 7)  # era E: usage on request, tool policy
OK, BUSY = 200, 503
HELPERS = 2  # connections for clients' questions (5.2)
SETTLE_SECONDS = 0.5  # after an error or a cancel
STUCK_SECONDS = 120.0  # an exception in mid-stream leaves the stream open for ever (1.5)
CANCEL_SECONDS = 1.0  # a cancel can come too early to be heard (1.3)
CLAIM_SECONDS = 10.0  # how long at least an answer goes on that nobody waits for
CLOSE_SECONDS = 10.0  # what still runs at the end is cancelled, and read that long
IGNORED = "X-Slotkeeper-Ignored"  # fields of the request that this server does not read


class FastFlowLM(Undriven):
    """A ``Backend`` (see base.py): one slot, nothing saved, every request in the same lane."""

    name = "FastFlowLM"
    lacking = flm_request.LACKING

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float,
        silence_timeout: float,
        lane: Lane | None = None,
        tokenizer: Path | None = None,
        model: str = "",
        scribe: Scribe | None = None,
    ) -> None:
        """It asks for no key, and none is sent: its header limit is small.

        ``lane``: of all processes on one NPU. ``tokenizer``: the model's tokenizer.json, for
        prompts that may be too long, and tool arguments as they were written. ``model``: the tag
        it was started with; else an answer tells. ``scribe``: shared with other processes.
        """
        self._transport = Transport(
            url, connect_timeout=connect_timeout, silence_timeout=silence_timeout
        )
        self._lane = lane or Lane()
        self._lane.on_wanted.append(self._make_way)
        self._helpers = asyncio.Semaphore(HELPERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, Running] = {}  # by the name that cancels it
        self._orphans = Orphans(self._spawn, self._cancel)
        self._asked: Counter[bytes] = Counter()  # requests that wait for the lane, by their keys
        self._scribe = scribe or Scribe()
        self._memory = Memory(spellings=self._scribe.spellings)
        self._window = Window(tokenizer)
        self._pace = Pace()
        self._advice = Advice()
        self._catalogue: frozenset[str] = frozenset()
        self._version: tuple[int, ...] = ()
        self._pinned = self._loaded = model

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        *,
        slot: int | None = None,  # noqa: ARG002 - it has one
    ) -> AbstractAsyncContextManager[Upstream]:
        """Forward a request; see ``Backend.send``.

        The path goes out without its query. What computes waits for its turn; left early it is
        cancelled, and read to its end before the next one starts. Left before anything was shown it
        goes on for a while (``flm_orphans``): a client that gave up sends the same again.
        """
        path = target.partition("?")[0]
        if flm_wire.asks(method, path):
            known, helpers = self._catalogue, self._helpers
            return flm_wire.asking(
                self._transport, method, path, body, known, loaded=self._loaded, helpers=helpers
            )
        return self._computing(CHAT if path in SAME_AS_CHAT else path, headers, body)

    async def facts(self) -> Facts:
        """Release and catalogue; the model and its context only once an answer has told them."""
        try:
            version = await flm_wire.ask(self._transport, "/api/version")
            listed = await flm_wire.ask(self._transport, "/v1/models")
        except SlotkeeperError as error:
            self._advice.failed(error)
            raise
        try:
            self._catalogue = frozenset(str(model["id"]) for model in listed["data"])
            self._version = tuple(map(int, re.findall(r"\d+", version["version"])[:3]))
        except (LookupError, TypeError) as error:
            raise flm_wire.broken("/api/version, /v1/models") from error
        await self._scribe.open()
        self._loaded = self._pinned
        self._memory.cache = cache_of(self._version)
        self._advice.release(self._memory.cache)
        return Facts(
            kind="fastflowlm",
            instance="",
            total_slots=1,
            n_ctx=self._window.capacity,
            model=self._loaded,
            model_path="",
            identity={"version": version["version"]},
            routing=Routing(REUSE[self._memory.cache], beside=BESIDE),
        )

    async def instance(self) -> str:
        """``""``: nothing tells one process from the next. Raises when it is not there."""
        await flm_wire.ask(self._transport, "/api/npu/status")
        return ""

    def primes(self, slot: int, body: bytes) -> bool:
        """See ``Backend``: for models that go on from the prompt, whatever they answered (5.18)."""
        del slot
        try:
            work = self._work(CHAT, [], body)
        except SlotkeeperError:
            return False
        cached = self._memory.cache is Cache.WHOLE
        return cached and primes(work.model, think=work.think)

    async def close(self) -> None:
        """Cancel what runs, let it end, close all connections."""
        self._orphans.forget()
        if self._tasks:
            for running in self._running.values():
                self._spawn(self._cancel(running))
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._memory.cancelled is not None:
            # the next proxy does not know what this server must not be asked (5.9)
            with suppress(SlotkeeperError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._flush()
        await self._scribe.keep(final=True)
        await self._transport.close()

    @asynccontextmanager
    async def _computing(
        self, path: str, headers: Headers, body: bytes | None
    ) -> AsyncIterator[Upstream]:
        raw = body or b""
        if not self._version:
            await self.facts()
        work = self._work(path, headers, raw)
        now = asyncio.get_running_loop().time
        visit, silent = Visit(now()), any(name.lower() == WHOLE for name, _ in headers)
        running = self._claimed(work) or await self._started(work, headers, raw)
        read = False
        try:
            await running.job.begun()
            visit.shown = None if silent or work.whole else now()
            yield running.job
            read = True
        finally:
            if read or not self._orphans.keep(running, visit, respite=CLAIM_SECONDS):
                self._leave(running)
            elif self._lane.wanted:
                self._make_way()

    def _claimed(self, work: Work) -> Running | None:
        """The answer of this very request, if it was left."""
        mine = self._orphans.claim(work)
        for running in self._running.values() if mine is None else ():
            before = running.work.prompt
            if work.prompt is None or before is None or not work.prompt.extends(before):
                running.hurry.set()  # what it holds will be gone all the same
        return mine

    def _make_way(self) -> None:
        """A request wants the NPU, perhaps of another process."""
        self._orphans.make_way(self._asked)

    def _work(self, path: str, headers: Headers, raw: bytes) -> Work:
        """As far as is known by now what is loaded."""
        owner = next((value for name, value in headers if name.lower() == OWNER), None)
        release = Release(self._catalogue, self._loaded, modern=self._version >= MODERN)
        return prepare(path, flm_wire.only_kind(headers), raw, owner, release, self._memory)

    async def _started(self, asked: Work, headers: Headers, raw: bytes) -> Running:
        """Wait for the turn, and use it, unless the same was left by another meanwhile."""
        self._asked[asked.key] += 1
        try:
            await self._lane.enter()
        finally:
            self._asked -= Counter([asked.key])
        try:
            work = self._work(asked.path, headers, raw)
            mine = self._orphans.claim(work)
        except BaseException:
            self._lane.leave(0.0)
            raise
        if mine is not None:
            self._lane.leave(0.0)
            return mine
        running = Running(work, Job(), asyncio.get_running_loop().time())
        self._running[work.name] = running
        self._spawn(self._run(running))
        return running

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="fastflowlm")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, running: Running) -> None:
        """Whatever becomes of it: the lane is free again when nothing runs for it any more."""
        settle = SETTLE_SECONDS
        work, job = running.work, running.job
        try:
            if not await self._fits(work, job):
                settle = 0.0
            elif await self._attempts(running):
                settle = 0.0
                if work.repair is not None:
                    await self._remember(work, work.repair)
        except SlotkeeperError as error:
            self._advice.failed(error)
            job.end(error)
        except Exception as error:  # a bug must not keep the lane
            log.exception("fastflowlm.fault", error=type(error).__name__)
            job.end(BackendBrokenError("the answer could not be read"))
        finally:
            job.end(BackendUnreachableError("the proxy is closing"))
            running.hurry.set()
            del self._running[work.name]
            self._lane.leave(settle)

    async def _fits(self, work: Work, job: Job) -> bool:
        """Refused here where the attempt would only cost the context (5.7)."""
        known = work.prompt is not None and work.model == self._window.model
        if work.prompt is None or not known:
            return True
        least = await self._window.least(work.prompt, self._memory)
        capacity = self._window.capacity
        if least < capacity or not capacity:
            return True
        job.whole(ERRORS, JSON, flm_answer.too_long(least, capacity, source="slotkeeper"))
        return False

    async def _attempts(self, running: Running) -> bool:
        """True if it ended well. Too long is tried again: the context may only have been lost.

        A restore without a checkpoint says the same as a prompt that does not fit (#744), and
        leaves the context empty. A prompt that is too long is refused again before any work.
        """
        work = running.work
        await self._prepared(work)
        refused = await self._attempt(running)
        if refused is not None and flm_answer.OVERFLOW in refused[2]:
            await asyncio.sleep(SETTLE_SECONDS)
            self._memory.repeated = []  # what it did not find says nothing of it
            refused = await self._attempt(running)
        if refused is None:
            return not (work.repair and work.repair.cancelled)
        if refused[0] == BUSY:
            self._advice.once(Hint.SHARED)
        running.job.whole(*refused)
        return refused[0] < ERRORS

    async def _prepared(self, work: Work) -> None:
        """What it holds must not be taken for something else."""
        if work.prompt is None:
            if work.path in FORGETTING:
                self._memory.lost()
            return
        self._advice.request(work, self._memory)
        if self._memory.flush_before(work.prompt):
            await self._flush()
        self._memory.spellings.sent(work.spelled)
        self._memory.begins(work.prompt)

    async def _attempt(self, running: Running) -> tuple[int, Headers, bytes] | None:
        """Send it. None if the answer was a stream, which is in its job then."""
        work, job = running.work, running.job
        async with self._transport.send("POST", work.path, work.headers, work.body) as upstream:
            head = flm_wire.without_kind(upstream.headers)
            if not flm_wire.streams(upstream):
                status, body = flm_answer.judged(
                    upstream.status, await upstream.read(), self._window.capacity
                )
                if work.prompt is not None and status < ERRORS:
                    raise flm_wire.broken(work.path)
                return status, [*head, *JSON], body
            told = [(IGNORED, ", ".join(work.unread))] if work.unread else []
            if not work.whole:
                job.begin(upstream.status, [*upstream.headers, *told])
            gathered = bytearray()
            while chunk := await flm_wire.next_of(upstream, STUCK_SECONDS):
                job.spoke.set()
                data = flm_wire.parsed(work.repair.feed, chunk) if work.repair else chunk
                if work.whole:
                    gathered += data
                else:
                    job.put(data)
                if work.repair is not None and work.repair.stopped:
                    self._leave(running)
        if work.repair is not None and not work.repair.done:
            raise flm_wire.broken(work.path)
        if work.whole:
            job.whole(
                OK, [*head, *JSON, *told], flm_wire.parsed(flm_answer.assembled, bytes(gathered))
            )
        job.end()
        return None

    async def _remember(self, work: Work, repair: Repair) -> None:
        """What an answer that ended by itself tells of the server."""
        if repair.told in self._catalogue:
            self._loaded = repair.told
        self._window.learn(self._loaded, repair.capacity)
        prompt, timings = work.prompt, repair.timings
        if prompt is None or timings is None:
            return
        self._pace.observe(timings, len(work.body))
        total = timings["cache_n"] + timings["prompt_n"]
        kind = memory(self._loaded, think=work.think)
        if self._memory.expected and not timings["cache_n"] and kind is Kind.PROMPT:
            self._advice.once(Hint.MISSED, self._loaded)
        self._memory.ended(prompt, repair.message, total)  # before whatever may fail, or wait
        self._scribe.spellings.last = self._loaded
        if goes_on_from_answer(self._loaded, think=work.think):
            await self._scribe.heard(self._memory, self._window, prompt, repair.message, timings)
        await self._scribe.keep()
        await self._window.told(prompt, total)

    async def _flush(self) -> None:
        """Another conversation, of a word: the server forgets what it held (3.3)."""
        async with self._transport.send("POST", CHAT, JSON, flush(self._memory.cache)) as upstream:
            while await flm_wire.next_of(upstream, STUCK_SECONDS):
                pass
        self._memory.lost()

    def _leave(self, running: Running) -> None:
        """Nobody wants the rest of this answer: once for each."""
        if not (running.left or running.job.ended.is_set()):
            running.left = True
            self._spawn(self._left(running))

    async def _left(self, running: Running) -> None:
        """Cancelled now, or when its end turns out to cost more than it saves (5.20)."""
        work = running.work
        kind = memory(work.model or self._loaded, think=work.think)
        tools = work.prompt is not None and bool(work.prompt.tools)
        seconds = self._pace.patience(kind, tools=tools, size=len(work.body), limit=work.limit)
        if self._lane.wanted:
            seconds = 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await running.hurry.wait()
        await self._cancel(running)

    async def _cancel(self, running: Running) -> None:
        """Tell the server, until it has ended. Its stream is read on meanwhile."""
        await flm_wire.cancel(self._transport, running.work.name, running.job, every=CANCEL_SECONDS)
