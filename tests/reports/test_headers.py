"""Reports on Claude Code: billing headers, counters, system messages in mid-conversation.

About proxy.core.normalise.shape and proxy.core.normalise.system; bug-reports section A.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest

from proxy.core.explain import quoted
from proxy.core.normalise import switched_on
from proxy.core.template import Traits
from tests.reports.kit import (
    CHAT,
    MESSAGES,
    Body,
    Explained,
    Trigger,
    Turn,
    arrives,
    extends,
    holds,
    last,
    named,
    played,
    why,
)
from tests.unit.core.normalise.kit import (
    Desk,
    Message,
    assistant,
    call,
    result,
    sent,
    system,
    tool,
    user,
)

HEADER = "x-anthropic-billing-header: "
CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude.\n\nYou help with code."
HELLO = {"role": "user", "content": [{"type": "text", "text": "Fix the bug in a.py."}]}
STRICT = Traits(mid_system=False, two_systems=False)


def blocks(header: str) -> Body:
    """As Claude Code sends it: the header is a system block of its own."""
    mark = {"cache_control": {"type": "ephemeral"}}
    texts = [{"type": "text", "text": header}, {"type": "text", "text": CLAUDE, **mark}]
    return {"model": "m", "max_tokens": 32, "system": texts, "messages": [HELLO]}


def text(header: str) -> Body:
    """The header opens a string ``system``; llama-server puts nothing between two blocks."""
    return {"model": "m", "max_tokens": 32, "system": header + CLAUDE, "messages": [HELLO]}


def bridged(header: str) -> Body:
    """Through a router that speaks OpenAI's API: one string."""
    return {"messages": [system(f"{header}\n{CLAUDE}"), user("Fix the bug in a.py.")]}


def parts(header: str) -> Body:
    """Through one that keeps the blocks as parts."""
    texts = [{"type": "text", "text": one} for one in (header, CLAUDE)]
    return {"messages": [system(texts), user("Fix the bug in a.py.")]}


CLI = "cc_version=2.1.188.4f3; cc_entrypoint=cli; "
SDK = "cc_version=2.1.188.4f3; cc_entrypoint=sdk-cli; "
BILLING = [
    ("1 ggml-org/llama.cpp#20623", MESSAGES, blocks, f"{CLI}cch=fa690;", f"{CLI}cch=0d9aa;"),
    ("2 anthropics/claude-code#68900", MESSAGES, blocks, f"{SDK}cch=36ee5;", f"{SDK}cch=0aaa9;"),
    ("4 ollama/ollama#14918", CHAT, bridged, f"{CLI}cch=fa690;", f"{CLI}cch=0d9aa;"),
    ("4 claude-code-router#1220", CHAT, parts, f"{CLI}cch=fa690;", f"{CLI}cch=0d9aa;"),
    ("8 copilot-api#174", MESSAGES, text, f"{CLI}cch=fa690;", f"{CLI}cch=0d9aa;"),
    ("75 sentinel", MESSAGES, blocks, f"{CLI}cch=00000;", f"{CLI}cch=0a1b2;"),
    (
        "75 no cch, suffix",
        MESSAGES,
        blocks,
        "cc_version=2.1.332.5b4; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.ed3; cc_entrypoint=sdk-cli;",
    ),
    (
        "75 editor, order",
        MESSAGES,
        text,
        f"{CLI}cch=fa690;",
        "cch=0d9aa; cc_entrypoint=claude-vscode; cc_version=2.1.188.9b1;",
    ),
    (
        "75 new field",
        CHAT,
        bridged,
        f"{CLI}cch=fa690;",
        f"{CLI}cc_workload=cron; cch=0d9aa; cc_is_subagent=true;",
    ),
]


@pytest.mark.parametrize(
    ("api", "build", "one", "other"), [pytest.param(*rest, id=name) for name, *rest in BILLING]
)
def test_the_header_is_deleted(api: str, build: Any, one: str, other: str) -> None:
    """Two requests equal but for the billing header are the same bytes, and it is not in them."""
    desk = Desk()
    raw = [arrives(desk, build(HEADER + fields), api).raw for fields in (one, other)]
    assert raw[0] == raw[1]
    assert b"billing" not in raw[0]
    assert b"cch=" not in raw[0]
    assert orjson.loads(raw[0])["messages"] == [system(CLAUDE), user("Fix the bug in a.py.")]


