"""Families, stop strings, pace, spelling, bounds: the small parts of FastFlowLM's driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, pre_tokenizers

from proxy.backends import flm_stop, flm_window
from proxy.backends.flm_memory import Memory as Held
from proxy.backends.flm_memory import Prompt
from proxy.backends.flm_models import Memory, ignores_tools, memory, primes
from proxy.backends.flm_pace import Pace
from proxy.backends.flm_stop import Stopper
from proxy.backends.flm_window import Window
from proxy.errors import BadRequestError
from tests.emulators.fastflowlm.models import CATALOGUE

SLOW = {"cache_n": 0, "prompt_n": 10_000, "prompt_ms": 40_000.0, "predicted_n": 100,
        "predicted_ms": 10_000.0}  # fmt: skip


@pytest.mark.parametrize("tag", sorted(CATALOGUE))
@pytest.mark.parametrize("think", [True, False])
def test_families(tag: str, think: bool) -> None:
    """The table says of every tag what the emulator was built to do."""
    model = CATALOGUE[tag]
    want = Memory.SYSTEM if model.family.flash else Memory(model.memory(think=think))
    assert memory(tag, think=think) is want
    assert ignores_tools(tag) is not model.tools
    assert primes(tag, think=think) is (want is Memory.PROMPT)


def test_an_unknown_family() -> None:
    """Nothing is claimed of it: its tools stay, and it is not primed."""
    assert memory("qwen9:1b", think=True) is Memory.UNKNOWN
    assert not ignores_tools("qwen9:1b")
    assert not ignores_tools("")
    assert not primes("", think=True)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
       st.integers(1, 5))  # fmt: skip
def test_stops(text: str, stops: list[str], size: int) -> None:
    """However a text is cut, it ends before the stop string that ends first, or is whole."""
    stopper = Stopper(tuple(stops))
    shown = "".join(stopper.feed(text[at : at + size]) for at in range(0, len(text), size))
    shown += stopper.rest()
    hit = [text.find(stop) for stop in stops if stop in text]
    assert stopper.hit is bool(hit)
    assert text.startswith(shown)
    if not hit:
        assert shown == text
    assert not any(stop in shown for stop in stops)
    assert stopper.feed("x") == ("" if hit else "x")


@pytest.mark.parametrize(
    ("asked", "want"), [(None, ()), ("x", ("x",)), ([], ()), (["a", "", "b"], ("a", "b"))]
)
def test_stop_field(asked: Any, want: tuple[str, ...]) -> None:
    """One text, several, or none."""
    assert flm_stop.strings({"stop": asked}) == want


@pytest.mark.parametrize("asked", [7, [7], {"a": 1}])
def test_no_stop_field(asked: Any) -> None:
    """Anything else is refused."""
    with pytest.raises(BadRequestError):
        flm_stop.strings({"stop": asked})


@pytest.mark.parametrize(
    ("kind", "tools", "limit", "waits"),
    [
        (Memory.PROMPT, True, 4096, True),  # 10 s of answer are left, against 40 s of prefill
        (Memory.UNKNOWN, True, 4096, True),
        (Memory.PROMPT, False, 4096, False),  # a cancel costs nothing
        (Memory.HISTORY, True, 4096, False),  # lost already
        (Memory.ANSWER, True, 4096, False),
    ],
)
def test_patience(kind: Memory, tools: bool, limit: int, waits: bool) -> None:
    """An answer is let run where a cancel costs more, at most as long as that would take."""
    pace = Pace()
    pace.observe(SLOW, 40_000)
    seconds = pace.patience(kind, tools=tools, size=40_000, limit=limit)
    assert (seconds > 10) is waits
    assert seconds <= pace.prefill(40_000) + 1e-9


def test_patience_has_an_end() -> None:
    """A short prompt is computed sooner than a long answer ends."""
    pace = Pace()
    assert pace.remaining(10) == pytest.approx(1.0)
    pace.observe({**SLOW, "predicted_n": 4000, "predicted_ms": 400_000.0}, 40_000)
    assert pace.patience(Memory.PROMPT, tools=True, size=40_000, limit=4096) == 0
    assert pace.patience(Memory.PROMPT, tools=True, size=40_000, limit=50) > 0


def prompt(*texts: str, **more: Any) -> Prompt:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return Prompt.of({"messages": messages, **more})


async def test_words_are_a_lower_bound() -> None:
    """Without a tokenizer only what cannot fit has a bound beyond the context."""
    window = Window(None)
    assert await window.least(prompt("word " * 900), Held()) == 0  # not known yet
    window.learn("m:1b", 512)
    assert await window.least(prompt("word " * 900), Held()) == 900
    assert await window.least(prompt("1, 2; " * 900), Held()) == 0
    assert await window.least(prompt("a"), Held()) == 0
    window.learn("other:1b", 0)
    assert window.capacity == 0


async def test_what_goes_on_is_counted_from_the_truth() -> None:
    """An extension has the tokens its beginning was told to have, less what templates drop."""
    window, held = Window(None), Held()
    window.learn("m:1b", 512)
    held.ended(prompt("a"), {"role": "assistant", "content": "b"}, 510)
    slack = flm_window.SLACK
    assert await window.least(prompt("a", "b", "c d"), held) == 510 - slack + 3
    thought = prompt("a", "<think>x y z</think>b", "c dd")
    assert await window.least(thought, held) == 510 - slack + 3
    assert await window.least(prompt("x", "b", "c d"), held) == 0


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One that splits at blanks and punctuation."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


async def test_a_tokenizer_is_trusted_once_it_was_right(tokenizer: Path) -> None:
    """Counts replace words after a prompt whose total it did not exceed; overhead is added."""
    window, long = Window(tokenizer), "1 , 2 ; " * 300
    window.learn("m:1b", 1000)
    assert await window.least(prompt(long), Held()) == 0  # no words in it
    await window.told(prompt("a b c"), 4)  # too small to be counted
    assert await window.least(prompt(long), Held()) == 0
    await window.told(prompt("x " * 300), 310)
    assert await window.least(prompt(long), Held()) == 1200 + 10
    await window.told(prompt("x " * 300), 304)
    assert await window.least(prompt(long), Held()) == 1200 + 4


async def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    """Fails no request: words are counted from then on."""
    window = Window(tmp_path / "gone.json")
    window.learn("m:1b", 1000)
    with capture_logs() as logged:
        await window.told(prompt("x " * 300), 310)
        assert await window.counts(["x"]) == []
        assert await window.least(prompt("x " * 2000), Held()) == 2000
    assert [line["event"] for line in logged] == ["tokenizer.broken"]
    again = Window(tmp_path / "gone.json")
    again.learn("m:1b", 1000)
    again._checks = 1
    assert await again.least(prompt("x " * 2000), Held()) == 2000


async def test_a_wrong_tokenizer_is_dropped(tokenizer: Path) -> None:
    """One that counts more than the server cannot be that of its model."""
    window = Window(tokenizer)
    window.learn("m:1b", 1000)
    await window.told(prompt("x " * 300), 299)
    await window.told(prompt("x " * 300), 310)
    assert await window.least(prompt("1 , " * 900), Held()) == 0
