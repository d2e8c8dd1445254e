"""Keeps a conversation's prompt byte-stable: ``(request, ledger) -> (request, changes, ledger)``.

Pure: no clock, no disk, no network. ``RULES`` is the whole list, in the order they are applied. No
rule fired: the client's bytes go on. A rule fired: only what it changed is written anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from proxy.core.conversation import head_length, key, text_of
from proxy.core.ledger import Answer, Conversation, Line
from proxy.core.normalise import history, optional, shape, system, tools
from proxy.core.normalise.base import Change, Context, Default, Draft, Item, Rule
from proxy.core.normalise.book import Book, Found
from proxy.core.normalise.match import Said
from proxy.core.splice import rebuild

SETTINGS = (
    "chat_template_kwargs", "json_schema", "parallel_tool_calls", "reasoning_effort",
    "response_format", "tool_choice",
)  # fmt: skip
# Rules that let a frozen text say what holds no more; the note tells what does.
FREEZING = frozenset(
    ("known-clocks", "clock", "git-status", "memory", "vanished-clock", "template-date")
)
ANSWERS = 8  # generated messages a conversation remembers: swipes and retries choose among them
TITLE = 60  # characters
_ON, _KNOWN, _OFF = Default.ON, Default.KNOWN, Default.OFF
# Where ledger rules look; where there is nothing to see they are not asked (``_nothing_at``).
_HISTORY, _SYSTEM, _OLD, _TOOLS = "history", "system text", "old user messages", "tools"

# Without the ledger: known noise at known places.
_SHAPE = (
    Rule("billing-header", "delete Claude Code's billing block", "start of the system text", _ON,
         shape.billing_header),
    Rule("cache-control", "strip cache_control and context_management", "messages, tools", _ON,
         shape.cache_control),
    Rule("single-part", "one text part is the plain string", "messages", _ON, shape.single_part),
    Rule("total-tokens", "delete <total_tokens> messages", "mid-conversation system messages", _OFF,
         optional.total_tokens),
)  # fmt: skip
# What was sent or generated before, put back.
_LEDGER = (
    Rule("replay", "what comes as it came goes out as it went", _HISTORY, _ON, history.replay),
    Rule("known-clocks", "a known client's clock keeps its first value", _SYSTEM, _KNOWN,
         system.known_clocks),
    Rule("clock", "the first text stays where all that differs is a clock or counter",
         _SYSTEM, _KNOWN, system.clock),
    Rule("git-status", "the git status keeps its first text", _SYSTEM, _OFF, optional.git_status),
    Rule("memory", "the memory block keeps its first text", _SYSTEM, _OFF, optional.memory),
    Rule("vanished-clock", "a clock taken out of an old message stays", _OLD, _KNOWN,
         system.vanished_clock),
    Rule("moved-reminder", "a reminder taken out of an old message stays", _OLD,
         _OFF, optional.moved_reminder),
    Rule("tool-order", "first-seen order and bytes, new tools last", _TOOLS, _ON, tools.tool_order),
    Rule("removed-tools", "a tool once declared stays declared", _TOOLS, _OFF,
         optional.removed_tools),
    Rule("trimmed-text", "the generated text, where only space at its ends differs", _HISTORY, _ON,
         history.trimmed_text),
    Rule("tool-arguments", "the generated arguments, where they are equal as JSON", _HISTORY, _ON,
         history.tool_arguments),
    Rule("tool-results", "the first-seen result, where it is equal as JSON", _HISTORY, _ON,
         history.tool_results),
    Rule("call-ids", "the first-seen ids of tool calls", _HISTORY, _ON, history.call_ids),
    Rule("reasoning", "dropped reasoning is put back in the current tool loop", _HISTORY, _ON,
         history.reasoning),
    Rule("template-date", "the date a template writes is the first request's", "template arguments",
         _ON, system.template_date),
    Rule("preserve-thinking", "ask the template to keep all reasoning", "template arguments", _OFF,
         optional.preserve_thinking),
    Rule("tail-note", "what the frozen text does not say is told at the end; off: nothing freezes",
         "last user or tool message", _ON, system.tail_note),
)  # fmt: skip
# What the served model's template cannot render.
_TEMPLATE = (
    Rule("leading-systems", "two leading system messages become one, where two are refused",
         "system text", _ON, system.leading_systems),
    Rule("system-in-place", "a system message becomes user text, where it is refused",
         "mid-conversation system messages", _ON, system.system_in_place),
)  # fmt: skip
RULES: tuple[Rule, ...] = (*_SHAPE, *_LEDGER, *_TEMPLATE)


class RuleFault(Exception):  # noqa: N818 - what went wrong is the cause
    """A rule raised; the original goes out (DESIGN.md rule 10)."""

    def __init__(self, rule: str) -> None:
        """``rule``: its name."""
        super().__init__(rule)
        self.rule = rule


class Result(NamedTuple):
    """What to send and to remember.

    ``raw`` and ``body`` are the client's own objects where nothing changed. ``after``: the
    conversation with this request, ``before``: as it was (None: new). ``known``: how many leading
    messages it repeats. ``like``: it is new, and ``before`` merely looks like it.
    """

    raw: bytes
    body: Mapping[str, Any]
    changes: tuple[Change, ...]
    after: Conversation
    before: Conversation | None
    known: int
    like: bool = False


def switched_on(mode: str, switches: Collection[str]) -> frozenset[str]:
    """Names of the rules that are on: those of ``safe``, less ``-name``, plus ``+name``.

    Without ``tail-note`` nobody could be told, so nothing is frozen either.
    """
    if mode == "off":
        return frozenset()
    on = {rule.name for rule in RULES if rule.default is not Default.OFF}
    on |= {name[1:] for name in switches if name.startswith("+")}
    on -= {name[1:] for name in switches if name.startswith("-")}
    return frozenset(on if "tail-note" in on else on - FREEZING)


def unfrozen(on: frozenset[str]) -> frozenset[str]:
    """Those rules before a server that reuses nothing: there a note would only be one more text."""
    return on - FREEZING - {"tail-note"}


def normalise(
    raw: bytes, body: Mapping[str, Any], book: Book, context: Context, origin: Conversation
) -> Result:
    """One request of ``/v1/chat/completions``, ``raw`` and parsed.

    ``origin``: namespace, client and time of the request, and the id of the conversation if it
    turns out to be a new one. The book is only read. Raises ``RuleFault``.
    """
    draft = Draft(body, shape.items(body["messages"]), _tools(body))
    _apply(_SHAPE, draft, context)
    came = [book.said(item.value, item.json) for item in draft.messages]
    head = head_length([said.value for said in came])
    blocks = [optional.BLOCKS[rule] for rule in optional.NOBODYS if rule in context.on]
    found = book.find(origin.namespace, came, head, context.client, blocks)
    draft.before, draft.known, draft.clock = found.before, found.known, found.clock
    draft.own = found.goes_on or found.known > 0
    draft.answers = dict(found.answers)
    draft.unequal = [
        number
        for number, (said, line) in enumerate(zip(came, draft.lines, strict=False))
        if said.json != line.went and number >= head
    ]
    _apply(_LEDGER, draft, context, _nothing_at(draft, came[:head]))
    after = _remembered(draft, came, head, found, origin)
    for number, note in draft.notes.items():
        item = draft.messages[number]
        item.put(system.noted(item.value, note))
    _apply(_TEMPLATE, draft, context)
    sent = _written(raw, draft) if draft.changes else (raw, body)
    before, like = found.before or found.like, found.before is None and found.like is not None
    return Result(*sent, tuple(draft.changes), after, before, found.known, like)


def answered(row: Conversation, message: bytes, prompt_n: int | None) -> Conversation:
    """The conversation with what the backend generated and counted; ``message`` is JSON."""
    made = Answer(len(row.lines), message, key(orjson.loads(message)))
    others = [answer for answer in row.answers if (answer.at, answer.key) != (made.at, made.key)]
    return replace(row, answers=(*others, made)[-ANSWERS:], prompt_n=prompt_n)


def resent(row: Conversation, context: Context) -> Mapping[str, Any]:
    """The body the conversation's last request was sent with, as far as a template can see it."""
    messages = [orjson.loads(line.went) for line in row.lines]
    for number, line in enumerate(row.lines):
        if line.note:
            messages[number] = system.noted(messages[number], line.note)
    draft = Draft({"messages": messages}, shape.items(messages), None)
    _apply(_TEMPLATE, draft, context)
    body = {"messages": [item.value for item in draft.messages], **orjson.loads(row.settings)}
    return {**body, "tools": [orjson.loads(tool) for tool in row.tools]} if row.tools else body


