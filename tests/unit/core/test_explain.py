"""Every cold request gets one true sentence, two short quotes and an advice.

Also ``proxy.core.rewrites`` and ``proxy.core.why``, which only it uses.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import explain, rewrites
from proxy.core.conversation import head_length, key
from proxy.core.explain import Cold, Why, first_difference, lost, quoted, rendered_difference
from proxy.core.ledger import Conversation, Line
from proxy.core.normalise import RULES
from proxy.core.template import Traits

NOTHING = Traits()
Message = dict[str, Any]


def user(content: Any) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def said(content: str | None, **more: Any) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content, **more}


def called(name: str, arguments: str, call: str = "c1") -> Message:
    """An assistant message that is one tool call."""
    function = {"name": name, "arguments": arguments}
    return said(None, tool_calls=[{"id": call, "type": "function", "function": function}])


def two_calls(*arguments: str) -> Message:
    """An assistant message that calls the same tool twice."""
    one, other = (called("ls", text)["tool_calls"][0] for text in arguments)
    return said(None, tool_calls=[one, other])


def result(content: str, call: str = "c1") -> Message:
    """What the tool gave."""
    return {"role": "tool", "tool_call_id": call, "content": content}


def image(data: str) -> Message:
    """A user message with a picture."""
    url = {"url": f"data:image/png;base64,{data}"}
    return user([{"type": "text", "text": "look"}, {"type": "image_url", "image_url": url}])


def tool(name: str, description: str = "", **parameters: Any) -> Message:
    """A declaration."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tools(names: str) -> list[Message]:
    """One declaration per letter."""
    return [tool(name) for name in names]


def talk(
    messages: list[Any],
    tools: list[Message] | None = None,
    notes: dict[int, str] | None = None,
    **settings: Any,
) -> Conversation:
    """A conversation whose last request was this, unchanged but for the notes."""
    data = [orjson.dumps(message) for message in messages]
    lines = tuple(
        Line(one, one, key(message), (notes or {}).get(place, ""))
        for place, (one, message) in enumerate(zip(data, messages, strict=True))
    )
    return Conversation(
        id="c",
        namespace=b"n",
        lines=lines,
        head=head_length(messages),
        tools=tuple(orjson.dumps(one) for one in tools or ()),
        settings=orjson.dumps(settings),
    )


def why(before: Conversation, now: Conversation, traits: Traits = NOTHING) -> Why:
    """The explanation, which must be there and must be fit to be shown."""
    found = first_difference(before, now, traits)
    assert found is not None
    assert found.advice
    assert max(len(found.before), len(found.after)) <= 60
    assert "\n" not in quoted(found)
    return found


S, Q, A = system("You are terse."), user("list the files"), said("a.py and b.py")
LOOP = [S, Q, called("ls", '{"path":"."}'), result("a.py\nb.py")]
REMINDER = "<system-reminder>\nYour mode has changed from plan to build.\n</system-reminder>"
GIT = "gitStatus: This is the git status.\nStatus:\n{}\n\nRecent commits:\n1a2b3c4 fix"
LONG = [S, *(message for n in range(6) for message in (user(f"q{n}"), said(f"answer {n}")))]

