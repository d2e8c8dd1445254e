"""Tool arguments: how they are written, and what is learned of a model (fastflowlm.md 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
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
    written,
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
WRITTEN: dict[str, str] = {str(one): text for one, text in TEXTS.items()}
LOOSE = frozenset({SCHEMA, SORTED})  # with blanks, which take tokens of their own
MIXED = st.lists(st.sampled_from([*map(str, Spelling), "another"]), max_size=60)
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
    said = [{"role": "assistant", "content": "", "tool_calls": [*calls]}]
    (message,), how = replayed(said, ORDERS, spellings, model)
    spellings.sent(how)
    return message["tool_calls"]  # type: ignore[no-any-return]


def text(spellings: Spellings, number: int, model: str | None = MODEL) -> str:
    """The arguments of one call, as they go out now."""
    (made,) = sent(spellings, call(number), model=model)
    return str(made["function"]["arguments"])


def follow(
    spellings: Spellings, truths: Sequence[str], first: int = 0, *, counted: bool = False
) -> list[bool]:
    """Steps of a tool loop, written like that; whether each found its answer again.

    ``counted``: it is known how many tokens each took.
    """
    hits = []
    for number, truth in enumerate(truths, first):
        if counted:
            spellings.counted([call(number)], LOOSE if truth in LOOSE else ALL - LOOSE)
        hits.append(text(spellings, number) == WRITTEN.get(truth))
        spellings.judge(MODEL, [call(number)], hit=hits[-1])
    return hits


def learn(spellings: Spellings, truth: str, steps: int, first: int = 0) -> list[bool]:
    """The same spelling at every step."""
    return follow(spellings, [truth] * steps, first)


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
        ("{a:1,b:2}", (), "{a:1,b:2}"),
    ],
)
def test_the_first_guess(told: str, order: tuple[str, ...], want: str) -> None:
    """Blanks and order as most models write them; what is no compact object stays."""
    said = [{"role": "assistant", "content": "", "tool_calls": [call(0, told)]}]
    (message,), _ = replayed(said, {"f": order}, Spellings(), MODEL)
    assert message["tool_calls"][0]["function"]["arguments"] == want


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("start", "piece"), [('{"', '\\"'), ("{", '"'), ("{", '":"\\'), ("", "{")])
def test_long_arguments_that_are_no_json(start: str, piece: str) -> None:
    """They stay, and are not searched for the end of each string that has none."""
    told = start + piece * 200_000 + "}"
    assert text_of(told) == told


def text_of(told: str) -> str:
    """A new call's arguments as they go out."""
    said = [{"role": "assistant", "content": "", "tool_calls": [call(0, told)]}]
    (message,), _ = replayed(said, ORDERS, Spellings(), MODEL)
    return str(message["tool_calls"][0]["function"]["arguments"])


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.sampled_from(Spelling))
def test_the_value_stays(value: dict[str, Any], guess: Spelling) -> None:
    """However it is spelled, it says the same."""
    told = orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    said = [{"role": "assistant", "content": "", "tool_calls": [call(0, told)]}]
    spellings = Spellings()
    spellings.counted([call(0, told)], frozenset({guess}))
    (message,), how = replayed(said, ORDERS, spellings, MODEL)
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


@settings(deadline=None)
@given(MIXED)
def test_a_model_that_mixes_them(truths: list[str]) -> None:
    """However it does, as told would not have been found much more often: a few tries, and no more.

    Each spelling is tried once before as told was ever found; later one must have earned it, or as
    told have failed six times in a row.
    """
    failed = sum(truth != TOLD for truth in truths)
    assert follow(Spellings(), truths).count(False) <= failed + 3 + failed // 6


@settings(deadline=None)
@given(MIXED)
def test_a_model_that_mixes_blanks_is_counted(truths: list[str]) -> None:
    """Whether a call had blanks is seen in its tokens, so mixing them costs nothing."""
    truths = [SCHEMA if truth in LOOSE else TOLD for truth in truths]
    assert all(follow(Spellings(), truths, counted=True))


@settings(deadline=None)
@given(MIXED)
def test_counted_is_no_worse(truths: list[str]) -> None:
    """A few tries at the order of keys, and at not trusting the count, as without one."""
    failed = sum(truth != TOLD for truth in truths)
    assert follow(Spellings(), truths, counted=True).count(False) <= failed + 3 + failed // 6


