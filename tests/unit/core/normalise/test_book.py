"""Which conversation a request belongs to; also ``proxy.core.normalise.match``."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

import proxy.core.normalise.book as books
from proxy.core.normalise import Result, match
from proxy.core.normalise.book import Book
from proxy.core.text import overlap
from tests.unit.core.normalise.kit import (
    Desk,
    Message,
    assistant,
    call,
    result,
    rules,
    sent,
    system,
    tool,
    user,
)
from tests.unit.core.normalise.scenes import LONG

S, Q, R = system("You are nice.\n" * 20), user("q"), user("r")
A, B = assistant(f"{LONG} A"), assistant(f"{LONG} B")


def same(*made: Result) -> bool:
    """Whether all of them are one conversation."""
    return len({one.after.id for one in made}) == 1


def talk(desk: Desk, *said: Message, first: Message = Q, head: Message = S) -> list[Result]:
    """A conversation in which the model says one thing after the other."""
    history, made = [head, first], []
    for number, one in enumerate(said):
        made.append(desk.ask(*history))
        desk.hear(made[-1], one)
        history += [one, user(f"r{number}")]
    made.append(desk.ask(*history))
    return made


def test_a_request_without_an_answer_opens_one() -> None:
    """Another first message is another conversation."""
    desk = Desk()
    made = [desk.ask(S, Q), desk.ask(S, R), desk.ask(R), desk.ask(S)]
    assert len({one.after.id for one in made}) == 4
    assert [one.before for one in made] == [None] * 4
    assert len(desk.book) == 4


def test_history_that_extends_goes_on() -> None:
    """One id through all turns, known up to what was sent; the answers are remembered."""
    made = talk(Desk(), A, B, assistant("c"))
    assert same(*made)
    assert [one.known for one in made] == [0, 2, 4, 6]
    assert [answer.at for answer in made[-1].after.answers] == [2, 4, 6]


def test_a_short_answer_is_enough_where_the_history_is_known() -> None:
    """``ok`` after a known beginning is this conversation's."""
    made = talk(Desk(), assistant("ok"), assistant("ok"))
    assert same(*made)


def test_an_identical_request_is_a_retry() -> None:
    """Before and after its answer, first turn or later."""
    desk = Desk()
    first = desk.ask(S, Q)
    second = desk.ask(S, Q)
    desk.hear(second, A)
    third = desk.ask(S, Q)
    assert same(first, second, third)
    later = desk.ask(S, Q, A, R)
    desk.hear(later, B)
    again = desk.ask(S, Q, A, R)
    assert same(first, later, again)
    assert again.known == 4
    assert [answer.at for answer in again.after.answers] == [2, 4]


def test_the_opening_of_one_that_went_on_is_another() -> None:
    """A first message sent again when the conversation is further is a new chat."""
    desk = Desk()
    made = talk(desk, A)
    assert not same(made[-1], desk.ask(S, Q))


def test_a_branch_keeps_the_ledger_up_to_where_it_leaves() -> None:
    """Another question at message k: a new id, what was repaired before stays repaired."""
    desk = Desk()
    spaced = assistant(f"{LONG} A \n")
    made = talk(desk, spaced, B, assistant("c"))
    branch = desk.ask(S, Q, A, user("other"))
    assert not same(made[-1], branch)
    assert branch.known == 3
    assert sent(branch) == [S, Q, spaced, user("other")]
    goes_on = desk.ask(S, Q, A, user("other"), assistant("d"), R)
    assert same(branch, goes_on)
    trunk = desk.ask(*sent(made[-1]), assistant("e"), R)
    assert same(made[-1], trunk)


def test_swipes() -> None:
    """Several answers to one request; the next turn goes on with any of them, repaired."""
    desk = Desk()
    first = desk.ask(S, Q)
    for text in ("one ", "two ", "three "):
        desk.hear(desk.ask(S, Q), assistant(text))
    made = [desk.ask(S, Q, assistant(text), R) for text in ("two", "one", "three")]
    assert [sent(one)[2]["content"] for one in made] == ["two ", "one ", "three "]
    assert same(first, made[0])
    assert not same(*made[:2])


