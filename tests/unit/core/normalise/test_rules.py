"""The table of rules: each does what it says, can be switched, and may fail without harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import proxy.core.normalise as normalising
from proxy.core.normalise import RULES, RuleFault, switched_on
from proxy.core.normalise.base import Context, Default, Draft, Rule
from proxy.core.normalise.match import Said
from proxy.core.template import Traits
from tests.unit.core.normalise.kit import (
    Desk,
    Message,
    assistant,
    rules,
    sent,
    system,
    tool,
    user,
)
from tests.unit.core.normalise.scenes import SCENES, Scene
from tests.unit.core.normalise.test_invariants import plays

NAMES = [rule.name for rule in RULES]
DEFAULTS = {rule.name: rule.default for rule in RULES}


def desk_for(scene: Scene, *switches: str) -> Desk:
    """A proxy as the scene wants it."""
    return Desk(rules=switches, **scene.desk)


def differs(body: dict[str, Any], want: Any) -> list[str]:
    """Names of the fields that are not as they should be."""
    expected = {"stream": None, **want}
    return [
        name
        for name in {*body, *want}
        if name in expected and orjson.dumps(body.get(name)) != orjson.dumps(expected[name])
    ]


def test_every_rule_has_a_scene() -> None:
    """No rule is left untested, names are given once."""
    assert list(SCENES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_fires(name: str) -> None:
    """Where it should, the rule changes exactly what it should, and says so."""
    scene = SCENES[name]
    made = scene.play(desk_for(scene, f"+{name}"))
    assert name in rules(made)
    assert not differs(orjson.loads(made.raw), scene.want)
    assert orjson.loads(made.raw) == made.body


@pytest.mark.parametrize("name", NAMES)
def test_switched_off(name: str) -> None:
    """With ``-name`` it does nothing."""
    scene = SCENES[name]
    off = [f"-{other}" for other in (name, *scene.also)]
    made = scene.play(desk_for(scene, f"+{name}", *off))
    assert name not in rules(made)
    assert not differs(orjson.loads(made.raw), scene.was)


@pytest.mark.parametrize("name", NAMES)
def test_default(name: str) -> None:
    """Rules that change the meaning do nothing until they are asked for; all others do."""
    scene = SCENES[name]
    made = scene.play(desk_for(scene))
    assert (name in rules(made)) is (DEFAULTS[name] is not Default.OFF)


@pytest.mark.parametrize("name", NAMES)
def test_other_rules_off(name: str) -> None:
    """In mode ``off`` nothing fires, and the client's own object goes out."""
    scene = SCENES[name]
    desk = desk_for(scene, f"+{name}")
    desk.mode = "off"
    made = scene.play(desk)
    assert not made.changes


@pytest.mark.parametrize("name", NAMES)
def test_is_idempotent(name: str) -> None:
    """What the rule made, sent in its place, goes out as it is."""
    scene = SCENES[name]
    desk = desk_for(scene, f"+{name}")
    made = scene.play(desk)
    assert desk.raw(made.raw, keep=False).raw == made.raw


def test_defaults_are_those_of_the_catalogue() -> None:
    """Section 8 of the catalogue of cache breakers, rule by rule."""
    assert DEFAULTS == {
        "billing-header": "on",
        "cache-control": "on",
        "single-part": "on",
        "total-tokens": "off",
        "replay": "on",
        "known-clocks": "known",
        "clock": "known",
        "git-status": "off",
        "memory": "off",
        "vanished-clock": "known",
        "moved-reminder": "off",
        "tool-order": "on",
        "removed-tools": "off",
        "trimmed-text": "on",
        "tool-arguments": "on",
        "tool-results": "on",
        "call-ids": "on",
        "reasoning": "on",
        "template-date": "on",
        "preserve-thinking": "off",
        "tail-note": "on",
        "leading-systems": "on",
        "system-in-place": "on",
    }


def test_switches() -> None:
    """A name is added or taken away; to take it away wins; ``off`` is off."""
    safe = switched_on("safe", [])
    assert safe == {name for name in NAMES if DEFAULTS[name] is not Default.OFF}
    assert switched_on("safe", ["+memory", "-clock"]) == (safe | {"memory"}) - {"clock"}
    assert "memory" not in switched_on("safe", ["-memory", "+memory"])
    assert switched_on("off", ["+memory"]) == frozenset()


