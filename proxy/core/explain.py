"""Why a request reused less than its conversation's last prompt (volatile-fields.md).

Asked for cold requests only, in this order: what was sent (``first_difference``), what the template
made of it (``rendered_difference``), what happened to the slot (``lost``). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from proxy.core.excerpt import Difference, difference, parting, shown
from proxy.core.ledger import Conversation
from proxy.core.rewrites import first_rewrite, text_of_line
from proxy.core.template import A_DATE, Traits
from proxy.core.why import Cold, Why, quoted

__all__ = ["Cold", "Why", "first_difference", "lost", "quoted", "rendered_difference"]

_ADVICE = {
    Cold.SYSTEM: "The client writes its system prompt anew. Everything after is read again.",
    Cold.TOOL_MOVED: "The rule `tool-order` keeps the order in which tools were first seen.",
    Cold.TOOL_ADDED: "Tools that connect late are read once. Adding them before the first message"
    " avoids it.",
    Cold.TOOL_REMOVED: "The client declares fewer tools. The opt-in rule `removed-tools` keeps them"
    " declared, at the risk of calls to tools that are gone.",
    Cold.TOOL_CHANGED: "The client describes a tool anew. One re-read is correct.",
    Cold.SETTINGS: "Most templates write this setting into the prompt's head. Keep it constant in"
    " a conversation.",
    Cold.TEMPLATE: "A template that keeps what it has written avoids this; see --chat-template-file"
    " of llama-server.",
    Cold.DATE: "One re-read a day. Where the template takes `date_string`, the rule"
    " `template-date` keeps the first date.",
    Cold.RESTARTED: "A snapshot would have survived it: see the settings of the store.",
    Cold.DISPLACED: "More slots, or a store for snapshots, keep more conversations.",
    Cold.EVICTED: "A larger store keeps more snapshots.",
    Cold.FORWARD: "/_slotkeeper/readyz says why this backend is not driven, and what lifts it.",
    Cold.UNKNOWN: "Another program that uses the same backend can be the reason.",
}
_EMPTY_THINK = (
    "Known of Qwen 3 with enable_thinking=false (QwenLM/Qwen3#1826): use a chat template that"
    " writes the empty block in every turn, or leave thinking on."
)
_DROPPED_THINK = (
    "Normal for templates that forget finished thoughts: one turn is read again. Where the"
    " template takes `preserve_thinking`, the opt-in rule `preserve-thinking` keeps them."
)
_MOVED_TOOLS = "This template cannot keep its prefix while tools are declared; another one can."
_RETOKENISED = "Nothing to be done: a few tokens where two texts meet."
# What is known to change in a system prompt; looked for before the difference, nearest wins.
_GIT = (
    "The client shows the git status. The opt-in rule `git-status` keeps the first one and tells"
    " the newer one at the end."
)
_MEMORY = (
    "The client writes its memory into the system prompt. The opt-in rule `memory` keeps the first"
    " one and tells the newer one at the end."
)
_FILE_EDITED = "An instruction file was edited. One re-read is correct."
_SYSTEM_PARTS = (
    ("gitStatus:", _GIT),
    ("<memory_context>", _MEMORY),
    ("AGENTS.md", _FILE_EDITED),
    ("CLAUDE.md", _FILE_EDITED),
)
_CLOCK = re.compile(rf"{A_DATE.pattern}|(?<!\d)\d{{1,2}}:\d{{2}}(?::\d{{2}})?(?!\d)")
_CLOCK_ADVICE = (
    "A clock in the system prompt. Take it out, or let the rules for clocks freeze it and tell the"
    " newer value at the end."
)
# Rendered only by a few templates, so they are suspected last.
_QUIET = frozenset(
    {"tool_choice", "parallel_tool_calls", "response_format", "json_schema", "grammar"}
)
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,79}")
_THOUGHT = re.compile(r"<think(?:ing)?>|\[THINK\]|<\|channel\|>analysis|<\|START_THINKING\|>")
_NO_THOUGHT = re.compile(r"<think(?:ing)?>\s*</think(?:ing)?>\s*")
_TOOLS_TEXT = re.compile(r"tool|function", re.IGNORECASE)
_NEAR = 40  # characters around a difference that tell what it is
_AROUND = 2000  # characters before it where a system prompt's section may begin
_NAME_SHOWN = 40
_FEW_TOKENS = 8  # tokens that may be split differently where two texts meet


def first_difference(before: Conversation, now: Conversation, traits: Traits) -> Why | None:
    """The first difference of what went to the backend, in the order the template renders it.

    ``before``: the conversation as of its last request, ``now``: as of this one. None: what was
    sent extends what was sent before (or repeats it).
    """
    finders = [_tools, _head] if traits.tools_first else [_head, _tools]
    if traits.renders_tools is False:
        finders.remove(_tools)
    for find in finders:
        why = find(before, now)
        if why is not None:
            return why
    return (
        _settings(before, now, quiet=False)
        or first_rewrite(before.lines, now.lines, now.head, traits)
        or _settings(before, now, quiet=True)
    )


def rendered_difference(before: str, now: str, traits: Traits | None = None) -> Why | None:
    """Why a template's work differs for messages that extend; None when ``now`` extends too.

    Both are whole rendered prompts, the generation prompt included.
    """
    if now.startswith(before):
        return None
    cut = parting(before, now)
    dates = [_covering(_CLOCK, text, cut.at) for text in (before, now)]
    if all(dates):
        old, new = (match.group() for match in dates if match)
        sentence = "the template's date rolled over"
        return Why(Cold.DATE, sentence, shown(old), shown(new), _ADVICE[Cold.DATE])

    def told(sentence: str, advice: str) -> Why:
        return Why(Cold.TEMPLATE, sentence, cut.before, cut.after, advice)

    empty = _covering(_NO_THOUGHT, before, cut.at)
    if empty and not _covering(_NO_THOUGHT, now, cut.at):
        return told(
            "the template writes an empty think block only in the newest turn", _EMPTY_THINK
        )
    if _covering(_THOUGHT, before, cut.at) and not _covering(_THOUGHT, now, cut.at):
        return told("the template drops the reasoning of finished turns", _DROPPED_THINK)
    near = before[max(0, cut.at - _NEAR) : cut.at + _NEAR]
    if traits and traits.tools_late and _TOOLS_TEXT.search(near):
        return told("the template moves the tools to the newest user message", _MOVED_TOOLS)
    sentence = f"the template renders the same messages differently at character {cut.at + 1}"
    return told(sentence, _ADVICE[Cold.TEMPLATE])


def lost(
    *,
    rolled_over: bool = False,
    forward: bool = False,
    restarted: bool = False,
    displaced: bool = False,
    evicted: bool = False,
    missing: int | None = None,
) -> Why:
    """What happened to the slot, when nothing in the prompt differs.

    ``rolled_over``: the template writes the date by itself, and it is another one since the last
    request. ``forward``: the backend chooses its slots. ``restarted``: since the last request.
    ``displaced``: no slot and no snapshot was known to hold it. ``evicted``: a snapshot of it was
    removed to make room. ``missing``: how many tokens of the last prompt were not reused.
    """
    if rolled_over:
        return _why(Cold.DATE, "the template's date rolled over")
    if missing is not None and 0 < missing <= _FEW_TOKENS:
        sentence = "the end of the last prompt was split into other tokens"
        return Why(Cold.TEMPLATE, sentence, advice=_RETOKENISED)
    if forward:
        return _why(Cold.FORWARD, "mode forward: the backend chose the slot")
    if evicted:
        sentence = "slot was lost, and its snapshot had been removed to make room"
        return _why(Cold.EVICTED, sentence)
    if restarted:
        return _why(Cold.RESTARTED, "slot was lost: the backend restarted")
    if displaced:
        sentence = "slot was lost: no slot and no snapshot held this conversation any more"
        return _why(Cold.DISPLACED, sentence)
    return _why(Cold.UNKNOWN, "nothing in the prompt differs, and the slot was expected to hold it")


def _why(cause: Cold, sentence: str, cut: Difference | None = None) -> Why:
    before, after = (cut.before, cut.after) if cut else ("", "")
    return Why(cause, sentence, before, after, _ADVICE[cause])


def _covering(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """The pattern's match around that character."""
    for match in pattern.finditer(text, max(0, at - _NEAR), at + _NEAR):
        if match.start() <= at <= match.end():
            return match
    return None


