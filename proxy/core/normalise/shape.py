"""Rules that need no ledger: what is known to be noise is taken out wherever it is known to be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from proxy.core.conversation import SYSTEM, plain
from proxy.core.normalise.base import Context, Draft, Item

# volatile-fields.md CC-1: every field ends in ";" and is one of cc_version, cc_entrypoint, cch,
# cc_...: other words begin the prompt. As a block of its own, or the leading run of a string
# (bridges join blocks, with or without a line end).
_BILLING = re.compile(r"x-a[nh]thropic-billing-header:[ \t]*(?:cc[a-z_]*=[^;\s]*;[ \t]*)+\n*")
_DROPPED = ("context_management",)


def billing_header(draft: Draft, _context: Context) -> None:
    """Delete Claude Code's billing block where it opens the system text, and nowhere else."""
    first = draft.messages[0] if draft.messages else None
    if first is None or not isinstance(first.value, dict) or first.value.get("role") not in SYSTEM:
        return
    content = first.value.get("content")
    if isinstance(content, str):
        found = _BILLING.match(content)
        if found is None:
            return
        rest: Any = content[found.end() :]
    elif isinstance(content, list) and content and isinstance(text := _text(content[0]), str):
        if _BILLING.fullmatch(text) is None:
            return
        rest = content[1:]
    else:
        return
    if rest:
        first.put({**first.value, "content": rest})
    else:
        del draft.messages[0]
    draft.did("billing-header", "messages[0]")


def cache_control(draft: Draft, _context: Context) -> None:
    """Strip ``cache_control`` marks, which move every turn, and ``context_management``."""
    for name in _DROPPED:
        if name in draft.body:
            draft.drop.add(name)
            draft.did("cache-control", name)
    for place, items in (("messages", draft.messages), ("tools", draft.tools or ())):
        for number, item in enumerate(items):
            if b'"cache_control"' not in item.json:
                continue
            cleaned = _unmarked(item.value)
            if cleaned is not item.value:
                item.put(cleaned)
                draft.did("cache-control", f"{place}[{number}]")


def single_part(draft: Draft, _context: Context) -> None:
    """A content of one text part becomes the plain string: clients flip between the two."""
    for number, item in enumerate(draft.messages):
        value = plain(item.value)
        if value is not item.value and item.value["content"][0].keys() <= {"type", "text"}:
            item.put(value)
            draft.did("single-part", f"messages[{number}]")


def items(values: Iterable[Any]) -> list[Item]:
    """Elements as the client sent them."""
    return [Item(value, index) for index, value in enumerate(values)]


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None


def _unmarked(value: Any) -> Any:
    """A message or tool without its marks: on itself, its parts, its calls, its function."""
    if not isinstance(value, dict):
        return value
    found = {name: item for name, item in value.items() if name != "cache_control"}
    changed = len(found) != len(value)
    for name in ("content", "tool_calls", "function"):
        inner = value.get(name)
        if isinstance(inner, list):
            cleaned: Any = [_unmarked(part) for part in inner]
            same = all(a is b for a, b in zip(cleaned, inner, strict=True))
        elif isinstance(inner, dict):
            cleaned = _unmarked(inner)
            same = cleaned is inner
        else:
            continue
        if not same:
            found[name], changed = cleaned, True
    return found if changed else value