def test_nothing_freezes_where_nobody_is_told() -> None:
    """Without the note there is no frozen clock, date or block either, even if asked for."""
    asked = [f"+{name}" for name in NAMES]
    off = switched_on("safe", [*asked, "-tail-note"])
    assert set(NAMES) - off == {
        "tail-note", "known-clocks", "clock", "git-status", "memory", "vanished-clock",
        "template-date",
    }  # fmt: skip
    desk = Desk(rules=["-tail-note"])
    desk.ask(system("It is 10:00."), user("q"))
    then = [system("It is 10:01."), user("q"), {"role": "assistant", "content": "a"}, user("r")]
    assert sent(desk.ask(*then)) == then


class BrokenError(Exception):
    """What a rule raises here."""


def _raises(_draft: Draft, _context: Context) -> None:
    raise BrokenError


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_that_raises_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault carries the rule's name and what it raised; switched off, it cannot raise."""

    def broken(rule: Rule) -> Rule:
        return replace(rule, apply=_raises) if rule.name == name else rule

    for table in ("_SHAPE", "_LEDGER", "_TEMPLATE"):
        monkeypatch.setattr(normalising, table, tuple(map(broken, getattr(normalising, table))))
    scene = SCENES[name]
    with pytest.raises(RuleFault) as caught:
        scene.play(desk_for(scene, f"+{name}"))
    assert caught.value.rule == name
    assert isinstance(caught.value.__cause__, BrokenError)
    assert name not in rules(scene.play(desk_for(scene, f"-{name}")))


@contextmanager
def asking_all() -> Iterator[set[str]]:
    """Ledger rules that are not asked, for want of anything to find, are asked too: in vain.

    Gives the places that were left out.
    """
    nothing_at, seen = normalising._nothing_at, set()

    def checked(draft: Draft, head: Sequence[Said]) -> set[str]:
        places = nothing_at(draft, head)
        trial = deepcopy(draft)
        for rule in normalising._LEDGER:
            if rule.where in places:
                rule.apply(trial, Context(switched_on("safe", ()), "claude-code"))
        assert [item.json for item in trial.messages] == [item.json for item in draft.messages]
        assert [item.json for item in trial.tools or ()] == [i.json for i in draft.tools or ()]
        assert (trial.changes, trial.stale) == (draft.changes, draft.stale)
        seen.update(places)
        return places

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalising, "_nothing_at", checked)
        yield seen


def test_a_new_request_asks_nothing_of_the_ledger() -> None:
    """Rules with nothing to look at are left out, and only these."""
    with asking_all() as places:
        Desk().ask(system("s"), user("q"), tools=[tool("t")])
    assert places == {"history", "system text", "old user messages", "tools"}
    with asking_all() as places:
        desk = Desk()
        first = desk.ask(system("It is 10:01:00."), user("q"), tools=[tool("t")], keep=False)
        desk.book.keep(first.after)
        desk.hear(first, assistant("a"))
        places.clear()
        moved = system("It is 10:02:00.")
        desk.ask(moved, user("q "), assistant("a"), user("r"), tools=[tool("t")])
    assert places == set()


def test_a_history_is_repaired_in_a_retry_too() -> None:
    """Nothing was answered since: only what was sent before can be put back."""
    desk = Desk()
    desk.hear(desk.ask(user("q")), assistant("hi \n"))
    first, again = (desk.ask(user("q"), assistant("hi"), user("r")) for _ in range(2))
    assert sent(again) == sent(first) == [user("q"), assistant("hi \n"), user("r")]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_asked_would_find_nothing(name: str) -> None:
    """In no scene does a ledger rule stay out that had something to do."""
    scene = SCENES[name]
    with asking_all():
        scene.play(desk_for(scene, f"+{name}"))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_not_asked_would_find_nothing_whatever_comes(data: st.DataObject) -> None:
    """However the client mangles what it got."""
    with asking_all():
        assert list(plays(Desk(), data))


