"""What happened minute by minute in the last day: the figures behind the dashboard's charts.

Bounded, figures only, and plain enough to be kept in a small file over restarts. No clock of its
own: times are unix seconds handed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

COLUMNS = (
    "t", "requests", "slot", "snapshot", "computed", "seconds_saved", "first_token_p50",
    "first_token_p95", "queue", "disk",
)  # fmt: skip
STEP = 60  # seconds
MINUTES = 24 * 60
SAMPLES = 512  # times to the first token that one minute remembers
VERSION = 1

Row = list[float | None]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start, and two gauges.

    ``slot``, ``snapshot``, ``computed``: prompt tokens by where they came from. ``seconds_saved``:
    prefill spared. ``queue``: requests waiting now. ``disk``: bytes of all snapshots now.
    """

    slot: float = 0.0
    snapshot: float = 0.0
    computed: float = 0.0
    seconds_saved: float = 0.0
    queue: float = 0.0
    disk: float = 0.0


@dataclass(slots=True)
class _Minute:
    """The minute that is under way."""

    t: int
    requests: int = 0
    slot: float = 0.0
    snapshot: float = 0.0
    computed: float = 0.0
    seconds_saved: float = 0.0
    queue: float = 0.0
    disk: float = 0.0
    first: list[float] = field(default_factory=list)

    def row(self) -> Row:
        first = sorted(self.first)
        return [
            self.t, self.requests, self.slot, self.snapshot, self.computed,
            round(self.seconds_saved, 3), quantile(first, 0.5), quantile(first, 0.95), self.queue,
            self.disk,
        ]  # fmt: skip


class Series:
    """One row per minute in which the proxy ran, the last ``MINUTES`` of them."""

    def __init__(self) -> None:
        """No minute yet."""
        self._rows: deque[Row] = deque(maxlen=MINUTES)
        self._minute: _Minute | None = None
        self._before = Totals()

    def answered(self, now: float, first_token: float | None) -> None:
        """A request ended; ``first_token``: seconds, None where nobody can know."""
        minute = self._at(now)
        minute.requests += 1
        if first_token is not None and len(minute.first) < SAMPLES:
            minute.first.append(first_token)

    def note(self, now: float, totals: Totals) -> None:
        """The counters as they stand; what came since the last note belongs to this minute."""
        minute, before = self._at(now), self._before
        minute.slot += totals.slot - before.slot
        minute.snapshot += totals.snapshot - before.snapshot
        minute.computed += totals.computed - before.computed
        minute.seconds_saved += totals.seconds_saved - before.seconds_saved
        minute.queue = max(minute.queue, totals.queue)
        minute.disk = totals.disk
        self._before = totals

    def rows(self, since: float) -> list[Row]:
        """Minutes that ended after ``since``, oldest first, the one under way included."""
        return [row for row in self._all() if (row[0] or 0) + STEP > since]

    def dump(self) -> bytes:
        """For the file."""
        return orjson.dumps({"version": VERSION, "columns": COLUMNS, "rows": self._all()})

    def load(self, data: bytes, now: float) -> None:
        """Begin with what an earlier run dumped; what is no such dump, or of the future, is not."""
        try:
            found = orjson.loads(data)
            if found["version"] != VERSION or found["columns"] != list(COLUMNS):
                return
            rows = {row[0]: row for row in found["rows"] if _is_row(row) and row[0] + STEP <= now}
        except (orjson.JSONDecodeError, LookupError, TypeError):
            return
        self._rows = deque((rows[t] for t in sorted(rows)), maxlen=MINUTES)

    def _all(self) -> list[Row]:
        return [*self._rows, self._minute.row()] if self._minute else list(self._rows)

    def _at(self, now: float) -> _Minute:
        """The minute of ``now``. A clock that was set back goes on in the minute it was in."""
        t = int(now // STEP) * STEP
        if self._minute is None:
            self._minute = _Minute(t)
        elif t > self._minute.t:
            self._rows.append(self._minute.row())
            self._minute = _Minute(t)
        return self._minute


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The nearest-rank quantile; None of nothing."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != len(COLUMNS) or not isinstance(row[0], int):
        return False
    return all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        for value in row
    )
