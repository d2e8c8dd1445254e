"""What every rule works on: a draft of the request, and what is known around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from proxy.core.ledger import Answer, Conversation, Line
from proxy.core.template import Traits


class Default(StrEnum):
    """When a rule is on in the mode ``safe`` (volatile-fields.md, section 8)."""

    ON = "on"  # the meaning does not change
    KNOWN = "known"  # on for a recognised client, or when the whole difference is time-shaped
    OFF = "off"  # changes the meaning: opt-in


@dataclass(frozen=True, slots=True)
class Change:
    """What a rule did, without any text: ``where`` is like ``messages[3].content``."""

    rule: str
    where: str


class Context(NamedTuple):
    """What is known around a request.

    ``on``: names of the rules that are on. ``client``: the recognised client program or ``""``.
    ``today``: today's date as Llama templates write it (``09 Oct 2026``).
    """

    on: frozenset[str]
    client: str = ""
    traits: Traits = Traits()
    today: str = ""


class Item:
    """An element of ``messages`` or ``tools``: its JSON, parsed when somebody asks for it.

    ``index``: its place in the client's array, None for one that is new. ``changed``: no longer
    what the client sent.
    """

    __slots__ = ("_json", "_value", "changed", "index")

    def __init__(self, value: Any, index: int | None = None) -> None:
        """As the client sent it."""
        self._value: Any = value
        self._json: bytes | None = None
        self.index = index
        self.changed = False

    @property
    def value(self) -> Any:
        """Parsed; to be replaced (``put``), never changed in place."""
        if self._value is None and self._json is not None:
            self._value = orjson.loads(self._json)
        return self._value

    @property
    def json(self) -> bytes:
        """Canonical JSON."""
        if self._json is None:
            self._json = orjson.dumps(self._value)
        return self._json

    def put(self, value: Any) -> None:
        """Replace the value."""
        self._value, self._json, self.changed = value, None, True

    def put_json(self, data: bytes) -> None:
        """Replace the value by the one this canonical JSON spells."""
        self._value, self._json, self.changed = None, data, True


@dataclass(slots=True)
class Draft:
    """The request while rules work on it.

    ``messages`` and ``tools`` (None: the request has none) are what will be sent. ``fields``:
    top-level fields to set, ``drop``: to leave out. ``before``: the conversation this request
    continues or branches off from, None for a new one. ``known``: how many leading messages of
    ``before`` this request repeats under the ledger's equivalences. ``own``: ``before`` is proved
    to be its own, and not merely a conversation that began alike. ``answers``: by message index,
    what the backend generated there. ``clock``: for a new
    conversation, the leading system messages another one with the same text but for the clock sent
    first (canonical JSON). ``stale``: pairs of what the frozen
    system text says and what holds now, ``stale_first``: of the first user message.
    ``unequal``: the repeated messages behind the system text that did not come as they went.
    ``notes``: by message index, text to go behind it. ``changes``: what was done so far.
    """

    body: Mapping[str, Any]
    messages: list[Item]
    tools: list[Item] | None
    fields: dict[str, Any] = field(default_factory=dict)
    drop: set[str] = field(default_factory=set)
    before: Conversation | None = None
    known: int = 0
    own: bool = False
    answers: dict[int, Answer] = field(default_factory=dict)
    clock: tuple[bytes, ...] = ()
    stale: list[tuple[str, str]] = field(default_factory=list)
    stale_first: list[tuple[str, str]] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    @property
    def lines(self) -> tuple[Line, ...]:
        """The ledger's lines of the messages this request repeats."""
        return self.before.lines[: self.known] if self.before else ()

    def did(self, rule: str, where: str) -> None:
        """Note a change."""
        self.changes.append(Change(rule, where))


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the visible table. ``apply`` changes the draft or leaves it; it may raise."""

    name: str
    what: str
    where: str
    default: Default
    apply: Callable[[Draft, Context], None]
