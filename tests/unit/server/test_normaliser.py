"""A request and the ledger: what is sent, what is kept, what is counted; no fault gets through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest

from proxy.core import normalise as core
from proxy.core.ledger import Conversation
from proxy.core.normalise import RULES
from proxy.core.normalise.base import Rule
from proxy.core.normalise.book import Book
from proxy.core.normalise.clients import Side
from proxy.core.template import Traits
from proxy.dialects import DIALECTS
from proxy.server.normaliser import Normaliser, Nowhere, Turn
from proxy.telemetry.metrics import Metrics
from tests.unit.doubles import Clock

KEY, OTHER = b"key".ljust(16), b"other".ljust(16)
ALL = frozenset(rule.name for rule in RULES) - {"preserve-thinking"}  # which always has something


@dataclass
class Served:
    """What the backend serves."""

    model: str = "m"
    traits: Traits = field(default_factory=Traits)
    adapters: bool = False


@dataclass
class Notes:
    """A ledger that only takes down what it is told."""

    told: list[tuple[str, str]] = field(default_factory=list)

    def changed(self, conversation: Conversation) -> None:
        """Recorded."""
        self.told.append(("changed", conversation.id))

    def gone(self, conversation: str) -> None:
        """Recorded."""
        self.told.append(("gone", conversation))


@dataclass
class Desk:
    """A normaliser, and requests to it."""

    on: frozenset[str] = ALL
    shadow: bool = False
    most: int = 8
    served: Served = field(default_factory=Served)
    ledger: Notes = field(default_factory=Notes)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        """Builds it."""
        self.book, self.metrics = Book(self.most, 1 << 20), Metrics()
        self.normaliser = Normaliser(
            self.book,
            self.ledger,
            self.metrics,
            self.clock,
            served=self.served,
            on=self.on,
            shadow=self.shadow,
        )

    def ask(
        self,
        *messages: Any,
        key: bytes = KEY,
        keep: bool = True,
        off: bool = False,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Turn:
        """One chat request."""
        raw = orjson.dumps({"messages": list(messages), **more})
        call = DIALECTS["/v1/chat/completions"].parse(raw)
        return self.normaliser.prepare(call, headers or {}, key, keep=keep, off=off)

    def hear(self, turn: Turn, text: str, prompt_n: int | None = 9) -> None:
        """The answer ran to its end."""
        message = {"role": "assistant", "content": text}
        self.normaliser.answered(turn, orjson.dumps(message), prompt_n)

    def count(self, series: str) -> float:
        """The value of a series."""
        lines = self.metrics.render()[0].decode().splitlines()
        (found,) = [line for line in lines if line.startswith(f"slotkeeper_{series} ")]
        return float(found.rpartition(" ")[2])


def user(content: Any) -> dict[str, Any]:
    """A person's message."""
    return {"role": "user", "content": content}