# Reports of bug-reports.md that cannot or must not be fixed: what is said of them.
REPORTS: dict[str, tuple[Conversation, Conversation, Cold, str]] = {
    "5 a tool result rewritten by the client": (
        talk([S, Q, called("cat", "{}"), result("see cch=ab12f; in the log"), A, user("go on")]),
        talk([S, Q, called("cat", "{}"), result("see cch=0d9aa; in the log"), A, user("go on")]),
        Cold.HISTORY,
        "history was rewritten at message 4 (tool result): `cch=ab12f` → `cch=0d9aa`",
    ),
    "16 git status after a commit": (
        talk([system(f"You are Claude Code.\n{GIT.format(' M src/a.py')}"), Q]),
        talk([system(f"You are Claude Code.\n{GIT.format('(clean)')}"), Q, A, user("next")]),
        Cold.SYSTEM,
        "system prompt changed at character 65: ` M src/a.py` → `(clean)`",
    ),
    "18 micro-compaction": (
        talk([*LOOP, A, user("thanks")]),
        talk([*LOOP[:3], result("[Old tool result content cleared]"), A, user("thanks"), A]),
        Cold.HISTORY,
        (
            "an old result was cleared in message 4 (tool result):"
            " `a.py\\nb.py` → `[Old tool result content cleared]`"
        ),
    ),
    "19 a tool that appears later": (
        talk([S, Q], tools("abde")),
        talk([S, Q, A, user("go on")], tools("abcde")),
        Cold.TOOL_ADDED,
        "tool `c` was added at place 3",
    ),
    "21 a reminder that moves": (
        talk([S, user("start\n" + REMINDER), called("ls", "{}"), result("x")]),
        talk([S, user("start"), called("ls", "{}"), result("x"), A, user("thanks\n" + REMINDER)]),
        Cold.HISTORY,
        (
            "a system reminder moved from message 2 to message 6:"
            " `\\n<system-reminder>\\nYour mode has changed from plan to…` → nothing"
        ),
    ),
    "29 AGENTS.md edited": (
        talk([system("You are Zed.\n# AGENTS.md\nUse tabs."), Q]),
        talk([system("You are Zed.\n# AGENTS.md\nUse tabs.\nWrite tests."), Q, A, user("on")]),
        Cold.SYSTEM,
        "system prompt grew at its end: nothing → `\\nWrite tests.`",
    ),
    "35 a change in the middle": (
        talk(LONG),
        talk([*LONG[:11], user("another q5"), *LONG[12:], user("q6")]),
        Cold.HISTORY,
        "history was rewritten at message 12 (user): nothing → `another `",
    ),
    "45 memory in the system prompt": (
        talk([system("Help.\n<memory_context>\nlikes tea\n</memory_context>"), Q]),
        talk([system("Help.\n<memory_context>\nlikes coffee\n</memory_context>"), Q, A, Q]),
        Cold.SYSTEM,
        "system prompt changed at character 30: `tea` → `coffee`",
    ),
    "49 the oldest messages are dropped": (
        talk(LONG),
        talk([S, *LONG[5:], user("q6")]),
        Cold.TRIMMED,
        "history trimmed at the front: 4 messages are gone",
    ),
    "P-4 the last request without tools": (
        talk([S, Q], tools("ab")),
        talk([S, Q, A, user("sum up")]),
        Cold.TOOL_REMOVED,
        "2 tools were removed, none left",
    ),
    "P-5 another reasoning effort": (
        talk([S, Q], reasoning_effort="low"),
        talk([S, Q, A, Q], reasoning_effort="high"),
        Cold.SETTINGS,
        'setting `reasoning_effort` changed: `"low"` → `"high"`',
    ),
    "P-5 thinking switched off": (
        talk([S, Q], chat_template_kwargs={"a": 1}),
        talk([S, Q, A, Q], chat_template_kwargs={"a": 1, "enable_thinking": False}),
        Cold.SETTINGS,
        "setting `chat_template_kwargs.enable_thinking` changed: nothing → `false`",
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports(report: str) -> None:
    """Each report that is explained rather than repaired gets its sentence."""
    before, now, cause, sentence = REPORTS[report]
    found = why(before, now)
    assert (found.cause, quoted(found)) == (cause, sentence)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("16 git status after a commit", "`git-status`"),
        ("18 micro-compaction", "clears old tool results"),
        ("21 a reminder that moves", "`moved-reminder`"),
        ("29 AGENTS.md edited", "instruction file"),
        ("45 memory in the system prompt", "`memory`"),
        ("P-4 the last request without tools", "`removed-tools`"),
    ],
)
def test_advice(report: str, words: str) -> None:
    """The advice fits the trigger, not only the cause."""
    before, now, *_ = REPORTS[report]
    assert words in why(before, now).advice