def _head(before: Conversation, now: Conversation) -> Why | None:
    if before.head != now.head and not (before.head and now.head):
        return _why(
            Cold.SYSTEM,
            "a system prompt was added" if now.head else "the system prompt was removed",
        )
    for place in range(max(before.head, now.head)):
        if place >= before.head:
            return _why(Cold.SYSTEM, f"system message {place + 1} was added")
        if place >= now.head:
            return _why(Cold.SYSTEM, f"system message {place + 1} was removed")
        one, other = before.lines[place], now.lines[place]
        if one is other or (one.went == other.went and one.note == other.note):
            continue
        old, new = text_of_line(one), text_of_line(other)
        if old != new:
            return _system(old, new, "" if now.head == 1 else f" (message {place + 1})")
    return None


def _system(old: str, new: str, which: str) -> Why:
    cut = difference(old, new)
    sentence = f"system prompt{which} changed at character {cut.at + 1}"
    if new.startswith(old):
        sentence = f"system prompt{which} grew at its end"
    clock = _covering(_CLOCK, old, cut.at) and _covering(_CLOCK, new, cut.at)
    around = old[max(0, cut.at - _AROUND) : cut.at] + new[cut.at : cut.at + _NEAR]
    found = max((around.rfind(mark), text) for mark, text in _SYSTEM_PARTS)
    advice = _ADVICE[Cold.SYSTEM]
    if clock:
        advice = _CLOCK_ADVICE
    elif found[0] >= 0:
        advice = found[1]
    return Why(Cold.SYSTEM, sentence, cut.before, cut.after, advice)


