"""Which conversation a request belongs to: by content, never by a client's id (DESIGN.md).

The book holds the newest conversations and finds them by what was said in them. Pure, no clock.
Rows are replaced, never changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import orjson

from proxy.core.conversation import KEY_BYTES, key, text_of
from proxy.core.ledger import Answer, Conversation
from proxy.core.normalise import clocks, match
from proxy.core.normalise.match import Said, Still

KEYS = 16_384  # of messages met before
COMPARED = 16  # conversations that began alike whose system texts are compared


class Found(NamedTuple):
    """What the book knows of a request.

    ``before``: the conversation it continues or leaves, None for a new one. ``known``: how many
    leading messages are its lines. ``answers``: by message index, what the backend generated there.
    ``goes_on``: it is still that conversation, not a branch. With another system text nothing is
    ``known``: what was said under it is put back nowhere. ``like``: without one, a conversation
    that looks alike, to explain a cold answer by and for nothing else. ``clock``: for a new one,
    the leading system messages that went out first where only the clock differs.
    """

    before: Conversation | None = None
    known: int = 0
    answers: tuple[tuple[int, Answer], ...] = ()
    goes_on: bool = False
    like: Conversation | None = None
    clock: tuple[bytes, ...] = ()


class Book:
    """Conversations by what was said in them; the least recently used are dropped."""

    def __init__(self, max_conversations: int, max_bytes: int) -> None:
        """``max_bytes``: of all texts together; what several share counts for each."""
        self._limits = max_conversations, max_bytes
        self._rows: dict[str, Conversation] = {}  # the least recently used first
        self._marks: dict[str, _Marks] = {}  # per conversation, its keys in _places
        self._places: dict[bytes, dict[str, None]] = {}
        self._sizes: dict[str, int] = {}
        self._total = 0  # of the sizes
        self._keys: dict[bytes, bytes] = {}  # keys of messages seen lately

    def __len__(self) -> int:
        """Count conversations."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Conversation]:
        """The least recently used first."""
        return iter(tuple(self._rows.values()))

    def get(self, conversation: str) -> Conversation | None:
        """One by id."""
        return self._rows.get(conversation)

    def size(self, conversation: str) -> int:
        """Bytes of one's texts."""
        return self._sizes.get(conversation, 0)

    def said(self, value: Any, json: bytes) -> Said:
        """A message, parsed and as canonical JSON, with its key; histories are met again."""
        mark = blake2b(json, digest_size=KEY_BYTES).digest()  # no text is kept for this
        found = self._keys.get(mark)
        if found is None:
            found = key(value)
            if len(self._keys) >= KEYS:
                self._keys.clear()
            self._keys[mark] = found
        return Said(value, json, found, str(value.get("role")) if isinstance(value, dict) else "")

    def find(
        self,
        namespace: bytes,
        said: Sequence[Said],
        head: int,
        client: str,
        blocks: Sequence[re.Pattern[str]] = (),
    ) -> Found:
        """The conversation these messages belong to: deepest match, then the most recent.

        Only proof makes it one (``proved``): an equal sentence said elsewhere is none. ``blocks``:
        parts of a system text that do not make it another one, beside clocks.
        """
        still = Still(client, tuple(blocks))
        spoken = [message for message in said if message.role == "assistant"]
        ids = {name for message in spoken for name in match.call_ids(message.value)}
        edited: Found | None = None
        like: Conversation | None = None
        for row, same in self._candidates(namespace, said, head, still, spoken=bool(spoken)):
            known = match.repeated(row, said, head, client)
            if not spoken:  # it opens a conversation, unless it is an identical resend
                if same and known == len(said) == len(row.lines):
                    return Found(row, known, goes_on=True)
            elif match.proved(row, said, known, head, ids, same=same):
                answers = match.generated(row, said, known)
                return Found(row, known, answers, match.goes_on(row, said, known))
            elif known > head + 1:  # its system text was edited, or it is a twin
                edited = edited or Found(row, goes_on=match.no_twin(row, said, known, head))
            like = like or (row if spoken else None)
        if edited:
            return edited
        clock = self._clock(namespace, said[:head], client) if head else ()
        return Found(like=like, clock=clock)

    def keep(self, row: Conversation) -> list[str]:
        """Take in a conversation, in place of its older self; the ids of those dropped for it."""
        before = self._marks.get(row.id, _NO_MARKS)
        marks = _marks(row, self._rows.get(row.id), before)  # may raise: nothing is changed yet
        now, size = marks.all(), row.size
        self._rows.pop(row.id, None)  # the most recent stands last
        if marks is not before:
            for mark in before.all() - now:
                self._leave(mark, row.id)
        for mark in now:
            holders = self._places.setdefault(mark, {})
            holders.pop(row.id, None)  # the most recent stands last
            holders[row.id] = None
        self._rows[row.id] = row
        self._marks[row.id] = marks
        self._total += size - self._sizes.get(row.id, 0)
        self._sizes[row.id] = size
        return self._shrink()

    def forget(self, conversation: str) -> bool:
        """Drop one; False when it is not here."""
        for mark in self._marks.pop(conversation, _NO_MARKS).all():
            self._leave(mark, conversation)
        self._total -= self._sizes.pop(conversation, 0)
        return self._rows.pop(conversation, None) is not None

    def _leave(self, mark: bytes, conversation: str) -> None:
        holders = self._places[mark]
        holders.pop(conversation, None)
        if not holders:
            del self._places[mark]

    def _shrink(self) -> list[str]:
        most, room = self._limits
        gone: list[str] = []
        while len(self._rows) > most or (self._total > room and len(self._rows) > 1):
            gone.append(next(iter(self._rows)))
            self.forget(gone[-1])
        return gone

    def _candidates(
        self,
        namespace: bytes,
        said: Sequence[Said],
        head: int,
        still: Still,
        *,
        spoken: bool,
    ) -> Iterator[tuple[Conversation, bool]]:
        """Deepest first, at one depth those with the same system text, then the most recent.

        Beside each: whether its system text is the same but for a clock. Of those where it is
        another one only a few are compared.
        """
        places = _running(namespace, [message.key for message in said[head:]])
        anchors = _anchors(namespace, ((m.value, m.key) for m in reversed(said))) if spoken else ()
        seen: set[str] = set()
        compared = 0
        for place in chain(reversed(places), anchors):
            others: list[Conversation] = []
            for holder in reversed(self._places.get(place, {})):  # the most recent first
                if holder in seen:
                    continue
                row = self._rows[holder]
                if match.same_head(row, said, head):
                    seen.add(holder)
                    yield row, True
                elif len(others) + compared < COMPARED:
                    seen.add(holder)
                    others.append(row)
            compared += len(others)
            for row in others:
                same = match.same_but_still(row, said, head, still)
                if same or match.like_head(row, said, head):
                    yield row, same

    def _clock(self, namespace: bytes, said: Sequence[Said], client: str) -> tuple[bytes, ...]:
        mark = _clock_mark(namespace, [message.value for message in said], client)
        for holder in reversed(self._places.get(mark, {})):
            row = self._rows[holder]
            return _head(row)
        return ()