def test_a_regenerated_answer_in_the_middle() -> None:
    """The person goes back one turn and has it answered anew."""
    desk = Desk()
    made = talk(desk, A, B)
    again = desk.ask(S, Q, A, user("r0"))
    desk.hear(again, assistant("another \n"))
    then = desk.ask(S, Q, A, user("r0"), assistant("another"), user("r1"))
    assert same(again, then)
    assert sent(then)[4] == assistant("another \n")
    assert len(desk.book) <= 2
    assert made[-1].known == 4


def test_a_moving_tail_keeps_the_id() -> None:
    """Clients that rewrite their last message with every request (context, reminders)."""
    desk = Desk()
    one = desk.ask(S, Q, A, user("r [context 1]"))
    desk.hear(one, B)
    two = desk.ask(S, Q, A, user("r"), B, user("s [context 2]"))
    three = desk.ask(S, Q, A, user("r"), B, user("s"), assistant("c"), user("t [context 3]"))
    assert same(one, two, three)


def test_trimmed_at_the_front() -> None:
    """The oldest messages are gone; a run of the others up to the latest answer tells."""
    desk = Desk()
    made = talk(desk, A, B, assistant("c"))
    trimmed = desk.ask(S, user("r0"), B, user("r1"), assistant("c"), user("y"))
    assert same(made[-1], trimmed)
    assert trimmed.known == 1
    few = desk.ask(S, user("r5"), user("r1"), assistant("c"), user("y"), keep=False)
    assert not same(made[-1], few)
    assert few.like


def test_compacted_results() -> None:
    """An old result was cleared: the latest answer is still there."""
    desk = Desk()
    asked = assistant("", call("f", '{"a": 1}'))
    first = desk.ask(S, Q, asked, result("a long result"))
    desk.hear(first, A)
    second = desk.ask(S, Q, asked, result("a long result"), A, R)
    desk.hear(second, B)
    cleared = desk.ask(S, Q, asked, result("[cleared]"), A, R, B, user("s"))
    assert same(first, second, cleared)
    assert cleared.known == 3


def test_another_first_message() -> None:
    """The client put its context into the first message anew."""
    desk = Desk()
    made = talk(desk, A, B)
    changed = desk.ask(S, user("q [new context]"), A, user("r0"), B, user("s"), keep=False)
    assert not same(made[-1], changed), "three equal messages are no proof"
    assert changed.like
    more = talk(desk, A, B, assistant("c"))
    later = [A, user("r0"), B, user("r1"), assistant("c"), user("s")]
    assert same(more[-1], desk.ask(S, user("q [newer context]"), *later))


def test_an_equal_answer_alone_proves_nothing() -> None:
    """However long it is: many begin with the same words. It only explains why it is cold."""
    desk = Desk()
    made = talk(desk, A, B)
    for said in (A, assistant("ok")):
        other = desk.ask(S, user("other"), said, user("r0"), keep=False)
        assert not same(made[-1], other)
        assert (other.known, other.like) == (0, said is A)
        assert other.after.answers == ()


def test_many_begin_with_the_same_call() -> None:
    """Only its id tells whose it is; a client that makes up ids anew has to be known otherwise."""
    desk = Desk()
    asked = assistant("", call("ls", "{}", "call-number-1"))
    made = talk(desk, asked)
    for name in ("call-number-2", "x1"):
        asks = assistant("", call("ls", "{}", name))
        other = desk.ask(S, user("other"), asks, result("a", name), keep=False)
        assert not same(made[-1], other)
        assert other.like
    mine = desk.ask(S, user("q [new context]"), asked, result("a", "call-number-1"))
    assert same(made[-1], mine)


