"""Rules that need no ledger: only at their anchor, only what they name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.unit.core.normalise.kit import Desk, assistant, call, rules, sent, system, tool, user
from tests.unit.core.normalise.scenes import BILLING, part


@pytest.mark.parametrize(
    ("header", "rest"),
    [
        (BILLING, "You are"),
        (f"{BILLING}\n", "You are"),
        (f"{BILLING}\n\n", "You are"),
        ("x-anthropic-billing-header: cch=00000; cc_version=2.1;", "You are"),
        ("x-anthropic-billing-header: cc_version=2.1.188.4f3;", "You are"),
        ("x-ahthropic-billing-header:cch=1;", "You are"),
        (BILLING, "x-anthropic-billing-header: is what this text is about"),
        (BILLING, "Mode=strict; Language=de; You are"),
        (f"{BILLING}\n", "Mode=strict;"),
    ],
)
def test_the_billing_header_leads(header: str, rest: str) -> None:
    """Every spelling seen is deleted where it leads the system string; the rest stays."""
    assert sent(Desk().ask(system(header + rest), user("a")))[0] == system(rest)


@pytest.mark.parametrize("content", [BILLING, [part(BILLING)], [part(BILLING + "\n")]])
def test_a_system_message_of_nothing_else_is_dropped(content: Any) -> None:
    """An empty one would be rendered."""
    assert sent(Desk().ask(system(content), user("a"))) == [user("a")]


@pytest.mark.parametrize(
    "messages",
    [
        [system(f" {BILLING}You are")],
        [system(f"You are\n{BILLING}")],
        [system("x-anthropic-billing-header: none")],
        [system("x-anthropic-billing-header: cch=1")],
        [system("x-anthropic-billing-header: Mode=strict; be nice")],
        [system([part(f"{BILLING} Mode=strict;"), part("b")])],
        [system([part("You are"), part(BILLING)])],
        [system([part(f"{BILLING} You are"), part("b")])],
        [system([{"type": "image_url", "text": BILLING}, part("b")])],
        [system("a"), system(BILLING)],
        [user(f"{BILLING} what is this?")],
        [user("a"), assistant(BILLING), user(BILLING)],
        [user("a"), system(BILLING)],
    ],
    ids=repr,
)
def test_other_places_quote_the_header(messages: list[Any]) -> None:
    """People paste it into bug reports; clients may put it elsewhere; both stay."""
    made = Desk().ask(*messages)
    assert sent(made) == messages
    assert not made.changes


def test_marks_go_from_their_places() -> None:
    """On a message, a part, a nested part, a call, a tool and its function."""
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    asked = call("f", "{}")
    nested = {"type": "tool_result", "content": [part("a", **mark)]}
    messages = [
        system([part("s", **mark), part("t")]),
        user([nested, part("b")], **mark),
        {**assistant("c"), "tool_calls": [{**asked, **mark}]},
        user("d"),
    ]
    tools: list[Any] = [{**tool("f", **mark), **mark}, tool("g")]
    made = Desk().ask(*messages, tools=tools)
    assert sent(made) == [
        system([part("s"), part("t")]),
        user([{"type": "tool_result", "content": [part("a")]}, part("b")]),
        assistant("c", asked),
        user("d"),
    ]
    assert orjson.loads(made.raw)["tools"] == [tool("f"), tool("g")]
    assert rules(made) == ["cache-control"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user('say "cache_control": {}')]},
        {"messages": [assistant("", call("f", '{"cache_control": {"type": "ephemeral"}}'))]},
        {
            "messages": [user("a")],
            "tools": [tool("f", parameters={"properties": {"cache_control": {"type": "object"}}})],
        },
        {"messages": [user("a")], "metadata": {"cache_control": 1, "context_management": 1}},
        {"messages": [{**user("a"), "x": {"cache_control": 1}}]},
    ],
    ids=repr,
)
def test_the_word_elsewhere_is_content(body: dict[str, Any]) -> None:
    """A tool may take an argument of that name, a person may speak of it."""
    raw = orjson.dumps(body)
    made = Desk().raw(raw)
    assert made.raw is raw


@pytest.mark.parametrize(
    "content",
    [
        [part("a", citations=[])],
        [part("a"), part("b")],
        [],
        [{"type": "input_text", "text": "a"}],
        [{"type": "text"}],
        ["a"],
    ],
    ids=repr,
)
def test_more_than_one_plain_part_stays(content: Any) -> None:
    """Nothing but one text part, with nothing else in it, becomes a string."""
    assert not Desk().ask(user(content)).changes


def test_the_marked_single_part_becomes_a_string() -> None:
    """Claude Code sends a message marked as its last, and as a string later."""
    marked = Desk().ask(user([part("a", cache_control={"type": "ephemeral"})]))
    assert marked.raw == Desk().ask(user("a")).raw
