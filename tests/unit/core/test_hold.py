"""For whom a scarce slot is kept a moment, and how long others wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.hold import (
    LEAST_PATIENCE,
    MOST_PATIENCE,
    SIDE_PATIENCE,
    TOOL_SECONDS,
    TURN_SECONDS,
    hold_left,
    hold_seconds,
    patience,
    same,
)
from proxy.core.records import Prompt
from tests.unit.factories import chat, content, costs

COSTS = costs()  # 0.01 s per token
NOW = 1000.0


@pytest.mark.parametrize(
    ("n_tokens", "expects", "side", "want"),
    [
        (5000, True, False, TOOL_SECONDS),
        (5000, False, False, TURN_SECONDS),
        (200, True, False, 1.0),  # half of what it costs
        (50, False, False, 0.25),
        (5000, True, True, 0.0),
        (0, True, False, 0.0),
    ],
)
def test_how_long(n_tokens: int, expects: bool, side: bool, want: float) -> None:
    """Longer for the result of a tool, never for more than half of what is kept, not for sides."""
    found = hold_seconds(n_tokens, COSTS, expects=expects, side=side)
    assert found == pytest.approx(want, rel=0.01)


@given(st.integers(0, 10**6), st.booleans())
def test_waiting_never_costs_more_than_computing(n_tokens: int, expects: bool) -> None:
    """Half of the prefill at most."""
    seconds = hold_seconds(n_tokens, COSTS, expects=expects, side=False)
    assert 0 <= seconds <= COSTS.prefill(0, n_tokens) / 2


def named(prompt: Prompt, conversation: str = "", *, side: bool = False) -> Prompt:
    """With what tells conversations apart."""
    return replace(prompt, conversation=conversation, side=side)


@pytest.mark.parametrize(
    ("arriving", "want"),
    [
        (chat("s", "q", "a", "r"), True),  # its next step
        (chat("s", "q"), True),  # the same again
        (named(chat("s", "other"), "c"), True),  # another try, known by its name
        (chat("s", "other"), False),
        (named(chat("s", "q", "a", "title?"), "c", side=True), False),
        (named(chat("s", "other"), "d"), False),
        (chat("s", "q", "a", "r", seed=b"another key"), False),
    ],
)
def test_whose_it_is(arriving: Prompt, want: bool) -> None:
    """The conversation's own requests do not wait for themselves; its side requests do."""
    held = content(named(chat("s", "q"), "c"), 900, held=NOW + 3)
    assert same(held.prompt, arriving) is want
    assert hold_left(held, arriving, NOW) == (0.0 if want else 3.0)


def test_it_ends() -> None:
    """Afterwards, and where nothing is held, nobody waits."""
    held = content(chat("s", "q"), 900, held=NOW)
    assert hold_left(held, chat("x"), NOW - 1) == 1.0
    assert hold_left(held, chat("x"), NOW) == 0.0
    assert hold_left(None, chat("x"), NOW) == 0.0


def test_two_side_requests_are_not_the_same_conversation() -> None:
    """Without a name, only what is extended is one's own."""
    assert not same(named(chat("t"), side=True), named(chat("u"), side=True))


@pytest.mark.parametrize(
    ("prefill", "loss", "side", "want"),
    [
        (1.0, 1.0, False, LEAST_PATIENCE),
        (90.0, 45.0, False, 180.0),
        (900.0, 450.0, False, MOST_PATIENCE),
        (900.0, 450.0, True, SIDE_PATIENCE),
    ],
)
def test_patience(prefill: float, loss: float, side: bool, want: float) -> None:
    """Bounded, and the longer the dearer the change is."""
    assert patience(prefill, loss, side=side) == want