def test_untouched_elements_keep_their_bytes() -> None:
    """One rule fires in one message of a body with odd spelling: all other bytes stay."""
    odd = (
        b'{"role" : "user", "content" : "\\u00e9\\u0041\\/ \\r\\n cafe\\u0301 e\\u0301",'
        b' "n": 123456789012345678901234567890, "f": 1.50e+2, "a": 1, "a": 2}'
    )
    whole = b'\n {"m" : 1.0,\n "messages" : [ %s ,\n\t%s ] , "big":99999999999999999999 }  \n'
    parts = b'{"role":"user","content":[{"type":"text","text":"b"}]}'
    made = Desk().raw(whole % (odd, parts))
    assert odd in made.raw
    assert b'"m":1.0' in made.raw
    assert b'"big":99999999999999999999' in made.raw
    assert sent(made)[1] == user("b")
    assert rules(made) == ["single-part"]


def test_of_duplicate_members_the_last_counts() -> None:
    """As for the engine's parser: what is sent holds the last ``messages`` and no other."""
    made = Desk().raw(
        b'{"messages":[{"role":"user","content":"no"}],"x":1,'
        b'"m\\u0065ssages":[{"role":"user","content":[{"type":"text","text":"yes"}]}]}'
    )
    assert made.raw == b'{"messages":[{"role":"user","content":"yes"}],"x":1}'


@pytest.mark.parametrize("space", [b" " * 5000, b"\n" * 5000, b" \t\r\n" * 2000])
def test_space_around_a_body_costs_no_time(space: bytes) -> None:
    """A body with space around it is rewritten at once (this test would run for years)."""
    raw = orjson.dumps({"messages": [user([{"type": "text", "text": "a"}])]})
    assert Desk().raw(space + raw + space).raw == b'{"messages":[{"role":"user","content":"a"}]}'


_ODD: list[Any] = [
    "text", None, 5, 1.5, True, [], ["a"], {}, {"role": None}, {"role": ["user"]},
    {"role": {}, "content": "a"}, {"content": "a"}, {"role": "user"}, user(None), user(5),
    user({}), user({"a": 1}), user([]), user([None]), user(["a"]), user([[]]), user([{}]),
    user([{"type": "text"}]), user([{"type": "text", "text": 5}]),
    user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]),
    user([{"type": ["text"], "text": "a"}]), user([{"type": "text", "text": "a", "x": 1}]),
    system(None), system([]), system(5), system({"text": "a"}), system([{"type": "text"}]),
    {"role": "developer", "content": ["a"]},
    {"role": "assistant", "content": None, "tool_calls": "f"},
    {"role": "assistant", "content": None, "tool_calls": {}},
    {"role": "assistant", "content": None, "tool_calls": [None, 5, "a", [], {}]},
    {"role": "assistant", "tool_calls": [{"function": None}]},
    {"role": "assistant", "tool_calls": [{"id": 5, "function": {}}]},
    {"role": "assistant", "tool_calls": [{"id": [], "function": {"arguments": {"a": 1}}}]},
    {"role": "assistant", "tool_calls": [{"id": "x", "function": {"arguments": "{a"}}]},
    {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": [], "arguments": 5}}]},
    {"role": "assistant", "content": "a", "function_call": {"name": "f"}},
    {"role": "assistant", "content": "a", "reasoning_content": ["b"]},
    {"role": "tool", "content": None}, {"role": "tool", "content": {"a": 1}},
    {"role": "tool", "content": "{", "tool_call_id": 5}, {"role": "tool", "tool_call_id": []},
    {"role": "user", "content": "\ufeff\u200b\uffff\x00"},
]  # fmt: skip
_NO_TOOLS: list[Any] = [
    None, "tools", 5, {}, [], [None], ["f"], [{}], [{"function": None}], [{"function": {}}],
    [{"function": {"name": 5}}], [{"function": {"name": ["f"]}}],
    [{"function": {"name": "f"}}, {"function": {"name": "f"}}],
]  # fmt: skip
_REFUSING = {
    "mid_system": False, "two_systems": False, "writes_date": True, "has_date_string": True,
}  # fmt: skip


