"""Tool definitions stay in the order and in the bytes they were first sent in."""

from __future__ import annotations

from typing import Any

from proxy.core.conversation import sorted_json
from proxy.core.normalise.base import Context, Draft, Item

REMEMBERED = 1024  # tools a conversation's order may hold


def name_of(tool: Any) -> str:
    """The name of a tool definition, ``""`` when it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def tool_order(draft: Draft, _context: Context) -> None:
    """First-seen order and bytes; new tools go to the end (CC-8, OC-4)."""
    if draft.before is None or not draft.tools or not draft.before.order:
        return
    seen = {name: (place, data) for place, (name, data) in enumerate(draft.before.order)}
    names = [name_of(item.value) for item in draft.tools]
    if "" in names or len(set(names)) < len(names):
        return
    for number, (name, item) in enumerate(zip(names, draft.tools, strict=True)):
        first = seen[name][1] if name in seen else item.json
        # the same definition with its keys in another order
        if item.json != first and sorted_json(item.json) == sorted_json(first):
            item.put_json(first)
            draft.did("tool-order", f"tools[{number}]")
    last = len(seen)
    ranks = [seen[name][0] if name in seen else last for name in names]
    order = sorted(range(len(names)), key=ranks.__getitem__)  # stable: new ones keep their order
    if order != list(range(len(names))):
        draft.tools = [draft.tools[number] for number in order]
        draft.did("tool-order", "tools")


def remembered(
    order: tuple[tuple[str, bytes], ...], sent: list[Item] | None
) -> tuple[tuple[str, bytes], ...]:
    """The first-seen order with what was sent now; what a definition became takes its old place."""
    if not sent:
        return order
    held = dict(order)
    now = {name_of(item.value): item.json for item in sent}
    if now.items() <= held.items():
        return order
    return tuple({**held, **now}.items())[:REMEMBERED]
