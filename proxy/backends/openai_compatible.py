"""Driver of any server that speaks OpenAI's API: Ollama, LM Studio, vLLM, mlx and others.

Nothing is assumed of it. What the proxy adds to requests for llama-server is taken out again, and
where the server tells how much it reused, it is told on in llama-server's words.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Any

import orjson

from proxy.backends.base import Facts, Upstream
from proxy.backends.transport import Headers, Transport
from proxy.backends.undriven import Undriven
from proxy.core.splice import rebuild
from proxy.core.sse import Event, Parser, encode
from proxy.errors import BackendBrokenError, BackendRefusedError, BackendTimeoutError

# Fields with the values the proxy gives them (dialects/body.py, dialects/anthropic_request.py);
# strict servers refuse a name they do not know.
ADDED: Mapping[str, Any] = {
    "cache_prompt": True,
    "id_slot": -1,
    "n_cache_reuse": 0,
    "return_progress": True,
    "verbose": True,
}
MODELS = "/v1/models"
ANSWER_SECONDS = 60.0
KEY_DEMANDED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
_TELLS = b'"cached_tokens"'


class OpenAICompatible(Undriven):
    """A ``Backend`` (see base.py) that only forwards."""

    def __init__(
        self, url: str, *, key: str | None, connect_timeout: float, silence_timeout: float
    ) -> None:
        """``key`` replaces the client's own on every request; None lets the client's through."""
        self._transport = Transport(
            url, connect_timeout=connect_timeout, silence_timeout=silence_timeout
        )
        self._key = key

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        *,
        slot: int | None = None,  # noqa: ARG002 - it has none
    ) -> AbstractAsyncContextManager[Upstream]:
        """Forward a request; see ``Transport.send``."""
        sent = body and stripped(body)
        if body is not None and target.partition("?")[0].endswith("/chat/completions"):
            return self._telling(method, target, headers, sent)
        return self._transport.send(method, target, self._with_key(headers), sent)

    @asynccontextmanager
    async def _telling(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
    ) -> AsyncIterator[Upstream]:
        sending = self._transport.send(method, target, self._with_key(headers), body)
        async with sending as upstream:
            yield Telling(upstream) if upstream.status == HTTPStatus.OK else upstream

    async def facts(self) -> Facts:
        """What ``/v1/models`` lists first; that it has no such page is no fault."""
        listed = await self._models()
        rows = listed.get("data") if isinstance(listed, dict) else None
        first = rows[0] if isinstance(rows, list) and rows else None
        model = first.get("id") if isinstance(first, dict) else None
        return Facts(
            kind="openai-compatible",
            instance="",
            total_slots=0,
            n_ctx=0,
            model=model if isinstance(model, str) else "",
            model_path="",
            identity={},
        )

    async def instance(self) -> str:
        """``""``: nothing tells one process from the next. Raises when it is not there."""
        await self._models()
        return ""

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def _models(self) -> Any:
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                self._transport.send("GET", MODELS, self._with_key([]), None) as upstream,
            ):
                raw = await upstream.read()
        except TimeoutError as error:
            raise BackendTimeoutError(f"{MODELS} was not answered in time") from error
        if upstream.status in KEY_DEMANDED:
            msg = f"{MODELS} was answered with {upstream.status}"
            raise BackendRefusedError(msg, answer=upstream.status)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            return None

    def _with_key(self, headers: Headers) -> Headers:
        if self._key is None:
            return headers
        kept = [pair for pair in headers if pair[0].lower() not in {"authorization", "x-api-key"}]
        return [*kept, ("Authorization", f"Bearer {self._key}")]


class Telling:
    """An ``Upstream`` whose events (or whole body) also tell the reuse as llama-server does."""

    def __init__(self, upstream: Upstream) -> None:
        """``upstream``: an answer of a chat."""
        kinds = [value for name, value in upstream.headers if name.lower() == "content-type"]
        self._upstream = upstream
        self._stream = any(kind.startswith("text/event-stream") for kind in kinds)
        self._parser = Parser()
        self._rest = bytearray()  # of an event that is not complete
        self.status = upstream.status
        self.headers = [pair for pair in upstream.headers if pair[0].lower() != "content-length"]

    async def read_some(self) -> bytes:
        """See ``Upstream``. A body that is no stream comes in one piece."""
        if not self._stream:
            return timed(await self._upstream.read())
        while chunk := await self._upstream.read_some():
            if out := self._told(chunk):
                return out
        rest, self._rest = bytes(self._rest), bytearray()
        return rest

    def _told(self, chunk: bytes) -> bytes:
        self._rest += chunk
        out = bytearray()
        try:
            for event in self._parser.feed(chunk):
                del self._rest[: len(event.raw)]
                out += _event(event)
        except ValueError as error:
            raise BackendBrokenError(f"the backend's answer is broken: {error}") from error
        return bytes(out)

    async def read(self) -> bytes:
        """See ``Upstream``."""
        out = bytearray()
        while piece := await self.read_some():
            out += piece
        return bytes(out)


def stripped(body: bytes) -> bytes:
    """``body`` without what the proxy added; the very bytes where there is nothing of it."""
    if not any(f'"{name}"'.encode() in body for name in ADDED):
        return body
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(value, dict):
        return body
    ours = [name for name, given in ADDED.items() if name in value and value[name] == given]
    return rebuild(body, value, {}, drop=ours) if ours else body


def timed(data: bytes) -> bytes:
    """An answer or event with ``timings``, if its usage tells how much was reused."""
    if _TELLS not in data:
        return data
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    usage = value.get("usage") if isinstance(value, dict) else None
    if not isinstance(usage, dict) or "timings" in value:
        return data
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, answer = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    if not isinstance(cached, int):
        return data
    if not isinstance(prompt, int) or not isinstance(answer, int) or cached > prompt:
        return data
    figures = {"cache_n": cached, "prompt_n": prompt - cached, "predicted_n": answer}
    return orjson.dumps({**value, "timings": figures})


def _event(event: Event) -> bytes:
    if event.comment_only:
        return event.raw
    data = timed(event.data)
    return event.raw if data is event.data else encode(data)