@pytest.mark.parametrize("truth", [SCHEMA, TOLD])
def test_a_count_that_is_wrong(truth: Spelling) -> None:
    """A tokenizer that is not quite the model's is not believed for long; one that is, again."""
    spellings, hits = Spellings(), []
    for number in range(12):
        wrong = ALL - LOOSE if truth in LOOSE else LOOSE
        spellings.counted([call(number)], wrong)
        hits.append(text(spellings, number) == TEXTS[truth])
        spellings.judge(MODEL, [call(number)], hit=hits[-1])
    assert hits[4:] == [True] * 8
    assert follow(spellings, [truth] * 20, 20, counted=True)[-10:] == [True] * 10
    other = TOLD if truth is SCHEMA else SCHEMA
    assert follow(spellings, [truth, other] * 10, 60, counted=True)[-10:] == [True] * 10


@settings(deadline=None)
@given(MIXED)
def test_habits_are_kept(truths: list[str]) -> None:
    """The next start goes on where this one was."""
    before, after = Spellings(), Spellings()
    follow(before, truths)
    after.recall(before.habits())
    assert after.habits() == before.habits()
    more = truths[::-1]
    assert follow(after, more, 100) == follow(before, more, 100)


HABIT = {"marks": [1, 1, 1, 1], "credit": 1, "found": True, "doubt": 0, "trust": 1}


@pytest.mark.parametrize(
    "kept",
    [
        b"", b"{", b"[]", b"{}", b'{"last":"m"}', b'{"last":"m","models":[]}',
        *(orjson.dumps({"last": "m", "models": {"m": row}}) for row in (
            1, {}, {**HABIT, "marks": [1]}, {**HABIT, "marks": [1, 1, 1, "x"]},
            {**HABIT, "trust": None},
        )),
        orjson.dumps({"models": {"m": HABIT}}),
        orjson.dumps({"last": "m", "models": {"m": HABIT}}).replace(b"[1,", b"[1e400,"),
    ],
)  # fmt: skip
def test_broken_habits(kept: bytes) -> None:
    """What cannot be read changes nothing."""
    spellings = Spellings()
    learn(spellings, TOLD, 3)
    before = spellings.habits()
    with pytest.raises(ValueError, match=r".+"):
        spellings.recall(kept)
    assert spellings.habits() == before


@pytest.mark.parametrize("wild", [1e20, 10**18, -1e300])
def test_wild_habits(wild: float) -> None:
    """Are as strong as one can be, and can be written down again; so many models are kept."""
    spellings = Spellings()
    row = {"marks": [wild] * 4, "credit": wild, "found": 1, "doubt": wild, "trust": wild}
    spellings.recall(orjson.dumps({"last": "m", "models": {f"m{n}": row for n in range(500)}}))
    models = orjson.loads(spellings.habits())["models"]
    strong = wild > 0
    assert models["m0"] == {
        "marks": [3 if strong else -3] * 4, "credit": 3 if strong else 0, "found": True,
        "doubt": 6 if strong else 0, "trust": 3 if strong else -3,
    }  # fmt: skip
    assert len(models) == 100


def test_a_call_as_it_is_generated() -> None:
    """Name and arguments in Qwen's form, by spelling; what is no call has none."""
    texts = written([call(0), call(1, "{}")], ORDERS)
    one, two = texts[SORTED]
    assert one == f'<tool_call>\n{{"name": "f", "arguments": {TEXTS[SORTED]}}}\n</tool_call>'
    assert two == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert [texts[how][0] for how in Spelling] == [one.replace(TEXTS[SORTED], TEXTS[how])
                                                  for how in Spelling]  # fmt: skip
    assert written([call(0), {"function": {"name": "f"}}], ORDERS) == {}


def test_models_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that never end fill nothing; those that are known are learned on."""
    monkeypatch.setattr(flm_spelling, "_MODELS", 1)
    spellings = Spellings()
    learn(spellings, TOLD, 1)
    text(spellings, 50, model="other:4b")
    spellings.judge("other:4b", [call(50)], hit=False)
    assert [spellings.guess(model) for model in (MODEL, "other:4b")] == [TOLD, SCHEMA]


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
    assert spellings.habits() == b'{"last":"","models":{}}'


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
