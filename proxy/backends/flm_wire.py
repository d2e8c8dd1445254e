"""Talking to FastFlowLM: questions that need no turn, streams that may stop for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
import structlog

from proxy.backends.base import Upstream
from proxy.backends.flm_lane import Job
from proxy.backends.flm_work import CHAT, JSON, question
from proxy.backends.transport import Answer, Headers, Transport
from proxy.errors import (
    BackendBrokenError,
    BackendRefusedError,
    BackendTimeoutError,
    SlotkeeperError,
)

log = structlog.get_logger("slotkeeper.fastflowlm")

OK = 200
READING = {"GET", "HEAD", "OPTIONS"}
NOT_COMPUTING = {"/api/cancel", "/api/pull", "/api/show"}
RUNNING, NOTHING = "/api/ps", b'{"models":[]}'  # with nothing loaded it reads what is not there
ANSWER_SECONDS = 60.0  # for a question to the server


async def ask(transport: Transport, path: str, body: dict[str, Any] | None = None) -> Any:
    """A question; a POST if it has a body. Raises what a ``Backend`` raises."""
    data = None if body is None else orjson.dumps(body)
    method = "GET" if body is None else "POST"
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            transport.send(method, path, JSON if data else [], data) as upstream,
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
        raise broken(path) from error


def asks(method: str, path: str) -> bool:
    """Whether a request is a question, which needs no turn."""
    return method in READING or path in NOT_COMPUTING


@asynccontextmanager
async def asking(
    transport: Transport,
    method: str,
    path: str,
    body: bytes | None,
    catalogue: frozenset[str],
    *,
    loaded: str,
    helpers: asyncio.Semaphore,
) -> AsyncIterator[Upstream]:
    """A client's question, without what the server would not survive (1.3, 1.4).

    ``loaded``: the model, "" if none is known to be. ``helpers``: so many are asked at a time, for
    it refuses its eleventh connection, whatever that is for (5.2). Raises ``BadRequestError``.
    """
    job = Job()
    if path == RUNNING and not loaded:
        job.whole(OK, JSON, NOTHING)
    else:
        data = None if method in READING else question(path, body or b"", catalogue)
        sending = transport.send(method, path, JSON if data else [], data)
        async with helpers, sending as upstream:
            job.whole(upstream.status, upstream.headers, await upstream.read())
    yield job


async def cancel(transport: Transport, name: str, job: Job, *, every: float) -> None:
    """Tell the server each ``every`` seconds, until it has ended. Its stream is read meanwhile."""
    while not job.ended.is_set():
        try:
            await ask(transport, "/api/cancel", {"request_id": name})
        except SlotkeeperError as error:
            log.info("fastflowlm.not-cancelled", why=error.message)
        with suppress(TimeoutError):
            async with asyncio.timeout(every):
                await job.ended.wait()


async def next_of(upstream: Answer, seconds: float) -> bytes:
    """Some of a stream; ``BackendTimeoutError`` when nothing comes for so long (1.5)."""
    try:
        async with asyncio.timeout(seconds):
            return await upstream.read_some()
    except TimeoutError as error:
        msg = f"the answer stopped in the middle, {seconds:.0f} s ago"
        raise BackendTimeoutError(msg, hint="see the backend's log") from error


def parsed(parse: Callable[[bytes], bytes], data: bytes) -> bytes:
    """What ``parse`` makes of (a part of) a chat's answer; nonsense is the server's fault."""
    try:
        return parse(data)
    except ValueError as error:
        raise broken(CHAT) from error


def broken(where: str) -> BackendBrokenError:
    """For an answer that none could have expected."""
    return BackendBrokenError(
        f"the backend's answer has an unknown shape: {where}", hint="is it FastFlowLM?"
    )


def streams(upstream: Answer) -> bool:
    """Whether events follow."""
    kinds = [value for name, value in upstream.headers if name.lower() == "content-type"]
    return any(kind.startswith("text/event-stream") for kind in kinds)


def only_kind(headers: Headers) -> Headers:
    """Only the content type goes on: 8 KiB of headers are too many, and cookies no business."""
    return [pair for pair in headers if pair[0].lower() == "content-type"]


def without_kind(headers: Headers) -> Headers:
    """The head of an answer whose body becomes another one."""
    return [pair for pair in headers if pair[0].lower() not in {"content-type", "content-length"}]
