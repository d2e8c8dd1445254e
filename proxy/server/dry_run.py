"""What would become of a request: every pure part of the cached path, and nothing of its effects.

No lease, no row in the ledger or the decision log, no metric; the backend only renders and counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson
from multidict import CIMultiDict

from proxy.core.explain import first_difference, rendered_difference
from proxy.core.normalise.clients import Side
from proxy.core.placement import Need, hit
from proxy.core.queue import SPARED_TOKENS, Kind, weigh
from proxy.core.records import Prompt, Reason
from proxy.core.why import told
from proxy.dialects import DIALECTS, TRANSLATIONS
from proxy.dialects.base import Unreadable
from proxy.errors import BadRequestError, SlotkeeperError
from proxy.scheduler import TYPICAL_SECONDS
from proxy.server import keys
from proxy.server.chat import NORMALISE
from proxy.server.explainer import TAIL_TOKENS
from proxy.server.record import FORESEEN

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping

    from proxy.backends.base import Backend
    from proxy.core.ledger import Conversation
    from proxy.core.placement import Option
    from proxy.core.template import Traits
    from proxy.dialects.base import Call, Dialect
    from proxy.scheduler import Scheduler
    from proxy.server.normaliser import Normaliser, Preview
    from proxy.tokens import Counter


_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2


@dataclass(frozen=True, slots=True)
class Question:
    """A request as its client would send it. ``headers``: those that say who that is."""

    path: str
    request: Mapping[str, Any]
    headers: CIMultiDict[str]

    @property
    def namespace(self) -> bytes:
        """What keeps clients of other keys apart."""
        return keys.namespace(self.headers)

    @property
    def raw(self) -> bytes:
        """The body."""
        return orjson.dumps(self.request)


def question(body: Mapping[str, Any]) -> Question:
    """Read ``{"path", "request", "headers"?}``. Raises ``BadRequestError``."""
    path, request, headers = body.get("path"), body.get("request"), body.get("headers", {})
    known = sorted({**DIALECTS, **TRANSLATIONS})
    if path not in known:
        hint = f"One of {', '.join(known)}."
        raise BadRequestError("'path' is none of the cached path.", hint=hint)
    if not isinstance(request, dict):
        raise BadRequestError("'request' must be the request's body, a JSON object.")
    plain = isinstance(headers, dict) and all(isinstance(v, str) for v in headers.values())
    if not plain:
        raise BadRequestError("'headers' must be an object of texts.")
    if not all(_NAME.fullmatch(name) and value.isprintable() for name, value in headers.items()):
        raise BadRequestError("'headers' has a name or a value that HTTP does not allow.")
    return Question(path, request, CIMultiDict(headers))


class DryRun:
    """Explains."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        counter: Counter,
        normaliser: Normaliser,
        traits: Callable[[], Traits],
        matches: Callable[[Prompt], tuple[tuple[Any, int], ...]],
        clock: Callable[[], float],
    ) -> None:
        """``matches``: snapshots that begin like a tokenised prompt; ``clock``: unix seconds."""
        self._scheduler = scheduler
        self._backend = backend
        self._counter = counter
        self._normaliser = normaliser
        self._traits = traits
        self._matches = matches
        self._clock = clock

    async def explain(self, asked: Question) -> dict[str, Any]:
        """See the module. Raises ``BadRequestError`` where the request itself is refused."""
        dialect = await self._dialect(asked.path)
        try:
            call = dialect.parse(asked.raw)
        except Unreadable as error:
            raise BadRequestError("This body is passed on as it is.") from error
        if call.settled:
            return _settled(call)
        before = call.body
        seen = self._preview(call, asked) if call.chat else None
        call = seen.call if seen else call
        prompt = await self._prompt(dialect, call, asked.namespace, seen)
        need, kind = self._scheduler.board.admit(
            Need(prompt, exact=True, wanted=call.id_slot, wide=call.wide, cache=call.cache)
        )
        rows = []
        if kind is Kind.NARROW:  # elsewhere nothing is restored, and the backend chooses
            need = replace(need, matches=self._matches(need.prompt))
            rows = self._options(need)
        return {
            **_known(seen),
            "before": _pretty(before),
            "after": _pretty(seen.after if seen else call.body),
            "prompt_tokens": len(prompt.tokens) if prompt.tokens is not None else None,
            "options": [worded(option) for option in rows],
            "choice": worded(rows[0]) if rows else None,
            "prefix": self._prefix(need),
            "cold": await self._cold(seen, rows),
        }

    def _preview(self, call: Call, asked: Question) -> Preview:
        off = asked.headers.get(NORMALISE, "").lower() == "off"
        return self._normaliser.preview(call, asked.headers, asked.namespace, off=off)

    async def _dialect(self, path: str) -> Dialect:
        if path in TRANSLATIONS and path in await self._backend.lacks():
            return TRANSLATIONS[path]
        if path not in DIALECTS:
            raise BadRequestError(
                "This backend takes such requests itself: they are passed on as they are."
            )
        return DIALECTS[path]

    async def _prompt(
        self, dialect: Dialect, call: Call, namespace: bytes, seen: Preview | None
    ) -> Prompt:
        prompt = dialect.prompt(call, namespace)
        tokens: array[int] | None = None
        try:
            tokens = await self._counter.exact(dialect.rendered(call))
        except SlotkeeperError:  # it cannot be asked, or not about this
            tokens = None
        talk = _conversation(seen)
        side = seen is not None and seen.side is not Side.MAIN
        return replace(prompt, tokens=tokens, conversation=talk or "", side=side)

    def _options(self, need: Need) -> list[Option]:
        engine = self._scheduler.board.engine(large=False, typical=TYPICAL_SECONDS)
        return weigh(need, engine, self._scheduler.costs, self._clock())

    def _prefix(self, need: Need) -> dict[str, Any]:
        """The longest beginning that is held anywhere."""
        held = [(hit(row.content, need.prompt), row.index) for row in self._scheduler.table]
        tokens, slot = max(held, key=lambda one: one[0], default=(0, -1))
        if need.matches and need.matches[0][1] > tokens:
            snapshot, covered = need.matches[0]
            return {"slot": None, "snapshot": snapshot.id, "tokens": covered}
        return {"slot": slot if tokens else None, "snapshot": None, "tokens": tokens}

    async def _cold(self, seen: Preview | None, rows: list[Option]) -> dict[str, str] | None:
        """Why it would reuse less than its conversation's last prompt, if something changed."""
        before = seen.result.before if seen else None
        if seen is None or before is None or before.prompt_n is None:
            return None
        if rows and rows[0].hit + TAIL_TOKENS >= min(before.prompt_n, rows[0].n_tokens):
            return None
        why = first_difference(before, seen.result.after, self._traits())
        if why is None:
            try:
                old, new = [await self._render(row) for row in (before, seen.result.after)]
            except SlotkeeperError:
                return None
            why = rendered_difference(old, new, self._traits())
        return told(why) if why else None

    async def _render(self, row: Conversation) -> str:
        return await self._backend.render(self._normaliser.body(row))


