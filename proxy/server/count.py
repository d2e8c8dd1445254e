"""``/v1/messages/count_tokens``: the tokens of the chat request it becomes. Computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from proxy.backends.base import Backend
    from proxy.server.passthrough import Passthrough

PATH = "/v1/messages/count_tokens"
_COUNTER = "/v1/chat/completions/input_tokens"
_DROP = ("content-type", "accept-encoding")
_SAID = {"X-Slotkeeper": str(Reason.PASS)}


class Count:
    """The handler; it needs no slot, so it takes no lease."""

    def __init__(self, backend: Backend, passthrough: Passthrough) -> None:
        """``passthrough`` reads bodies, and takes the requests only the backend can read."""
        self._backend = backend
        self._passthrough = passthrough
        self._dialect = Messages()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Count. The backend's refusals come in Anthropic's shape."""
        raw = await self._passthrough.body(request)
        try:
            call = self._dialect.parse(raw)
        except Unreadable:
            return await self._passthrough.handle(request)
        headers = [*keys.upstream(request, _DROP), ("Content-Type", "application/json")]
        named = {"model": call.model} if call.model else {}
        body = orjson.dumps({**named, **self._dialect.shown(call)})
        async with self._backend.send("POST", _COUNTER, headers, body) as upstream:
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
        return json_response({"input_tokens": count}, headers=_SAID)
