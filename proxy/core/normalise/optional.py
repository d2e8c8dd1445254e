"""Rules that change the meaning, so they are off until somebody asks for them by name.

Each has its danger, from volatile-fields.md: a model that believes an old branch may commit to the
wrong one (CC-5), stale memories (OU-4), a stale plan-mode reminder makes it refuse edits (OC-3),
a tool that is gone gets called (CC-8), more context than it was trained for (T-3), no idea of the
budget left (CC-2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import orjson

from proxy.core.conversation import SYSTEM, head_length, text_of
from proxy.core.normalise.base import Context, Draft, Item
from proxy.core.normalise.system import note_target, reminder_left
from proxy.core.normalise.tools import name_of

_COUNTER = re.compile(r"\s*<total_tokens>[^<]*</total_tokens>\s*")
# Parts of a system text that stand still when asked to, by rule.
BLOCKS: Mapping[str, re.Pattern[str]] = {
    "git-status": re.compile(
        r"^gitStatus: (?:.*?^Recent commits:\n(?:[0-9a-f]{7,}[^\n]*(?:\n|\Z))*|.*\Z)",
        re.DOTALL | re.MULTILINE,
    ),
    "memory": re.compile(
        r"<memory_context>(?:(?!<memory_context>).)*?</memory_context>", re.DOTALL
    ),
}

# Of these, what says nothing of a person: it does not make a system text another one.
NOBODYS = ("git-status",)


def total_tokens(draft: Draft, _context: Context) -> None:
    """Delete mid-conversation system messages that hold nothing but the token countdown."""
    head = head_length(item.value for item in draft.messages)
    kept = [item for item in draft.messages[head:] if not _counts(item)]
    if len(kept) < len(draft.messages) - head:
        draft.messages = [*draft.messages[:head], *kept]
        draft.did("total-tokens", "messages")


def git_status(draft: Draft, _context: Context) -> None:
    """The git status of the first request stays; the newer one is told at the tail."""
    _keep_block(draft, "git-status")


def memory(draft: Draft, _context: Context) -> None:
    """The memory block of the first request stays; the newer one is told at the tail."""
    _keep_block(draft, "memory")


def moved_reminder(draft: Draft, _context: Context) -> None:
    """A reminder that moved on to the newest message stays where it first was, too."""
    lines = draft.lines
    for number in draft.unequal:
        item, line = draft.messages[number], lines[number]
        if item.json in (line.came, line.went):
            continue
        old = orjson.loads(line.went)
        if reminder_left(old, item.value):
            item.put({**item.value, "content": old["content"]})
            draft.did("moved-reminder", f"messages[{number}].content")


def removed_tools(draft: Draft, _context: Context) -> None:
    """Tools the client no longer declares stay declared, at their place."""
    if draft.before is None or not draft.tools:
        return
    now = {name_of(item.value): item for item in draft.tools}
    if "" in now or len(now) < len(draft.tools):
        return
    missing = [name for name, _ in draft.before.order if name and name not in now]
    if not missing:
        return
    made: list[Item] = []
    for name, data in draft.before.order:
        if name:
            made.append(now.pop(name) if name in now else Item(orjson.loads(data)))
    draft.tools = [*made, *now.values()]
    draft.did("removed-tools", "tools")


def preserve_thinking(draft: Draft, _context: Context) -> None:
    """Set the template argument that keeps the reasoning of finished turns."""
    given = draft.fields.get("chat_template_kwargs", draft.body.get("chat_template_kwargs"))
    if given is not None and (not isinstance(given, dict) or "preserve_thinking" in given):
        return
    draft.fields["chat_template_kwargs"] = {**(given or {}), "preserve_thinking": True}
    draft.did("preserve-thinking", "chat_template_kwargs")


def _counts(item: Item) -> bool:
    value = item.value
    if not isinstance(value, dict) or value.get("role") not in SYSTEM:
        return False
    text = text_of(value)
    return text is not None and _COUNTER.fullmatch(text) is not None


def _keep_block(draft: Draft, rule: str) -> None:
    if draft.before is None or note_target(draft) is None:
        return
    head = head_length(item.value for item in draft.messages)
    for number, line in enumerate(draft.before.lines[: min(head, draft.before.head)]):
        item = draft.messages[number]
        old, new = text_of(orjson.loads(line.went)), text_of(item.value)
        first, now = BLOCKS[rule].search(old or ""), BLOCKS[rule].search(new or "")
        if new is None or first is None or now is None or first[0] == now[0]:
            continue
        item.put({**item.value, "content": new[: now.start()] + first[0] + new[now.end() :]})
        draft.stale.append((first[0], now[0]))
        draft.did(rule, f"messages[{number}].content")