def system(text: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


def part(text: str) -> list[dict[str, Any]]:
    """A text as a list of one part."""
    return [{"type": "text", "text": text}]


def said(text: str) -> dict[str, Any]:
    """A model's message."""
    return {"role": "assistant", "content": text}


def sent(turn: Turn) -> list[Any]:
    """The messages that go to the backend; raw and parsed say the same."""
    found: list[Any] = orjson.loads(turn.call.raw)["messages"]
    assert found == turn.call.body["messages"]
    return found


def test_a_turn() -> None:
    """Something was changed: it is another call, the original is kept, each rule named once."""
    desk = Desk()
    turn = desk.ask(user(part("hello")), user(part("there")), temperature=0.5)
    assert sent(turn) == [user("hello"), user("there")]
    assert sent(Turn(turn.original)) == [user(part("hello")), user(part("there"))]
    assert (turn.altered, turn.shadow, turn.kept) == (True, False, True)
    assert turn.rules == ["single-part"]
    assert desk.count('rules_total{outcome="applied",rule="single-part"}') == 1
    assert turn.row is not None
    assert desk.ledger.told == [("changed", turn.row.id)]
    assert desk.count("conversations") == 1
    assert turn.row.used == desk.clock.now


def test_nothing_changes() -> None:
    """The call is the client's own, to the object."""
    desk = Desk()
    turn = desk.ask(user("hello"))
    assert turn.call.raw is turn.original.raw
    assert (turn.altered, turn.rules) == (False, [])


def test_client_and_side() -> None:
    """Recognised by header or by the first texts, and counted."""
    desk = Desk()
    assert desk.ask(user("hi"), headers={"user-agent": "opencode/1.0"}).client == "opencode"
    system = {"role": "system", "content": "You are a title generator. You output ONLY a title."}
    assert desk.ask(system, user("hi")).side is Side.TITLE
    assert desk.count('side_requests_total{kind="title"}') == 1


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_only_looked_at(mode: str) -> None:
    """The client's bytes go on, and the ledger has what was sent, not what would have been."""
    desk = Desk(shadow=mode == "shadow")
    turn = desk.ask(user(part("hello")), off=mode == "off")
    assert turn.call.raw is turn.original.raw
    assert (turn.altered, turn.shadow) == (False, mode == "shadow")
    assert ("single-part" in turn.rules) is (mode == "shadow")
    assert turn.row is not None
    assert turn.row.lines[0].went == orjson.dumps(user(part("hello")))


@pytest.mark.parametrize("way", ["", "off", "paused", "shadow"])
def test_a_preview_is_of_now(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what ``prepare`` would send, why that is not what the rules make, and keeps nothing.

    In shadow mode the rules' changes are shown all the same.
    """
    desk = Desk(shadow=way == "shadow")
    monkeypatch.setattr(desk.normaliser, "_paused", lambda: way == "paused")
    raw = orjson.dumps({"messages": [user(part("hello"))]})
    call = DIALECTS["/v1/chat/completions"].parse(raw)
    seen = desk.normaliser.preview(call, {}, KEY, off=way == "off")
    assert len(desk.book) == 0
    turn = desk.ask(user(part("hello")), off=way == "off")
    assert seen.call.raw == turn.call.raw
    assert seen.changes == turn.changes
    altered = way in {"", "shadow"}
    assert (seen.after["messages"] == [user("hello")]) is altered
    assert seen.note.partition(" ")[0] == {"": "", "off": "the", "paused": "caching"}.get(
        way, "shadow"
    )


@pytest.mark.parametrize("way", ["off", "paused"])
def test_what_is_frozen_stays_frozen(way: str) -> None:
    """A request that goes out as it came, in between, changes nothing for those after it."""
    desk = Desk()

    def system(clock: str) -> dict[str, Any]:
        return {"role": "system", "content": f"Be kind. Current time is {clock}."}

    talk = [user("a"), said("b"), user("c"), said("d"), user("e"), said("f"), user("g")]
    desk.hear(desk.ask(system("14:02:11"), *talk[:1]), "b")
    frozen = desk.ask(system("14:03:00"), *talk[:3])
    assert sent(frozen)[0] == system("14:02:11")
    desk.hear(frozen, "d")
    desk.normaliser._paused = lambda: way == "paused"
    between = desk.ask(system("14:04:00"), *talk[:5], off=way == "off")
    assert sent(between) == [system("14:04:00"), *talk[:5]]
    desk.hear(between, "f")
    desk.normaliser._paused = lambda: False
    after = desk.ask(system("14:05:00"), *talk)
    assert sent(after)[:3] == sent(frozen)[:3]
    assert after.row is not None
    assert frozen.row is not None
    assert after.row.id == frozen.row.id


def test_answers() -> None:
    """What was generated goes out again as it was; the newest eight are remembered."""
    desk = Desk()
    turn = desk.ask(user("hello"))
    for number in range(10):
        desk.hear(turn, f"  answer {number}  ", number)
    (row,) = desk.book
    assert [orjson.loads(one.message)["content"][9] for one in row.answers] == list("23456789")
    assert row.prompt_n == 9
    again = desk.ask(user("hello"), said("answer 9"), user("go on"))
    assert sent(again)[1] == said("  answer 9  ")
    assert again.before == row


def test_two_answers_at_once() -> None:
    """Requests of one conversation that overlap lose neither answer."""
    desk = Desk()
    one, two = desk.ask(user("hello")), desk.ask(user("hello"))
    desk.hear(one, "  one  ")
    desk.hear(two, "  two  ")
    (row,) = desk.book
    assert [orjson.loads(answer.message)["content"] for answer in row.answers] == [
        "  one  ",
        "  two  ",
    ]


def test_answers_that_are_none() -> None:
    """No message, no row, one that is no JSON object: nothing changes, at most a fault counts."""
    desk = Desk()
    turn = desk.ask(user("hello"))
    (row,) = desk.book
    desk.normaliser.answered(turn, None, 5)
    desk.normaliser.answered(Turn(turn.original), b"{}", 5)
    assert desk.count('faults_total{where="normalise"}') == 0
    desk.normaliser.answered(turn, b"no json", 5)
    assert desk.count('faults_total{where="normalise"}') == 1
    assert list(desk.book) == [row]


def test_not_kept() -> None:
    """Neither a new conversation nor a turn of a known one, whatever becomes of it."""
    desk = Desk()
    first = desk.ask(user("hello"))
    desk.hear(first, "  an answer  ")
    (row,) = desk.book
    desk.ledger.told.clear()
    desk.ask(user("something else"), keep=False)
    turn = desk.ask(user("hello"), said("an answer"), user(part("secret")), keep=False)
    assert sent(turn)[1] == said("  an answer  "), "it is normalised all the same"
    desk.normaliser.refused(turn)
    desk.hear(turn, "secret")
    assert (list(desk.book), desk.ledger.told, turn.kept) == ([row], [], False)
    assert not desk.normaliser.forgotten(turn)


def test_no_messages() -> None:
    """A request without any is no conversation."""
    desk = Desk()
    assert (desk.ask().kept, len(desk.book)) == (False, 0)


@pytest.mark.parametrize("role", [["system"], {"a": 1}, 5, None])
def test_a_strange_role(role: Any) -> None:
    """A role that is no string is the backend's to refuse, and no fault here."""
    desk = Desk()
    turn = desk.ask({"role": role, "content": "x"}, user("hi"))
    desk.hear(turn, "hello")
    assert desk.ask({"role": role, "content": "x"}, user("hi"), said("hello"), user("go")).kept
    assert desk.count('faults_total{where="normalise"}') == 0


def test_refused() -> None:
    """The original is sent, and the ledger knows that: no note, nothing put in its place."""
    desk = Desk()
    first = {"role": "system", "content": "The time is 14:02."}
    desk.hear(desk.ask(first, user("hello")), "fine")
    later = {"role": "system", "content": "The time is 14:03."}
    turn = desk.ask(later, user("hello"), said("fine"), user("and now?"))
    assert "14:03" in sent(turn)[-1]["content"]
    assert turn.altered
    assert desk.normaliser.revert(turn) is turn.original
    assert not turn.altered
    before = desk.book.get(turn.row.id) if turn.row else None
    assert before is not None
    assert before.lines[-1].note  # until the original is taken, nothing is given up
    desk.normaliser.refused(turn)
    assert (turn.call, turn.rules) == (turn.original, [])
    row = desk.book.get(turn.row.id) if turn.row else None
    assert row is not None
    assert all(line.went == line.came and not line.note for line in row.lines)
    assert desk.count('faults_total{where="normalise"}') == 1


def test_forgotten() -> None:
    """A conversation dropped while a request of it runs stays away; ``forget`` tells if it was."""
    desk = Desk()
    turn = desk.ask(user(part("hello")))
    assert turn.row is not None
    assert not desk.normaliser.forgotten(turn)
    assert desk.normaliser.forget(turn.row.id)
    assert not desk.normaliser.forget(turn.row.id)
    assert desk.normaliser.forgotten(turn)
    desk.normaliser.refused(turn)
    desk.hear(turn, "answer")
    assert len(desk.book) == 0
    assert desk.ledger.told == [("changed", turn.row.id), ("gone", turn.row.id)]
    assert desk.count("conversations") == 0


def test_the_oldest_go() -> None:
    """Beyond the limit the least recently used is dropped, in the ledger too."""
    desk = Desk(most=2)
    rows = [desk.ask(user(name)).row for name in ("one", "two", "three")]
    ids = [row.id for row in rows if row]
    assert [row.id for row in desk.normaliser.conversations()] == [ids[2], ids[1]]
    assert ("gone", ids[0]) in desk.ledger.told


@pytest.mark.parametrize("change", ["key", "model", "served"])
def test_namespaces(change: str) -> None:
    """Nothing crosses API keys, models the client names, or models the backend serves."""
    desk = Desk()
    desk.hear(desk.ask(user("hello"), model="a"), "  a long enough answer to be known  ")
    if change == "served":
        desk.served.model = "another"
    turn = desk.ask(
        user("hello"),
        said("a long enough answer to be known"),
        user("go on"),
        key=OTHER if change == "key" else KEY,
        model="b" if change == "model" else "a",
    )
    assert turn.before is None
    assert sent(turn)[1] == said("a long enough answer to be known")


def test_body() -> None:
    """What a conversation's last request was sent as, note and tools included."""
    desk = Desk()
    tool = {"type": "function", "function": {"name": "read"}}
    turn = desk.ask(user(part("hello")), tools=[tool], tool_choice="auto")
    assert turn.row is not None
    row = replace(turn.row, lines=(replace(turn.row.lines[0], note=" note"),))
    body = desk.normaliser.body(row)
    assert body["messages"] == [user("hello note")]
    assert (body["tools"], body["tool_choice"]) == ([tool], "auto")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_that_raises(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them: the original goes out, the conversation is known, and it is counted."""

    def boom(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    desk = Desk(on=ALL | {rule.name})
    tools = [{"type": "function", "function": {"name": "read"}}]
    desk.hear(desk.ask(system("It is 10:01:00."), user("hello"), tools=tools), "hi")
    for group in ("_SHAPE", "_LEDGER", "_TEMPLATE"):
        found = getattr(core, group)
        broken = tuple(replace(one, apply=boom) if one is rule else one for one in found)
        monkeypatch.setattr(core, group, broken)
    # Everything differs a little: there is something to look at for every rule.
    again = [system("It is 10:02:00."), user("hello "), said("hi"), user(part("more"))]
    turn = desk.ask(*again, tools=tools)
    assert turn.call.raw is turn.original.raw
    assert (turn.altered, turn.kept) == (False, True)
    assert desk.count(f'rules_total{{outcome="fault",rule="{rule.name}"}}') == 1
    assert desk.count('faults_total{where="normalise"}') == 1


@pytest.mark.parametrize("method", ["find", "keep"])
def test_a_book_that_raises(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours: the request goes out, and nothing is claimed of its conversation."""

    def boom(*_: Any) -> None:
        raise KeyError("secret")

    desk = Desk()
    monkeypatch.setattr(desk.book, method, boom)
    turn = desk.ask(user("hello"))
    desk.hear(turn, "an answer")
    assert sent(turn) == [user("hello")]
    assert (turn.kept, len(desk.book), desk.ledger.told) == (False, 0, [])
    assert desk.count('faults_total{where="normalise"}') == 1


def test_nowhere() -> None:
    """The ledger of a proxy that keeps none on disk."""
    Nowhere().changed(Conversation("c", b""))
    Nowhere().gone("c")
