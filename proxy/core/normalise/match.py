"""Whether a request belongs to a conversation of the ledger: by proof, not by likeness. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import orjson

from proxy.core.conversation import calls, text_of
from proxy.core.ledger import Answer, Conversation
from proxy.core.normalise import clocks
from proxy.core.normalise.system import first_user, reminder_left, stood_still
from proxy.core.text import common_lines, overlap

ID_CHARS = 12  # a tool call's id this long is nobody else's
RUN = 4  # so many messages in a row are no coincidence
SIMILAR = 0.5  # share of a system text that has to be equal for it to be the same one, edited


class Said(NamedTuple):
    """One message of a request as the book looks at it."""

    value: Any
    json: bytes
    key: bytes
    role: str  # "" for what is no message


class Still(NamedTuple):
    """What may differ in a system text and leave it the same: clocks, and these blocks."""

    client: str
    blocks: tuple[re.Pattern[str], ...]


_BEFORE, _BEHIND = b'{"role":"system","content":"', b'"}'


def same_head(row: Conversation, said: Sequence[Said], head: int) -> bool:
    """Whether the leading system messages are those that came or went."""
    if row.head != head:
        return False
    for line, message in zip(row.lines[:head], said[:head], strict=True):
        came = line.key == message.key and message.json == line.came  # a key tells most apart
        if not came and (line.went is line.came or message.json != line.went):
            return False
    return True


def like_head(row: Conversation, said: Sequence[Said], head: int) -> bool:
    """Whether the leading system messages are an edited form of the row's."""
    pairs = list(zip(row.lines[: row.head], said[:head], strict=False))
    return bool(pairs) and all(
        message.json in (line.came, line.went) or _alike(_bare(line.came), _bare(message.json))
        for line, message in pairs
    )


def _alike(a: bytes, b: bytes) -> bool:
    return overlap(a, b) >= SIMILAR or common_lines(a, b) >= SIMILAR


def _bare(message: bytes) -> bytes:
    """Without what all system messages begin and end with."""
    return message.removeprefix(_BEFORE).removesuffix(_BEHIND)


def same_but_still(row: Conversation, said: Sequence[Said], head: int, still: Still) -> bool:
    """Whether the leading system messages differ from the row's in what stands still only."""
    if row.head != head:
        return False
    for line, message in zip(row.lines[:head], said[:head], strict=True):
        old, new = text_of(orjson.loads(line.went)), text_of(message.value)
        if old is None or new is None:
            return False
        for block in still.blocks:
            first, now = block.search(old), block.search(new)
            if first and now:
                new = new[: now.start()] + first[0] + new[now.end() :]
        if clocks.differences(old, new, shared=False, client=still.client) is None:
            return False
    return True


def proved(
    row: Conversation, said: Sequence[Said], known: int, head: int, ids: set[str], *, same: bool
) -> bool:
    """Whether a request with history belongs to this conversation, beyond looking like it.

    Its history repeats the row's from the start, under the same system text; or a tool call in it
    (``ids``) is one the backend made in the row; or, where the beginning was trimmed, a run of
    messages is the row's.
    """
    if same and known > head:
        return True
    if ids and any(ids & call_ids(orjson.loads(answer.message)) for answer in row.answers):
        return True
    return same and _longest_run(row, said, head) >= RUN


def no_twin(row: Conversation, said: Sequence[Said], known: int, head: int) -> bool:
    """Whether what is repeated under another system text is so much that it is no twin's.

    Two conversations of one program may begin with the same greeting and the same call.
    """
    count = known - head + follows(row, said, known)
    return count >= RUN and goes_on(row, said, known)


def call_ids(message: Any) -> set[str]:
    """Ids of a message's tool calls that are long enough to be nobody else's."""
    ids = (call.get("id") for call in calls(message))
    return {name for name in ids if isinstance(name, str) and len(name) >= ID_CHARS}


def _longest_run(row: Conversation, said: Sequence[Said], head: int) -> int:
    """How many messages in a row, up to the request's last answer, are the row's."""
    keys = [line.key for line in row.lines[row.head :]]
    keys += [answer.key for answer in row.answers[-1:] if answer.at == len(row.lines)]
    spoken = [number for number, message in enumerate(said) if message.role == "assistant"]
    ours = [message.key for message in said[head : spoken[-1] + 1]]
    if ours[-1] not in keys:
        return 0
    place = len(keys) - keys[::-1].index(ours[-1])
    pairs = zip(reversed(ours), reversed(keys[:place]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def repeated(row: Conversation, said: Sequence[Said], head: int, client: str) -> int:
    """How many leading messages repeat the row's lines. The head counts as one, if of equal length.

    An old user message from which only a clock or reminders vanished is a repeated one, if what
    follows it is what followed it; the last message is nothing old.
    """
    if row.head != head:
        return 0
    known = head
    for line, message in zip(row.lines[head:], said[head:], strict=False):
        if line.key != message.key:
            if not follows(row, said, known + 1):
                break
            old = orjson.loads(line.went)
            first = first_user(message.value for message in said)
            same = stood_still(old, message.value, client, first=known == first)
            if not same and not reminder_left(old, message.value):
                break
        known += 1
    return known


def follows(row: Conversation, said: Sequence[Said], number: int) -> bool:
    """Whether the message at this place is the row's there, or one generated there."""
    if number >= len(said):
        return False
    if number < len(row.lines) and row.lines[number].key == said[number].key:
        return True
    return any(a.at == number and a.key == said[number].key for a in row.answers)


def generated(
    row: Conversation, said: Sequence[Said], known: int
) -> tuple[tuple[int, Answer], ...]:
    """Generated messages that are in the request beyond what is known.

    At the place they were generated for, behind what is known and at most one message that differs;
    or, where the beginning was rewritten, those with a tool call of the same id.
    """
    found: list[tuple[int, Answer]] = []
    for number, message in enumerate(said[known:], known):
        ids = call_ids(message.value) if message.role == "assistant" else set()
        for answer in row.answers:
            here = answer.at == number <= known + 1 and message.role == "assistant"
            if answer.key == message.key and (here or ids & call_ids(orjson.loads(answer.message))):
                found.append((number, answer))
    return tuple(dict(found).items())


def goes_on(row: Conversation, said: Sequence[Said], known: int) -> bool:
    """Still the same conversation, no branch.

    All of it is there, or all but its last message (clients with a moving tail), or its latest
    answer is (the history before that was rewritten).
    """
    if known >= len(row.lines) - 1:
        return True
    latest = row.answers[-1].key if row.answers else None
    return latest is not None and any(
        message.key == latest for message in said[known:] if message.role == "assistant"
    )
