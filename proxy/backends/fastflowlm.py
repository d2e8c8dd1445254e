"""Driver of FastFlowLM: one conversation in RAM, exact extension, and a server that breaks easily.

What it must not be done to, and what it says that is not so: fastflowlm.md, sections 1 and 5.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson
import structlog

from proxy.backends import flm_answer, flm_request
from proxy.backends.base import Facts, Upstream
from proxy.backends.flm_answer import Repair
from proxy.backends.flm_lane import Job, Lane, Orphan
from proxy.backends.transport import Answer, Headers, Transport
from proxy.backends.undriven import Undriven
from proxy.errors import (
    BackendBrokenError,
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)

log = structlog.get_logger("slotkeeper.fastflowlm")

CHAT = "/v1/chat/completions"
SAME_AS_CHAT = {CHAT, "/chat/completions"}
READING = {"GET", "HEAD", "OPTIONS"}
NOT_COMPUTING = {"/api/cancel", "/api/pull", "/api/show"}
JSON: Headers = [("Content-Type", "application/json")]
MODERN = (1, 0, 7)  # era E: usage on request, tool policy
OK = 200
ERRORS = 400
SETTLE_SECONDS = 0.5  # after an error or a cancel
STUCK_SECONDS = 120.0  # an exception in mid-stream leaves the stream open for ever (1.5)
CANCEL_SECONDS = 1.0  # a cancel can come too early to be heard (1.3)
ANSWER_SECONDS = 60.0  # for a question to the server
CLAIM_SECONDS = 10.0  # how long an answer waits for the client that left during its prefill
CLOSE_SECONDS = 10.0  # what still runs at the end is cancelled, and read that long
FLUSH: dict[str, Any] = {
    "messages": [{"role": "user", "content": "."}],
    "max_tokens": 1,
    "stream": True,
}


@dataclass(slots=True)
class Work:
    """A request on its way. ``messages`` None: no chat. ``whole``: the client wants one body."""

    path: str
    headers: Headers
    body: bytes
    name: str  # by which it can be cancelled
    messages: list[Any] | None = None
    whole: bool = False
    repair: Repair | None = None


class FastFlowLM(Undriven):
    """A ``Backend`` (see base.py): one slot, nothing saved, every request in the same lane."""

    name = "FastFlowLM"

    def __init__(self, url: str, *, connect_timeout: float, silence_timeout: float) -> None:
        """It asks for no key, and none is sent: its header limit is small."""
        self._transport = Transport(
            url, connect_timeout=connect_timeout, silence_timeout=silence_timeout
        )
        self._lane = Lane()
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: dict[str, Job] = {}  # that run, by the name that cancels them
        self._orphans: dict[tuple[str, bytes], Orphan] = {}  # by path and body
        self._catalogue: frozenset[str] = frozenset()
        self._version: tuple[int, ...] = ()
        self._loaded = ""
        self._n_ctx = 0
        self._cancelled: list[Any] | None = None  # messages of a chat that did not end by itself

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        slot: int | None = None,  # noqa: ARG002 - it has one
    ) -> AbstractAsyncContextManager[Upstream]:
        """Forward a request; see ``Backend.send``.

        The path goes out without its query. What computes waits for its turn; left early it is
        cancelled, and read to its end before the next one starts. Left before anything came it
        goes on while nobody else wants the NPU: a client that gave up sends the same again, and
        gets that answer (else the two would go on for ever: its issue 733).
        """
        path = target.partition("?")[0]
        if method in READING or path in NOT_COMPUTING:
            return self._transport.send(method, path, _kind(headers), body)
        return self._computing(CHAT if path in SAME_AS_CHAT else path, headers, body)

    async def facts(self) -> Facts:
        """Release and catalogue; the model and its context only once an answer has told them."""
        version = await self._ask("/api/version")
        listed = await self._ask("/v1/models")
        try:
            self._catalogue = frozenset(str(model["id"]) for model in listed["data"])
            self._version = tuple(map(int, re.findall(r"\d+", version["version"])[:3]))
        except (LookupError, TypeError) as error:
            raise _broken("/api/version, /v1/models") from error
        self._loaded = ""
        return Facts(
            kind="fastflowlm",
            instance="",
            total_slots=1,
            n_ctx=self._n_ctx,
            model=self._loaded,
            model_path="",
            identity={"version": version["version"]},
        )

    async def instance(self) -> str:
        """``""``: nothing tells one process from the next. Raises when it is not there."""
        await self._ask("/api/npu/status")
        return ""

    async def close(self) -> None:
        """Cancel what runs, let it end, close all connections."""
        for orphan in self._orphans.values():
            orphan.waiting.cancel()
        if self._tasks:
            for name, job in self._jobs.items():
                self._spawn(self._cancel(name, job))
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._transport.close()

    @asynccontextmanager
    async def _computing(
        self, path: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> AsyncIterator[Upstream]:
        raw = body if isinstance(body, bytes) else b""
        if body is not None and not isinstance(body, bytes):
            raw = b"".join([piece async for piece in body])
        name, job = self._claimed(path, raw) or await self._started(path, headers, raw)
        began = False
        try:
            await job.begun()
            began = True
            yield job
        finally:
            if job.ended.is_set():
                pass  # nothing runs for it
            elif began or self._lane.wanted:
                self._spawn(self._cancel(name, job))
            else:
                waiting = self._spawn(self._unclaimed(path, raw))
                self._orphans[path, raw] = Orphan(name, job, waiting)

    def _claimed(self, path: str, raw: bytes) -> tuple[str, Job] | None:
        """The answer of this very request, if it was left; others that still run must go."""
        mine = self._orphans.pop((path, raw), None)
        for key, orphan in [*self._orphans.items()]:
            if not orphan.job.ended.is_set():
                orphan.waiting.cancel()
                del self._orphans[key]
                self._spawn(self._cancel(orphan.name, orphan.job))
        if mine is None:
            return None
        mine.waiting.cancel()
        return (mine.name, mine.job) if mine.job.status or not mine.job.ended.is_set() else None

    async def _unclaimed(self, path: str, raw: bytes) -> None:
        """An orphan's last respite: its prefill, and some seconds of its answer."""
        orphan = self._orphans[path, raw]
        await orphan.job.begins()
        await asyncio.sleep(CLAIM_SECONDS)
        del self._orphans[path, raw]
        await self._cancel(orphan.name, orphan.job)

    async def _started(self, path: str, headers: Headers, raw: bytes) -> tuple[str, Job]:
        if not self._version:
            await self.facts()
        work = self._work(path, headers, raw)
        await self._lane.enter()
        job = self._jobs[work.name] = Job()
        self._spawn(self._run(work, job))
        return work.name, job

    def _work(self, path: str, headers: Headers, raw: bytes) -> Work:
        """Raises ``BadRequestError`` for a chat that it could not read."""
        answer_id = uuid4().hex[:24]
        name = f"slotkeeper-{answer_id}"
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            return Work(path, _kind(headers), raw, name)
        if path != CHAT:
            sent = flm_request.other(body, catalogue=self._catalogue)
            return Work(path, JSON, orjson.dumps({**sent, "request_id": name}), name)
        modern = self._version >= MODERN
        sent = flm_request.chat(body, catalogue=self._catalogue, loaded=self._loaded, modern=modern)
        stream, options, model = body.get("stream"), body.get("stream_options"), body.get("model")
        counted = isinstance(options, dict) and options.get("include_usage") is True
        return Work(
            path,
            JSON,
            orjson.dumps({**sent, "request_id": name}),
            name,
            messages=sent["messages"],
            whole=stream is not True,
            repair=Repair(
                model=model if isinstance(model, str) else "",
                answer_id=answer_id,
                usage_chunk=counted and stream is True,
            ),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="fastflowlm")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, work: Work, job: Job) -> None:
        """Whatever becomes of it: the lane is free again when nothing runs for it any more."""
        settle = SETTLE_SECONDS
        try:
            if work.messages is not None and work.messages == self._cancelled:
                await self._flush()
            self._cancelled = work.messages  # until it is known to have ended well
            if await self._attempts(work, job):
                settle = 0.0
                self._cancelled = None if work.messages is not None else self._cancelled
        except SlotkeeperError as error:
            job.end(error)
        except Exception as error:  # a bug must not keep the lane
            log.exception("fastflowlm.fault", error=type(error).__name__)
            job.end(BackendBrokenError("the answer could not be read"))
        finally:
            job.end(BackendUnreachableError("the proxy is closing"))
            del self._jobs[work.name]
            self._lane.leave(settle)

    async def _attempts(self, work: Work, job: Job) -> bool:
        """True if it ended well. Too long is tried again: the context may only have been lost.

        A restore without a checkpoint says the same as a prompt that does not fit (#744), and
        leaves the context empty. A prompt that is too long is refused again before any work.
        """
        refused = await self._attempt(work, job)
        if refused is not None and flm_answer.TOO_LONG.encode() in refused[2]:
            await asyncio.sleep(SETTLE_SECONDS)
            refused = await self._attempt(work, job)
        if refused is None:
            return not (work.repair and work.repair.cancelled)
        status, headers, body = refused
        job.begin(status, headers)
        job.put(body)
        job.end()
        return status < ERRORS

    async def _attempt(self, work: Work, job: Job) -> tuple[int, Headers, bytes] | None:
        """Send it. None if the answer was a stream, which is in ``job`` then."""
        async with self._transport.send("POST", work.path, work.headers, work.body) as upstream:
            head = _without_kind(upstream.headers)
            if not _streams(upstream):
                status, body = flm_answer.judged(upstream.status, await upstream.read())
                if work.messages is not None and status < ERRORS:
                    raise _broken(work.path)
                return status, [*head, *JSON], body
            if not work.whole:
                job.begin(upstream.status, upstream.headers)
            gathered = bytearray()
            while chunk := await _next(upstream):
                data = _repaired(work.repair, chunk)
                if work.whole:
                    gathered += data
                else:
                    job.put(data)
        if work.repair is not None:
            if not work.repair.done:
                raise _broken(work.path)
            self._learn(work.repair)
        if work.whole:
            answer = _assembled(bytes(gathered))
            job.begin(OK, [*head, *JSON])
            job.put(answer)
        job.end()
        return None

    def _learn(self, repair: Repair) -> None:
        if repair.told in self._catalogue:
            self._loaded = repair.told
        self._n_ctx = repair.capacity or self._n_ctx

    async def _flush(self) -> None:
        """Another conversation, of one word: the identical one would crash it (3.3)."""
        body = orjson.dumps(FLUSH)
        async with self._transport.send("POST", CHAT, JSON, body) as upstream:
            while await _next(upstream):
                pass

    async def _cancel(self, name: str, job: Job) -> None:
        """Tell the server, until it has ended. Its stream is read on meanwhile."""
        while not job.ended.is_set():
            try:
                await self._ask("/api/cancel", {"request_id": name})
            except SlotkeeperError as error:
                log.info("fastflowlm.not-cancelled", why=error.message)
            try:
                async with asyncio.timeout(CANCEL_SECONDS):
                    await job.ended.wait()
            except TimeoutError:
                continue

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """A question that needs no turn."""
        data = None if body is None else orjson.dumps(body)
        method = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                self._transport.send(method, path, JSON if data else [], data) as upstream,
            ):
                raw = await upstream.read()
        except TimeoutError as error:
            raise BackendTimeoutError(f"{path} was not answered in time") from error
        if upstream.status != OK:
            raise BackendRefusedError(
                f"{path} was answered with {upstream.status}", answer=upstream.status
            )
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _broken(path) from error