def test_advice_names_rules_that_exist() -> None:
    """Whoever follows an advice finds the rule under that name."""
    source = inspect.getsource(explain) + inspect.getsource(rewrites)
    named = set(re.findall(r"rule `([a-z-]+)`", source.replace('"\n    "', "")))
    assert {"git-status", "tool-order", "reasoning"} <= named
    assert named <= {rule.name for rule in RULES}


CASES: dict[str, tuple[Conversation, Conversation, Cold, str]] = {
    "the example of the issue": (
        talk([system("x" * 112 + " at 14:02."), Q]),
        talk([system("x" * 112 + " at 14:03."), Q]),
        Cold.SYSTEM,
        "system prompt changed at character 121: `14:02` → `14:03`",
    ),
    "second system message": (
        talk([S, system("It is 9:15"), Q]),
        talk([S, system("It is 9:16"), Q]),
        Cold.SYSTEM,
        "system prompt (message 2) changed at character 10: `9:15` → `9:16`",
    ),
    "system added": (talk([Q]), talk([S, Q]), Cold.SYSTEM, "a system prompt was added"),
    "system removed": (talk([S, Q]), talk([Q]), Cold.SYSTEM, "the system prompt was removed"),
    "system message added": (
        talk([S, Q]),
        talk([S, S, Q]),
        Cold.SYSTEM,
        "system message 2 was added",
    ),
    "system message removed": (
        talk([S, S, Q]),
        talk([S, Q]),
        Cold.SYSTEM,
        "system message 2 was removed",
    ),
    "tool moved back": (
        talk([Q], [*tools("ab"), tool("search"), *tools("cd")]),
        talk([Q], [*tools("abcd"), tool("search")]),
        Cold.TOOL_MOVED,
        "tool `search` moved from place 3 to 5",
    ),
    "tool moved forward": (
        talk([Q], tools("abcde")),
        talk([Q], tools("aebcd")),
        Cold.TOOL_MOVED,
        "tool `e` moved from place 5 to 2",
    ),
    "tools shuffled": (
        talk([Q], tools("abcde")),
        talk([Q], tools("edcba")),
        Cold.TOOL_MOVED,
        "tool `a` moved from place 1 to 5",
    ),
    "tool at the end": (
        talk([Q], tools("ab")),
        talk([Q], tools("abcd")),
        Cold.TOOL_ADDED,
        "tool `c` was added at the end (and 1 more)",
    ),
    "tools where there were none": (
        talk([Q]),
        talk([Q], tools("a")),
        Cold.TOOL_ADDED,
        "1 tool was declared where there were none",
    ),
    "tool removed": (
        talk([Q], tools("abcd")),
        talk([Q], tools("ad")),
        Cold.TOOL_REMOVED,
        "tool `b` was removed from place 2 (and 1 more)",
    ),
    "tool described anew": (
        talk([Q], [tool("a"), tool("b", "Read files in /old place")]),
        talk([Q], [tool("a"), tool("b", "Read files in /new place")]),
        Cold.TOOL_CHANGED,
        "description of tool `b` (place 2) changed: `old` → `new`",
    ),
    "tool parameters": (
        talk([Q], [tool("b", "x", type="object")]),
        talk([Q], [tool("b", "x", type="string")]),
        Cold.TOOL_CHANGED,
        "definition of tool `b` (place 1) changed: `object` → `string`",
    ),
    "tool of another kind": (
        talk([Q], [{"type": "web_search"}]),
        talk([Q], [{"type": "web_search"}, {"name": "flat"}]),
        Cold.TOOL_ADDED,
        "tool `flat` was added at the end",
    ),
    "tool choice, when nothing else differs": (
        talk([Q], tool_choice="auto"),
        talk([Q, A, Q], tool_choice="none"),
        Cold.SETTINGS,
        'setting `tool_choice` changed: `"auto"` → `"none"`',
    ),
    "tool choice is suspected last": (
        talk([Q, A, Q], tool_choice="auto"),
        talk([Q, said("other"), Q], tool_choice="none"),
        Cold.HISTORY,
        "history was rewritten at message 2 (assistant): `a.py and b.py` → `other`",
    ),
    "a setting with an odd name": (
        talk([Q], chat_template_kwargs={"my secret text": 1}),
        talk([Q], chat_template_kwargs={"my secret text": 2}),
        Cold.SETTINGS,
        "a setting changed: `1` → `2`",
    ),
    "reasoning dropped": (
        talk([S, Q, said("x", reasoning_content="hm, so"), result("y")]),
        talk([S, Q, said("x"), result("y")]),
        Cold.REASONING,
        "reasoning was dropped from message 3 (assistant): `hm, so` → nothing",
    ),
    "reasoning added": (
        talk([Q, A, result("y")]),
        talk([Q, said("a.py and b.py", reasoning_content="hm"), result("y")]),
        Cold.REASONING,
        "reasoning was added to message 2 (assistant): nothing → `hm`",
    ),
    "reasoning trimmed": (
        talk([Q, said("x", reasoning_content="hm\n")]),
        talk([Q, said("x", reasoning_content="hm"), Q]),
        Cold.REASONING,
        "reasoning was rewritten in message 2 (assistant): `\\n` → nothing",
    ),
    "image changed": (
        talk([image("AAAA"), A]),
        talk([image("BBBB"), A, Q]),
        Cold.HISTORY,
        "an image changed in message 1 (user)",
    ),
    "image removed": (
        talk([image("AAAA"), A]),
        talk([user("look"), A, Q]),
        Cold.HISTORY,
        "an image was removed from message 1 (user)",
    ),
    "image added": (
        talk([user("look"), A]),
        talk([image("AAAA"), A, Q]),
        Cold.HISTORY,
        "an image was added to message 1 (user)",
    ),
    "arguments in another order": (
        talk([Q, called("ls", '{"a":1,"b":2.0}'), result("x")]),
        talk([Q, called("ls", '{"b":2,"a":1}'), result("x")]),
        Cold.HISTORY,
        (
            "arguments of tool `ls` were rewritten in message 2 (assistant) (the same as JSON):"
            ' `a":1,"b":2.0` → `b":2,"a":1`'
        ),
    ),
    "arguments with another meaning": (
        talk([Q, called("ls", '{"a":"one"}'), result("x")]),
        talk([Q, called("ls", '{"a":"two"}'), result("x")]),
        Cold.HISTORY,
        "arguments of tool `ls` were rewritten in message 2 (assistant): `one` → `two`",
    ),
    "the second call's arguments": (
        talk([Q, two_calls("{}", '{"a":1}'), result("x")]),
        talk([Q, two_calls("{}", '{"a":7}'), result("x")]),
        Cold.HISTORY,
        "arguments of tool `ls` were rewritten in message 2 (assistant): `1` → `7`",
    ),
    "another tool called": (
        talk([Q, called("ls", "{}"), result("x")]),
        talk([Q, called("cat", "{}"), result("x")]),
        Cold.HISTORY,
        "tool calls changed in message 2 (assistant)",
    ),
    "a call without arguments": (
        talk([Q, said("x", tool_calls=[{"id": "c", "function": {"name": "f"}}])]),
        talk([Q, said("x")]),
        Cold.HISTORY,
        "tool calls changed in message 2 (assistant)",
    ),
    "ids, when nothing else differs": (
        talk([Q, called("ls", "{}", "c1"), result("x", "c1")]),
        talk([Q, called("ls", "{}", "d7"), result("x", "d7"), A]),
        Cold.HISTORY,
        "ids of tool calls changed in message 2 (assistant)",
    ),
    "ids are suspected last": (
        talk([Q, called("ls", "{}", "c1"), result("x", "c1"), A]),
        talk([Q, called("ls", "{}", "d7"), result("x", "d7"), said("other"), Q]),
        Cold.HISTORY,
        "history was rewritten at message 4 (assistant): `a.py and b.py` → `other`",
    ),
    "role": (
        talk([Q, A, user("x"), A]),
        talk([Q, A, result("x"), said("y"), Q]),
        Cold.HISTORY,
        "role of message 3 changed from user to tool result",
    ),
    "role nobody knows": (
        talk([{"role": "critic", "content": "x"}, Q]),
        talk([{"role": "poet", "content": "x"}, Q]),
        Cold.HISTORY,
        "role of message 1 changed from other role to other role",
    ),
    "one message removed": (
        talk([S, Q, A, user("b"), said("c")]),
        talk([S, Q, user("b"), said("c"), Q]),
        Cold.HISTORY,
        "message 3 (assistant) was removed",
    ),
    "several messages removed": (
        talk(LONG),
        talk([*LONG[:3], *LONG[7:], Q]),
        Cold.HISTORY,
        "messages 4 to 7 were removed",
    ),
    "one trimmed": (
        talk([S, Q, A, user("b")]),
        talk([S, A, user("b"), said("c"), Q]),
        Cold.TRIMMED,
        "history trimmed at the front: 1 message is gone",
    ),
    "one inserted": (
        talk([S, Q, A, user("b")]),
        talk([S, Q, user("new"), A, user("b"), said("c")]),
        Cold.HISTORY,
        "a message was inserted at message 3",
    ),
    "two inserted": (
        talk([S, Q, A, user("b")]),
        talk([S, Q, user("new"), user("er"), A, user("b"), said("c")]),
        Cold.HISTORY,
        "2 messages were inserted at message 3",
    ),
    "the last message moves along": (
        talk([S, Q, user("<<<CONTEXT>>>")]),
        talk([S, Q, A, user("more"), user("<<<CONTEXT>>>")]),
        Cold.HISTORY,
        "the last message moved from place 3 to 5",
    ),
    "the last message is taken back": (
        talk([S, Q, user("reminder of 9:15")]),
        talk([S, Q, A, user("reminder of 9:16")]),
        Cold.HISTORY,
        "message 3 (user), the last one sent before, is gone",
    ),
    "text taken back from the newest message": (
        talk([S, user("fix it\n\n# *SEARCH/REPLACE* rules\nalways")]),
        talk([S, user("fix it"), A, user("next\n\n# *SEARCH/REPLACE* rules\nalways")]),
        Cold.HISTORY,
        (
            "history was rewritten at message 2 (user):"
            " `\\n\\n# *SEARCH/REPLACE* rules\\nalways` → nothing"
        ),
    ),
    "compaction": (
        talk(LONG),
        talk([S, user("Summary: much was said"), A]),
        Cold.HISTORY,
        (
            "history was rewritten at message 2 (user): 3 messages instead of 13:"
            " `q0` → `Summary: much was said`"
        ),
    ),
    "taken back": (talk(LONG), talk(LONG[:12]), Cold.HISTORY, "the last message was taken back"),
    "taken back twice": (
        talk(LONG),
        talk(LONG[:10]),
        Cold.HISTORY,
        "the last 3 messages were taken back",
    ),
    "reminder put in": (
        talk([S, user("start"), A]),
        talk([S, user("start\n" + REMINDER), A, Q]),
        Cold.HISTORY,
        (
            "a system reminder was put into message 2 (user):"
            " nothing → `\\n<system-reminder>\\nYour mode has changed from plan to…`"
        ),
    ),
    "reminder gone": (
        talk([S, user("start\n" + REMINDER), A]),
        talk([S, user("start"), A, Q]),
        Cold.HISTORY,
        (
            "a system reminder was taken out of message 2 (user):"
            " `\\n<system-reminder>\\nYour mode has changed from plan to…` → nothing"
        ),
    ),
    "a note that was not put back": (
        talk([S, Q, A], notes={1: "\n[now 9:15]"}),
        talk([S, Q, A, Q]),
        Cold.HISTORY,
        ("Slotkeeper's own note changed at the end of message 2 (user): `\\n[now 9:15]` → nothing"),
    ),
    "no object at all": (
        talk([S, 7, Q]),
        talk([S, user("x"), Q]),
        Cold.HISTORY,
        "role of message 2 changed from other role to user",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_difference(case: str) -> None:
    """The first difference in the order of the prompt, in words a user understands."""
    before, now, cause, sentence = CASES[case]
    found = why(before, now)
    assert (found.cause, quoted(found)) == (cause, sentence)


@pytest.mark.parametrize("case", [*CASES, *REPORTS])
def test_sentences_hold_no_prompt_text(case: str) -> None:
    """The sentence goes into the log: nothing of a message is in it, whatever the quotes say."""
    before, now, *_ = {**CASES, **REPORTS}[case]
    for pair in ((before, now), (now, before)):
        found = first_difference(*pair, NOTHING)
        if found is None:
            continue
        named = set(re.findall(r"`([^`]*)`", found.sentence))
        tools_named = {tool for one in pair for data in one.tools for tool in _names(data)}
        calls = {"ls", "cat"}
        assert all(one in tools_named | calls or "_" in one for one in named)
        for text in ("a.py", "cch=", "coffee", "q5", "9:15", "hm", "SEARCH", "AAAA", "CONTEXT"):
            assert text not in found.sentence


def _names(data: bytes) -> set[str]:
    tool = orjson.loads(data)
    return {tool.get("name", ""), tool.get("type", ""), tool.get("function", {}).get("name", "")}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (talk(LOOP), talk(LOOP)),
        (talk(LOOP, tools("ab"), x=1), talk([*LOOP, A, Q], tools("ab"), x=1)),
        (
            talk([Q], chat_template_kwargs={"a": 1, "b": 2}),
            talk([Q], chat_template_kwargs={"b": 2, "a": 1}),
        ),
        # Key order, unknown keys, one text part and a string, no content and null: rendered alike.
        (talk([S, Q]), talk([{"content": "You are terse.", "role": "system"}, Q])),
        (talk([Q, A]), talk([Q, {**A, "refusal": None, "name": "x"}, Q])),
        (talk([user([{"type": "text", "text": "hi"}]), A]), talk([user("hi"), A, Q])),
        (talk([{"role": "assistant"}]), talk([said(None), Q])),
    ],
)
def test_extends(before: Conversation, now: Conversation) -> None:
    """What renders alike is no difference."""
    assert first_difference(before, now, NOTHING) is None


