"""How much two texts have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.text import around_reminders, common_lines, overlap, shared, shared_end


@given(st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_shared_is_what_a_loop_would_count(one: str, other: str) -> None:
    """From the front and from the back."""

    def counted(a: str, b: str) -> int:
        pairs = zip(a, b, strict=False)
        return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

    assert shared(one, other) == counted(one, other)
    assert shared_end(one, other) == counted(one[::-1], other[::-1])
    assert shared_end(one, other, 3) == min(3, counted(one[::-1], other[::-1]))


@pytest.mark.parametrize(
    ("a", "b", "share"),
    [(b"", b"", 1.0), (b"abcd", b"abcd", 1.0), (b"abcd", b"abxd", 0.75), (b"ab", b"", 0.0)],
)
def test_overlap(a: bytes, b: bytes, share: float) -> None:
    """The common beginning and end, of the longer one."""
    assert overlap(a, b) == share


@pytest.mark.parametrize(
    ("a", "b", "share"),
    [
        (b"", b"", 0.0),
        (b"one\\ntwo", b"two\\none", 0.75),
        (b"one", b"two", 0.0),
        (b"one\\none", b"one\\nsix", 0.375),
    ],
)
def test_common_lines(a: bytes, b: bytes, share: float) -> None:
    """Whatever their order."""
    assert common_lines(a, b) == share


@pytest.mark.parametrize(
    ("text", "reminders", "around"),
    [
        ("plain", [], ["plain"]),
        ("a<system-reminder>b</system-reminder>c", ["<system-reminder>b</system-reminder>"],
         ["a", "c"]),
        ("<system-reminder>open", [], ["<system-reminder>open"]),
    ],
)  # fmt: skip
def test_around_reminders(text: str, reminders: list[str], around: list[str]) -> None:
    """Whole ones only; one piece more than there are reminders."""
    assert around_reminders(text) == (reminders, around)
