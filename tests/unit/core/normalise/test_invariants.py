"""What must hold whatever clients send: hypothesis plays clients that mangle what they got."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.normalise import Result
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

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("0123456789:-. \n"), max_size=40)
CLOCKS = st.builds(
    "Current time is {:02}:{:02}:{:02}.".format,
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
)
SYSTEMS = st.builds("You are nice.\n{}\n{}".format, CLOCKS, st.sampled_from(["Be brief.", ""]))
ARGUMENTS = st.dictionaries(
    st.sampled_from("abcd"), st.integers(-9, 9) | st.text("xyé ", max_size=4) | st.booleans()
)


def spelt(value: Any, how: int) -> str:
    """JSON as one of several clients spells it."""
    if how == 0:
        return orjson.dumps(value).decode()
    if how == 1:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2).decode()
    return orjson.dumps(dict(reversed(value.items()))).decode().replace(",", ",  ")


@st.composite
def exchanges(draw: st.DrawFn) -> list[tuple[Message, list[Message]]]:
    """Rounds of a conversation: what the model says, and what the client sends behind it."""
    rounds: list[tuple[Message, list[Message]]] = []
    for number in range(draw(st.integers(1, 4))):
        text = draw(TEXTS)
        if draw(st.booleans()):
            arguments = spelt(draw(ARGUMENTS), draw(st.integers(0, 2)))
            asked = call("f", arguments, f"call-{number}")
            said = assistant(f"\n{text} ", asked, reasoning_content="\nhm ")
            rounds.append((said, [result(draw(TEXTS), f"call-{number}")]))
        else:
            rounds.append((assistant(f"{text}\n"), [user(draw(TEXTS))]))
    return rounds


def mangled(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Message:
    """The model's message as a client sends it back (clients.md 4)."""
    kept = dict(message)
    if draw(st.booleans()):
        kept["content"] = kept["content"].strip()
    if draw(st.booleans()):
        kept.pop("reasoning_content", None)
    if "tool_calls" in kept:
        first = kept["tool_calls"][0]
        arguments = orjson.loads(first["function"]["arguments"])
        again = {**first["function"], "arguments": spelt(arguments, draw(st.integers(0, 2)))}
        kept["tool_calls"] = [{**first, "function": again}]
    if draw(st.booleans()):
        kept["content"] = [{"type": "text", "text": kept["content"]}]
    return kept


def plays(desk: Desk, data: st.DataObject) -> Iterator[Result]:
    """A whole conversation through ``desk``, request by request."""
    rounds = data.draw(exchanges())
    history: list[Message] = [user(data.draw(TEXTS))]
    tools = [tool(name) for name in "fgh"]
    for said, behind in rounds:
        head = system(data.draw(SYSTEMS))
        made = desk.ask(head, *history, tools=data.draw(st.permutations(tools)))
        yield made
        desk.hear(made, said)
        history += [mangled(said, data.draw), *behind]
    yield desk.ask(system(data.draw(SYSTEMS)), *history, tools=tools)


def brief(made: Result) -> bool:
    """Which of the two system texts."""
    return "Be brief." in made.body["messages"][0]["content"]


def extends(before: Result, after: Result) -> bool:
    """Every byte that mattered before leads what matters now."""
    old, new = orjson.loads(before.raw), orjson.loads(after.raw)
    return bool(
        new["messages"][: len(old["messages"])] == old["messages"] and new["tools"] == old["tools"]
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_history_that_extends_is_sent_extended(data: st.DataObject) -> None:
    """However the client mangles the model's words, what goes out extends what went out.

    As long as the system text differs in its clock alone.
    """
    for before, after in pairwise(plays(Desk(), data)):
        if brief(before) == brief(after):
            assert extends(before, after)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_was_normalised_comes_out_unchanged(data: st.DataObject) -> None:
    """The output with the same ledger is its own output."""
    desk = Desk()
    for made in plays(desk, data):
        again = desk.raw(made.raw, keep=False)
        assert again.raw == made.raw


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nothing_crosses_keys(data: st.DataObject) -> None:
    """With another key, the same conversation goes out as if the first had never been."""
    desk, alone = Desk(), Desk()
    assert list(plays(desk, data))
    messages = [system(data.draw(SYSTEMS)), user(data.draw(TEXTS))]
    assert desk.ask(*messages, key="other").raw == alone.ask(*messages, key="other").raw


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=4), st.sampled_from([0, orjson.OPT_INDENT_2]))
def test_bytes_are_untouched_where_no_rule_applies(
    turns: Sequence[tuple[str, str]], option: int
) -> None:
    """A new conversation of plain texts goes on byte for byte."""
    messages = [system("You are nice.")]
    for asked, said in turns:
        messages += [user(asked), assistant(said)]
    messages.append(user("hm"))
    raw = orjson.dumps({"messages": messages, "temperature": 1.0, "seed": 2**62}, option=option)
    made = Desk().raw(raw)
    assert made.raw is raw
    assert not made.changes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_texts_are_only_repaired_or_noted(data: st.DataObject) -> None:
    """What persons and tools said is sent as the client sent it, to the last space.

    Of what was generated, the space at its ends is the model's. A note may stand behind it.
    """
    desk = Desk()
    rounds = data.draw(exchanges())
    history: list[Message] = [user(data.draw(TEXTS))]
    for said, behind in rounds:
        history = [edited(message, data.draw) for message in history]
        made = desk.ask(system(data.draw(SYSTEMS)), *history)
        for came, went in zip(history, sent(made)[1:], strict=True):
            ours, theirs = went["content"], came["content"]
            theirs = theirs[0]["text"] if isinstance(theirs, list) else theirs
            ours = ours.split("\n\n<system-reminder>\nW")[0]
            assert went["role"] == came["role"]
            if came["role"] == "assistant":
                ours, theirs = ours.strip(), theirs.strip()
            assert ours == theirs
        desk.hear(made, said)
        history += [mangled(said, data.draw), *behind]


