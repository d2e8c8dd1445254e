"""Where a request meets the ledger: made byte-stable before it goes, remembered when it was sent.

Never in the way: a fault sends the original, counted (DESIGN.md rule 10).
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from proxy.core.adapters import Adapters
from proxy.core.conversation import KEY_BYTES, text_of
from proxy.core.ledger import Conversation
from proxy.core.normalise import (
    ANSWERS,
    Result,
    RuleFault,
    answered,
    clients,
    normalise,
    resent,
    unfrozen,
)
from proxy.core.normalise.base import Change, Context
from proxy.core.normalise.clients import Side
from proxy.telemetry.metrics import RuleOutcome, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.core.normalise.book import Book
    from proxy.core.template import Traits
    from proxy.dialects.base import Call
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.normalise")

ID_BYTES = 12
PAUSED = "caching is paused: requests go on as they came, and the backend chooses the slot"
OFF = "the request asks to go on as it came, so nothing is changed"
SHADOW = "shadow mode: changes are only reported, and the request goes on as it came"
FORGOTTEN = 1024  # ids of forgotten conversations an answer may still be running for


class Served(Protocol):
    """What the backend serves now, as far as it is known."""

    model: str
    traits: Traits
    adapters: bool


class Ledger(Protocol):
    """Keeps conversations beyond this process; neither method waits or raises."""

    def changed(self, conversation: Conversation) -> None:
        """There is a new or newer one."""

    def gone(self, conversation: str) -> None:
        """One is no longer kept."""


class Nowhere:
    """A ledger of this process alone."""

    def changed(self, conversation: Conversation) -> None:
        """Nothing is kept."""

    def gone(self, conversation: str) -> None:
        """Nothing was kept."""


@dataclass(slots=True)
class Turn:
    """One request and its conversation. ``row`` None: not known (a fault, or switched off).

    ``before``: the conversation as it was, None for a new one. ``changes``: what was done, or in
    shadow mode would have been. ``kept``: ``row`` was put into the book.
    """

    call: Call
    client: str = ""
    side: Side = Side.MAIN
    row: Conversation | None = None
    before: Conversation | None = None
    changes: tuple[Change, ...] = ()
    shadow: bool = False
    kept: bool = False
    origin: Conversation | None = None
    rested: bool = False  # no rule was asked: the client's wish, or caching is paused
    reverted: bool = False  # the backend refused what was made of it; the original was sent
    original: Call = field(init=False)

    def __post_init__(self) -> None:
        self.original = self.call

    @property
    def altered(self) -> bool:
        """What is sent is not what came."""
        return bool(self.changes) and not self.shadow and not self.reverted

    @property
    def rules(self) -> list[str]:
        """Names of the rules that did something, each once."""
        return list(dict.fromkeys(change.rule for change in self.changes))


@dataclass(frozen=True, slots=True)
class Preview:
    """What would become of a request now: ``call`` as it would be sent, ``result`` with it.

    ``changes`` make ``after`` of its body; in shadow mode they are only reported. ``note``: why
    what is sent is not what the rules would make of it, ``""`` if it is.
    """

    client: str
    side: Side
    call: Call
    result: Result
    changes: tuple[Change, ...]
    after: Mapping[str, Any]
    note: str


class Normaliser:
    """Holds the book of conversations."""

    def __init__(
        self,
        book: Book,
        ledger: Ledger,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        served: Served,
        on: frozenset[str],
        shadow: bool,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """``clock`` gives unix seconds; ``on``: names of rules; ``shadow``: only report.

        While it is ``paused``, requests go on as they came.
        """
        self._book = book
        self._ledger = ledger
        self._metrics = metrics
        metrics.conversations.set_function(lambda: len(book))
        self._clock = clock
        self.on = on
        self._shadow = shadow
        self._served = served
        self._paused = paused
        # Where the backend can reuse nothing, nothing is frozen, and no note tells what is newer.
        self.reuses: Callable[[], bool] = lambda: True
        self.adapters = Adapters(lambda: served.adapters)
        self._forgotten: deque[str] = deque(maxlen=FORGOTTEN)

    def prepare(
        self, call: Call, headers: Mapping[str, str], namespace: bytes, *, keep: bool, off: bool
    ) -> Turn:
        """The turn whose ``call`` is to be sent, and the conversation as it will be then.

        ``headers`` by lower-case name. ``keep`` False: nothing of it is remembered. ``off``: the
        client asked for its own bytes.
        """
        turn = Turn(call)
        try:
            turn.client, turn.side = _recognised(call, headers)
            self._metrics.side_request(turn.side)
            turn.origin = self._origin(turn, namespace)
            turn.rested = off or self._paused()
            self._normalise(turn, turn.origin, frozenset() if turn.rested else self.on)
            # A request that went out as it came is no reason to thaw what is frozen.
            keep = keep and not (turn.rested and turn.before and _altered(turn.before))
        except Exception as error:  # noqa: BLE001 - rule 10
            self._fault(error)
        if keep and turn.row is not None and turn.row.lines:
            turn.kept = self._keep(turn.row)
        return turn

    def preview(
        self, call: Call, headers: Mapping[str, str], namespace: bytes, *, off: bool = False
    ) -> Preview:
        """What ``prepare`` would make of it now; changes nothing.

        Raises ``RuleFault``, and whatever an odd request makes a rule raise.
        """
        turn = Turn(call)
        turn.client, turn.side = _recognised(call, headers)
        origin, paused = self._origin(turn, namespace), self._paused()
        made = result = self._made(turn, origin, frozenset() if off or paused else self.on)
        shadow = self._shadow and bool(made.changes)
        if shadow:
            result = self._made(turn, origin, frozenset())
        sent = replace(call, raw=result.raw, body=result.body)
        note = PAUSED if paused else OFF if off else SHADOW if shadow else ""
        return Preview(turn.client, turn.side, sent, result, made.changes, made.body, note)

    def forgotten(self, turn: Turn) -> bool:
        """Its owner had its conversation forgotten, perhaps while it ran."""
        return turn.row is not None and turn.row.id in self._forgotten

    def known(self, conversation: str) -> bool:
        """It is remembered now."""
        return self._book.get(conversation) is not None

    def conversation(self, conversation: str) -> Conversation | None:
        """One that is remembered."""
        return self._book.get(conversation)

    def answered(self, turn: Turn, message: bytes | None, prompt_n: int | None) -> None:
        """The answer ran to its end: ``message`` is what the backend generated, as JSON."""
        row = self._book.get(turn.row.id) if turn.row is not None and turn.kept else None
        if row is None or turn.row is None or message is None:
            return
        try:
            done = answered(turn.row, message, prompt_n)
            # Another request of the conversation may have come meanwhile; its answers stay.
            others = [answer for answer in row.answers if answer not in done.answers]
            same = row.lines == turn.row.lines
            self._keep(
                replace(
                    row,
                    answers=(*others, *done.answers)[-ANSWERS:],
                    prompt_n=prompt_n if same else row.prompt_n,
                )
            )
        except Exception as error:  # noqa: BLE001 - rule 10
            self._fault(error)

    def revert(self, turn: Turn) -> Call:
        """The backend refused what was made of the request: the original, to be tried instead."""
        turn.reverted = True
        turn.call = turn.original
        return turn.original

    def refused(self, turn: Turn) -> None:
        """The original was taken where the altered request was not: a fault of the rules'."""
        self._fault(ValueError())
        turn.changes = ()
        if turn.origin is None:
            return
        try:
            turn.row = self._made(turn, turn.origin, frozenset()).after
        except Exception as error:  # noqa: BLE001 - rule 10
            self._fault(error)
        if turn.kept and turn.row is not None and not self.forgotten(turn):
            self._keep(turn.row)

    def body(self, row: Conversation) -> Mapping[str, Any]:
        """What the conversation's last request was, for rendering it once more."""
        return resent(row, self._context(row.client, frozenset() if self._shadow else self.on))

    def conversations(self) -> list[Conversation]:
        """The most recently used first."""
        return list(reversed(list(self._book)))

    def forget(self, conversation: str) -> bool:
        """Drop one for good; False when it is not known."""
        found = self._book.forget(conversation)
        self._forgotten.append(conversation)
        if found:
            self._ledger.gone(conversation)
        return found

    def _normalise(self, turn: Turn, origin: Conversation, on: frozenset[str]) -> None:
        try:
            result = self._made(turn, origin, on)
        except RuleFault as fault:
            self._metrics.rule(fault.rule, RuleOutcome.FAULT)
            self._fault(fault.__cause__ or fault, rule=fault.rule)
            result = self._made(turn, origin, frozenset())
        if result.changes:
            turn.changes, turn.shadow = result.changes, self._shadow
            outcome = RuleOutcome.SHADOW if turn.shadow else RuleOutcome.APPLIED
            for rule in turn.rules:
                self._metrics.rule(rule, outcome)
            if turn.shadow:  # the ledger has what is sent
                result = self._made(turn, origin, frozenset())
            turn.call = replace(turn.call, raw=result.raw, body=result.body)
        turn.row, turn.before = result.after, result.before

    def _origin(self, turn: Turn, namespace: bytes) -> Conversation:
        """What the request belongs to if it turns out to be new."""
        seed = namespace + f"{self._served.model}\0{turn.call.model}".encode()
        return Conversation(
            id=os.urandom(ID_BYTES).hex(),
            namespace=blake2b(seed, digest_size=KEY_BYTES, person=b"conversation").digest(),
            client=turn.client,
            used=self._clock(),
        )

    def _made(self, turn: Turn, origin: Conversation, on: frozenset[str]) -> Result:
        call, context = turn.call, self._context(turn.client, on)
        return normalise(call.raw, call.body, self._book, context, origin)

    def _context(self, client: str, on: frozenset[str]) -> Context:
        on, traits, today = on if self.reuses() else unfrozen(on), self._served.traits, ""
        if traits.writes_date:
            today = datetime.fromtimestamp(self._clock()).astimezone().strftime("%d %b %Y")
        return Context(on, client, traits, today)

    def _keep(self, row: Conversation) -> bool:
        """False when that failed."""
        try:
            for gone in self._book.keep(row):
                self._ledger.gone(gone)
            self._ledger.changed(row)
        except Exception as error:  # noqa: BLE001 - rule 10
            self._fault(error)
            return False
        return True

    def _fault(self, error: BaseException, *, rule: str = "") -> None:
        self._metrics.fault(Where.NORMALISE)
        log.error("normalise.fault", error=type(error).__name__, rule=rule)


def _altered(row: Conversation) -> bool:
    """Its last request went out with something in it that the client did not send."""
    return any(line.note or line.went != line.came for line in row.lines)


def _recognised(call: Call, headers: Mapping[str, str]) -> tuple[str, Side]:
    texts = {"system": "", "user": ""}
    for message in call.body["messages"][:4]:
        role = str(message.get("role")) if isinstance(message, dict) else ""
        if role in texts and not texts[role]:
            texts[role] = text_of(message) or ""
    return (
        clients.client(headers, texts["system"], texts["user"]),
        clients.side(call.body, headers),
    )
