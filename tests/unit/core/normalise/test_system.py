"""Clocks that stand still and are told at the end; system text where a template refuses it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest

from proxy.core.normalise import Result, resent, switched_on
from proxy.core.normalise.base import Context
from proxy.core.normalise.system import AGAIN, stood_still
from proxy.core.template import Traits
from tests.unit.core.normalise.kit import (
    Desk,
    Message,
    assistant,
    call,
    result,
    rules,
    sent,
    system,
    user,
)
from tests.unit.core.normalise.scenes import DATED, LONG, TODAY, part, told

Q, R = user("q"), user("r")
REFUSING = Traits(mid_system=False, two_systems=False)


def at(minute: int, second: int = 0) -> Message:
    """System text with a clock."""
    return system(f"You are nice.\nIt is 10:{minute:02}:{second:02}.\nBe brief.")


def note(minute: int, second: int = 0, *, first: int = 0) -> str:
    """What is told of it."""
    return told((f"It is 10:{first:02}:00.", f"It is 10:{minute:02}:{second:02}."))


def test_the_first_request_goes_out_unchanged() -> None:
    """There is nothing it could differ from."""
    assert not Desk().ask(at(0), Q).changes


def test_notes_stay_where_they_were_put() -> None:
    """Five turns, five minutes: each turn's own note, once; the history extends."""
    desk, history, made = Desk(), [Q], []
    for minute in range(5):
        made.append(desk.ask(at(minute), *history))
        desk.hear(made[-1], assistant(f"{LONG} {minute}"))
        history += [assistant(f"{LONG} {minute}"), user(f"r{minute}")]
    for before, after in pairwise(made):
        assert sent(after)[: len(sent(before))] == sent(before)
    expected = ["q", *(f"r{minute - 1}{note(minute)}" for minute in range(1, 5))]
    assert [one["content"] for one in sent(made[-1]) if one["role"] == "user"] == expected


def test_the_same_value_is_told_once() -> None:
    """As long as the last note holds, nothing is added; when the first value holds again, that."""
    desk, history = Desk(), [Q]
    contents = []
    for minute in (0, 1, 1, 0, 0, 1):
        made = desk.ask(at(minute), *history)
        contents.append(sent(made)[-1]["content"])
        history += [assistant(LONG), user("r")]
    assert contents == ["q", f"r{note(1)}", "r", f"r{AGAIN}", "r", f"r{note(1)}"]


def test_a_retry_tells_what_holds_now() -> None:
    """The same request a minute later: one note, the current one; back at the first value, none."""
    desk = Desk()
    desk.ask(at(0), Q)
    history = [Q, assistant(LONG), R]
    contents = [sent(desk.ask(at(minute), *history))[-1]["content"] for minute in (1, 2, 2, 0)]
    assert contents == [f"r{note(1)}", f"r{note(2)}", f"r{note(2)}", "r"]


def test_a_retry_of_the_first_request() -> None:
    """It keeps the first clock, too."""
    desk = Desk()
    desk.ask(at(0), Q)
    assert sent(desk.ask(at(3), Q)) == [at(0), user("q" + note(3))]


def test_once_a_minute_is_enough_in_a_tool_loop() -> None:
    """Seconds are not told to every tool's result, but to every person's message."""
    desk, history = Desk(), [Q]
    desk.ask(at(0), *history)
    contents = []
    for minute, second in ((0, 5), (0, 9), (1, 1), (1, 50), (2, 0)):
        history += [assistant("", call("f", "{}")), result("ok")]
        contents.append(sent(desk.ask(at(minute, second), *history))[-1]["content"])
    notes = [note(0, 5), "", note(1, 1), "", note(2)]
    assert contents == ["ok" + one for one in notes]
    history += [assistant(LONG), R]
    assert sent(desk.ask(at(2, 1), *history))[-1] == user("r" + note(2, 1))


def test_a_note_behind_json() -> None:
    """A result that is JSON carries it as text; next time the JSON, respelt, goes out as before."""
    asked = assistant("", call("f", "{}"))
    desk = Desk()
    desk.ask(at(0), Q)
    first = sent(desk.ask(at(1), Q, asked, result('{"a": 1}')))
    assert first[-1] == result('{"a": 1}' + note(1))
    second = sent(desk.ask(at(1), Q, asked, result('{"a":1.0}'), assistant(LONG), R))
    assert second[: len(first)] == first


