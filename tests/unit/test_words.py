"""Figures and foreign text as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import words


@given(st.text())
def test_plain_text_commands_no_terminal(text: str) -> None:
    """Whatever a title holds, one printable line comes out."""
    assert words.plain(text).isprintable()


def test_an_escape_sequence_is_defused() -> None:
    """The letters stay, the escape does not."""
    assert words.plain("\x1b]0;owned\x07") == "\ufffd]0;owned\ufffd"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"),
     (2**51, "2048.0 TiB"), (None, "-")],
)  # fmt: skip
def test_size(value: object, shown: str) -> None:
    """Powers of 1024, one decimal."""
    assert words.size(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 ms"), (0.0174, "17 ms"), (2.34, "2.3 s"), (250, "4 min 10 s"), (7380, "2 h 3 min"),
     (3 * 86400 + 4 * 3600, "3 d 4 h"), (None, "-")],
)  # fmt: skip
def test_seconds(value: object, shown: str) -> None:
    """Two units at most."""
    assert words.seconds(value) == shown


@pytest.mark.parametrize(
    ("age", "shown"),
    [(-4, "just now"), (4.9, "just now"), (59, "59 s ago"), (200, "3 min ago"), (7300, "2 h ago"),
     (90000, "1 d ago")],
)  # fmt: skip
def test_ago(age: float, shown: str) -> None:
    """One unit; a clock that went back is no future."""
    assert words.ago(1000.0, 1000.0 + age) == shown


def test_one_is_not_many() -> None:
    """A plural only where there are several, or none."""
    assert [words.many(n, "slot") for n in (0, 1, 2000)] == ["0 slots", "1 slot", "2,000 slots"]


@pytest.mark.parametrize(
    ("before", "after", "sides"),
    [
        ("at 13:58. You", "at 14:01. You", ("13:58", "14:01")),
        ("same", "same", ("", "")),
        ("a tool", "a tool more", ("", "more")),
        ("", "new", ("", "new")),
        ("one two", "one two two", ("", "two")),
        ("x " * 40, "y", (f"{'x ' * 19}x…", "y")),
    ],
)
def test_differing(before: str, after: str, sides: tuple[str, str]) -> None:
    """Whole words, without what both sides share, and not too many of them."""
    assert words.differing(before, after) == sides


def test_what_is_not_known() -> None:
    """A dash, for every kind of figure."""
    assert {
        words.number(None),
        words.ago(None, 5.0),
        words.since(None, 5.0),
        words.clock(None),
        words.moment(None),
        words.short(""),
    } == {"-"}
    assert words.number(12345) == "12,345"
    assert words.since(9.0, 5.0) == "0 ms", "clocks differ"
    assert words.short("ab" * 16) == "abababababab"
    assert len(words.clock(0.0)) == len("00:00:00")


@pytest.mark.parametrize(
    ("part", "shown"),
    [(0, "0 %"), (1, "< 1 %"), (125, "13 %"), (999, "> 99 %"), (1000, "100 %")],
)
def test_percent(part: int, shown: str) -> None:
    """As the dashboard rounds it: half a percent up."""
    assert words.percent(part, 1000) == shown
