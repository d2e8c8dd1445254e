"""Talking to FastFlowLM: questions that need no turn, streams that may stop for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from proxy.backends.flm_work import CHAT, JSON
from proxy.backends.transport import Answer, Headers, Transport
from proxy.errors import BackendBrokenError, BackendRefusedError, BackendTimeoutError

OK = 200
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
