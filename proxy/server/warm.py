"""Has a prompt ready before anybody asks: it is computed by the cached path, then saved."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web
from multidict import CIMultiDict

from proxy.core.slots import SlotState
from proxy.dialects.base import Unreadable
from proxy.errors import BackendRefusedError, BadRequestError
from proxy.server.dry_run import Question
from proxy.server.record import EXCHANGE, Exchange
from proxy.server.relay import OK

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from proxy.core.queue import Lease
    from proxy.dialects.base import Dialect
    from proxy.scheduler import Scheduler
    from proxy.server.chat import Chat
    from proxy.server.record import Recorder
    from proxy.transfer import Transfer

PAUSE = 0.05  # seconds between two looks at a slot the keeper is saving
SLACK = 8  # tokens at a prompt's end, which a snapshot need not hold

# What limits the answer, by path; the others stand for the same and would contradict.
_LIMITS: Mapping[str, str] = {
    "/v1/chat/completions": "max_tokens",
    "/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/completions": "max_tokens",
    "/completion": "n_predict",
    "/completions": "n_predict",
    "/infill": "n_predict",
}
_OTHERS = frozenset(
    {"max_completion_tokens", "max_tokens", "n_predict", "stream", "stream_options"}
)


class Warm:
    """The action."""

    def __init__(
        self,
        chat: Chat,
        recorder: Recorder,
        scheduler: Scheduler,
        transfer: Transfer | None,
        save: Callable[[int], Awaitable[None]] | None,
    ) -> None:
        """``transfer`` and ``save`` None: nothing is ever saved."""
        self._chat = chat
        self._recorder = recorder
        self._scheduler = scheduler
        self._transfer = transfer
        self._save = save

    async def run(
        self, request: web.Request, spare: web.Request, asked: Question
    ) -> dict[str, Any]:
        """Compute and save. ``spare``: a copy of ``request`` made before its body was read.

        Raises what a client's request would be refused with.
        """
        exchange = self._exchange(spare, asked, await self._dialect(asked.path))
        request[EXCHANGE] = exchange
        await self._chat.run(exchange)
        lease = exchange.lease
        if exchange.status != OK or lease is None:
            raise BackendRefusedError(
                f"The backend refused the prompt with {exchange.status}.",
                answer=exchange.status,
                hint="See its log.",
            )
        snapshot = await self._saved(lease)
        prompt, cached = lease.prompt_n, lease.cache_n
        return {
            "prompt": prompt,
            "cached": cached,
            "computed": None if prompt is None or cached is None else prompt - cached,
            "seconds": round(self._recorder.now() - exchange.started, 3),
            "snapshot": snapshot,
        }

    async def _dialect(self, path: str) -> Dialect:
        dialect = await self._chat.dialect(path) if path in _LIMITS else None
        if dialect is None:
            hint = f"One of {', '.join(_LIMITS)}."
            raise BadRequestError("Prompts of this path cannot be warmed.", hint=hint)
        return dialect

    def _exchange(self, spare: web.Request, asked: Question, dialect: Dialect) -> Exchange:
        """As if a client had sent it, with the shortest answer."""
        kept = {name: value for name, value in asked.request.items() if name not in _OTHERS}
        asked = Question(asked.path, {**kept, _LIMITS[asked.path]: 1}, asked.headers)
        try:
            call = dialect.parse(asked.raw)
        except Unreadable as error:
            raise BadRequestError("This body is passed on as it is.") from error
        headers = CIMultiDict({**asked.headers, "Host": spare.headers.get("Host", "")})
        made = spare.clone(rel_url=asked.path, headers=headers)
        return Exchange(made, dialect, call, self._recorder.now())

    async def _saved(self, lease: Lease) -> str | None:
        """Save the slot, if it still holds this; the id of what now holds the prompt."""
        slot, table = lease.slot, self._scheduler.table
        if slot is None or self._save is None or self._transfer is None:
            return None
        # The keeper may have been faster.
        while table[slot].state is SlotState.SAVING:  # noqa: ASYNC110 - a table has no event
            await asyncio.sleep(PAUSE)
        content = table[slot].content
        ours = content is not None and content.prompt is lease.prompt
        if content is not None and ours and content.n_saved + SLACK < content.n_tokens:
            await self._save(slot)
            content = table[slot].content
        tokens = content.tokens if content is not None and ours else lease.prompt.tokens
        if tokens is None or lease.prompt_n is None:
            return None
        for snapshot, covered in self._transfer.index.ranked(lease.prompt.seed, tokens):
            if covered + SLACK >= lease.prompt_n:
                return snapshot.id
        return None
