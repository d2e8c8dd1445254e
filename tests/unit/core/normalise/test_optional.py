"""Rules that change the meaning: when asked for, they do that and no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.core.normalise.kit import Desk, Message, assistant, rules, sent, system, user
from tests.unit.core.normalise.scenes import GIT, LONG, REMINDER, part, told

Q, R = user("q"), user("r")
NICE = "You are nice.\n" * 20
COUNTER = "<total_tokens>14873211 tokens left</total_tokens>"


def second(rule: str, first: list[Message], then: list[Message], **desk: Any) -> list[Message]:
    """What is sent of ``then``, the model having answered ``first``."""
    made = Desk(rules=[f"+{rule}"], **desk)
    made.hear(made.ask(*first), assistant(LONG))
    return sent(made.ask(*then))


@pytest.mark.parametrize(
    "messages",
    [
        [system(COUNTER), Q],
        [Q, user(COUNTER)],
        [Q, system(f"Mind this: {COUNTER}")],
        [Q, system([part(COUNTER), part("more")])],
        [Q, assistant(COUNTER)],
        [Q, system("<total_tokens>a</total_tokens> and <total_tokens>b</total_tokens>")],
    ],
    ids=repr,
)
def test_other_messages_with_a_counter_stay(messages: list[Message]) -> None:
    """Leading system text, a person quoting it, a message that says more."""
    assert sent(Desk(rules=["+total-tokens"]).ask(*messages)) == messages


def test_every_counter_goes() -> None:
    """Several, as text or as a part, with space around."""
    messages = [Q, system(f"\n{COUNTER}\n"), assistant("a"), system([part(COUNTER)]), R]
    made = Desk(rules=["+total-tokens"]).ask(*messages)
    assert sent(made) == [Q, assistant("a"), R]
    assert rules(made)[-1] == "total-tokens"


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("git-status", GIT.format("main"), GIT.format("dev")),
        ("memory", "<memory_context>a</memory_context>", "<memory_context>b</memory_context>"),
    ],
)
def test_only_the_block_of_the_system_text_is_kept(rule: str, old: str, new: str) -> None:
    """Around it the new text goes out; a person's message with the same words is untouched."""
    said = [user(old), assistant("first"), user("p")]
    first = [system(f"{NICE}One.\n\n{old}"), *said]
    then = [system(f"{NICE}Two.\n\n{new}"), *said, assistant(LONG), user(new)]
    went = second(rule, [*first], then)
    assert went[0] == system(f"{NICE}Two.\n\n{old}")
    assert went[1] == user(old)
    assert went[5]["content"].startswith(new + "\n\n<system-reminder>\n")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([system("S")], [system(f"S\n\n{GIT.format('dev')}")]),
        ([system(f"S\n\n{GIT.format('dev')}")], [system("S")]),
        ([system(f"S{GIT.format('dev')}")], [system(f"S{GIT.format('main')}")]),
        ([system(GIT.format("a")), system("b")], [system(GIT.format("a")), user(GIT.format("c"))]),
    ],
    ids=repr,
)
def test_a_block_that_came_or_went_is_the_clients(
    first: list[Message], then: list[Message]
) -> None:
    """Nothing is put where nothing was, nor into what is no system text."""
    behind = [Q, assistant(LONG), R]
    assert second("git-status", [*first, Q], [*then, *behind]) == [*then, *behind]


def test_a_block_stays_only_where_somebody_can_be_told() -> None:
    """No user or tool message: no note, so the new block goes out."""
    then = [system(GIT.format("dev")), assistant(LONG), assistant("b")]
    assert second("git-status", [system(GIT.format("main")), assistant(LONG)], then) == then


def test_the_kept_block_is_told() -> None:
    """The newer one is in the note, whole."""
    old, new = GIT.format("main"), GIT.format("dev")
    went = second("git-status", [system(old), Q], [system(new), Q, assistant(LONG), R])
    assert went[-1] == user("r" + told((old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"q {REMINDER}", "q!"),
        (f"{REMINDER}", ""),
        ("q", f"q {REMINDER}"),
        ("q <b>x</b>", "q"),
    ],
)
def test_what_is_no_reminder_left_out_is_the_clients(old: str, new: str) -> None:
    """Another text, nothing but a reminder, one that came, other tags."""
    then = [user(new), assistant(LONG), R]
    assert second("moved-reminder", [user(old)], then) == then


@pytest.mark.parametrize("role", ["assistant", "tool", "system"])
def test_reminders_of_others_stay_out(role: str) -> None:
    """Only old user messages are looked at."""
    said = {"role": role, "content": f"x\n\n{REMINDER}"}
    then = [Q, {**said, "content": "x"}, assistant(LONG), R]
    assert second("moved-reminder", [Q, said, R], then) == then


@pytest.mark.parametrize("given", [{"preserve_thinking": False}, {"preserve_thinking": True}, "a"])
def test_thinking_the_client_decided_on(given: Any) -> None:
    """Its own word stands."""
    made = Desk(rules=["+preserve-thinking"]).ask(Q, chat_template_kwargs=given)
    assert not made.changes