def worded(option: Option) -> dict[str, object]:
    """Its row, with the word the answer's header would have (``Lease.observed``)."""
    spared = option.hit >= SPARED_TOKENS or 2 * option.hit >= option.n_tokens
    hot = Reason.RESTORED if option.reason is Reason.RESTORED else Reason.SLOT_HIT
    word = option.reason if option.reason not in FORESEEN else hot if spared else Reason.COLD
    return {**option.explain(), "reason": str(word)}


def _settled(call: Call) -> dict[str, Any]:
    """Of a request the proxy answers by itself: nothing is sent, so nothing is computed."""
    body = _pretty(call.body)
    return {
        **_known(None),
        "note": "Slotkeeper answers this by itself: nothing is sent to the backend or computed.",
        "before": body,
        "after": body,
        "prompt_tokens": 0,
        "options": [],
        "choice": None,
        "prefix": {"slot": None, "snapshot": None, "tokens": 0},
        "cold": None,
    }


def _known(seen: Preview | None) -> dict[str, Any]:
    """What the ledger and the rules say."""
    if seen is None:
        return {
            "client": None, "side": "", "conversation": None, "known": 0, "rules": [], "note": "",
        }  # fmt: skip
    return {
        "client": seen.client or None,
        "side": "" if seen.side is Side.MAIN else str(seen.side),
        "conversation": _conversation(seen),
        "known": seen.result.known,
        "rules": [{"rule": change.rule, "where": change.where} for change in seen.changes],
        "note": seen.note,
    }


def _conversation(seen: Preview | None) -> str | None:
    """The one it goes on with; a new one has no id yet."""
    if seen is None or seen.result.before is None:
        return None
    before, after = seen.result.before, seen.result.after
    return before.id if before.id == after.id else None


def _pretty(body: Mapping[str, Any]) -> str:
    return orjson.dumps(body, option=orjson.OPT_INDENT_2, default=dict).decode()
