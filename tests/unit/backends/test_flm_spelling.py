"""Tool arguments: how they are written, and what is learned of a model (fastflowlm.md 3.3)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends import flm_spelling
from proxy.backends.flm_spelling import (
    ALL,
    AS_TOLD,
    Spelling,
    Spellings,
    mark_of,
    replayed,
    schema_orders,
)

SCHEMA, TOLD, SORTED, TIGHT = Spelling
MODEL = "qwen3-it:4b"
ORDERS = {"f": ("b", "a")}
TEXTS = {
    SCHEMA: '{"b": 2, "a": 1}',
    TOLD: '{"a":1,"b":2}',
    SORTED: '{"a": 1, "b": 2}',
    TIGHT: '{"b":2,"a":1}',
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def call(number: int, arguments: Any = TEXTS[TOLD]) -> dict[str, Any]:
    """A tool call as the server tells it."""
    return {"id": f"call_{number}", "function": {"name": "f", "arguments": arguments}}


def sent(spellings: Spellings, *calls: Any, model: str | None = MODEL) -> list[Any]:
    """These calls as they go out now; None: to a model that does not mind."""
    guess = spellings.guess(model) if model else None
    said = [{"role": "assistant", "content": "", "tool_calls": [*calls]}]
    (message,), how = replayed(said, ORDERS, spellings, guess)
    spellings.sent(how)
    return message["tool_calls"]  # type: ignore[no-any-return]


def text(spellings: Spellings, number: int, model: str | None = MODEL) -> str:
    """The arguments of one call, as they go out now."""
    (made,) = sent(spellings, call(number), model=model)
    return str(made["function"]["arguments"])


def learn(spellings: Spellings, truth: Spelling | str, steps: int, first: int = 0) -> list[bool]:
    """Steps of a tool loop; whether each found its answer again."""
    hits = []
    for number in range(first, first + steps):
        hits.append(text(spellings, number) == TEXTS.get(truth))  # type: ignore[arg-type]
        spellings.judge(MODEL, [call(number)], hit=hits[-1])
    return hits


@pytest.mark.parametrize(
    ("told", "order", "want"),
    [
        ('{"a":1,"b":[1,2,{"c":"x:,\\"y"}]}', (), '{"a": 1, "b": [1, 2, {"c": "x:,\\"y"}]}'),
        ('{"a":1,"b":2}', ("b", "a"), '{"b": 2, "a": 1}'),
        ('{"a":1,"z":0,"b":2}', ("b", "a"), '{"b": 2, "a": 1, "z": 0}'),
        ('{"n":12345678901234567890}', (), '{"n": 12345678901234567890}'),
        ("{}", ("a",), "{}"),
        ('{"a": 1}', ("a",), '{"a": 1}'),
        ("[1,2]", (), "[1,2]"),
        ("", (), ""),
        ('{"a":"unfinished}', (), '{"a":"unfinished}'),
    ],
)
def test_the_first_guess(told: str, order: tuple[str, ...], want: str) -> None:
    """Blanks and order as most models write them; what is no compact object stays."""
    said = [{"role": "assistant", "content": "", "tool_calls": [call(0, told)]}]
    (message,), _ = replayed(said, {"f": order}, Spellings(), SCHEMA)
    assert message["tool_calls"][0]["function"]["arguments"] == want


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.sampled_from(Spelling))
def test_the_value_stays(value: dict[str, Any], guess: Spelling) -> None:
    """However it is spelled, it says the same."""
    told = orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    said = [{"role": "assistant", "content": "", "tool_calls": [call(0, told)]}]
    (message,), how = replayed(said, ORDERS, Spellings(), guess)
    assert orjson.loads(message["tool_calls"][0]["function"]["arguments"]) == value
    assert guess in how[mark_of(call(0, told))]


def test_odd_calls() -> None:
    """What has no text of arguments stays, and schemas without parameters have no order."""
    odd: list[Any] = [{}, 7, {"function": 7}, {"function": {"arguments": {"a": 1}}}]
    assert sent(Spellings(), *odd) == odd
    assert schema_orders(None) == {}
    assert schema_orders([{"function": {"name": "f"}}]) == {"f": ()}


@pytest.mark.parametrize(("truth", "misses"), [(SCHEMA, 0), (TOLD, 1), (SORTED, 2), (TIGHT, 3)])
def test_it_is_learned(truth: Spelling, misses: int) -> None:
    """Each miss rules one spelling out; what was found stays found."""
    hits = learn(Spellings(), truth, 12)
    assert hits == [False] * misses + [True] * (12 - misses)


def test_what_none_of_them_hits() -> None:
    """Is sent as the server tells it, as without a proxy."""
    spellings = Spellings()
    assert not any(learn(spellings, "another", 40))
    assert [text(spellings, 100 + n) for n in range(4)] == [TEXTS[TOLD]] * 4


def test_a_model_that_changes_its_mind() -> None:
    """Now and then another spelling costs that step and no more; for good, it is learned again."""
    spellings = Spellings()
    learn(spellings, TOLD, 8)
    assert learn(spellings, SCHEMA, 1, 20) == [False]
    assert learn(spellings, TOLD, 4, 30) == [True] * 4
    assert learn(spellings, SCHEMA, 20, 40)[-8:] == [True] * 8


def test_a_call_stays_as_it_went_out() -> None:
    """Whatever is learned later: else the prefix that holds it would be lost."""
    spellings = Spellings()
    before = text(spellings, 0)
    learn(spellings, TOLD, 4, 1)
    assert (text(spellings, 0), text(spellings, 9)) == (before, TEXTS[TOLD])
    assert text(spellings, 0, model=None) == before
    again = {**call(0), "function": {"name": "f", "arguments": '{"a":1}'}}
    assert sent(spellings, again)[0]["function"]["arguments"] == '{"a":1}'  # another call


def test_as_told_stays_as_told() -> None:
    """What went out before the model was known is not spelled anew once it is."""
    spellings = Spellings()
    assert text(spellings, 0, model=None) == text(spellings, 0) == TEXTS[TOLD]


def test_several_calls() -> None:
    """An answer of several is found only if each is right, so a miss rules nothing else out."""
    spellings = Spellings()
    calls = [call(0), call(1, '{"a":1}')]
    sent(spellings, *calls)
    spellings.judge(MODEL, calls, hit=False)
    assert spellings.guess(MODEL) is TOLD
    assert spellings.guess("other:4b") is SCHEMA


@pytest.mark.parametrize("hit", [True, False])
def test_what_says_nothing(hit: bool) -> None:
    """No call, one without a difference, one never sent as it was told."""
    spellings = Spellings()
    sent(spellings, call(0, "{}"), call(1))
    for calls in ([], [call(0, "{}")], [call(1), call(2)], [{"id": 7}]):
        spellings.judge(MODEL, calls, hit=hit)
    assert not spellings._marks


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls used last are remembered."""
    monkeypatch.setattr(flm_spelling, "_CALLS", 3)
    spellings = Spellings()
    for number in (0, 1, 2, 0, 3):
        text(spellings, number)
    assert [spellings.of(mark_of(call(n))) is not None for n in range(4)] == [
        True, False, True, True,
    ]  # fmt: skip
    assert (ALL > AS_TOLD, len(spellings._sent)) == (True, 3)