@pytest.mark.parametrize(
    "content",
    [
        [part("r"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        [part("r"), part("s")],
        [{"type": "image_url", "image_url": {"url": "http://a/b"}}],
        [],
    ],
    ids=repr,
)
def test_a_note_behind_parts(content: list[Any]) -> None:
    """It is a part of its own; the parts before it stay as they were, every time."""
    desk = Desk()
    desk.ask(at(0), Q)
    first = sent(desk.ask(at(1), Q, assistant(LONG), user(content)))
    assert first[-1] == user([*content, part(note(1))])
    second = sent(desk.ask(at(1), Q, assistant(LONG), user(content), assistant(LONG), R))
    assert second[: len(first)] == first


def test_a_note_behind_nothing() -> None:
    """A message without content gets one."""
    desk = Desk()
    desk.ask(at(0), Q)
    assert sent(desk.ask(at(1), Q, assistant(LONG), user(None)))[-1] == user(note(1))


def test_no_clock_stands_still_where_nobody_can_be_told() -> None:
    """Without a message that could carry the newer value, the newer value goes out."""
    desk = Desk()
    desk.ask(at(0), assistant(LONG))
    assert sent(desk.ask(at(1), assistant(LONG))) == [at(1), assistant(LONG)]
    desk = Desk(traits=DATED, today="09 Oct 2026")
    desk.ask(assistant(LONG))
    desk.today = "10 Oct 2026"
    made = desk.ask(assistant(LONG), assistant("b"))
    assert made.body["chat_template_kwargs"] == {"date_string": "10 Oct 2026"}


def test_the_beginning_of_an_answer_knows_the_time() -> None:
    """To be gone on with a minute later: the message before it carries the newer value."""
    desk = Desk()
    desk.ask(at(0), Q)
    made = desk.ask(at(1), Q, assistant("It is"))
    assert sent(made) == [at(0), user("q" + note(1)), assistant("It is")]
    again = desk.ask(at(1, 30), Q, assistant("It is"))
    assert sent(again) == sent(made)
    later = desk.ask(at(2), Q, assistant("It is"))
    assert sent(later) == [at(0), user("q" + note(2)), assistant("It is")]


def test_a_retry_with_a_system_message_at_the_end_knows_the_time() -> None:
    """The last message of a person may not be the last of all."""
    desk = Desk()
    desk.ask(at(0), Q)
    history = [Q, assistant(LONG), R, system("Plan mode.")]
    contents = [sent(desk.ask(at(minute), *history))[3]["content"] for minute in (1, 2, 0)]
    assert contents == [f"r{note(1)}", f"r{note(2)}", f"r{AGAIN}"]


def test_other_system_text_starts_anew() -> None:
    """What differs in more than a clock goes out as it is; the note of the old text is gone."""
    desk = Desk()
    desk.ask(at(0), Q)
    desk.ask(at(1), Q, assistant(LONG), R)
    edited = system("You are nice.\nIt is 10:02:00.\nBe brief, be quick.")
    made = desk.ask(edited, Q, assistant(LONG), R, assistant("b"), user("s"))
    assert sent(made)[0] == edited
    assert sent(made)[3] == user("r")
    assert sent(made)[-1] == user("s")


def test_a_known_clock_stands_still_beside_any_edit() -> None:
    """At both ends of the text something changes; it is the same conversation."""
    desk = Desk(client="home-assistant")
    lights = "\n".join(f"- light {number}: off" for number in range(50))
    text = "Current time is 10:{:02}:00. Today's date is 2026-10-09.\n{}\nthe door is {}"
    said = [Q, assistant("first"), user("p")]
    desk.hear(desk.ask(system(text.format(0, lights, "open")), *said), assistant("hm"))
    made = desk.ask(system(text.format(1, lights, "shut")), *said, assistant("hm"), R)
    assert sent(made)[0] == system(text.format(0, lights, "shut"))
    assert 'it is now "Current time is 10:01:00.' in sent(made)[-1]["content"]


def test_numbers_of_a_person_are_no_clock() -> None:
    """Only system text, and a known client's place in the first message, are looked at."""
    desk = Desk(client="qwen-code")
    desk.hear(desk.ask(user("It is 10:00. Today's date is 2026-10-09.")), assistant(LONG))
    then = [user("It is 10:01. Today's date is 2026-10-10."), assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


def test_a_clock_taken_out_of_the_newest_message_is_taken_out() -> None:
    """A person who edits the last message, or opens another chat, means it."""
    desk = Desk()
    desk.ask(user(TODAY + "q"))
    assert sent(desk.ask(Q)) == [Q]
    desk = Desk()
    desk.ask(Q, assistant(LONG), user(TODAY + "r"))
    assert sent(desk.ask(Q, assistant(LONG), R)) == [Q, assistant(LONG), R]


@pytest.mark.parametrize("text", ["Meet me at 10:00.\n", "<date>\nCall Ann today 10:00\n</date>\n"])
def test_words_beside_the_clock_do_not_come_back(text: str) -> None:
    """What a person took out of an old message stays out, unless it was nothing but a clock."""
    desk = Desk()
    desk.hear(desk.ask(user(f"{text}q")), assistant(LONG))
    then = [Q, assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


def test_other_fields_of_a_system_message_are_content() -> None:
    """A name that changed beside the clock is not hidden."""
    desk = Desk()
    desk.hear(desk.ask(at(0), Q), assistant(LONG))
    then = [{**at(1), "name": "x"}, Q, assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


def rollover(desk: Desk, days: int) -> list[Result]:
    """A conversation of one turn a day."""
    history, made = [Q], []
    for day in range(9, 9 + days):
        desk.today = f"{day:02} Oct 2026"
        made.append(desk.ask(*history))
        desk.hear(made[-1], assistant(f"{LONG} {day}"))
        history += [assistant(f"{LONG} {day}"), user(f"r{day}")]
    return made


def test_days_go_by() -> None:
    """The template's date stays the first day's; each day is told in its own turn, once."""
    made = rollover(Desk(traits=DATED), 5)
    for before, after in pairwise(made):
        assert sent(after)[: len(sent(before))] == sent(before)
        assert after.body["chat_template_kwargs"] == {"date_string": "09 Oct 2026"}
    assert made[-1].raw.count(b"it is now") == 4
    pair = ("Today Date: 09 Oct 2026", "Today Date: 13 Oct 2026")
    assert sent(made[-1])[-1] == user("r12" + told(pair))


@pytest.mark.parametrize(
    "traits", [Traits(), Traits(writes_date=True), Traits(has_date_string=True)]
)
def test_no_date_where_the_template_cannot_take_one(traits: Traits) -> None:
    """Both has to be known of it."""
    assert not Desk(traits=traits, today="09 Oct 2026").ask(Q).changes
    assert not Desk(traits=DATED).ask(Q).changes


def test_a_date_the_client_gives_is_the_clients() -> None:
    """Nothing is added, nothing replaced."""
    desk = Desk(traits=DATED, today="09 Oct 2026")
    assert not desk.ask(Q, chat_template_kwargs={"date_string": "1 Jan 2000"}).changes


@pytest.mark.parametrize(
    ("messages", "went"),
    [
        ([system("a"), system(""), system("b"), Q], [system("a\n\nb"), Q]),
        ([system([part("a")]), {**system("b"), "role": "developer"}, Q], [system("a\n\nb"), Q]),
        ([system("a"), Q], [system("a"), Q]),
        ([system("a"), system([part("b"), part("c")]), Q], None),
        ([system("a"), system(5), Q], None),
    ],
    ids=repr,
)
def test_leading_systems(messages: list[Message], went: list[Message] | None) -> None:
    """Texts are joined; what is no text is left to the template."""
    assert sent(Desk(traits=REFUSING).ask(*messages)) == (messages if went is None else went)


@pytest.mark.parametrize("traits", [Traits(), Traits(mid_system=True, two_systems=True)])
def test_system_text_stays_where_it_is_rendered(traits: Traits) -> None:
    """Or where nothing is known of the template."""
    made = Desk(traits=traits).ask(system("a"), system("b"), Q, system("c"))
    assert not made.changes


_REMINDED = "<system-reminder>\n{}\n</system-reminder>"
_C, _D = _REMINDED.format("c"), _REMINDED.format("d")
_ASKED = assistant("", call("f", "{}"))


@pytest.mark.parametrize(
    ("messages", "went"),
    [
        ([Q, system("c")], [user(f"q\n\n{_C}")]),
        ([Q, system("c"), system("d")], [user(f"q\n\n{_C}\n\n{_D}")]),
        ([Q, system("c"), R], [user(f"q\n\n{_C}\n\nr")]),
        ([Q, R], [Q, R]),
        ([Q, _ASKED, result("ok"), system("c")], [Q, _ASKED, result("ok"), user(_C)]),
        ([Q, _ASKED, result("ok"), system("c"), R], [Q, _ASKED, result("ok"), user(f"{_C}\n\nr")]),
        ([Q, assistant("a"), system("c"), R], [Q, assistant("a"), user(f"{_C}\n\nr")]),
        ([Q, system(_C)], [user(f"q\n\n{_C}")]),
        ([Q, system([part("c")])], [user(f"q\n\n{_C}")]),
        ([Q, system([part("c"), part("d")])], [user([part("q"), part(_C), part(_D)])]),
        ([user([part("q"), part("r")]), system("c")], [user([part("q"), part("r"), part(_C)])]),
        ([user(None), system("c")], [user([part(_C)])]),
        (["odd", system("c")], ["odd", user(_C)]),
        ([Q, system(5)], [Q, system(5)]),
        ([Q, {"role": "developer", "content": "c"}], [user(f"q\n\n{_C}")]),
    ],
    ids=repr,
)
def test_system_in_place(messages: list[Any], went: list[Any]) -> None:
    """At its place, as a reminder, deterministically; nothing hoisted, nothing dropped."""
    head = system("a")
    assert sent(Desk(traits=REFUSING).ask(head, *messages)) == [head, *went]


def test_no_content_is_not_made_a_word() -> None:
    """A system message without content does not say ``None``."""
    assert b"None" not in Desk(traits=REFUSING).ask(Q, system(None)).raw


CLAUDE: list[list[Message]] = [
    [Q, system("environment")],
    [_ASKED, result("one"), system("c")],
    [_ASKED, result("two"), system("d"), system("e")],
    [assistant(LONG), user("r"), system("plan mode")],
    [_ASKED, result("three")],
    [assistant(LONG), system("not used recently"), user("s")],
    [assistant("b"), user([part("t"), part("u")]), system("f"), system("g")],
    [assistant("c"), user("v")],
]


@pytest.mark.parametrize("clocked", [False, True])
def test_demoted_messages_extend(clocked: bool) -> None:
    """Turn by turn as Claude Code sends them: what goes out extends what went out, in order.

    With and without a clock in the system text.
    """
    desk = Desk(traits=REFUSING)
    history: list[Message] = []
    last: list[Message] = []
    for minute, more in enumerate(CLAUDE):
        history += more
        heads = [at(minute if clocked else 0), system("second")]
        made = desk.ask(*heads, *history)
        now = sent(made)
        assert now[: len(last)] == last
        assert [one["role"] for one in now].count("system") == 1
        last = now
    text = orjson.dumps([one["content"] for one in last]).decode()
    words = ["second", '"q', "environment", "one", "<system-reminder>\\nc", "two", "reminder>\\nd"]
    words += ["reminder>\\ne", "plan mode", "three", "not used recently", "s", "t", "u"]
    place = 0
    for word in [*words, "reminder>\\nf", "reminder>\\ng", "v"]:
        place = text.find(word, place)
        assert place >= 0, word


def test_what_was_sent_is_rebuilt() -> None:
    """The body for rendering the last request once more is the one that went out."""
    desk = Desk(traits=REFUSING)
    desk.ask(at(0), Q)
    made = desk.ask(at(1), Q, assistant(LONG), R, system("c"), tools=[], tool_choice="auto")
    again = resent(made.after, Context(switched_on("safe", ()), traits=REFUSING))
    assert again["messages"] == sent(made)
    assert again["tool_choice"] == "auto"


def test_rules_that_only_repeat_are_told() -> None:
    """A request that is changed by an old note alone says so."""
    desk = Desk()
    desk.ask(at(0), Q)
    desk.ask(at(1), Q, assistant(LONG), R)
    made = desk.ask(at(1), Q, assistant(LONG), R, assistant("b"), user("s"))
    assert rules(made) == ["clock", "tail-note"]


@pytest.mark.parametrize(
    "text", ["<system-reminder>\n", " \n", "<system-reminder>a</system-reminder>\n", TODAY]
)
def test_long_old_messages_are_compared_at_once(text: str) -> None:
    """An edited message full of tags or space costs linear time (this test would run for hours)."""
    desk = Desk()
    long = text * (1_000_000 // len(text))
    desk.ask(Q, assistant(LONG), user(long + "a"), assistant(LONG), R)
    then = [Q, assistant(LONG), user(long + "b"), assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<system-reminder>a</system-reminder>\n\nq", "q"),
        ("q \n<system-reminder>a</system-reminder>", "q"),
        ("q\n<system-reminder>a</system-reminder>\n\nr", "q\nr"),
    ],
)
def test_a_message_without_its_reminders_is_the_same(old: str, new: str) -> None:
    """It is sent as it came, and what follows it is known."""
    desk = Desk()
    desk.hear(desk.ask(user(old)), assistant("a "))
    desk.ask(user(old), assistant("a"), R)
    made = desk.ask(user(new), assistant("a"), R, assistant("b"), user("s"))
    assert made.known == 3
    assert sent(made)[:2] == [user(new), assistant("a ")]


CLOCK = "Time: 14:00\n\n"


def test_a_person_who_takes_a_clock_out_gets_an_answer_without_it() -> None:
    """An old message edited and answered anew is the person's, then and later."""
    desk = Desk()
    desk.hear(desk.ask(user(f"{CLOCK}q")), assistant(LONG))
    desk.hear(desk.ask(user(f"{CLOCK}q"), assistant(LONG), R), assistant("more"))
    then = [Q, assistant("another"), R]
    assert sent(desk.ask(*then, keep=False)) == then
    desk.hear(desk.ask(Q), assistant("another"))
    assert sent(desk.ask(*then)) == then
    assert sent(desk.ask(*then, assistant("b"), user("s"))) == [*then, assistant("b"), user("s")]


@pytest.mark.parametrize("behind", [[], [assistant("another"), user("s")]])
def test_a_clock_taken_out_in_mid_conversation(behind: list[Message]) -> None:
    """The same behind a history that is known."""
    desk = Desk()
    first = [Q, assistant(LONG), user(f"{CLOCK}r")]
    desk.hear(desk.ask(*first), assistant("b"))
    desk.hear(desk.ask(*first, assistant("b"), user("s")), assistant("c"))
    then = [Q, assistant(LONG), user("r"), *behind]
    assert sent(desk.ask(*then)) == then


@pytest.mark.parametrize(
    ("old", "new", "stays"),
    [
        ([part(TODAY), part("q")], [part("q")], True),
        ([part(TODAY), part("q")], "q", True),
        ([part("q"), part(TODAY), part("r")], [part("q"), part("r")], True),
        ([part(TODAY), part(TODAY), part("q")], [part(TODAY), part("q")], True),
        ([part(TODAY), part("q")], [part("q ")], False),
        ([part(TODAY), part("q"), part("r")], [part("q"), part(" r")], False),
        ([part(TODAY), part("q"), part("r")], [part("q")], False),
        ([part(TODAY), part("q")], [], False),
        ([part(TODAY)], [{"type": "image_url", "image_url": {"url": "http://a/b"}}], False),
        ([part("q")], [part("q"), part(TODAY)], False),
        (f"{TODAY}q", " q", False),
        ("q ", "q", False),
    ],
    ids=repr,
)
def test_only_the_clock_may_be_gone(old: Any, new: Any, stays: bool) -> None:
    """All other parts are equal to the last space, or the message is the client's."""
    assert stood_still(user(old), user(new), "", first=True) is stays
    desk = Desk(rules=["-single-part"])
    desk.hear(desk.ask(user(old)), assistant(LONG))
    went = sent(desk.ask(user(new), assistant(LONG), R))
    assert went == [user(old if stays else new), assistant(LONG), R]
