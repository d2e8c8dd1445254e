"""``/v1/messages/count_tokens``: the tokens of the chat request it becomes. Computes nothing.

The header ``X-Slotkeeper-Count`` says how: ``exact`` by the backend, which renders the prompt;
where it has no counter, by the ``tokenizer`` set for it (what a template adds is guessed), else as
an ``estimate`` from the bytes. Neither of the latter counts pictures.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.core.records import Reason
from proxy.dialects.anthropic import Messages
from proxy.dialects.anthropic_errors import translated
from proxy.dialects.base import Unreadable
from proxy.errors import BackendBrokenError
from proxy.server import keys
from proxy.server.envelope import json_response
from proxy.server.relay import OK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.backends.base import Backend, Upstream
    from proxy.dialects.base import Call
    from proxy.server.density import Density
    from proxy.server.passthrough import Passthrough
    from proxy.tokens import Counter

PATH = "/v1/messages/count_tokens"
HOW = "X-Slotkeeper-Count"
_COUNTER = "/v1/chat/completions/input_tokens"
_NO_COUNTER = {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED}
_DROP = ("content-type", "accept-encoding")
_SAID = {"X-Slotkeeper": str(Reason.PASS)}


class Count:
    """The handler; it needs no slot, so it takes no lease."""

    def __init__(
        self, backend: Backend, passthrough: Passthrough, counter: Counter, density: Density
    ) -> None:
        """``passthrough`` reads bodies, and takes the requests only the backend can read."""
        self._backend = backend
        self._passthrough = passthrough
        self._counter = counter
        self._density = density
        self._dialect = Messages()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Count. The backend's refusals come in Anthropic's shape."""
        raw = await self._passthrough.body(request)
        try:
            call = self._dialect.parse(raw)
        except Unreadable:
            return await self._passthrough.handle(request, raw)
        if _COUNTER in await self._backend.lacks():
            return await self._estimated(call)
        headers = [*keys.upstream(request, _DROP), ("Content-Type", "application/json")]
        named = {"model": call.model} if call.model else {}
        body = orjson.dumps({**named, **self._dialect.shown(call)})
        async with self._backend.send("POST", _COUNTER, headers, body) as upstream:
            if upstream.status in _NO_COUNTER:
                return await self._estimated(call)
            return await _exact(upstream)

    async def _estimated(self, call: Call) -> web.Response:
        body = {**call.body, "messages": [_textual(m) for m in call.body["messages"]]}
        count = await self._counter.length(_plain(body))
        if count is not None:
            return _counted(count, "tokenizer")
        textual = self._dialect.call(call.raw, body)
        return _counted(self._density.tokens(self._dialect.prompt(textual, b"").size), "estimate")


async def _exact(upstream: Upstream) -> web.Response:
    status, answer = upstream.status, await upstream.read()
    if status != OK:
        refusal = translated(answer, status)
        return web.Response(
            body=refusal, status=status, content_type="application/json", headers=_SAID
        )
    try:
        count = int(orjson.loads(answer)["input_tokens"])
    except (ValueError, LookupError, TypeError) as error:
        raise BackendBrokenError("the backend's token count is none") from error
    return _counted(count, "exact")


def _counted(count: int, how: str) -> web.Response:
    return json_response({"input_tokens": count}, headers={**_SAID, HOW: how})


def _textual(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its pictures."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [part for part in content if part["type"] == "text"]}


def _plain(body: Mapping[str, Any]) -> str:
    """About what a template makes of it, its marks left out."""
    pieces = [orjson.dumps(tool).decode() for tool in body.get("tools") or ()]
    for message in body["messages"]:
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        calls = [orjson.dumps(call["function"]).decode() for call in message.get("tool_calls", ())]
        pieces += [message["role"], *texts, *calls, ""]
    return "\n".join(pieces)