def test_order_of_the_template() -> None:
    """Where tools come first they are named first."""
    before = talk([system("a"), Q], tools("ab"))
    now = talk([system("b"), Q], tools("abc"))
    assert why(before, now).cause is Cold.SYSTEM
    assert why(before, now, Traits(tools_first=True)).cause is Cold.TOOL_ADDED
    assert why(talk([S, Q]), now, Traits(tools_first=False)).cause is Cold.SYSTEM


def test_tools_that_are_not_rendered() -> None:
    """They cannot be the cause."""
    before, now = talk([S, Q], tools("ab")), talk([S, Q, A, Q], tools("abc"))
    for first in (True, False, None):
        assert first_difference(before, now, Traits(tools_first=first, renders_tools=False)) is None


def test_reasoning_the_template_leaves_out_anyway() -> None:
    """Dropping it from finished turns is not the client's fault, in the running loop it is."""
    thought = said("x", reasoning_content="hm")
    forgets = Traits(keeps_reasoning=False)
    before = talk([S, Q, thought, result("y")])
    assert first_difference(before, talk([S, Q, said("x"), result("y"), A, Q]), forgets) is None
    assert why(before, talk([S, Q, said("x"), result("y"), A]), forgets).cause is Cold.REASONING
    assert why(before, talk([S, Q, said("x"), result("y"), A, Q])).cause is Cold.REASONING