def _tools(before: Conversation, now: Conversation) -> Why | None:
    if before.tools == now.tools:
        return None
    was, new = [[_tool_name(data) for data in one.tools] for one in (before, now)]
    if not was:
        return _why(Cold.TOOL_ADDED, f"{_count(new)} declared where there were none")
    if not new:
        return _why(Cold.TOOL_REMOVED, f"{_count(was)} removed, none left")
    place = next(
        (
            i
            for i, pair in enumerate(zip(before.tools, now.tools, strict=False))
            if len(set(pair)) > 1
        ),
        min(len(was), len(new)),
    )
    if place < min(len(was), len(new)) and was[place] == new[place]:
        return _changed_tool(before.tools[place], now.tools[place], new[place], place)
    if place == len(was) or (place < len(new) and new[place] not in was):
        more = len(set(new) - set(was)) - 1
        at = "at the end" if place == len(was) else f"at place {place + 1}"
        sentence = f"tool {_called(new[place])} was added {at}{_more(more)}"
        return _why(Cold.TOOL_ADDED, sentence)
    if place == len(new) or was[place] not in new:
        more = len(set(was) - set(new)) - 1
        sentence = f"tool {_called(was[place])} was removed from place {place + 1}{_more(more)}"
        return _why(Cold.TOOL_REMOVED, sentence)
    name = next(
        (name for name in (was[place], new[place]) if _without(was, name) == _without(new, name)),
        was[place],
    )
    sentence = (
        f"tool {_called(name)} moved from place {was.index(name) + 1} to {new.index(name) + 1}"
    )
    return _why(Cold.TOOL_MOVED, sentence)


def _changed_tool(was: bytes, new: bytes, name: str, place: int) -> Why:
    old, given = (_described(data) for data in (was, new))
    what, sides = "definition", (was.decode(), new.decode())
    if old != given:
        what, sides = "description", (old, given)
    sentence = f"{what} of tool {_called(name)} (place {place + 1}) changed"
    return _why(Cold.TOOL_CHANGED, sentence, difference(*sides))


def _function(data: bytes) -> Mapping[str, Any]:
    tool = orjson.loads(data)
    tool = tool if isinstance(tool, dict) else {}
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _tool_name(data: bytes) -> str:
    function = _function(data)
    return str(function.get("name") or function.get("type"))


def _described(data: bytes) -> str:
    return str(_function(data).get("description") or "")


def _called(name: str) -> str:
    return f"`{shown(name[:_NAME_SHOWN])}`"


def _count(names: Sequence[str]) -> str:
    return "1 tool was" if len(names) == 1 else f"{len(names)} tools were"


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _without(names: Sequence[str], name: str) -> list[str]:
    return [one for one in names if one != name]


def _settings(before: Conversation, now: Conversation, *, quiet: bool) -> Why | None:
    if before.settings == now.settings:
        return None
    was, new = (dict(_flat(orjson.loads(one.settings))) for one in (before, now))
    for name in dict.fromkeys((*was, *new)):
        old, given = was.get(name, b""), new.get(name, b"")
        if old != given and (name.partition(".")[0] in _QUIET) is quiet:
            shown_name = f"setting `{name}`" if _NAME.fullmatch(name) else "a setting"
            sides = shown(old.decode()), shown(given.decode())
            return Why(Cold.SETTINGS, f"{shown_name} changed", *sides, _ADVICE[Cold.SETTINGS])
    return None


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Each setting by name, template arguments one by one."""
    for name, value in settings.items():
        if name == "chat_template_kwargs" and isinstance(value, dict):
            yield from _flat({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            yield name, orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