_CLOCK, _ANCHOR = b"clock", b"anchor"  # kinds of marks; the others are bare digests


def _running(namespace: bytes, keys: Iterable[bytes]) -> list[bytes]:
    last, found = namespace, []
    for one in keys:
        last = blake2b(last + one, digest_size=KEY_BYTES).digest()
        found.append(last)
    return found


def _anchors(namespace: bytes, messages: Iterable[tuple[Any, bytes]]) -> Iterator[bytes]:
    """Marks of assistant messages: where to look when the beginning was rewritten."""
    for value, mark in messages:
        if isinstance(value, dict) and value.get("role") == "assistant":
            for name in sorted(match.call_ids(value)):  # many begin with one and the same call
                yield _ANCHOR + namespace + mark + name.encode("utf-8", "surrogatepass")
            yield _ANCHOR + namespace + mark


class _Marks(NamedTuple):
    """Where a row is found: at its system text, at each of its messages, at what it generated."""

    clock: bytes = b""
    places: tuple[bytes, ...] = ()
    answers: tuple[bytes, ...] = ()

    def all(self) -> set[bytes]:
        found = {self.clock, *self.places, *self.answers}
        found.discard(b"")
        return found


_NO_MARKS = _Marks()


def _marks(row: Conversation, old: Conversation | None, known: _Marks) -> _Marks:
    """The marks of a row; what its older self had already costs nothing."""
    clock, same, kept = b"", 0, False
    if old and old.namespace == row.namespace and _head(old) == _head(row):
        clock = known.clock  # masking a long text takes time
        for one, other in zip(old.lines[old.head :], row.lines[row.head :], strict=False):
            if one.key != other.key:
                break
            same += 1
        kept = old.answers == row.answers
    else:
        said = [orjson.loads(went) for went in _head(row)]
        clock = _clock_mark(row.namespace, said, row.client)
    if kept and same == len(row.lines) - row.head == len(known.places):
        return known
    places = known.places[:same]
    start = places[-1] if places else row.namespace
    keys = [line.key for line in row.lines[row.head + same :]]
    places = (*places, *_running(start, keys))
    return _Marks(clock, places, tuple(_answer_marks(row, places)))


def _answer_marks(row: Conversation, places: Sequence[bytes]) -> Iterator[bytes]:
    """Behind the message each answer followed, and by its anchors."""
    for answer in row.answers:
        at = answer.at - row.head
        if 0 <= at <= len(places):
            yield from _running(places[at - 1] if at else row.namespace, [answer.key])
    made = ((orjson.loads(answer.message), answer.key) for answer in row.answers)
    yield from _anchors(row.namespace, made)


def _head(row: Conversation) -> tuple[bytes, ...]:
    return tuple([line.went for line in row.lines[: row.head]])


def _clock_mark(namespace: bytes, head: Sequence[Any], client: str) -> bytes:
    """Equal for system texts that are equal but for a clock; empty where one is no plain text."""
    digest = blake2b(namespace, digest_size=KEY_BYTES)
    for message in head:
        text = text_of(message)
        if text is None:
            return b""
        masked = clocks.masked(text, shared=True, client=client)
        digest.update(masked.encode("utf-8", "surrogatepass") + b"\0")
    return _CLOCK + digest.digest() if head else b""
