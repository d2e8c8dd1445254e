"""What was said before goes out as it went, and what somebody changed on purpose as it came."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

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
from tests.unit.core.normalise.scenes import LONG, part

Q, R = user("q"), user("r")


def turn(said: Message, *then: Message, first: tuple[Message, ...] = (Q,)) -> list[Message]:
    """What is sent of ``first`` and ``then``, when the model had said ``said`` between them."""
    desk = Desk()
    desk.hear(desk.ask(*first), said)
    return sent(desk.ask(*first, *then))


@pytest.mark.parametrize(
    ("generated", "came"),
    [
        ('{"n": 1}', '{"n": 2}'),
        ('{"n": 1}', '{"n": "1"}'),
        ('{"n": 1}', '{"n": true}'),
        ('{"n": 0}', '{"n": false}'),
        ('{"n": 1}', '{"n": 1, "m": null}'),
        ('{"n": [1, 2]}', '{"n": [2, 1]}'),
        ('{"n": "a b"}', '{"n": "a  b"}'),
        ('{"n": "a"}', '{"n": "a "}'),
        ('{"n": "a"}', '{"n": "A"}'),
        ('{"n": "e\u0301"}', '{"n": "\u00e9"}'),
        ('{"n": "a\\n"}', '{"n": "a\\r\\n"}'),
        ('{"n": 12345678901234567890}', '{"n": 12345678901234567891}'),
        ('{"n": 123456789012345678901234}', '{"n": 123456789012345678901235}'),
        ('{"n": 0.1}', '{"n": 0.10000000000000000001}'),
        ('{"n": 123456789012345.678}', '{"n": 123456789012345.679}'),
        ('{"n": 1e22}', '{"n": 10000000000000000000001}'),
        ('{"n": 1', '{"n": 1}'),
        ("{}", "[]"),
        ("{}", "null"),
    ],
)
def test_edited_arguments_are_the_clients(generated: str, came: str) -> None:
    """A person, or a guard in the client, changed what the model asked for: so it stays."""
    then = [assistant("", call("f", came)), result("ok")]
    assert turn(assistant("", call("f", generated)), *then) == [Q, *then]


@pytest.mark.parametrize(
    ("generated", "came"),
    [
        ('{"n": 1.0, "m": [1, {"b": 1, "a": 2}]}', '{"m":[1,{"a":2,"b":1}],"n":1}'),
        ('{"n": "\\u00e9\\/"}', '{"n":"é/"}'),
        ("{}", ""),
        ("", "{}"),
        ("\n{ }\n", "{}"),
        ('{"n": 12345678901234567890}', '{"n":12345678901234567890}'),
    ],
)
def test_respelt_arguments_are_the_generated(generated: str, came: str) -> None:
    """Order of keys, spaces, escapes and ``1.0`` are no meaning."""
    said = assistant("", call("f", generated))
    assert turn(said, assistant("", call("f", came)), result("ok")) == [Q, said, result("ok")]


@pytest.mark.parametrize(
    "then",
    [
        [assistant("", call("g", '{"a":1}')), result("ok")],
        [assistant("", call("f", '{"a":1}'), call("f", '{"a":1}')), result("ok")],
        [assistant("text", call("f", '{"a":1}')), result("ok")],
        [assistant(""), R],
    ],
    ids=repr,
)
def test_another_call_is_the_clients(then: list[Message]) -> None:
    """Another name, another count, another text: another message."""
    assert turn(assistant("", call("f", '{"a": 1}')), *then) == [Q, *then]


@pytest.mark.parametrize(
    ("generated", "came"),
    [("a b", "a  b"), ("a\nb", "a\r\nb"), ("a", "b"), ("e\u0301", "\u00e9"), ("a\u200b", "a")],
)
def test_edited_text_is_the_clients(generated: str, came: str) -> None:
    """Space within a text, line ends and letters are meaning."""
    assert turn(assistant(generated), assistant(came), R) == [Q, assistant(came), R]


@pytest.mark.parametrize("came", ["", "\n", None])
def test_generated_space_comes_back(came: Any) -> None:
    """Space in front of a call is dropped by clients, or becomes null; none is taken away."""
    asked = call("f", "{}")
    went = turn(assistant(" \n", asked), assistant(came, asked), result("ok"))
    assert went == [Q, assistant(" \n", asked), result("ok")]
    assert turn(assistant(""), assistant(came), R) == [Q, assistant(came), R]


def test_the_space_a_person_typed_is_the_persons() -> None:
    """Only generated text is put back as it was; an indentation may be an edit."""
    desk = Desk()
    desk.hear(desk.ask(user("x = 1\n")), assistant(LONG))
    then = [user("    x = 1"), assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


def test_json_of_a_person_is_text() -> None:
    """Only a tool's result may be respelt."""
    desk = Desk()
    desk.hear(desk.ask(user('{"a": 1}')), assistant(LONG))
    then = [user('{"a":1}'), assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


@pytest.mark.parametrize(
    ("first", "came"),
    [('{"a": 1}', '{"a": 2}'), ("{}", ""), ("", "{}"), ("a  b", "a b"), ("[1]", "1")],
)
def test_another_result_is_the_clients(first: str, came: str) -> None:
    """Cleared, shortened or edited results stay so; nothing and ``{}`` are two things."""
    asked = assistant("", call("f", "{}"))
    desk = Desk()
    desk.hear(desk.ask(Q, asked, result(first)), assistant(LONG))
    then = [Q, asked, result(came), assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


def test_a_result_of_many_parts_is_left_alone() -> None:
    """Images and parts come as they are."""
    asked = assistant("", call("f", "{}"))
    desk = Desk()
    desk.hear(
        desk.ask(Q, asked, {**result(""), "content": [part("a "), part("b")]}), assistant("h")
    )
    then = [Q, asked, {**result(""), "content": [part("a"), part("b")]}, assistant("h"), R]
    assert sent(desk.ask(*then)) == then


@pytest.mark.parametrize("behind", [[], [R]])
def test_the_beginning_of_an_answer_is_its_authors(behind: list[Message]) -> None:
    """A last message of the model's is to be gone on with: its last space counts."""
    desk = Desk()
    desk.hear(desk.ask(Q), assistant("It is ", reasoning_content="hm"))
    desk.ask(Q, assistant("It is"), R)
    made = desk.ask(Q, assistant("It is"), *behind)
    assert sent(made)[1] == assistant("It is " if behind else "It is")


def test_a_prefill_is_never_repaired() -> None:
    """The client sends a trimmed beginning, then one with a space: each as it came."""
    desk = Desk()
    desk.ask(Q, assistant("It is"))
    assert sent(desk.ask(Q, assistant("It is "))) == [Q, assistant("It is ")]


def test_the_chosen_one_of_several_answers() -> None:
    """Swipes: whichever answer the client goes on with is put back as it was generated."""
    desk = Desk()
    for text in ("one ", "two\n", "\nthree"):
        desk.hear(desk.ask(Q), assistant(text))
    assert sent(desk.ask(Q, assistant("two"), R)) == [Q, assistant("two\n"), R]


def test_parallel_calls_with_results_in_another_order() -> None:
    """Results stand where the client puts them; each keeps its id."""
    said = assistant("", call("f", '{"a": 1}', "x1"), call("g", '{"b": 2}', "x2"))
    back = assistant("", call("f", '{"a":1}', "x1"), call("g", '{"b":2}', "x2"))
    results = [result("two", "x2"), result("one", "x1")]
    assert turn(said, back, *results) == [Q, said, *results]


def test_renamed_ids_reach_their_own_results() -> None:
    """In any order of results, in every call of one message."""
    said = assistant("", call("f", "{}", "x1"), call("g", "{}", "x2"))
    back = assistant("", call("f", "{}", "y1"), call("g", "{}", "y2"))
    went = turn(said, back, result("two", "y2"), result("one", "y1"))
    assert went == [Q, said, result("two", "x2"), result("one", "x1")]


def test_swapped_results_of_equal_text_keep_their_ids() -> None:
    """``ok`` and ``ok`` are equal texts; whose they are is not the proxy's to say."""
    asked = assistant("", call("f", "{}", "x1"), call("g", "{}", "x2"))
    desk = Desk()
    desk.hear(desk.ask(Q, asked, result("ok", "x1"), result("ok", "x2")), assistant(LONG))
    then = [Q, asked, result("ok", "x2"), result("ok", "x1"), assistant(LONG), R]
    assert sent(desk.ask(*then)) == then


@pytest.mark.parametrize("lost", [None, 5, ["x"]])
def test_a_lost_id_is_nobodys(lost: Any) -> None:
    """A call whose id the client lost does not shift the ids of those beside it."""
    said = assistant("", call("f", "{}", "x1"), call("g", "{}", "x2"))
    back = assistant("", {**call("f", "{}"), "id": lost}, call("g", "{}", "y2"))
    went = turn(said, back, result("two", "y2"))
    assert [one["id"] for one in went[1]["tool_calls"]] == [lost, "x2"]
    assert went[2]["tool_call_id"] == "x2"


def test_one_id_for_several_calls_stays() -> None:
    """The client's own confusion is not made another one."""
    said = assistant("", call("f", "{}", "x1"), call("g", "{}", "x2"))
    back = assistant("", call("f", "{}", "y"), call("g", "{}", "y"))
    then = [back, result("one", "y"), result("two", "y")]
    assert turn(said, *then) == [Q, *then]


def test_ids_that_begin_anew_in_every_turn() -> None:
    """``call_0`` in each turn: each becomes its own turn's, also where a result was cleared."""
    desk, history = Desk(), [Q]
    expected = [Q]
    for number in range(4):
        desk.hear(desk.ask(*history), assistant("", call("f", "{}", f"id-{number}")))
        history += [assistant("", call("f", "{}", "call_0")), result(f"{number}", "call_0")]
        expected += [
            assistant("", call("f", "{}", f"id-{number}")), result(f"{number}", f"id-{number}"),
        ]  # fmt: skip
    assert sent(desk.ask(*history)) == expected
    history[4] = result("cleared", "call_0")
    ids = [
        (one.get("tool_calls") or [{"id": one.get("tool_call_id")}])[0]["id"]
        for one in sent(desk.ask(*history))
    ]
    # What was not sent before keeps its own name; every result still names its call.
    assert ids == [None, "id-0", "id-0", "id-1", "id-1", "id-2", "id-2", "call_0", "call_0"]


def test_ids_made_anew_in_every_request() -> None:
    """Random ones: the first-seen go out every time."""
    desk = Desk()
    said = assistant("", call("f", "{}", "first"))
    desk.hear(desk.ask(Q), said)
    for number in range(3):
        back = assistant("", call("f", "{}", f"random-{number}"))
        assert sent(desk.ask(Q, back, result("ok", f"random-{number}"))) == [
            Q, said, result("ok", "first"),
        ]  # fmt: skip


def test_malformed_calls_beside_good_ones_stay() -> None:
    """Nothing is dropped from a list of calls that holds more than calls."""
    desk = Desk()
    desk.hear(desk.ask(Q), assistant("", call("f", "{}", "x1")))
    back = {**assistant(""), "tool_calls": [call("f", "{}", "y1"), "odd", None]}
    then = [Q, back, result("ok", "y1")]
    went = sent(desk.ask(*then))
    assert went[1] == back


def test_reasoning_of_a_finished_turn_stays_away() -> None:
    """Put back only in the current tool loop: templates drop it before the last user message."""
    desk = Desk()
    desk.hear(desk.ask(Q), assistant(LONG, reasoning_content="hm"))
    assert sent(desk.ask(Q, assistant(LONG), R)) == [Q, assistant(LONG), R]


def test_reasoning_once_put_back_stays() -> None:
    """The history extends: it is not taken away again when the loop ends."""
    asked = assistant("", call("f", "{}"))
    desk = Desk()
    desk.hear(desk.ask(Q), {**asked, "reasoning_content": "hm"})
    loop = sent(desk.ask(Q, asked, result("ok")))
    assert loop[1]["reasoning_content"] == "hm"
    after = sent(desk.ask(Q, asked, result("ok"), assistant(LONG), R))
    assert after[:3] == loop


@pytest.mark.parametrize("mine", ["another thought", ["hm"], 5])
def test_reasoning_the_client_wrote_is_its_own(mine: Any) -> None:
    """Only what is missing, or equal but for space at its ends, is put back."""
    asked = assistant("", call("f", "{}"))
    back = {**asked, "reasoning_content": mine}
    assert turn({**asked, "reasoning_content": "hm\n"}, back, result("ok"))[1] == back


def test_nothing_is_put_back_into_another_conversation() -> None:
    """Another one that begins with the same call, and whose ledger is lost, gets no one's words."""
    desk = Desk()
    asked = assistant("", call("ls", "{}", "x1"))
    desk.hear(desk.ask(system("S"), Q), {**asked, "reasoning_content": "secret"})
    desk.ask(system("S"), Q, asked, result("a"))
    then = [system("S"), user("other"), assistant("", call("ls", "{}", "y1")), result("b", "y1")]
    made = desk.ask(*then)
    assert sent(made) == then
    assert made.like
    assert made.after.answers == ()


GREETING = "Hello! How can I assist you today?"


@pytest.mark.parametrize("heads", [("S", "S"), ("You serve Alice. " * 9, "You serve Bob. " * 9)])
@pytest.mark.parametrize("asked", [("A: my number is 123-45", "B: tidy my blog"), ("hi", "hi")])
def test_an_equal_sentence_gives_nothing_away(
    heads: tuple[str, str], asked: tuple[str, str]
) -> None:
    """One key, one program, one greeting: the other conversation's thoughts, ids, title stay its.

    Equal from the first word on under one system text they are one conversation, of course.
    """
    if heads[0] == heads[1] and asked[0] == asked[1]:
        return
    desk = Desk()
    mine = desk.ask(system(heads[0]), user(asked[0]))
    desk.hear(
        mine, assistant(GREETING, call("ls", "{}", "call-of-the-first"), reasoning_content="x")
    )
    before = desk.book.get(mine.after.id)
    then = [system(heads[1]), user(asked[1]), assistant(GREETING, call("ls", "{}", "call-2nd-one"))]
    made = desk.ask(*then, result("b", "call-2nd-one"))
    assert sent(made) == [*then, result("b", "call-2nd-one")]
    assert made.after.id != mine.after.id
    assert made.after.title == asked[1]
    assert made.after.answers == ()
    assert desk.book.get(mine.after.id) == before


def test_nothing_was_said() -> None:
    """An unknown conversation with history is not touched."""
    raw = orjson.dumps({"messages": [Q, assistant("hi "), R]})
    assert Desk().raw(raw).raw is raw


def test_a_conversation_the_ledger_forgot_goes_on() -> None:
    """From here on the client's own words are its history, and stay."""
    desk = Desk()
    made = desk.ask(Q)
    desk.hear(made, assistant("hi \n"))
    desk.book.forget(made.after.id)
    second = desk.ask(Q, assistant("hi"), R)
    desk.hear(second, assistant("ho\n"))
    third = desk.ask(Q, assistant("hi"), R, assistant("ho"), user("s"))
    assert sent(second) == [Q, assistant("hi"), R]
    assert sent(third) == [Q, assistant("hi"), R, assistant("ho\n"), user("s")]
    assert "replay" not in rules(third)


def test_a_new_result_is_as_new_as_it_comes() -> None:
    """The last message is nothing old: a tool that was run again may spell its JSON otherwise."""
    asked = assistant("", call("f", "{}"))
    desk = Desk()
    desk.ask(Q, asked, result('{"a": 1}'))
    assert sent(desk.ask(Q, asked, result('{"a":1.0}'))) == [Q, asked, result('{"a":1.0}')]
    then = [Q, asked, result('{"a": 1}'), assistant(LONG), R]
    went = [Q, asked, result('{"a":1.0}'), assistant(LONG), R]
    assert sent(desk.ask(*then)) == went


@pytest.mark.parametrize("came", ["ok", "ok\n", "  ok"])
def test_the_space_of_a_result_is_the_tools(came: str) -> None:
    """Text is no JSON: a result that was trimmed stays trimmed."""
    asked = assistant("", call("f", "{}"))
    desk = Desk()
    desk.hear(desk.ask(Q, asked, result(" ok \n")), assistant(LONG))
    then = [Q, asked, result(came), assistant(LONG), R]
    assert sent(desk.ask(*then)) == then