def test_an_empty_line_is_a_message_without_text() -> None:
    """A message that did not go out at all has neither role nor text."""
    gone = Line(b'{"role":"user","content":"x"}', b"", b"k")
    before = talk([Q])
    now = Conversation(id="c", namespace=b"n", lines=(gone,))
    assert why(before, now).cause is Cold.HISTORY


def test_our_own_note_is_not_the_clients_doing() -> None:
    """The same turn sent again, at another time."""
    notes = ["\n<system-reminder>It is 14:02.</system-reminder>", "\n<system-reminder>It is 14:09."]
    found = why(talk([Q], notes={0: notes[0]}), talk([Q], notes={0: notes[1]}))
    assert found.sentence == "Slotkeeper's own note changed at the end of message 1 (user)"
    assert found.before != found.after


def test_a_clock_gets_its_own_advice() -> None:
    """Time and date in the system prompt are the client's to remove, or ours to freeze."""
    for old, new in (
        ("14:02", "14:03"),
        ("2026-10-09", "2026-10-10"),
        ("2026-10-09T10:01:00Z", "2026-10-09T10:02:30Z"),
        ("at 10:01:00", "at 10:01:07"),
    ):
        found = why(talk([system(f"Now: {old}."), Q]), talk([system(f"Now: {new}."), Q]))
        assert "clock" in found.advice
    assert "clock" not in why(talk([system("a b"), Q]), talk([system("a c"), Q])).advice


