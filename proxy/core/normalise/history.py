"""Ledger rules on what was said before: it goes out as it went out, or as it was generated.

Each rule looks at the messages the request repeats and puts back what a client changed in passing.
What really differs is the client's business and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from proxy.core.conversation import both_json, calls, json_equal, plain, sorted_json, text_of
from proxy.core.normalise.base import Context, Draft, Item


def replay(draft: Draft, _context: Context) -> None:
    """A message that comes as it came before goes out as it went; of system text see ``system``.

    The order of a message's members does not matter: it differs from one API to the other.
    """
    prefill, lines = _prefill(draft), draft.lines
    for number in draft.unequal:
        item, line = draft.messages[number], lines[number]
        if number == prefill or item.json == line.went:
            continue
        if item.json == line.came or sorted_json(item.json) == sorted_json(line.went):
            item.put_json(line.went)
            draft.did("replay", f"messages[{number}]")


def trimmed_text(draft: Draft, _context: Context) -> None:
    """A generated text equal but for space at its ends goes out with the space it had (T-7)."""
    for number, item, twin in _twins(draft):
        if _role(item.value) != "assistant":
            continue
        blank = item.value.get("content") is None
        ours, theirs = "" if blank else text_of(item.value), text_of(twin)
        if ours is None or not theirs or ours == theirs:
            continue
        if ours.strip() == theirs.strip():
            item.put({**plain(item.value), "content": theirs})
            draft.did("trimmed-text", f"messages[{number}].content")


def tool_arguments(draft: Draft, _context: Context) -> None:
    """Arguments that are equal as JSON go out as they were generated (T-5)."""
    for number, item, twin in _twins(draft):
        ours, theirs = calls(item.value), calls(twin)
        if not ours or len(ours) != len(theirs) or len(ours) != len(item.value["tool_calls"]):
            continue
        made = [_with_arguments(a, b) for a, b in zip(ours, theirs, strict=True)]
        if any(a is not b for a, b in zip(made, ours, strict=True)):
            item.put({**item.value, "tool_calls": made})
            draft.did("tool-arguments", f"messages[{number}].tool_calls")


def tool_results(draft: Draft, _context: Context) -> None:
    """An old tool's result that is equal as JSON goes out as it first did (T-5)."""
    for number, item, twin in _twins(draft):
        if _role(item.value) != "tool" or number == len(draft.messages) - 1:
            continue
        ours, theirs = text_of(item.value), text_of(twin)
        if ours is None or theirs is None or ours == theirs:
            continue
        if both_json(ours, theirs):
            item.put({**plain(item.value), "content": theirs})
            draft.did("tool-results", f"messages[{number}].content")


def call_ids(draft: Draft, _context: Context) -> None:
    """Tool-call ids made anew by the client become the ones first seen (T-6).

    Clients number their calls anew in every turn: an id counts up to the next model's message.
    """
    twins = {number: twin for number, _, twin in _twins(draft)}
    start = min([draft.known, *twins]) if draft.before else len(draft.messages)
    while start > 0 and _role(draft.messages[start - 1].value) == "tool":
        start -= 1
    renamed: dict[str, str] = {}
    for number, item in enumerate(draft.messages[max(start - 1, 0) :], max(start - 1, 0)):
        value = item.value
        if _role(value) == "assistant":
            renamed = _first_seen(_own(draft, item), twins.get(number, value))
            made = [{**call, **_renamed(call, "id", renamed)} for call in calls(value)]
            whole = made and len(made) == len(value["tool_calls"])
            if number in twins and whole and made != value["tool_calls"]:
                item.put({**value, "tool_calls": made})
                draft.did("call-ids", f"messages[{number}].tool_calls")
        elif _role(value) == "tool" and (new := _renamed(value, "tool_call_id", renamed)):
            item.put({**value, **new})
            draft.did("call-ids", f"messages[{number}].tool_call_id")


def reasoning(draft: Draft, _context: Context) -> None:
    """Reasoning the client dropped or trimmed is put back (T-3).

    What was sent before always, so that the history extends; what was generated in the current tool
    loop, where templates render it.
    """
    loop = _last_user(draft)
    for number, item, twin in _twins(draft):
        theirs = twin.get("reasoning_content")
        ours = item.value.get("reasoning_content")
        if not isinstance(theirs, str) or not theirs or ours == theirs:
            continue
        if number >= draft.known and number < loop:
            continue
        if not ours or (isinstance(ours, str) and ours.strip() == theirs.strip()):
            item.put({**item.value, "reasoning_content": theirs})
            draft.did("reasoning", f"messages[{number}].reasoning_content")


def _twins(draft: Draft) -> Iterator[tuple[int, Item, Any]]:
    """Messages that differ from what the ledger has in their place, and that."""
    before = draft.before
    if before is None:
        return
    prefill = _prefill(draft)
    for number in draft.unequal:  # no rule makes equal messages differ again
        item, went = draft.messages[number], before.lines[number].went
        if number != prefill and item.json != went:
            yield number, item, orjson.loads(went)
    for number, answer in sorted(draft.answers.items()):
        if number != prefill:
            yield number, draft.messages[number], orjson.loads(answer.message)


def _prefill(draft: Draft) -> int:
    """The place of a last message the model is to go on with, as its author left it; or -1."""
    last = len(draft.messages) - 1
    return last if last >= 0 and _role(draft.messages[last].value) == "assistant" else -1


def _last_user(draft: Draft) -> int:
    """Where the current tool loop begins."""
    for number in range(len(draft.messages) - 1, -1, -1):
        value = draft.messages[number].value
        if isinstance(value, dict) and value.get("role") == "user":
            return number
    return -1


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _own(draft: Draft, item: Item) -> Any:
    """The message as the client sent it."""
    return item.value if item.index is None else draft.body["messages"][item.index]


def _first_seen(mine: Any, other: Any) -> dict[str, str]:
    """First-seen ids by the client's; none where one id of the client's stands for several."""
    pairs = {
        (a["id"], b["id"])
        for a, b in zip(calls(mine), calls(other), strict=False)
        if isinstance(a.get("id"), str) and isinstance(b.get("id"), str)
    }
    found = dict(pairs)
    return found if len(found) == len(pairs) else {}


def _renamed(value: Any, name: str, first_seen: dict[str, str]) -> dict[str, str]:
    """The member ``name`` with its first-seen value, if that is another one."""
    now = value.get(name)
    first = first_seen.get(now) if isinstance(now, str) else None
    return {} if first in (None, now) else {name: first}


def _with_arguments(ours: Any, theirs: Any) -> Any:
    """``ours`` with the argument string of ``theirs``, where they mean the same."""
    mine, other = ours["function"], theirs["function"]
    a, b = mine.get("arguments"), other.get("arguments")
    strings = isinstance(a, str) and isinstance(b, str)
    if mine.get("name") != other.get("name") or not strings or a == b or not json_equal(a, b):
        return ours
    return {**ours, "function": {**mine, "arguments": b}}
