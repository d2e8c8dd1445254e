"""The minutes of the last day."""

from __future__ import annotations

from dataclasses import fields

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.series import COLUMNS, MINUTES, SAMPLES, STEP, Series, Totals, quantile

NOON = 1_700_000_040.0  # the beginning of a minute


def rows(series: Series, since: float = 0.0) -> list[dict[str, float | None]]:
    """By name."""
    return [dict(zip(COLUMNS, row, strict=True)) for row in series.rows(since)]


def test_a_minute_holds_what_came_in_it() -> None:
    """Counters by their difference, gauges as they are (the queue at its longest), times ranked."""
    series = Series()
    series.note(NOON, Totals(slot=10, computed=5, queue=3, disk=100))
    for seconds in (3.0, 1.0, None, 2.0):
        series.answered(NOON + 30, seconds)
    series.note(NOON + 59, Totals(slot=30, snapshot=7, computed=6, seconds_saved=1.5, disk=90))
    series.note(NOON + 61, Totals(slot=31, snapshot=7, computed=6, seconds_saved=1.5, disk=80))
    first, second = rows(series)
    assert first == {
        "t": NOON, "requests": 4, "slot": 30, "snapshot": 7, "computed": 6, "seconds_saved": 1.5,
        "first_token_p50": 2.0, "first_token_p95": 3.0, "queue": 3, "disk": 90,
    }  # fmt: skip
    assert (second["t"], second["slot"], second["requests"], second["disk"]) == (
        NOON + 60,
        1,
        0,
        80,
    )
    assert second["first_token_p50"] is second["first_token_p95"] is None


def test_only_what_was_asked_for() -> None:
    """A minute counts as long as a part of it is in the span."""
    series = Series()
    for minute in range(5):
        series.answered(NOON + minute * STEP, None)
    assert [row["t"] for row in rows(series, NOON + 3.5 * STEP)] == [NOON + 180, NOON + 240]


def test_bounded() -> None:
    """A day is kept, and of one minute's times some."""
    series = Series()
    for minute in range(MINUTES + 5):
        series.answered(NOON + minute * STEP, None)
    assert len(series.rows(0)) == MINUTES + 1, "the one under way comes on top"
    for number in range(SAMPLES + 100):
        series.answered(NOON + (MINUTES + 5) * STEP, float(number))
    assert rows(series)[-1]["first_token_p95"] == quantile([float(n) for n in range(SAMPLES)], 0.95)
    assert len(series.dump()) < 1024 * 1024


def test_a_clock_set_back_breaks_no_order() -> None:
    """What comes then counts to the minute there was."""
    series = Series()
    series.answered(NOON + 600, None)
    series.answered(NOON, None)
    assert [(row["t"], row["requests"]) for row in rows(series)] == [(NOON + 600, 2)]


def test_it_goes_on_after_a_restart() -> None:
    """The minutes that are over are there again, those to come (another clock) are not."""
    old, new = Series(), Series()
    for minute in range(4):
        old.answered(NOON + minute * STEP, 1.0)
    new.load(old.dump(), NOON + 2.5 * STEP)
    new.answered(NOON + 2.5 * STEP, None)
    assert [row["t"] for row in rows(new)] == [NOON, NOON + 60, NOON + 120]
    assert [row["first_token_p50"] for row in rows(new)] == [1.0, 1.0, None]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"no json", b"[]", b"1", b"{}", b'{"version":1}',
        b'{"version":9,"columns":[],"rows":[]}',
        orjson.dumps({"version": 1, "columns": COLUMNS, "rows": 5}),
        orjson.dumps({"version": 1, "columns": COLUMNS[1:], "rows": [[1] * 9]}),
        orjson.dumps({"version": 1, "columns": COLUMNS, "rows": [[1] * 9, "x", None, [True] * 10]}),
        orjson.dumps({"version": 1, "columns": COLUMNS, "rows": [[1.5] * 10, [1, "x"] * 5]}),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_left_out(data: bytes) -> None:
    """A damaged file costs the past, not the start."""
    series = Series()
    series.load(data, NOON)
    assert series.rows(0) == []


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_quantiles(values: list[float], share: float) -> None:
    """One of the values, with no more than that share below it."""
    found = quantile(sorted(values), share)
    assert found in values
    assert sum(value < found for value in values) <= share * len(values)


def test_totals_are_columns() -> None:
    """Whatever is counted is shown."""
    assert {field.name for field in fields(Totals)} <= set(COLUMNS)
    assert quantile([], 0.5) is None