def edited(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Message:
    """A message in which somebody sometimes changes the space at its ends."""
    if message["role"] == "assistant" or draw(st.integers(0, 3)):
        return message
    how = draw(st.sampled_from(["{}\n", " {}", "{}"]))
    return {**message, "content": how.format(message["content"].strip())}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_crosses_conversations_that_sound_alike(data: st.DataObject) -> None:
    """Two that are answered with the same words, by the same calls.

    Under system texts that are alike, from one and the same question; or under the same text from
    two questions. The second comes when the first is some rounds old, with a history the ledger
    does not know: it gets no thought, no id and no text of the first's, and the first's ledger is
    what it would be without the second.
    """
    both, alone = Desk(), Desk()
    rounds = [said for said, _ in data.draw(exchanges())]
    served, asked = data.draw(st.sampled_from([("AB", ["hi", "hi"]), ("AA", ["A: hi", "B: hi"])]))
    heads = [system(f"You are nice.\n{'Be brief. ' * 9}\nYou serve {one}.") for one in served]
    mine, theirs = ([user(question)] for question in asked)
    comes = data.draw(st.integers(1, len(rounds)))
    for number, said in enumerate(rounds):
        made, only = both.ask(heads[0], *mine), alone.ask(heads[0], *mine)
        assert made.raw == only.raw
        answer = owned(said, "A", number) | {"reasoning_content": "secret"}
        both.hear(made, answer)
        alone.hear(only, answer)
        theirs += [mangled(owned(said, "B", number), data.draw), user(f"B: {number}")]
        if number + 1 >= comes:
            other = both.ask(heads[1], *theirs)
            assert sent(other)[1:] == [single(message) for message in theirs]
            assert other.after.id != made.after.id
            assert other.after.title == asked[1]
            assert not [one for one in other.after.answers if b"secret" in one.message]
        mine += [mangled(answer, data.draw), user(f"A: {number}")]
    rows = both.book.get(made.after.id), alone.book.get(only.after.id)
    assert rows[0] is not None
    assert rows[1] is not None
    assert (rows[0].lines, rows[0].answers) == (rows[1].lines, rows[1].answers)


def owned(said: Message, name: str, number: int) -> Message:
    """What both models said; long ids of calls are one conversation's own, short ones are not."""
    kept = {name: value for name, value in said.items() if name != "reasoning_content"}
    if "tool_calls" in said:
        first = said["tool_calls"][0]
        ids = f"call-of-{name}-number-{number}" if number % 2 else f"call_{number}"
        kept["tool_calls"] = [{**first, "id": ids}]
    return kept


def single(message: Message) -> Message:
    """A message with its one text part as a string."""
    content = message["content"]
    return {**message, "content": content[0]["text"]} if isinstance(content, list) else message


@settings(max_examples=50, deadline=None)
@given(SYSTEMS, SYSTEMS, TEXTS, TEXTS)
def test_only_system_clocks_cross_conversations(
    one: str, other: str, asked: str, again: str
) -> None:
    """A second conversation takes over the first one's clock and nothing else."""
    desk = Desk()
    first = desk.ask(system(one), user(f"1{asked}"))
    desk.hear(first, assistant("\nsecret "))
    made = desk.ask(system(other), user(f"2{again}"), tools=[tool("g"), tool("f")])
    head, question = sent(made)
    same = ("Be brief." in one) == ("Be brief." in other)
    assert head["content"] == (one if same else other)
    assert question["content"].startswith(f"2{again}")
    assert "secret" not in made.raw.decode()
    if same and one != other:
        assert other.splitlines()[1] in question["content"]