@pytest.mark.parametrize(
    "build", [pytest.param(one, id=f"75 {one.__name__}") for one in (blocks, text)]
)
def test_misspelt_or_alone(build: Any) -> None:
    """The one misspelling that was seen counts, and a system text of nothing else is no message."""
    made = arrives(Desk(), build(f"x-ahthropic-billing-header: {CLI}cch=ab12f;"), MESSAGES)
    assert sent(made)[0] == system(CLAUDE)
    alone = {**build(""), "system": f"{HEADER}{CLI}cch=ab12f;"}
    assert [one["role"] for one in sent(arrives(Desk(), alone, MESSAGES))] == ["user"]


QUOTED = f"{HEADER}{CLI}cch=ab12f;"
LOG = f"src/log.txt:3: {QUOTED}\n{QUOTED}"


@pytest.mark.parametrize("real", [f"{HEADER}{CLI}cch=77777;", ""], ids=["6 loreai#739", "6 alone"])
def test_a_quoted_header_stays(real: str) -> None:
    """User text, tool results and later system blocks that quote the header keep every byte."""
    desk = Desk()
    use = {"type": "tool_use", "id": "toolu_1", "name": "Grep", "input": {"pattern": "cch="}}
    body = {
        "max_tokens": 32,
        "system": [
            *([{"type": "text", "text": real}] if real else []),
            {"type": "text", "text": CLAUDE},
            {"type": "text", "text": QUOTED},
        ],
        "messages": [
            {"role": "user", "content": QUOTED},
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": LOG}],
            },
            {"role": "system", "content": QUOTED},
        ],
    }
    got = sent(arrives(desk, body, MESSAGES))
    assert [part["text"] for part in got[0]["content"]] == [CLAUDE, QUOTED]
    assert [one["content"] for one in got[1:]] == [QUOTED, "", LOG, QUOTED]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"messages": [user(QUOTED)]}, id="6 no system"),
        pytest.param({"messages": [system(f"{CLAUDE}\n{QUOTED}"), user("x")]}, id="6 behind"),
        pytest.param(
            {"messages": [system(f"x {QUOTED}"), assistant(QUOTED), user(QUOTED)]}, id="6 inside"
        ),
        pytest.param({"messages": [system(f"{HEADER}is deleted by us"), user("x")]}, id="6 talk"),
    ],
)
def test_only_at_the_start(body: Body) -> None:
    """Where the header does not open the system text, the client's bytes go on."""
    raw = orjson.dumps(body)
    assert Desk().raw(raw).raw == raw


ENVIRONMENT = "# Environment\n\ncwd: /home/u/p\n\n# Agents\n\n- Explore: read-only search"
AGENTS = "Available agent types:\n- general-purpose: for multi-step tasks\n- Explore: fast search"
TODO = (
    "The task tools haven't been used recently. If you are working on tasks that would benefit"
    " from tracking, use them.\n\n[1. [pending] fix a.py]"
)
PLAN_ON = "Plan mode is active. You MUST NOT make any edits."
PLAN_OFF = "You have exited plan mode. You can now make edits."
ROLLOVER = "The date has changed. Today's date is now 2026-12-01. DO NOT mention this to the user."


def counter(tokens: int) -> Message:
    """The countdown."""
    left = f"<total_tokens>{tokens} tokens left</total_tokens>"
    return system([{"type": "text", "text": left}])


def agent(*messages: Message) -> list[Turn]:
    """Claude Code over the Messages API; a request ends where the next assistant message begins."""
    ends = [n for n, one in enumerate(messages) if one["role"] == "assistant"] + [len(messages)]
    body = {"max_tokens": 32, "system": [{"type": "text", "text": CLAUDE}]}
    return [Turn({**body, "messages": list(messages[:n])}) for n in ends]


def uses(number: int) -> Message:
    """A tool is called."""
    use = {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"n": number}}
    return {"role": "assistant", "content": [use]}


def used(number: int) -> Message:
    """Its result."""
    block = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"file {number}"}
    return user([block])


