"""Quotes are short, whole words where possible, and around the place that differs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.excerpt import difference, parting, shown
from proxy.core.text import shared


@pytest.mark.parametrize(
    ("before", "after", "at", "sides"),
    [
        ("It is 14:02.", "It is 14:03.", 10, ("14:02", "14:03")),
        ("It is 14:02 here", "It is 15:02 here", 7, ("14:02", "15:02")),
        ("cch=ab12f;", "cch=0d9aa;", 4, ("cch=ab12f", "cch=0d9aa")),
        ("v1.2.3", "v1.3.3", 3, ("v1.2.3", "v1.3.3")),
        ("the end.", "the end", 7, ("end.", "end")),
        ("abc", "abc\n", 3, ("", "\\n")),
        ("one two", "one three two", 5, ("two", "three two")),
        ("a  b", "a b", 2, (" ", "")),
        ("", "new", 0, ("", "new")),
        ("aaa", "aa", 2, ("aaa", "aa")),
        ("x" * 100 + "y", "x" * 100 + "z", 100, ("x" * 30 + "y", "x" * 30 + "z")),
    ],
)
def test_difference(before: str, after: str, at: int, sides: tuple[str, str]) -> None:
    """The span that differs, widened to words."""
    found = difference(before, after)
    assert (found.at, (found.before, found.after)) == (at, sides)


def test_parting_ignores_the_ends() -> None:
    """What is shared at the ends of two prompts says nothing of where they part."""
    found = parting("hi <think> end", "hi there <think> end")
    assert (found.at, found.before, found.after) == (3, "<think> end", "there <think> end")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("bell\x07 \x1b[31m \u202e", "bell? ?[31m ?"),
        ("word " * 30, "word word word word word word word word word word word…"),
        ("x" * 61, "x" * 59 + "…"),
        ("x" * 60, "x" * 60),
    ],
)
def test_shown(text: str, line: str) -> None:
    """One line, nothing a terminal would obey, sixty characters."""
    assert shown(text) == line


@given(st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_shared(one: str, other: str) -> None:
    """All characters before are equal, the next one is not."""
    n = shared(one, other)
    assert one[:n] == other[:n]
    assert n == min(len(one), len(other)) or one[n] != other[n]


@given(st.text(max_size=90), st.text(max_size=90), st.text(max_size=90), st.text(max_size=90))
def test_always_short(head: str, old: str, new: str, tail: str) -> None:
    """Whatever differs, both sides can be shown, and they differ where the texts do."""
    before, after = head + old + tail, head + new + tail
    found = difference(before, after)
    for side in (found.before, found.after):
        assert len(side) <= 60
        assert side.isprintable()
    assert found.at == shared(before, after)
    if old == new:
        assert (found.before, found.after) == ("", "")