def _apply(
    rules: tuple[Rule, ...], draft: Draft, context: Context, without: Collection[str] = ()
) -> None:
    """``without``: places where no rule would find anything."""
    for rule in rules:
        if rule.where not in without and rule.name in context.on:
            try:
                rule.apply(draft, context)
            except Exception as error:
                raise RuleFault(rule.name) from error


def _nothing_at(draft: Draft, head: Sequence[Said]) -> set[str]:
    """Where a request is what the ledger has, or the ledger has nothing."""
    before = draft.before
    firsts = [line.went for line in before.lines[: before.head]] if before else draft.clock
    places = {
        _SYSTEM: firsts and [*firsts] != [said.json for said in head],
        _OLD: draft.unequal,
        _HISTORY: draft.unequal or draft.answers,
        _TOOLS: before and draft.tools,
    }
    return {place for place, found in places.items() if not found}


def _tools(body: Mapping[str, Any]) -> list[Item] | None:
    found = body.get("tools")
    return shape.items(found) if isinstance(found, list) else None


def _remembered(
    draft: Draft, came: list[Said], head: int, found: Found, origin: Conversation
) -> Conversation:
    """The conversation as of this request; lines that stayed the same are the same objects."""
    old = found.before.lines if found.before else ()
    lines: list[Line] = []
    for number, (said, item) in enumerate(zip(came, draft.messages, strict=True)):
        line = old[number] if number < len(old) else None
        note, json, went = draft.notes.get(number, ""), said.json, item.json
        if line and line.came == json and line.went == went and line.note == note:
            lines.append(line)
        else:
            lines.append(Line(json, json if json == went else went, said.key, note))
    before = found.before or origin
    order, answers = before.order, before.answers
    if not found.goes_on:  # of a branch it is only what it has
        names = {tools.name_of(item.value) for item in draft.tools or ()}
        order = tuple((name, data) for name, data in order if name in names)
        answers = tuple(answer for answer in answers if answer.at <= found.known)
    sent: list[bytes] = []
    if draft.tools:
        order = tools.remembered(order, draft.tools)
        held = {data: data for _, data in order}
        sent = [held.get(item.json, item.json) for item in draft.tools]
    return Conversation(
        id=before.id if found.goes_on else origin.id,
        namespace=origin.namespace,
        client=origin.client,
        lines=tuple(lines),
        head=head,
        tools=tuple(sent),
        order=order,
        settings=_settings(draft),
        answers=answers,
        prompt_n=before.prompt_n,
        used=origin.used,
        title=before.title if found.goes_on else _title(came),
    )


def _settings(draft: Draft) -> bytes:
    body = {**draft.body, **draft.fields} if draft.fields else draft.body
    return orjson.dumps({name: body[name] for name in SETTINGS if name in body})


def _title(came: list[Said]) -> str:
    for said in came:
        text = text_of(said.value)
        if said.role == "user" and text:
            return " ".join(text[: 4 * TITLE].split())[:TITLE]
    return ""


def _written(raw: bytes, draft: Draft) -> tuple[bytes, Mapping[str, Any]]:
    """The bytes and the parsed body of a changed request."""
    lists: dict[str, list[tuple[int | None, bytes]]] = {}
    values: dict[str, Any] = {}
    for name, items in (("messages", draft.messages), ("tools", draft.tools)):
        own = draft.body.get(name)
        if items is None or not isinstance(own, list):
            continue
        order = [item.index for item in items]
        if order != list(range(len(own))) or any(item.changed for item in items):
            lists[name] = [(None if item.changed else item.index, item.json) for item in items]
            values[name] = [item.value for item in items]
    body = {name: value for name, value in draft.body.items() if name not in draft.drop}
    body |= {**values, **draft.fields}
    return rebuild(raw.strip(), draft.body, lists, draft.drop, draft.fields), body