IN_PLACE = [
    (9, "anthropics/claude-code#77698", agent(HELLO, system(ENVIRONMENT), uses(1), used(1))),
    (10, "ollama/ollama#17774", agent(HELLO, system(AGENTS), uses(1), used(1), system("more"))),
    (
        11,
        "ollama/ollama#18431",
        agent(HELLO, counter(14873211), uses(1), used(1), counter(14870001), uses(2), used(2),
              counter(14860420), assistant("Done."), user("Thanks."), counter(14850000)),
    ),
    (
        11,
        "constant",
        agent(HELLO, counter(1000000), uses(1), used(1), counter(1000000), uses(2), used(2),
              counter(1000000)),
    ),
    (
        13,
        "jundot/omlx#2483",
        agent(HELLO, uses(1), used(1), uses(2), used(2), uses(3), used(3), system(TODO), uses(4),
              used(4), uses(5), used(5), system(TODO)),
    ),
    (
        14,
        "jundot/omlx#1826",
        agent(HELLO, system(PLAN_ON), assistant("The plan: ..."), user("Go."), system(PLAN_OFF),
              uses(1), used(1), assistant("Done."), user("Next."), system(ROLLOVER)),
    ),
    (
        74,
        "diegosouzapw/OmniRoute#8934",
        agent(HELLO, assistant("Yes?"), user("Rename it."), system(AGENTS), uses(1), used(1)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("strict", [True, False], ids=["refused", "rendered"])
@pytest.mark.parametrize(
    "trigger",
    named([
        Trigger(row, name, turns, api=MESSAGES, client="claude-code")
        for row, name, turns in IN_PLACE
    ]),
)  # fmt: skip
def test_system_messages_keep_their_place(trigger: Trigger, strict: bool) -> None:
    """Never hoisted, never dropped, nothing said differently later: the history only grows.

    A template that refuses them gets them as user text at their place; another one as they are.
    """
    traits = STRICT if strict else Traits(mid_system=True)
    desk = Desk(client=trigger.client, traits=traits)
    made = [arrives(desk, turn.body, MESSAGES) for turn in trigger.turns]
    assert all(extends(one, other) for one, other in pairwise(made))
    for turn, one in zip(trigger.turns, made, strict=True):
        assert sent(one)[0] == system(CLAUDE)
        roles = {message["role"] for message in sent(one)[1:]}
        assert ("system" in roles) == (not strict and "system" in asked(turn))
        assert in_order(texts(turn.body["messages"]), "\n".join(texts(sent(one)[1:])))


def asked(turn: Turn) -> set[str]:
    """The roles in a request."""
    return {message["role"] for message in turn.body["messages"]}


def texts(messages: list[Message]) -> list[str]:
    """All texts, tool results included, in their order."""
    found = []
    for message in messages:
        content = message["content"]
        for part in content if isinstance(content, list) else [{"text": content}]:
            said = part.get("text", part.get("content"))
            found += [said] if isinstance(said, str) else []
    return found


def in_order(wanted: list[str], whole: str) -> bool:
    """Each text is there, each behind the one before."""
    place = 0
    for one in wanted:
        place = whole.find(one, place) + len(one)
        if place < len(one):
            return False
    return True


def test_9_what_a_strict_template_gets() -> None:
    """The exact messages: demoted text stands behind the user's own, or behind a tool's result."""
    made = played(Trigger(9, "", IN_PLACE[0][2], api=MESSAGES, traits=STRICT))
    reminder = f"<system-reminder>\n{ENVIRONMENT}\n</system-reminder>"
    first = [system(CLAUDE), user(f"Fix the bug in a.py.\n\n{reminder}")]
    assert sent(made[0]) == first
    assert sent(made[1])[:2] == first
    made = played(Trigger(11, "", IN_PLACE[2][2], api=MESSAGES, traits=STRICT))
    counted = "<total_tokens>14870001 tokens left</total_tokens>"
    assert sent(made[1])[-1] == user(f"<system-reminder>\n{counted}\n</system-reminder>")
    assert sent(made[1])[-2] == result("file 1", "toolu_1")


@pytest.mark.parametrize("rule", ["total-tokens"], ids=["11 off"])
def test_the_countdown_is_not_deleted(rule: str) -> None:
    """Skills read it: deleting is for those who ask for it, and then the history grows, too."""
    assert rule not in switched_on("safe", ())
    trigger = Trigger(11, "", IN_PLACE[2][2], api=MESSAGES, rules=[f"+{rule}"])
    made = played(trigger)
    assert all(holds(trigger, made))
    assert all(b"total_tokens" not in one.raw for one in made)


def git(status: str, commits: str) -> str:
    """Claude Code's block before 2.1.267."""
    return (
        "gitStatus: This is the git status at the start of the conversation. Note that this status"
        " is a snapshot in time, and will not update during the conversation.\nCurrent branch:"
        f" main\n\nStatus:\n{status}\n\nRecent commits:\n{commits}"
    )


DIRTY, CLEAN = git("M src/a.py", "1a2b3c4 fix"), git("(clean)", "5d6e7f8 more\n1a2b3c4 fix")
RESUMED = [
    Turn({"messages": [system(f"{CLAUDE}\n\n{DIRTY}"), user("Fix a.py.")]}, assistant("Fixed.")),
    Turn({"messages": [system(f"{CLAUDE}\n\n{CLEAN}"), user("Fix a.py."), assistant("Fixed."),
                       user("Now b.py.")]}, assistant("Done.")),
]  # fmt: skip
THIRD = Turn({"messages": [*RESUMED[1].body["messages"], assistant("Done."), user("And c.py.")]})
GREP = assistant("", call("Grep", '{"pattern":"cch"}', "toolu_9"))


def grepped(found: str) -> list[Message]:
    """A tool result that the client writes anew."""
    return [system(CLAUDE), user("Where is cch?"), GREP, result(found, "toolu_9")]


def old_results(*contents: str) -> list[Message]:
    """A conversation with results of tools."""
    made = [system(CLAUDE), user("Look around.")]
    for number, content in enumerate(contents):
        asked = call("Read", f'{{"n":{number}}}', f"toolu_{number}")
        made += [assistant("", asked), result(content, f"toolu_{number}")]
    return made


FILES = [f"{number}: def f{number}(): return {number}\n" * 9 for number in range(6)]
CLEARED = ["[Old tool result content cleared]", *FILES[1:]]
EXPLAINED = [
    Explained(
        Trigger(
            5,
            "anthropics/claude-code#40652",
            [
                Turn({"messages": grepped("a.js:7: cch=ab12f;")}, assistant("In a.js.")),
                Turn(
                    {
                        "messages": [
                            *grepped("a.js:7: cch=0c0de;"),
                            assistant("In a.js."),
                            user("Thanks."),
                        ]
                    }
                ),
            ],
        ),
        "history was rewritten at message 4 (tool result): `cch=ab12f` → `cch=0c0de`",
        "The client edited its history.",
    ),
    Explained(
        Trigger(16, "anthropics/claude-code#78720", RESUMED),
        "system prompt changed at character 269: `M src/a.py\\n\\nRecent commits:` →"
        " `(clean)\\n\\nRecent commits:\\n5d6e7f8 more`",
        "The opt-in rule `git-status` keeps the first one",
    ),
    Explained(
        Trigger(
            18,
            "cnighswonger/claude-code-cache-fix#36",
            [
                Turn({"messages": old_results(*FILES)}, assistant("Six files.")),
                Turn({"messages": [*old_results(*CLEARED), assistant("Six files."), user("Go.")]}),
            ],
        ),
        "an old result was cleared in message 4 (tool result)",
        "The client clears old tool results to save context, often after a pause.",
    ),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, id=f"{one.trigger.row} {one.trigger.report}") for one in EXPLAINED],
)
def test_left_alone_and_explained(case: Explained) -> None:
    """The client's own bytes go on, and the first difference is named."""
    made = played(case.trigger)
    assert [one.raw for one in made] == [orjson.dumps(turn.body) for turn in case.trigger.turns]
    found = why(made[-2], made[-1])
    assert found is not None
    assert quoted(found).startswith(case.sentence)
    assert case.advice in found.advice


@pytest.mark.parametrize(
    "trigger",
    named([
        Trigger(16, "nimbalyst/nimbalyst#1177", [*RESUMED, THIRD], rules=["+git-status"]),
    ]),
)  # fmt: skip
def test_git_status_by_request(trigger: Trigger) -> None:
    """Who asks for it gets the first block frozen, and the newer one told once, in a note."""
    made = played(trigger)
    assert holds(trigger, made) == [True, True]
    assert holds(trigger, played(trigger, "off")) == [False, True]
    assert CLEAN in last(made[1])
    assert DIRTY in sent(made[2])[0]["content"]
    assert last(made[2]) == "And c.py."


READ, BASH, LSP, GLOB = (tool(name) for name in ("Read", "Bash", "LSP", "Glob"))


def test_19_jundot_omlx_2333() -> None:
    """A tool that appears late goes to the end and stays there; the ones before keep their bytes.

    What is read again is said; old results that are cleared are left (row 18).
    """
    desk, history = Desk(), [user("a"), assistant("b"), user("c")]
    orders = [READ, BASH], [READ, LSP, BASH], [LSP, BASH, READ], [GLOB, LSP, READ, BASH]
    made = [desk.ask(*history, tools=list(order)) for order in orders]
    tools = [orjson.loads(one.raw)["tools"] for one in made]
    assert tools == [[READ, BASH], [READ, BASH, LSP], [READ, BASH, LSP], [READ, BASH, LSP, GLOB]]
    found = why(made[0], made[1])
    assert found is not None
    assert found.sentence == "tool `LSP` was added at the end"
    assert why(made[1], made[2]) is None