def _everything(client: str = "") -> Desk:
    traits = Traits(**_REFUSING)
    switches = [f"+{name}" for name in NAMES]
    return Desk(rules=switches, traits=traits, client=client, today="09 Oct 2026")


def _plays(odd: Any, client: str) -> None:
    desk = _everything(client)
    head = system("Today's date: 2026-10-09")
    for messages in (
        [odd],
        [head, odd],
        [head, user("a"), odd],
        [odd, head],
        [head, odd, user("a")],
        [head, odd, {"role": "assistant", "content": "b"}, odd],
        [system("Today's date: 2026-10-10"), odd, {"role": "assistant", "content": "b "}, odd],
        [head, user("c"), {"role": "assistant", "content": "b "}, system("d"), odd, user("e")],
        [odd, odd, odd],
    ):
        made = desk.ask(*messages)
        desk.hear(made, {"role": "assistant", "content": "b", "reasoning_content": "c"})
        assert orjson.loads(made.raw) == made.body
        normalising.resent(made.after, Context(switched_on("safe", ())))


@pytest.mark.parametrize("client", ["", "claude-code", "qwen-code"])
@pytest.mark.parametrize("odd", _ODD, ids=repr)
def test_odd_messages(odd: Any, client: str) -> None:
    """Whatever stands in ``messages``, with every rule on: no fault, and valid JSON goes out."""
    _plays(odd, client)


@pytest.mark.parametrize("odd", [message for message in _ODD if message != {}], ids=repr)
def test_odd_messages_alone_are_untouched(odd: Any) -> None:
    """A message no rule knows goes out byte for byte."""
    raw = orjson.dumps({"messages": [user("a"), odd, user("b")]}, option=orjson.OPT_INDENT_2)
    assert Desk().raw(raw).raw is raw


@pytest.mark.parametrize("tools", _NO_TOOLS, ids=repr)
def test_odd_tools(tools: Any) -> None:
    """Whatever ``tools`` is, it goes out as it came, in every turn."""
    desk = _everything()
    for more in ([], [{"role": "assistant", "content": "b"}, user("c")]):
        made = desk.ask(user("a"), *more, tools=tools)
        assert orjson.loads(made.raw)["tools"] == tools
        desk.ask(user("a"), *more, tools=[{"function": {"name": "f"}}, {}])


@pytest.mark.parametrize("kwargs", ["a", 5, [], None, {"date_string": "x"}])
def test_odd_template_arguments(kwargs: Any) -> None:
    """Template arguments that are no object, or name the date, are left alone."""
    desk = _everything()
    made = desk.ask(user("a"), chat_template_kwargs=kwargs)
    now = orjson.loads(made.raw)["chat_template_kwargs"]
    date = {"date_string": "09 Oct 2026", "preserve_thinking": True}
    expected = {None: date}.get(kwargs) if not isinstance(kwargs, list | dict) else None
    if isinstance(kwargs, dict):
        expected = {**kwargs, "preserve_thinking": True}
    assert now == (expected or kwargs)


def test_no_messages() -> None:
    """An empty list is the engine's to refuse."""
    raw = b'{"messages":[ ]}'
    assert Desk().raw(raw).raw is raw


def test_unicode_and_line_ends_are_left_alone() -> None:
    """No normal form, no line end, no invisible character is changed where rules fire around it."""
    text = "e\u0301 \u00e9 \r\n \u200b\ufeff\u2028 \U000e0041 \x7f"
    made = Desk().ask(user([{"type": "text", "text": text}]), {"role": "tool", "content": text})
    assert sent(made) == [user(text), {"role": "tool", "content": text}]
    assert rules(made) == ["single-part"]


@pytest.mark.parametrize("depth", [200, 240])
def test_deep_nesting(depth: int) -> None:
    """A schema nested deeply is compared like any other."""
    deep: Any = "x"
    for _ in range(depth):
        deep = [deep]
    message: Message = {"role": "user", "content": "a", "x": deep}
    made = Desk().ask(message, user([{"type": "text", "text": "b"}]))
    assert sent(made) == [message, user("b")]
