"""Costs learned from observations."""

from __future__ import annotations

import math
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.costs import Costs


def trained(a: float, b: float, *, noise: float = 0.0, n: int = 60, longest: int = 16_000) -> Costs:
    """Costs that saw ``n`` prompts of a server with these true figures."""
    dice = random.Random(1)
    costs = Costs()
    for _ in range(n):
        start = dice.randrange(longest // 2)
        end = start + dice.randrange(64, longest // 2)
        seconds = (a * end + b * end**2) - (a * start + b * start**2)
        costs.observe_prefill(start, end, seconds * (1 + dice.uniform(-noise, noise)))
    return costs


def test_priors() -> None:
    """Before anything was seen the guesses are the documented ones."""
    costs = Costs()
    assert costs.prefill(0, 500) == pytest.approx(1.0)
    assert costs.prefill(500, 1000) == pytest.approx(1.0)
    assert costs.restore(10**9) == pytest.approx(0.105)
    assert costs.save(10**9) == pytest.approx(0.11)
    assert costs.size(10) == 1_000_000


def test_nothing_to_compute_costs_nothing() -> None:
    """An empty or reversed range is free."""
    costs = trained(1e-3, 1e-7)
    assert costs.prefill(100, 100) == costs.prefill(100, 50) == 0.0


@pytest.mark.parametrize(("a", "b"), [(2e-3, 0.0), (2e-3, 1e-7), (1e-4, 2e-8)])
def test_prefill_finds_the_true_figures(a: float, b: float) -> None:
    """Both the linear and the quadratic part are found, beyond the lengths seen too."""
    costs = trained(a, b)
    for start, end in ((0, 100), (0, 16_000), (15_900, 16_000), (0, 32_000)):
        true = a * (end - start) + b * (end**2 - start**2)
        assert costs.prefill(start, end) == pytest.approx(true, rel=0.05)


def test_prefill_stands_noise() -> None:
    """Ten per cent of noise on each observation leaves the fit useful."""
    costs = trained(2e-3, 1e-7, noise=0.1)
    assert costs.prefill(0, 16_000) == pytest.approx(2e-3 * 16_000 + 1e-7 * 16_000**2, rel=0.1)


def test_no_square_from_prompts_of_one_length() -> None:
    """Noise among equal lengths must not be taken for curvature."""
    costs = Costs()
    dice = random.Random(2)
    for _ in range(50):
        costs.observe_prefill(0, 1000 + dice.randrange(200), 2.0 * dice.uniform(0.8, 1.2))
    assert costs.prefill(0, 10_000) == pytest.approx(10 * costs.prefill(0, 1000))
    assert costs.prefill(0, 1000) == pytest.approx(1.85, rel=0.1)


def test_no_square_from_few_prompts() -> None:
    """Seven prompts are not enough for one, the eighth is."""
    costs = Costs()
    for i in range(1, 9):
        assert costs.prefill(0, 2000) == pytest.approx(2 * costs.prefill(0, 1000))
        costs.observe_prefill(0, 2000 * i, 2000 * i * (1e-3 + 1e-6 * 2000 * i))
    assert costs.prefill(0, 2000) > 2.1 * costs.prefill(0, 1000)


def test_never_negative() -> None:
    """A server that is faster on long prompts, or all curve, gives no negative part."""
    falling = Costs()
    rising = Costs()
    for i in range(1, 30):
        n = 1000 * i
        falling.observe_prefill(0, n, 5.0 + n * 1e-4)
        rising.observe_prefill(0, n, n**3 * 1e-11)
    assert falling.prefill(0, 1_000_000) > 0
    assert falling.prefill(0, 2000) == pytest.approx(2 * falling.prefill(0, 1000))
    for n in (1, 10, 100, 1000):
        assert rising.prefill(0, n) > 0


def test_the_past_fades() -> None:
    """After a change of server speed the estimate follows."""
    costs = Costs()
    for seconds in (10.0, 1.0):
        for _ in range(200):
            costs.observe_prefill(0, 1000, seconds)
            costs.observe_restore(10**8, seconds)
            costs.observe_save(10**8, seconds)
            costs.observe_size(100, int(seconds * 1000))
        assert costs.prefill(0, 1000) == pytest.approx(seconds, rel=0.1)
        assert costs.restore(10**8) == pytest.approx(seconds, rel=0.05)
        assert costs.save(10**8) == pytest.approx(seconds, rel=0.05)
        assert costs.size(100) == pytest.approx(seconds * 1000, rel=0.01)


def test_first_state_tells_the_size() -> None:
    """One observation is nearly the truth."""
    costs = Costs()
    costs.observe_size(100, 2_305_600)
    assert costs.size(1000) == pytest.approx(23_056_000, rel=0.01)


def test_tiny_files_say_little_about_speed() -> None:
    """A restore of 36 bytes in no time does not promise a gigabyte in no time."""
    costs = Costs()
    costs.observe_restore(36, 1e-9)
    assert costs.restore(10**9) > 0.1
    assert costs.restore(0) == pytest.approx(5e-3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_not_learned(seconds: float) -> None:
    """Times that cannot be, sizes of nothing and tiny prompts change no estimate."""
    costs = Costs()
    costs.observe_prefill(0, 1000, seconds)
    costs.observe_restore(10**8, seconds)
    costs.observe_save(10**8, seconds)
    costs.observe_prefill(0, 31, 9.0)
    costs.observe_prefill(50, 40, 9.0)
    costs.observe_prefill(-100, 40, 9.0)
    costs.observe_restore(0, 1.0)
    costs.observe_save(-5, 1.0)
    costs.observe_size(0, 100)
    costs.observe_size(100, 0)
    assert costs.to_json() == Costs().to_json()
    costs.observe_prefill(0, 32, 9.0)
    assert costs.to_json() != Costs().to_json()


def test_json_round_trip() -> None:
    """What was learned survives being written and read."""
    costs = trained(2e-3, 1e-7)
    costs.observe_restore(10**8, 0.5)
    costs.observe_save(10**8, 0.7)
    costs.observe_size(100, 12_345)
    again = Costs.from_json(orjson.loads(orjson.dumps(costs.to_json())))
    assert again.to_json() == costs.to_json()
    assert again.prefill(10, 9000) == costs.prefill(10, 9000)
    assert again.restore(10**7) == costs.restore(10**7)
    assert again.save(10**7) == costs.save(10**7)
    assert again.size(77) == costs.size(77)


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {"prefill": 3, "restore": "x", "save": None},
        {"prefill": [1.0] * 5, "restore": [1.0], "size": {}},
        {"prefill": [1.0, 1.0, 1.0, 1.0, 1.0, -1.0], "save": [math.nan, 1.0]},
        {"prefill": [True] * 6, "size": ["1", "2"], "restore": [math.inf, 1]},
    ],
)
def test_junk_falls_back_to_the_priors(junk: Any) -> None:
    """A damaged file of costs costs nothing but what was learned."""
    assert Costs.from_json(junk).to_json() == Costs().to_json()


def test_good_parts_survive_bad_ones() -> None:
    """Each part stands by itself."""
    costs = Costs.from_json({"prefill": "?", "size": [100, 5000.0]})
    assert costs.size(100) == pytest.approx(5000, rel=0.01)
    assert costs.prefill(0, 500) == pytest.approx(1.0)


sums = st.lists(st.floats(0, 1e30), min_size=6, max_size=6)


@given(sums, st.integers(0, 200_000), st.integers(1, 200_000))
def test_any_stored_sums_give_sane_costs(stored: list[float], start: int, tokens: int) -> None:
    """Sums no data can have had still give finite times that are not negative."""
    costs = Costs.from_json({"prefill": stored, "save": stored[:2]})
    seconds = costs.prefill(start, start + tokens)
    assert math.isfinite(seconds)
    assert seconds >= 0
    assert math.isfinite(costs.save(tokens))


def test_bytes_per_token_are_learned() -> None:
    """From a guess to what requests turn out to be; tiny ones and nonsense teach nothing."""
    made = Costs()
    assert made.text == 4.0
    made.observe_text(10**6, 5)
    made.observe_text(0, 500)
    assert made.text == 4.0
    for _ in range(20):
        made.observe_text(6000, 2000)
    assert made.text == pytest.approx(3.0, rel=0.02)
    assert Costs.from_json(made.to_json()).text == made.text
