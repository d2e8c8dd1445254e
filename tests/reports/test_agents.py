"""Reports on other coding agents: dates, reasoning, arguments, tools, moving reminders.

About proxy.core.normalise and proxy.core.explain; bug-reports section B and rows 55, 57 and 73.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.explain import quoted
from proxy.core.normalise import switched_on
from proxy.core.template import Traits
from proxy.dialects import DIALECTS
from tests.reports.kit import (
    CHAT,
    MESSAGES,
    Explained,
    Trigger,
    Turn,
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

RULES = "Follow the conventions of the project.\n" * 20


def daily(before: str, *texts: str, rest: str = "") -> list[Turn]:
    """A conversation whose system text says another time in each request."""
    said = [assistant(f"Answer {number}.") for number in range(len(texts))]
    history: list[Message] = []
    turns = []
    for number, text in enumerate(texts):
        history.append(user(f"Question {number}?"))
        body = {"messages": [system(before + text + rest), *history]}
        turns.append(Turn(body, said[number]))
        history.append(said[number])
    return turns


def env(date: str) -> str:
    """OpenCode's and Kilo's."""
    return (
        "<env>\n  Working directory: /home/u/p\n  Is directory a git repo: yes\n  Platform: linux\n"
        f"  Today's date: {date}\n</env>\n"
    )


def channel(number: int, at: str) -> str:
    """OpenClaw's end of the system prompt."""
    return (
        "\n\nConversation info (untrusted metadata):\n```json\n{\n"
        f'  "message_id": "{number}",\n  "timestamp": "Sun 2026-02-22 {at} CDT"\n}}\n```\n'
    )


