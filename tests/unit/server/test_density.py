"""About proxy.server.density."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.server.density import Density


def test_nothing_is_known() -> None:
    """Rather too many tokens than too few."""
    assert Density().tokens(10) == 4
    assert Density().tokens(0) == 0


def test_what_makes_no_sense_is_not_learned() -> None:
    """A prompt of no bytes or tokens says nothing."""
    density = Density()
    density.learn(0, 5)
    density.learn(5, 0)
    assert density.tokens(10) == 4


@given(st.lists(st.integers(1, 10_000), min_size=1), st.integers(1, 8), st.integers(0, 10_000))
def test_a_steady_rate_is_found(prompts: list[int], rate: int, size: int) -> None:
    """The estimate is the true count, rounded up by at most one."""
    density = Density()
    for tokens in prompts:
        density.learn(tokens * rate, tokens)
    assert size / rate - 1e-6 <= density.tokens(size) <= size / rate + 1 + 1e-6


def test_the_latest_counts_most() -> None:
    """Another kind of text moves the estimate towards itself."""
    density = Density()
    density.learn(1000, 500)
    for _ in range(20):
        density.learn(1000, 250)
    assert 250 < density.tokens(1000) < 260
