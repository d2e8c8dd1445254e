"""Rules on system text: a clock in it stands still, and the newer value is told at the tail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from proxy.core.conversation import SYSTEM, head_length, text_of, texts_of
from proxy.core.normalise import clocks
from proxy.core.normalise.base import Context, Draft
from proxy.core.text import CLOSE, OPEN, around_reminders

AGAIN = (
    "\n\n<system-reminder>\nWhat the system prompt says of the time holds again.\n"
    "</system-reminder>"
)
_TARGETS = ("user", "tool")
_KWARGS = "chat_template_kwargs"


def known_clocks(draft: Draft, context: Context) -> None:
    """A recognised client's own clock keeps its first value, whatever else changed (KNOWN rows)."""
    if not context.client:
        return
    for number, first in _frozen(draft):
        item = draft.messages[number]
        text, old = text_of(item.value), text_of(first)
        if text is None or old is None or text == old:
            continue
        pinned = clocks.pinned(text, old, context.client)
        pairs = clocks.differences(pinned, text, shared=False, client=context.client)
        if pairs:
            draft.stale += pairs
            item.put({**item.value, "content": pinned})
            draft.did("known-clocks", f"messages[{number}].content")


def clock(draft: Draft, context: Context) -> None:
    """Where all that differs is time- or counter-shaped, the first text stays.

    For a new conversation: only clocks, and the text of another one of the same key and model.
    """
    shared = draft.before is None
    for number, first in _frozen(draft):
        item = draft.messages[number]
        text, old = text_of(item.value), text_of(first)
        if text is None or old is None or text == old or item.value.keys() != first.keys():
            continue
        pairs = clocks.differences(old, text, shared=shared, client=context.client)
        if pairs:
            draft.stale += pairs
            item.put({**item.value, "content": old})
            draft.did("clock", f"messages[{number}].content")


def vanished_clock(draft: Draft, context: Context) -> None:
    """A clock the client took out of (or renewed in) an old user message stays as it was sent."""
    first = first_user(item.value for item in draft.messages)
    lines = draft.lines
    for number in draft.unequal:
        item, line = draft.messages[number], lines[number]
        if item.json in (line.came, line.went):
            continue
        old = orjson.loads(line.went)
        if stood_still(old, item.value, context.client, first=number == first):
            draft.stale_first += _renewed(old, item.value, context.client)
            item.put({**item.value, "content": old["content"]})
            draft.did("vanished-clock", f"messages[{number}].content")


def first_user(messages: Iterable[Any]) -> int:
    """The place of the first user message, -1 without one."""
    places = (
        number
        for number, message in enumerate(messages)
        if isinstance(message, dict) and message.get("role") == "user"
    )
    return next(places, -1)


def stood_still(old: Any, new: Any, client: str, *, first: bool) -> bool:
    """Whether two forms of one old user message differ in nothing but a clock.

    One that is gone, as a part or a block of its own (QW-1, anything-llm#6399); in the ``first``
    user message also a known client's, with another value. All else is equal to the last space.
    """
    if not _role(old) == _role(new) == "user":
        return False
    pairs = _aligned(old, new)
    moved = [(one, other) for one, other in pairs if one != other]
    return bool(moved) and all(
        other is None
        or clocks.vanished(one, other)
        or (first and bool(_first_differences(one, other, client)))
        for one, other in moved
    )


def reminder_left(old: Any, new: Any) -> bool:
    """Whether a user message is the old one without its reminders (OC-3)."""
    if not _role(old) == _role(new) == "user":
        return False
    reminders, around = around_reminders("\n".join(_texts(old)))
    now = "\n".join(_texts(new)).strip()
    return bool(reminders) and _closed(around) == now != ""


def template_date(draft: Draft, context: Context) -> None:
    """The date a template writes by itself is the one of the conversation's first request (T-1)."""
    traits = context.traits
    if not (traits.writes_date and traits.has_date_string and context.today):
        return
    given = draft.body.get(_KWARGS)
    if given is not None and (not isinstance(given, dict) or "date_string" in given):
        return
    sent = orjson.loads(draft.before.settings).get(_KWARGS) if draft.before else None
    first = sent.get("date_string") if isinstance(sent, dict) else None
    stays = isinstance(first, str) and note_target(draft) is not None
    first = first if stays else context.today
    draft.fields[_KWARGS] = {**(given or {}), "date_string": first}
    draft.did("template-date", _KWARGS)
    if first != context.today:
        draft.stale.append((f"Today Date: {first}", f"Today Date: {context.today}"))


def tail_note(draft: Draft, _context: Context) -> None:
    """Notes stay where they were first put; what the frozen text does not say is told at the end.

    The last user or tool message carries it. In a tool loop once a minute is enough, and where that
    message was sent before and something follows it (the beginning of an answer to go on with).
    """
    noted = [(number, line.note) for number, line in enumerate(draft.lines) if line.note]
    if not (noted or draft.stale or draft.stale_first):
        return
    target = note_target(draft)
    fresh = target is not None and (target >= draft.known or target == len(draft.messages) - 1)
    told = ""
    for number, note in noted:
        if not (fresh and number == target):
            draft.notes[number] = told = note
            draft.did("tail-note", f"messages[{number}].content")
    if target is None:
        return
    text = clocks.note(draft.stale) + clocks.note(draft.stale_first, where="the first message")
    if not text and told not in ("", AGAIN):
        text = AGAIN
    seldom = not fresh or draft.messages[target].value.get("role") == "tool"
    if text in ("", told) or (seldom and clocks.coarse(text) == clocks.coarse(told)):
        return
    draft.notes[target] = text
    draft.did("tail-note", f"messages[{target}].content")