def test_the_same_history_under_another_system_prompt() -> None:
    """A side request with the whole history (memory extraction) is another conversation."""
    desk = Desk()
    made = talk(desk, A, B)
    history = sent(made[-1])[1:]
    for heads in ([system("Extract memories.")], [system("Titles!"), system("You write them.")]):
        side = desk.ask(*heads, *history)
        assert side.before is None
        assert not same(made[-1], side)
    assert desk.ask(*history).before is None
    assert same(made[-1], desk.ask(*sent(made[-1]), assistant("c"), R))


@pytest.mark.parametrize(
    "edited",
    [
        system("You are nice.\n" * 15 + "Be brief."),
        system("Be brief.\n" + "You are nice.\n" * 20),
        system("Date: 1\n" + "You are nice.\n" * 20 + "Status: 2"),
    ],
    ids=["end", "start", "both"],
)
def test_an_edited_system_prompt_is_still_the_same(edited: Message) -> None:
    """At its end, its start or both, if four messages are repeated; nothing is put back then."""
    desk = Desk()
    made = talk(desk, A, B)
    short = desk.ask(edited, Q, A, user("another"), keep=False)
    assert not same(made[-1], short), "it may be a twin that began alike"
    after = desk.ask(edited, *sent(made[-1])[1:], assistant("c"), R)
    assert same(made[-1], after)
    assert (after.known, after.like) == (0, False)


def test_two_short_system_prompts() -> None:
    """What all system messages have in common does not make them alike."""
    desk = Desk()
    talk(desk, A, head=system("You are a poet."))
    assert desk.ask(system("Write titles."), Q, A, R).before is None


def test_one_more_system_message() -> None:
    """The first is the same: the conversation is the same, its history is not lined up."""
    desk = Desk()
    made = talk(desk, A)
    after = desk.ask(S, system("more"), *sent(made[-1])[1:], B, R)
    assert after.before is not None
    assert after.known == 0


def test_of_two_the_one_with_the_same_system_prompt() -> None:
    """Before the more recent one."""
    desk = Desk()
    one = talk(desk, A, head=S)
    two = talk(desk, B, head=system("You are nice.\n" * 20 + "Be brief."))
    assert not same(one[-1], two[-1])
    for made in (one, two, one, two):
        assert same(made[-1], desk.ask(*sent(made[-1])))
        assert same(made[-1], desk.ask(*sent(made[-1])[:3], R))


def test_two_that_begin_alike() -> None:
    """One question in two windows: each goes on as itself once they differ."""
    desk = Desk()
    one = desk.ask(S, Q)
    desk.hear(one, A)
    more = desk.ask(S, Q, A, R)
    two = desk.ask(S, Q)
    desk.hear(two, B)
    assert not same(more, two)
    other = desk.ask(S, Q, B, user("s"))
    assert same(two, other)
    assert same(more, desk.ask(S, Q, A, R, assistant("c"), user("t")))
    assert not same(more, other)


def test_the_most_recent_of_equals() -> None:
    """A branch and its trunk are equally deep: the one used last."""
    desk = Desk()
    desk.ask(S, Q, A, user("one"))
    two = desk.ask(S, Q, A, user("two"), B, R)
    third = desk.ask(S, Q, A, user("three"))
    assert third.before is not None
    assert third.before.id == two.after.id


@pytest.mark.parametrize("history", [[S, Q, A, R], [S, Q], [S]])
def test_nothing_crosses_keys(history: list[Message]) -> None:
    """Not the conversation, not the clock, not the tools."""
    desk = Desk()
    talk(desk, A)
    desk.ask(*history, tools=[tool("f"), tool("g")])
    made = desk.ask(*history, key="other", tools=[tool("g"), tool("f")])
    assert made.before is None
    assert not made.changes


