"""Everything that is not the cached path, byte for byte.

What makes the backend compute takes leases first (DESIGN.md step 5): it cannot name its slot, so
where pins are in use it takes them all. What only reads goes straight through.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.core.placement import Need
from proxy.core.records import Prompt, Reason
from proxy.errors import BackendUnreachableError, RequestTimeoutError
from proxy.server import keys
from proxy.server.record import LEASE
from proxy.server.relay import passed

if TYPE_CHECKING:
    from aiohttp import web

    from proxy.backends.base import Backend
    from proxy.scheduler import Scheduler

READ_ONLY = frozenset({"GET", "HEAD", "OPTIONS"})
# POSTs that compute nothing (llama-server.md 1.1, 1.9)
NOT_COMPUTING = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/chat/completions/input_tokens",
        "/v1/chat/completions/input_tokens",
        "/responses/input_tokens",
        "/v1/responses/input_tokens",
        "/api/cancel",  # FastFlowLM's and Ollama's: questions, and a word to what runs
        "/api/show",
        "/api/pull",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/control",
        "/v1/streams/lookup",
        "/props",
        "/lora-adapters",
        "/models",
        "/models/load",
        "/models/unload",
    }
)
CHANGING = frozenset({"/lora-adapters", "/models/load", "/models/unload"})
UNPROMPTED = Need(Prompt(seed=b"", chain=(), ends=(), size=0), exact=True, wide=True)


class Passthrough:
    """Handlers of every other path."""

    def __init__(self, scheduler: Scheduler, backend: Backend, *, body_timeout: float) -> None:
        """``body_timeout`` in seconds."""
        self._body_timeout = body_timeout
        self._scheduler = scheduler
        self._backend = backend

    async def handle(self, request: web.Request, body: bytes | None = None) -> web.StreamResponse:
        """Any request the routes name nowhere else; ``body``: where it was read already."""
        if body is None and request.body_exists:
            body = await self.body(request)
        if request.method in READ_ONLY or request.path in NOT_COMPUTING:
            try:
                return await self._forward(request, body, Reason.PASS)
            finally:
                if request.method not in READ_ONLY and request.path in CHANGING:
                    self._scheduler.lost()  # another LoRA set or model: nothing known holds
        try:
            return await self.computing(request, body)
        finally:
            if request.path.startswith("/slots/"):
                self._scheduler.lost()  # an admin changed a slot behind our back

    async def body(self, request: web.Request) -> bytes:
        """The request's body, within a time: a broken chunk would hang the read for good.

        To be read once: a second time nothing would be there (``RuntimeError``).
        """
        size = request.content_length
        if request.content.is_eof() and size is not None:
            body = request.content.read_nowait()  # all here, and no larger than the gate allows
            if len(body) != size:
                raise RuntimeError("the body was read before")
            return body
        try:
            async with asyncio.timeout(self._body_timeout):
                return await request.read()
        except TimeoutError:
            msg = f"the body did not arrive within {self._body_timeout:.0f} s"
            raise RequestTimeoutError(msg, hint="see server.body_timeout") from None

    async def computing(self, request: web.Request, body: bytes | None) -> web.StreamResponse:
        """With a lease on everything the backend may use for it."""
        need = replace(UNPROMPTED, path=request.path)
        async with self._scheduler.lease(need, _nothing_to_resolve) as lease:
            request[LEASE] = lease
            lease.sent = True
            return await self._forward(request, body, lease.reason, lease.slot)

    async def _forward(
        self,
        request: web.Request,
        body: bytes | None,
        reason: Reason,
        slot: int | None = None,
    ) -> web.StreamResponse:
        headers = keys.upstream(request)
        try:
            async with self._backend.send(
                request.method, request.raw_path, headers, body, slot=slot
            ) as upstream:
                return await passed(request, upstream, {"X-Slotkeeper": str(reason)})
        except BackendUnreachableError:
            self._scheduler.lost()
            raise


async def _nothing_to_resolve() -> Prompt:
    return UNPROMPTED.prompt