HEAD = "<|im_start|>system\nToday Date: {}\n\nHelp.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
TURN = HEAD.format("09 Oct 2026") + "<|im_start|>assistant\n"
ANSWERED = "hello<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\nThey greet.\n</think>\n\n"
RENDERED: dict[str, tuple[str, str, Traits, Cold, str]] = {
    "date": (
        TURN,
        HEAD.format("10 Oct 2026") + "<|im_start|>assistant\n" + ANSWERED,
        NOTHING,
        Cold.DATE,
        "the template's date rolled over: `09 Oct 2026` → `10 Oct 2026`",
    ),
    "date, month and all": (
        HEAD.format("2026-11-30"),
        HEAD.format("2026-12-01"),
        NOTHING,
        Cold.DATE,
        "the template's date rolled over: `2026-11-30` → `2026-12-01`",
    ),
    "63 empty think block": (
        TURN + "<think>\n\n</think>\n\n",
        TURN + ANSWERED + "<think>\n\n</think>\n\n",
        NOTHING,
        Cold.TEMPLATE,
        (
            "the template writes an empty think block only in the newest turn:"
            " `<think>\\n\\n</think>\\n\\n` →"
            " `hello<|im_end|>\\n<|im_start|>user\\nmore<|im_end|>\\n<|im_sta…`"
        ),
    ),
    "thinking of a finished turn": (
        TURN + THOUGHT + "<tool_call>",
        TURN + "<tool_call>",
        NOTHING,
        Cold.TEMPLATE,
        (
            "the template drops the reasoning of finished turns:"
            " `think>\\nThey greet.\\n</think>\\n\\n<tool_call>` → `tool_call>`"
        ),
    ),
    "thinking opened by the generation prompt": (
        TURN + "<think>\n",
        TURN + ANSWERED + "<think>\n",
        NOTHING,
        Cold.TEMPLATE,
        (
            "the template drops the reasoning of finished turns:"
            " `<think>\\n` → `hello<|im_end|>\\n<|im_start|>user\\nmore<|im_end|>\\n<|im_sta…`"
        ),
    ),
    "tools move with the user": (
        "[AVAILABLE_TOOLS] [{}][/AVAILABLE_TOOLS][INST] hi[/INST]",
        "[INST] hi[/INST] hello</s>[AVAILABLE_TOOLS] [{}][/AVAILABLE_TOOLS][INST] more[/INST]",
        Traits(tools_late=True),
        Cold.TEMPLATE,
        (
            "the template moves the tools to the newest user message:"
            " `AVAILABLE_TOOLS] [{}][/AVAILABLE_TOOLS][INST] hi[/INST]` →"
            " `INST] hi[/INST] hello</s>[AVAILABLE_TOOLS]…`"
        ),
    ),
    "anything else": (
        "<user>hi there <bot>",
        "<user>hi there<bot>hello",
        Traits(tools_late=True),
        Cold.TEMPLATE,
        (
            "the template renders the same messages differently at character 15:"
            " ` <bot>` → `<bot>hello`"
        ),
    ),
    "shorter": (
        "<user>hi<bot>",
        "<user>hi",
        NOTHING,
        Cold.TEMPLATE,
        "the template renders the same messages differently at character 9: `<bot>` → nothing",
    ),
}