async def _next(upstream: Answer) -> bytes:
    try:
        async with asyncio.timeout(STUCK_SECONDS):
            return await upstream.read_some()
    except TimeoutError as error:
        msg = f"the answer stopped in the middle, {STUCK_SECONDS:.0f} s ago"
        raise BackendTimeoutError(msg, hint="see the backend's log") from error


def _repaired(repair: Repair | None, chunk: bytes) -> bytes:
    if repair is None:
        return chunk
    try:
        return repair.feed(chunk)
    except ValueError as error:
        raise _broken(CHAT) from error


def _assembled(events: bytes) -> bytes:
    try:
        return flm_answer.assembled(events)
    except ValueError as error:
        raise _broken(CHAT) from error


def _streams(upstream: Answer) -> bool:
    kinds = [value for name, value in upstream.headers if name.lower() == "content-type"]
    return any(kind.startswith("text/event-stream") for kind in kinds)


def _kind(headers: Headers) -> Headers:
    """Only the content type goes on: 8 KiB of headers are too many, and cookies no business."""
    return [pair for pair in headers if pair[0].lower() == "content-type"]


def _without_kind(headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0].lower() not in {"content-type", "content-length"}]


def _broken(where: str) -> BackendBrokenError:
    return BackendBrokenError(
        f"the backend's answer has an unknown shape: {where}", hint="is it FastFlowLM?"
    )