def leading_systems(draft: Draft, context: Context) -> None:
    """Two leading system messages become one, where the template refuses two (OC-6)."""
    if context.traits.two_systems is not False:
        return
    count = head_length(item.value for item in draft.messages)
    if count < 2:  # noqa: PLR2004 - two is the point
        return
    texts = [text_of(item.value) for item in draft.messages[:count]]
    if None in texts:
        return
    first = draft.messages[0]
    first.put({**first.value, "content": "\n\n".join(text for text in texts if text)})
    del draft.messages[1:count]
    draft.did("leading-systems", "messages[0]")


def system_in_place(draft: Draft, context: Context) -> None:
    """A system message in mid-conversation becomes user text at its place (CC-3).

    Only where the template cannot render it. Never moved to the front, never dropped. Whether it is
    joined to a neighbour depends on what stands before it alone, so the history extends.
    """
    if context.traits.mid_system is not False:
        return
    head = head_length(item.value for item in draft.messages)
    if not any(_role(item.value) in SYSTEM for item in draft.messages[head:]):
        return
    kept = draft.messages[:head]
    folding = False  # the last kept message took in a demoted one, or is one
    for item in draft.messages[head:]:
        value = item.value
        role = _role(value)
        last = kept[-1] if len(kept) > head else None
        joins = last is not None and _role(last.value) == "user"
        reminder = _reminder(value) if role in SYSTEM else None
        if reminder is not None:
            if joins and last is not None:
                last.put(joined(last.value, reminder))
            else:
                item.put({"role": "user", "content": reminder})
                kept.append(item)
            folding = True
            draft.did("system-in-place", "messages")
        elif role == "user" and folding and joins and last is not None:
            last.put(joined(last.value, value.get("content")))
        else:
            kept.append(item)
            folding = False
    draft.messages = kept


def joined(message: Any, more: Any) -> Any:
    """A user message with more content behind its own."""
    content = message.get("content")
    if isinstance(content, str) and isinstance(more, str):
        return {**message, "content": f"{content}\n\n{more}" if content else more}
    return {**message, "content": [*_as_parts(content), *_as_parts(more)]}


def noted(message: Any, note: str) -> Any:
    """``message`` with a note behind its text."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": note}]}
    return {**message, "content": (content or "") + note}


def _frozen(draft: Draft) -> list[tuple[int, Any]]:
    """Leading system messages that differ from what went out first in their place, and that."""
    if draft.before is None:
        firsts = draft.clock
    else:
        firsts = tuple(line.went for line in draft.before.lines[: draft.before.head])
    head = head_length(item.value for item in draft.messages)
    if len(firsts) != head or note_target(draft) is None:  # nobody to tell the newer value
        return []
    return [
        (number, orjson.loads(first))
        for number, first in enumerate(firsts)
        if draft.messages[number].json != first
    ]


def _texts(message: Any) -> list[str]:
    """A message's texts, part by part; none when a part is no text."""
    content, found = message.get("content"), texts_of(message)
    return found if not isinstance(content, list) or len(found) == len(content) else []


def _first_differences(old: str, new: str, client: str) -> list[tuple[str, str]] | None:
    return clocks.differences(old, new, shared=True, client=client, place="first-user")


def _renewed(old: Any, new: Any, client: str) -> list[tuple[str, str]]:
    """What a first message's frozen clocks say, and what holds now."""
    pairs = (
        _first_differences(one, other, client)
        for one, other in _aligned(old, new)
        if other is not None
    )
    return [pair for found in pairs for pair in found or ()]


def _closed(around: list[str]) -> str:
    """What stood around reminders, without the space next to them."""
    first, *others = around
    return "\n".join([first.rstrip(), *(piece.strip() for piece in others)]).strip()


def _aligned(old: Any, new: Any) -> list[tuple[str, str | None]]:
    """Texts of two messages part by part; None where the newer one has lost a clock's part.

    Empty when there is no telling which belongs to which.
    """
    before, now = _texts(old), _texts(new)
    if len(before) == len(now):
        return list(zip(before, now, strict=True))
    pairs: list[tuple[str, str | None]] = []
    at = 0
    for text in before if now else ():
        here = now[at] if at < len(now) else None
        if here != text and clocks.only_clock(text):
            here = None
        at += here is not None
        pairs.append((text, here))
    gone = [text for text, other in pairs if other is None]
    return pairs if at == len(now) and all(map(clocks.only_clock, gone)) else []


def note_target(draft: Draft) -> int | None:
    """The place of the last user or tool message, which carries a note; None without one."""
    for number in range(len(draft.messages) - 1, -1, -1):
        value = draft.messages[number].value
        if isinstance(value, dict) and value.get("role") in _TARGETS:
            content = value.get("content")
            return number if content is None or isinstance(content, str | list) else None
    return None


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _reminder(message: Any) -> Any:
    """A system message's content as user text; None where it is nothing a message may hold."""
    content = message.get("content")
    text = "" if content is None else text_of(message)
    if text is None:
        return [_reminding(part) for part in content] if isinstance(content, list) else None
    return _tagged(text)


def _reminding(part: Any) -> Any:
    text = part.get("text") if isinstance(part, dict) else None
    return {**part, "text": _tagged(text)} if isinstance(text, str) else part


def _tagged(text: str) -> str:
    return text if text.lstrip().startswith(OPEN) else f"{OPEN}\n{text}\n{CLOSE}"


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