@pytest.mark.parametrize("case", RENDERED)
def test_rendered_difference(case: str) -> None:
    """What the template did to messages that extend."""
    before, now, traits, cause, sentence = RENDERED[case]
    found = rendered_difference(before, now, traits)
    assert found is not None
    assert (found.cause, quoted(found)) == (cause, sentence)
    assert found.advice


def test_rendered_extends() -> None:
    """Nothing to say."""
    assert rendered_difference(TURN, TURN + ANSWERED) is None
    assert rendered_difference(TURN, TURN) is None


EXPECTED = "nothing in the prompt differs, and the slot was expected to hold it"


@pytest.mark.parametrize(
    ("facts", "cause", "sentence"),
    [
        ({}, Cold.UNKNOWN, EXPECTED),
        ({"restarted": True}, Cold.RESTARTED, "slot was lost: the backend restarted"),
        (
            {"displaced": True},
            Cold.DISPLACED,
            "slot was lost: no slot and no snapshot held this conversation any more",
        ),
        (
            {"displaced": True, "evicted": True},
            Cold.EVICTED,
            "slot was lost, and its snapshot had been removed to make room",
        ),
        (
            {"forward": True, "restarted": True, "missing": 900},
            Cold.FORWARD,
            "mode forward: the backend chose the slot",
        ),
        (
            {"forward": True, "missing": 2},
            Cold.TEMPLATE,
            "the end of the last prompt was split into other tokens",
        ),
        ({"missing": 0}, Cold.UNKNOWN, EXPECTED),
    ],
)
def test_lost(facts: dict[str, Any], cause: Cold, sentence: str) -> None:
    """Plain facts about the slot become one cause."""
    found = lost(**facts)
    assert (found.cause, quoted(found)) == (cause, sentence)
    assert found.advice