OPENCODE, KILO = "You are opencode, an interactive CLI tool.\n", "You are Kilo.\n"
GOOSE = "You are a general-purpose AI agent called goose, created by Block.\n\n"
HERMES = "You are Hermes Agent.\n\n"
OPENCLAW = "You are a personal assistant running inside OpenClaw.\n"
CLOCKS = [
    Trigger(
        24,
        "anomalyco/opencode#32622",
        daily(OPENCODE, env("Sun Mar 22 2026"), env("Mon Mar 23 2026"), env("Mon Mar 23 2026"),
              rest=RULES),
        client="opencode",
    ),
    Trigger(
        24,
        "not recognised",
        daily(OPENCODE, env("Sun Mar 22 2026"), env("Mon Mar 23 2026"), env("Mon Mar 23 2026"),
              rest=RULES),
    ),
    Trigger(
        30,
        "aaif-goose/goose#2431",
        daily(GOOSE, *(f"The current date is 2025-04-30 14:31:{s}.\n\n" for s in (10, 31, 59)),
              rest=RULES),
        client="goose",
        told=["2025-04-30 14:31:59"],
    ),
    Trigger(
        32,
        "NousResearch/hermes-agent#15866",
        daily(HERMES + RULES, *(f"Conversation started: Friday, October 09, 2026 02:{m} PM\n"
                                for m in ("31", "32", "47"))),
        client="hermes",
        told=["Friday, October 09, 2026 02:47 PM"],
    ),
    Trigger(
        34,
        "openclaw/openclaw#78053",
        daily(OPENCLAW + RULES,
              *(channel(682 + n, at) for n, at in ((0, "17:41"), (2, "17:42"), (7, "17:58")))),
        client="openclaw",
        told=['"message_id": "689"', "17:58 CDT"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("trigger", named(CLOCKS))
def test_a_clock_stands_still(trigger: Trigger) -> None:
    """The first text stays, every request extends the one before, the newest value is told."""
    made = played(trigger)
    assert made[0].raw == orjson.dumps(trigger.turns[0].body)
    assert all(holds(trigger, made))
    assert not all(holds(trigger, played(trigger, "off")))
    assert {sent(one)[0]["content"] for one in made} == {sent(made[0])[0]["content"]}
    for value in trigger.told:
        assert value in last(made[-1])
    for number, one in enumerate(made):
        assert last(one).startswith(f"Question {number}?")


def test_24_after_midnight() -> None:
    """The new date is told once, with the first message of the day, and stays there."""
    made = played(CLOCKS[0])
    told = sent(made[1])[-1]["content"]
    assert "Today's date: Mon Mar 23 2026" in told
    assert sent(made[2])[3]["content"] == told
    assert last(made[2]) == "Question 2?"


THOUGHT = "The user wants the list.\nI call ls."
LS = call("bash", '{"command":"ls"}', "call_1")
CAT = call("bash", '{"command":"cat a"}', "call_2")
ASK = user("What is here?")


def looped(*messages: Message) -> dict[str, Any]:
    """A request in a tool loop."""
    return {"messages": [system("S"), ASK, *messages]}


def thinking(kept: Message, thought: str = THOUGHT) -> list[Turn]:
    """A tool loop of two calls whose first message comes back as ``kept``; then the next turn."""
    first = assistant("", LS, reasoning_content=thought)
    second = assistant("", CAT, reasoning_content="Now a.")
    bare = assistant("", CAT)
    return [
        Turn(looped(), first),
        Turn(looped(kept, result("a b", "call_1")), second),
        Turn(looped(kept, result("a b", "call_1"), bare, result("x", "call_2")), assistant("Done")),
        Turn(
            looped(
                kept,
                result("a b", "call_1"),
                bare,
                result("x", "call_2"),
                assistant("Done"),
                user("Thanks"),
            )
        ),
    ]


def echoed(text: str, back: str) -> list[Turn]:
    """The model's text comes back in another form."""
    return [
        Turn(looped(), assistant(text)),
        Turn(looped(assistant(back), user("Go on.")), assistant("Yes.")),
        Turn(looped(assistant(back), user("Go on."), assistant("Yes."), user("Stop."))),
    ]


def called(arguments: str, back: str, *results: str) -> list[Turn]:
    """Arguments, and a result, come back written in another way (the result in each request)."""
    first = assistant("", call("write", arguments))
    again = assistant("", call("write", back))
    found = [result(one) for one in results or ("ok", "ok")]
    return [
        Turn(looped(), first),
        Turn(looped(again, found[0]), assistant("Done.")),
        Turn(looped(again, found[-1], assistant("Done."), user("Thanks."))),
    ]


def blank(back: Any) -> list[Turn]:
    """Only space was generated before a tool call; the client sends ``back``."""
    return [
        Turn(looped(), assistant("\n\n", LS)),
        Turn(looped(assistant(back, LS), result("a b", "call_1"))),
    ]


WRITE = '{"path": "src/a.py", "content": "caf\\u00e9",  "append": false, "limit": 10000.0}'
SORTED = '{"append": false, "content": "café", "limit": 10000, "path": "src/a.py"}'
COMPACT = '{"path":"src/a.py","content":"café","append":false,"limit":10000}'
WEATHER = '{"temp": 21.0, "city": "Oslo", "wind": {"kmh": 9, "from": "NW"}}'
REWRITTEN = '{"city":"Oslo","temp":21,"wind":{"from":"NW","kmh":9}}'
ECHOES = [
    Trigger(23, "anomalyco/opencode#19081", thinking(assistant("", LS))),
    Trigger(55, "ggml-org/llama.cpp#21903", thinking(assistant("", LS, reasoning_content=""))),
    Trigger(
        55,
        "trimmed",
        thinking(assistant("", LS, reasoning_content=THOUGHT), f"\n{THOUGHT} \n"),
    ),
    Trigger(38, "unslothai/unsloth#10791", called(WRITE, SORTED)),
    Trigger(39, "teunlao/swift-ai-sdk#39", called(WRITE, SORTED, WEATHER, REWRITTEN)),
    Trigger(39, "OpenRouterTeam/ai-sdk-provider#171", called(WRITE, COMPACT)),
    Trigger(39, "stanfordnlp/dspy#10216", called("{}", "{}", WEATHER, REWRITTEN)),
    Trigger(40, "ai-dynamo/dynamo#10637", called(WRITE, SORTED, "ok", "ok")),
    Trigger(57, "ggml-org/llama.cpp#11970", echoed("\nHere it is. \n\n", "Here it is.")),
    Trigger(57, "abetlen/llama-cpp-python#1369", echoed(" Sure:\n- a\n- b\n", "Sure:\n- a\n- b")),
    Trigger(57, "blank before a call", blank("")),
    Trigger(57, "blank, null", blank(None)),
]


@pytest.mark.parametrize("trigger", named(ECHOES))
def test_what_was_generated_goes_back(trigger: Trigger) -> None:
    """Whatever the client made of it, the backend gets the text that is in its cache."""
    made = played(trigger)
    assert all(holds(trigger, made))
    assert not all(holds(trigger, played(trigger, "off")))


def test_38_unknown_arguments_stay() -> None:
    """What this proxy has not seen generated is not sorted, whatever order it is in."""
    body = looped(assistant("", call("write", '{"z": 1,  "a": 10000.0}')), result('{"z":1, "a":2}'))
    raw = orjson.dumps(body)
    assert Desk().raw(raw).raw == raw
    other = looped(assistant("", call("write", '{"z": 2,  "a": 10000.0}')), result("ok"))
    desk = Desk()
    desk.hear(desk.ask(*looped()["messages"]), assistant("", call("write", '{"a": 1, "z": 1}')))
    assert desk.raw(orjson.dumps(other)).raw == orjson.dumps(other)


def test_23_not_beyond_the_loop() -> None:
    """Reasoning of a turn that was never replayed is not put back once the turn is over."""
    desk = Desk()
    desk.hear(desk.ask(ASK), assistant("A list.", reasoning_content=THOUGHT))
    made = desk.ask(ASK, assistant("A list."), user("Thanks."))
    assert "reasoning_content" not in sent(made)[1]


MCP = [tool("git_status"), tool("fs_read"), tool("fs_write"), tool("bash")]


@pytest.mark.parametrize(
    ("order", "client"),
    [
        pytest.param([2, 3, 1, 0], "opencode", id="25 anomalyco/opencode#23571"),
        pytest.param([3, 2, 1, 0], "goose", id="30 aaif-goose/goose#4610"),
        pytest.param([1, 0, 3, 2], "", id="25 no name"),
    ],
)
def test_tools_keep_their_order(order: list[int], client: str) -> None:
    """After a restart MCP servers answer in another order, and the keys of schemas turn."""
    turned = [{"function": MCP[n]["function"], "type": "function"} for n in order]
    turns = [
        Turn({"messages": [ASK], "tools": MCP}, assistant("A list.")),
        Turn({"messages": [ASK, assistant("A list."), user("Go.")], "tools": turned}),
    ]
    trigger = Trigger(25, "", turns, client=client)
    made = played(trigger)
    assert holds(trigger, made) == [True]
    assert holds(trigger, played(trigger, "off")) == [False]
    assert why(made[0], made[1]) is None


PROMPT, EXTRA = f"You are an agent.\n{RULES}", "Instructions from: /home/u/p/AGENTS.md\nBe brief."


@pytest.mark.parametrize(
    ("traits", "merged"),
    [
        pytest.param(Traits(two_systems=False), True, id="26 anomalyco/opencode#14743"),
        pytest.param(Traits(two_systems=True), False, id="26 rendered"),
        pytest.param(Traits(), False, id="26 not known"),
    ],
)
def test_two_leading_system_messages(traits: Traits, merged: bool) -> None:
    """One, with an empty line between the texts, where the template refuses two; each time."""
    history = [ASK, assistant("A list."), user("Go.")]
    turns = [Turn({"messages": [system(PROMPT), system(EXTRA), *history[:n]]}) for n in (1, 3)]
    trigger = Trigger(26, "", turns, traits=traits)
    made = played(trigger)
    head = [system(f"{PROMPT}\n\n{EXTRA}")] if merged else [system(PROMPT), system(EXTRA)]
    assert sent(made[0]) == [*head, ASK]
    assert holds(trigger, made) == [True]


SWITCH = (
    "<system-reminder>\nYour operational mode has changed from plan to build.\nYou are no longer"
    " in read-only mode.\n</system-reminder>"
)
PLAN = "<system-reminder>\nPlan mode is active. You must not edit any file.\n</system-reminder>"


def reminded(text: str, reminder: str, *, as_parts: bool) -> Message:
    """A user message with a reminder behind it; OpenCode sends it as a part of its own."""
    if as_parts:
        return user([{"type": "text", "text": text}, {"type": "text", "text": reminder}])
    return user(f"{text}\n\n{reminder}")


def moved(reminder: str, *, as_parts: bool) -> list[Turn]:
    """The reminder leaves message 2 and turns up in message 6."""
    work = [assistant("", call("edit", '{"n":1}')), result("edited"), assistant("Built.")]
    first = [system("S"), reminded("Build it.", reminder, as_parts=as_parts)]
    then = [system("S"), user("Build it."), *work, reminded("Ok?", reminder, as_parts=as_parts)]
    return [
        Turn({"messages": first}, work[0]),
        Turn({"messages": [*first, *work[:2]]}, work[2]),
        Turn({"messages": then}),
    ]


MOVED = [
    Trigger(21, "anomalyco/opencode#23595", moved(SWITCH, as_parts=True), client="opencode"),
    Trigger(21, "one text", moved(SWITCH, as_parts=False), client="opencode"),
]


@pytest.mark.parametrize("trigger", named(MOVED))
def test_a_moving_reminder_is_explained(trigger: Trigger) -> None:
    """By default the client's bytes go on, and both places are named."""
    made = played(trigger)
    assert made[-1].raw == orjson.dumps(trigger.turns[-1].body)
    assert holds(trigger, made) == [True, False]
    found = why(made[1], made[2])
    assert found is not None
    assert found.sentence == "a system reminder moved from message 2 to message 6"
    assert "The opt-in rule `moved-reminder` keeps them in place." in found.advice


@pytest.mark.parametrize("trigger", named(MOVED))
def test_a_moving_reminder_by_request(trigger: Trigger) -> None:
    """Who asks for it gets the reminder kept where it first was."""
    wanted = Trigger(21, "", trigger.turns, client="opencode", rules=["+moved-reminder"])
    made = played(wanted)
    assert holds(wanted, made) == [True, True]
    assert SWITCH in last(made[-1])


@pytest.mark.parametrize("as_parts", [True, False], ids=["22 anomalyco/opencode#24121", "22 text"])
def test_a_stale_reminder_is_not_repeated(as_parts: bool) -> None:
    """Off by default: a model that still reads "plan mode" refuses edits in build mode."""
    assert "moved-reminder" not in switched_on("safe", ())
    old = [system("S"), reminded("Plan it.", PLAN, as_parts=as_parts)]
    now = [system("S"), user("Plan it."), assistant("1. ..."), user("Build it.")]
    turns = [Turn({"messages": old}, now[2]), Turn({"messages": now})]
    made = played(Trigger(22, "", turns, client="opencode"))
    assert made[-1].raw == orjson.dumps({"messages": now})
    assert b"Plan mode" not in made[-1].raw


def said(*texts: str) -> list[Message]:
    """A chat of texts, the user's first."""
    return [user(one) if n % 2 == 0 else assistant(one) for n, one in enumerate(texts)]


CHATS = [f"It is message {n} of a chat that goes on and on." for n in range(8)]
EDITED = [*CHATS[:2], "The user has edited this one.", *CHATS[3:]]
EXTENSIONS = ["## developer\nEdit files.", "## memory\nRemember.", "## web\nBrowse."]
GREW = "# Rules of AGENTS.md\n\n- Use tabs."
EXPLAINED = [
    Explained(
        Trigger(
            29,
            "zed-industries/zed#63808",
            [
                Turn({"messages": [system(f"{PROMPT}{GREW}"), *said(*CHATS[:3])]}),
                Turn({"messages": [system(f"{PROMPT}{GREW}\n- Add tests."), *said(*CHATS[:5])]}),
            ],
            client="zed",
        ),
        "system prompt grew at its end: nothing → `\\n- Add tests.`",
        "An instruction file was edited. One re-read is correct.",
    ),
    Explained(
        Trigger(
            30,
            "aaif-goose/goose#5192",
            [
                Turn({"messages": [system(GOOSE + "\n".join(EXTENSIONS)), *said(*CHATS[:3])]}),
                Turn({"messages": [system(GOOSE + "\n".join(EXTENSIONS[::-1])),
                                   *said(*CHATS[:5])]}),
            ],
            client="goose",
        ),
        "system prompt changed at character 72: ",
        "The client writes its system prompt anew.",
    ),
    Explained(
        Trigger(
            35,
            "openclaw/openclaw#45110",
            [
                Turn({"messages": [system(OPENCLAW), *said(*CHATS[:7])]}),
                Turn({"messages": [system(OPENCLAW), *said(*EDITED)]}),
            ],
            client="openclaw",
        ),
        "history was rewritten at message 4 (user): ",
        "The client edited its history. One re-read from there is correct.",
    ),
]  # fmt: skip


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


UUIDS = [f"call_9f1c2f0e-6c1b-4c3e-9d7a-00000000000{n}" for n in range(2)]


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(UUIDS, id="73 ml-explore/mlx-lm#1375"),
        pytest.param(["abcDEF123", "123456789"], id="73 ggml-org/llama.cpp#14349"),
    ],
)
def test_ids_are_not_changed(ids: list[str]) -> None:
    """Whatever a template thinks of them: what the model made goes to the client and comes back."""
    one, other = (call("f", '{"n":1}', name) for name in ids)
    made = Desk(traits=Traits()).ask(ASK, assistant("", one, other), *(result("r", i) for i in ids))
    assert made.changes == ()
    use = [{"type": "tool_use", "id": name, "name": "f", "input": {"n": 1}} for name in ids]
    back = [{"type": "tool_result", "tool_use_id": name, "content": "r"} for name in ids]
    body = {"messages": [user("x"), assistant(use), user(back)], "max_tokens": 9}
    got = orjson.loads(DIALECTS[MESSAGES].parse(orjson.dumps(body)).raw)["messages"]
    assert [one["id"] for one in got[1]["tool_calls"]] == ids
    assert [one["tool_call_id"] for one in got[2:]] == ids


def test_73_ids_made_anew() -> None:
    """A client that makes new ids for the same calls does not change what the backend got."""
    desk = Desk()
    first = desk.ask(ASK, assistant("", call("f", "{}", UUIDS[0])), result("r", UUIDS[0]))
    again = [assistant("", call("f", "{}", UUIDS[1])), result("r", UUIDS[1])]
    second = desk.ask(ASK, *again, assistant("Done."), user("Go."))
    assert extends(first, second)


@pytest.mark.parametrize(
    ("given", "sent_on"),
    [
        pytest.param({}, True, id="41 continuedev/continue#2845"),
        pytest.param({"cache_prompt": True}, True, id="41 huggingface/chat-ui#920"),
        pytest.param({"cache_prompt": False}, False, id="41 respected"),
    ],
)
@pytest.mark.parametrize("api", [CHAT, MESSAGES, "/v1/completions", "/completion", "/infill"])
def test_prompts_are_cached(api: str, given: dict[str, Any], sent_on: bool) -> None:
    """An old llama.cpp caches only when it is told to; who says no means it."""
    body = {"messages": [ASK], "prompt": "x", "input_prefix": "x", "max_tokens": 9, **given}
    dialect = DIALECTS[api]
    got = orjson.loads(dialect.upstream(dialect.parse(orjson.dumps(body)), 0))
    assert got["cache_prompt"] is sent_on