def test_clock_families() -> None:
    """System text that is equal with the clock masked: the first value, in a new conversation.

    Of the same key only, and only clocks.
    """
    desk = Desk()
    one = desk.ask(system("Be nice.\nIt is 10:00:00."), Q)
    desk.hear(one, A)
    two = desk.ask(system("Be nice.\nIt is 10:05:00."), R)
    assert sent(two)[0] == sent(one)[0]
    assert not same(one, two)
    assert sent(desk.ask(system("Be nice.\nIt is 10:09:00."), user("s")))[0] == sent(one)[0]
    assert not desk.ask(system("Be nice.\nIt is 10:05:00."), R, key="other").changes
    assert not desk.ask(system("Be kind.\nIt is 10:05:00."), user("t")).changes
    counted = [desk.ask(system(f"Message count: {n}"), user(f"u{n}")) for n in (1, 2)]
    assert not counted[1].changes


def test_a_forgotten_clock() -> None:
    """When all of a family are gone, so is their first value."""
    desk = Desk()
    one = desk.ask(system("It is 10:00:00."), Q)
    assert desk.book.forget(one.after.id)
    assert not desk.ask(system("It is 10:05:00."), R).changes


def test_system_text_in_parts_has_no_family() -> None:
    """Its clock cannot be told."""
    desk = Desk()
    parts = [{"type": "text", "text": "It is 10:00."}, {"type": "text", "text": "b"}]
    desk.ask(system(parts), Q)
    assert not desk.ask(system([{**parts[0], "text": "It is 10:01."}, parts[1]]), R).changes


def test_forget() -> None:
    """Nothing of it is left; the second time there is nothing to forget."""
    desk = Desk()
    made = talk(desk, A, B)
    conversation = made[-1].after.id
    assert desk.book.size(conversation) > 0
    assert desk.book.forget(conversation)
    assert not desk.book.forget(conversation)
    assert desk.book.get(conversation) is None
    assert desk.book.size(conversation) == len(desk.book) == 0
    assert desk.ask(*sent(made[-1]), assistant("c"), R).before is None


def test_too_many_conversations() -> None:
    """The least recently used goes, and says so."""
    desk = Desk(book=Book(2, 1 << 20))
    one, two = desk.ask(S, Q), desk.ask(S, R)
    desk.ask(S, Q)
    assert desk.book.keep(desk.ask(S, user("s"), keep=False).after) == [two.after.id]
    assert [row.id for row in desk.book] == [one.after.id, "conversation 4"]


def test_too_many_bytes() -> None:
    """Old ones go until the rest fits; a single one may be larger."""
    desk = Desk(book=Book(100, 3000))
    first = [desk.ask(user(f"{number}" * 900)) for number in range(3)]
    assert len(desk.book) == 3
    huge = desk.ask(user("x" * 5000))
    assert [row.id for row in desk.book] == [huge.after.id]
    assert desk.ask(*sent(first[0]), A, R).before is None


def test_size_counts_what_is_held() -> None:
    """Messages as they came, as they went if they differ, tools and answers."""
    desk = Desk()
    made = desk.ask(Q, tools=[tool("f")])
    small = desk.book.size(made.after.id)
    assert small == made.after.size
    desk.hear(made, A)
    assert desk.book.size(made.after.id) == small + len(orjson.dumps(A))


def test_remembered_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of messages seen lately are kept up to a size, and are the same without it."""
    kept = Desk()
    monkeypatch.setattr(books, "KEYS", 1)
    fresh = Desk()
    for desk in (kept, fresh):
        assert same(*talk(desk, A, B))
    first, second = (next(iter(desk.book)) for desk in (kept, fresh))
    assert first.lines == second.lines


def test_only_the_newest_edited_ones_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question under many system prompts: the work per request is bounded."""
    compared = []

    def counted(a: bytes, b: bytes) -> float:
        compared.append(a)
        return overlap(a, b)

    monkeypatch.setattr(match, "overlap", counted)
    desk = Desk()
    for number in range(40):
        desk.ask(system(f"{number} " * 50), Q, assistant("ok"), R)
    compared.clear()
    desk.ask(system("none of these"), Q, assistant("ok"), R)
    assert len(compared) <= 3 * books.COMPARED