TEXTS = st.text(max_size=12)
MESSAGES = st.lists(
    st.one_of(
        st.builds(system, TEXTS),
        st.builds(user, TEXTS),
        st.builds(said, TEXTS),
        st.builds(lambda text, thought: said(text, reasoning_content=thought), TEXTS, TEXTS),
        st.builds(called, st.sampled_from("ab"), TEXTS),
        st.builds(result, TEXTS),
        st.builds(image, st.sampled_from(["AA", "BB"])),
    ),
    max_size=6,
)
TALKS = st.builds(talk, MESSAGES, st.builds(tools, st.text("abc", max_size=4)))


@given(TALKS, TALKS, st.sampled_from([NOTHING, Traits(tools_first=True, keeps_reasoning=False)]))
def test_always_an_answer(before: Conversation, now: Conversation, traits: Traits) -> None:
    """Any two requests: never an error, None only where all of it is rendered again."""
    found = first_difference(before, now, traits)
    if found is None:
        assert before.tools == now.tools
        assert len(before.lines) <= len(now.lines)
    else:
        assert max(len(found.before), len(found.after)) <= 60
        assert quoted(found).isprintable()
        assert found.advice


@given(MESSAGES, MESSAGES)
def test_an_extension_is_no_difference(messages: list[Message], more: list[Message]) -> None:
    """Whatever comes after what was sent before, if the head stays the head."""
    messages = [Q, *messages]
    assert first_difference(talk(messages), talk([*messages, *more]), NOTHING) is None


@given(st.text(max_size=200), st.text(max_size=200))
def test_rendered_never_fails(before: str, now: str) -> None:
    """Any two prompts."""
    found = rendered_difference(before, now, Traits(tools_late=True))
    assert (found is None) == now.startswith(before)


def test_long_conversations_are_compared_in_blocks() -> None:
    """Two requests of 150 kB that differ at the end of one message: found, and only there."""
    long = [S, *(user(f"{n} " + "x" * 5000) for n in range(30))]
    late = [*long[:29], user("28 " + "x" * 4999 + "y"), long[30], A]
    found = why(talk(long), talk(late))
    assert found.sentence == "history was rewritten at message 30 (user)"
    assert (found.before[-1], len(found.before)) == ("x", 31)
