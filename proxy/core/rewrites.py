"""What a client changed in the messages it had sent before: the first such change, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from proxy.core.conversation import calls, json_equal, texts_of
from proxy.core.excerpt import difference
from proxy.core.ledger import Line
from proxy.core.template import Traits
from proxy.core.text import around_reminders
from proxy.core.why import Cold, Why

CLEARED = "[Old tool result content cleared]"  # Claude Code's micro-compaction (CC-9)
_IN_A_ROW = 3  # messages that must agree before two places count as the same
_ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool result",
}
_EDITED = "The client edited its history. One re-read from there is correct."
_COMPACTED = (
    "The client summarised or cut its history, or a message was edited. One re-read is correct."
)
_CLEARED = (
    "The client clears old tool results to save context, often after a pause. One re-read is"
    " correct; see the client's settings to turn that off."
)
_REMINDED = (
    "The client moves its reminders to the newest message. The opt-in rule `moved-reminder` keeps"
    " them in place."
)
_TAIL = (
    "The client adds text to its newest message, or a message at the end, and takes it back in the"
    " next request. Only what comes after is read again."
)
_TRIMMED = "The client drops its oldest messages. A larger context, or trimming in chunks, helps."
_REASONING = (
    "The client does not send back the model's reasoning as it came. The rule `reasoning` puts it"
    " back inside a running tool loop."
)
_ARGUMENTS = (
    "The client writes tool calls anew. Calls this proxy has streamed are put back as they were"
    " generated; these arguments mean something else."
)
_OWN_NOTE = (
    "The prompt was sent again, and the note tells a newer value. Nothing before it is computed"
    " again."
)
_IDS = "The client makes new ids. Few templates render them."
_IMAGES = "The client encodes or resizes its images anew. The same bytes are reused."


@dataclass(frozen=True, slots=True)
class _Message:
    """A message as a template sees it."""

    role: str
    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: tuple[str, ...]
    media: tuple[bytes, ...]

    @property
    def called(self) -> str:
        """The role, as users know it."""
        return _ROLES.get(self.role, "other role")


def text_of_line(line: Line) -> str:
    """The text of a message as it went out, note included."""
    return _read(line).text


def first_rewrite(
    before: Sequence[Line], now: Sequence[Line], head: int, traits: Traits
) -> Why | None:
    """The first change behind ``head`` leading messages; None when ``now`` extends ``before``."""
    ids: Why | None = None
    for place, (was, new) in enumerate(zip(before[head:], now[head:], strict=False), head):
        if _same(was, new):
            continue
        one, other = _read(was), _read(new)
        if traits.keeps_reasoning is False and _finished(now, place):
            # the template leaves it out there, whatever the client sends
            one, other = replace(one, reasoning=""), replace(other, reasoning="")
        if replace(one, ids=()) != replace(other, ids=()):
            if was.went == new.went:
                cut = difference(was.note, new.note)
                sentence = f"Slotkeeper's own note changed at the end of {_name(place, other)}"
                return Why(Cold.HISTORY, sentence, cut.before, cut.after, _OWN_NOTE)
            moved = _shifted(before, now, head, place) if was.key != new.key else None
            return moved or _part(one, other, place) or _text(before, now, place, one, other)
        if ids is None and one.ids != other.ids:
            sentence = f"ids of tool calls changed in {_name(place, other)}"
            ids = Why(Cold.HISTORY, sentence, advice=_IDS)
    gone = len(before) - len(now)
    if gone > 0:
        what = "message was" if gone == 1 else f"{gone} messages were"
        return Why(Cold.HISTORY, f"the last {what} taken back", advice=_EDITED)
    return ids


def _same(one: Line, other: Line) -> bool:
    return one is other or (one.went == other.went and one.note == other.note)


def _read(line: Line) -> _Message:
    message: Any = orjson.loads(line.went) if line.went else None
    if not isinstance(message, dict):
        message = {}
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    reasoning = message.get("reasoning_content")
    found = calls(message)
    return _Message(
        role=str(message.get("role")),
        text="\n".join(texts_of(message)) + line.note,
        reasoning=reasoning if isinstance(reasoning, str) else "",
        calls=tuple(
            (str(call["function"].get("name")), _arguments(call["function"])) for call in found
        ),
        ids=(str(message.get("tool_call_id")), *(str(call.get("id")) for call in found)),
        media=tuple(
            orjson.dumps(part) for part in parts if isinstance(part, dict) and "text" not in part
        ),
    )


def _arguments(function: Any) -> str:
    given = function.get("arguments")
    return given if isinstance(given, str) else orjson.dumps(given).decode()


def _finished(now: Sequence[Line], place: int) -> bool:
    """Whether a user message comes after it: its turn is over."""
    return any(_read(line).role == "user" for line in now[place + 1 :])


def _name(place: int, message: _Message) -> str:
    return f"message {place + 1} ({message.called})"


def _meets(one: Sequence[Line], i: int, other: Sequence[Line], j: int) -> bool:
    """Whether the two go on with the same messages from there."""
    count = min(_IN_A_ROW, len(one) - i, len(other) - j)
    return count > 0 and all(one[i + k].key == other[j + k].key for k in range(count))


def _places(text: Sequence[Line], start: int, other: Sequence[Line], i: int) -> Iterator[int]:
    return (j for j in range(start, len(text)) if _meets(text, j, other, i))


def _shifted(before: Sequence[Line], now: Sequence[Line], head: int, place: int) -> Why | None:
    """Messages that were removed or inserted, so that everything after stands elsewhere."""
    last = place == len(before) - 1
    found = next(_places(before, place + 1, now, place), None)
    if found is not None:
        gone = found - place
        if place == head:
            plural = "message is" if gone == 1 else "messages are"
            sentence = f"history trimmed at the front: {gone} {plural} gone"
            return Why(Cold.TRIMMED, sentence, advice=_TRIMMED)
        sentence = (
            f"{_name(place, _read(before[place]))} was removed"
            if gone == 1
            else f"messages {place + 1} to {found} were removed"
        )
        return Why(Cold.HISTORY, sentence, advice=_COMPACTED)
    found = next(_places(now, place + 1, before, place), None)
    if found is not None:
        if last and found == len(now) - 1:
            sentence = f"the last message moved from place {place + 1} to {found + 1}"
            return Why(Cold.HISTORY, sentence, advice=_TAIL)
        more = found - place
        plural = "a message was" if more == 1 else f"{more} messages were"
        sentence = f"{plural} inserted at message {place + 1}"
        return Why(Cold.HISTORY, sentence, advice=_EDITED)
    was, new = _read(before[place]), _read(now[place])
    if last and was.role != new.role:
        sentence = f"{_name(place, was)}, the last one sent before, is gone"
        return Why(Cold.HISTORY, sentence, advice=_TAIL)
    return None


def _part(was: _Message, new: _Message, place: int) -> Why | None:
    """A change of something that is not the text."""
    name = _name(place, new)
    if was.role != new.role:
        sentence = f"role of message {place + 1} changed from {was.called} to {new.called}"
        return Why(Cold.HISTORY, sentence, advice=_EDITED)
    if was.reasoning != new.reasoning:
        if not new.reasoning:
            sentence = f"reasoning was dropped from {name}"
        elif not was.reasoning:
            sentence = f"reasoning was added to {name}"
        else:
            sentence = f"reasoning was rewritten in {name}"
        cut = difference(was.reasoning, new.reasoning)
        return Why(Cold.REASONING, sentence, cut.before, cut.after, _REASONING)
    if was.text != new.text:
        return None
    if was.media != new.media:
        if len(was.media) == len(new.media):
            sentence = f"an image changed in {name}"
        elif len(was.media) > len(new.media):
            sentence = f"an image was removed from {name}"
        else:
            sentence = f"an image was added to {name}"
        return Why(Cold.HISTORY, sentence, advice=_IMAGES)
    return _calls(was, new, name)


def _calls(was: _Message, new: _Message, name: str) -> Why:
    for (tool, old), (tool_now, given) in zip(was.calls, new.calls, strict=False):
        if tool != tool_now:
            break
        if old != given:
            same = " (the same as JSON)" if json_equal(old, given) else ""
            cut = difference(old, given)
            sentence = f"arguments of tool `{tool[:40]}` were rewritten in {name}{same}"
            return Why(Cold.HISTORY, sentence, cut.before, cut.after, _ARGUMENTS)
    return Why(Cold.HISTORY, f"tool calls changed in {name}", advice=_EDITED)


def _text(
    before: Sequence[Line], now: Sequence[Line], place: int, was: _Message, new: _Message
) -> Why:
    """A change of the text, and how clients come to make it."""
    name = _name(place, new)
    cut = difference(was.text, new.text)

    def told(sentence: str, advice: str) -> Why:
        return Why(Cold.HISTORY, sentence, cut.before, cut.after, advice)

    if CLEARED in new.text and CLEARED not in was.text:
        return told(f"an old result was cleared in {name}", _CLEARED)
    old, around = around_reminders(was.text)
    given, now_around = around_reminders(new.text)
    if old != given and _bare(around) == _bare(now_around):
        return told(_reminder(now, place, old, given, name), _REMINDED)
    if len(now) < len(before):
        sentence = f"history was rewritten at {name}: {len(now)} messages instead of {len(before)}"
        return told(sentence, _COMPACTED)
    taken_back = place == len(before) - 1 and was.text.startswith(new.text.rstrip())
    return told(f"history was rewritten at {name}", _TAIL if taken_back else _EDITED)


def _bare(pieces: Sequence[str]) -> str:
    return "".join("".join(pieces).split())


def _reminder(
    now: Sequence[Line], place: int, old: Sequence[str], given: Sequence[str], name: str
) -> str:
    gone = next((one for one in old if one not in given), "")
    if not gone:
        return f"a system reminder was put into {name}"
    for later in range(place + 1, len(now)):
        if gone in text_of_line(now[later]):
            return f"a system reminder moved from message {place + 1} to message {later + 1}"
    return f"a system reminder was taken out of {name}"