def test_of_equal_answers_each_is_its_own() -> None:
    """The same call twice in a loop, with a thought of its own before each."""
    desk = Desk()
    asked = [assistant("", call("ls", "{}", f"call-number-{number}")) for number in (1, 2)]
    first = desk.ask(S, Q)
    desk.hear(first, {**asked[0], "reasoning_content": "one"})
    second = desk.ask(S, Q, asked[0], result("a", "call-number-1"))
    desk.hear(second, {**asked[1], "reasoning_content": "two"})
    history = [S, Q, asked[0], result("[cleared]", "call-number-1"), asked[1]]
    history.append(result("b", "call-number-2"))
    made = desk.ask(*history)
    thoughts = [one.get("reasoning_content") for one in sent(made)]
    assert thoughts == [None, None, "one", None, "two", None]
    desk.book.forget(made.after.id)
    assert rules(desk.ask(*history)) == []


def test_messages_that_are_none() -> None:
    """A conversation that once held a bare string is compared like any other."""
    desk = Desk()
    desk.raw(orjson.dumps({"messages": [Q, A, "odd", B, R]}))
    made = desk.ask(Q, A, user("even"), B, user("s"))
    assert made.known == 2


def test_a_branch_takes_what_it_has() -> None:
    """Answers up to where it leaves, tools it declares, a title of its own."""
    desk = Desk()
    tools = [tool("f"), tool("g")]
    history: list[Message] = [S, Q]
    for said in (A, B, assistant("c")):
        made = desk.ask(*history, tools=tools)
        desk.hear(made, said)
        history += [said, R]
    made = desk.ask(*history, tools=tools)
    branch = desk.ask(S, Q, A, user("other"), tools=[tool("g"), tool("h")], keep=False)
    assert branch.before == made.after
    assert not same(made, branch)
    assert [answer.at for answer in branch.after.answers] == [2]
    assert [name for name, _ in branch.after.order] == ["g", "h"]
    assert desk.ask(S, Q, A, user("other"), keep=False).after.order == ()
    assert branch.after.title == "q"


def test_what_a_conversation_holds_is_counted_once() -> None:
    """Tools in the order they were first seen are the same objects; notes and names count."""
    desk = Desk()
    desk.ask(system("It is 10:00."), Q, tools=[tool("f")])
    row = desk.ask(system("It is 10:01."), Q, A, R, tools=[tool("f")]).after
    assert row.tools[0] is row.order[0][1]
    lines = sum(len(line.came) + len(line.note) for line in row.lines)
    frozen = len(orjson.dumps(system("It is 10:00.")))
    tools = len(row.tools[0]) + len("f")
    assert row.lines[-1].note
    assert row.size == lines + frozen + tools + len(row.settings) + len(row.title)


def test_a_row_that_cannot_be_marked_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one it was to replace stays, and is found."""
    desk = Desk()
    made = desk.ask(S, Q)

    def broken(*_: object) -> bytes:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(books, "_clock_mark", broken)
        with pytest.raises(RuntimeError):
            desk.book.keep(replace(made.after, lines=made.after.lines[1:], head=0))
    assert desk.book.get(made.after.id) == made.after
    assert desk.ask(S, Q).after.id == made.after.id


@pytest.mark.parametrize("empty", [True, False])
def test_marks_are_those_of_a_new_row(empty: bool) -> None:
    """What its older self had is reused only where it is the same, also when nothing is said."""
    desk = Desk()
    made = desk.ask(S, Q)
    desk.hear(made, A)
    row = desk.book.get(made.after.id)
    assert row is not None
    old = replace(row, lines=row.lines[:1] if empty else row.lines)
    desk.book.keep(old)
    for new in (replace(old, namespace=b"another".ljust(16)), replace(old, head=0)):
        desk.book.keep(new)
        fresh = Book(64, 1 << 24)
        fresh.keep(new)
        assert desk.book._marks[new.id] == fresh._marks[new.id]
        desk.book.keep(old)
