"""What computing, saving and restoring cost here, in seconds, learned from what they did cost.

``S(n) = a*n + b*n**2`` is the time to compute a prompt of n tokens from nothing (attention makes
the square). An observation from ``start`` to ``end`` says ``seconds / tokens = a + b*(start +
end)``: a straight line, fitted by least squares weighted with tokens, the past fading with every
observation. No clock: the caller measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_PRIOR_RATE = 1 / 500  # seconds per token: a small model on a CPU, a large one is slower
_PRIOR_TOKENS = 64.0  # how many observed tokens that guess is worth
# Seconds, and seconds per byte as of the fastest disks: what seems too dear is never tried, so a
# guess above the truth would never be corrected; one below it is, by the first save or restore.
_RESTORE_LATENCY, _PRIOR_RESTORE = 5e-3, 0.1e-9
_SAVE_LATENCY, _PRIOR_SAVE = 10e-3, 0.1e-9
_PRIOR_BYTES = 1e6  # how many observed bytes these are worth: a tiny file tells little of speed
_PRIOR_SIZE = 100_000.0  # bytes per token
_PRIOR_SIZE_TOKENS = 1e-6  # nearly nothing: the first state seen tells it
_PRIOR_TEXT, _PRIOR_TEXT_TOKENS = 4.0, 64.0  # bytes of a request per token, and that guess's worth
_MIN_TOKENS = 32  # below, the fixed part of a request outweighs its tokens
_KEEP_LINE = 0.97  # what an observation leaves of the weight of the past
_KEEP_RATIO = 0.9
_MAX_SUM = 1e30  # no sum of real observations comes near
_MIN_POINTS = 7.0  # observations (8, faded) before a square is believed,
_MIN_SPREAD = 1000.0  # and the standard deviation of their (start + end), in tokens


def _usable(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def _numbers(data: object, n: int) -> list[float] | None:
    """Take a list of n numbers that can be sums of observations; None for anything else."""
    if not isinstance(data, list) or len(data) != n:
        return None
    if not all(type(x) in (int, float) and 0 <= x <= _MAX_SUM for x in data):
        return None
    return [float(x) for x in data]


class _Ratio:
    """``y / x``, the past fading; begins with ``prior``, worth ``weight`` of x."""

    def __init__(self, prior: float, weight: float) -> None:
        self._prior = prior
        self._weight = weight
        self.sums = [0.0, 0.0]

    def observe(self, x: float, y: float) -> None:
        self.sums = [_KEEP_RATIO * self.sums[0] + x, _KEEP_RATIO * self.sums[1] + y]

    @property
    def value(self) -> float:
        x, y = self.sums
        return (y + self._prior * self._weight) / (x + self._weight)


class _Line:
    """``y = a + b*z``, weighted, the past fading; never negative."""

    def __init__(self) -> None:
        # Number of observations, then the weighted sums of 1, z, y, z*z, z*y.
        self.sums = [0.0] * 6

    def observe(self, weight: float, z: float, y: float) -> None:
        new = (1.0, weight, weight * z, weight * y, weight * z * z, weight * z * y)
        self.sums = [_KEEP_LINE * old + x for old, x in zip(self.sums, new, strict=True)]

    def fit(self) -> tuple[float, float]:
        """Return ``(a, b)``; b is 0 until the data spans enough to tell."""
        count, weight, sum_z, sum_y, sum_zz, sum_zy = self.sums
        flat = (sum_y + _PRIOR_TOKENS * _PRIOR_RATE) / (weight + _PRIOR_TOKENS)
        if count < _MIN_POINTS or weight < _MIN_TOKENS:
            return flat, 0.0
        mean_z, mean_y = sum_z / weight, sum_y / weight
        variance = sum_zz / weight - mean_z * mean_z
        if variance < _MIN_SPREAD**2:
            return flat, 0.0
        slope = (sum_zy / weight - mean_z * mean_y) / variance
        if slope <= 0:
            return flat, 0.0
        start = mean_y - slope * mean_z
        return (start, slope) if start > 0 else (0.0, sum_zy / sum_zz)


class Costs:
    """The four costs placement and retention reckon with. Starts from sane guesses."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._prefill = _Line()
        self._restore = _Ratio(_PRIOR_RESTORE, _PRIOR_BYTES)
        self._save = _Ratio(_PRIOR_SAVE, _PRIOR_BYTES)
        self._size = _Ratio(_PRIOR_SIZE, _PRIOR_SIZE_TOKENS)
        self._text = _Ratio(_PRIOR_TEXT, _PRIOR_TEXT_TOKENS)

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute tokens ``start`` up to ``end``; 0 when there are none."""
        if end <= start:
            return 0.0
        a, b = self._prefill.fit()
        return (end - start) * (a + b * (start + end))

    def restore(self, size: int) -> float:
        """Seconds to restore a state of ``size`` bytes."""
        return _RESTORE_LATENCY + self._restore.value * size

    def save(self, size: int) -> float:
        """Seconds to save a state of ``size`` bytes."""
        return _SAVE_LATENCY + self._save.value * size

    def size(self, n_tokens: int) -> int:
        """Bytes a state of ``n_tokens`` will have."""
        return round(self._size.value * n_tokens)

    @property
    def text(self) -> float:
        """Bytes of a request per token, where nobody counts tokens beforehand."""
        return self._text.value

    def observe_prefill(self, start: int, end: int, seconds: float) -> None:
        """Learn from a prompt whose tokens ``start`` up to ``end`` were computed."""
        tokens = end - start
        if start >= 0 and tokens >= _MIN_TOKENS and _usable(seconds):
            self._prefill.observe(tokens, start + end, seconds / tokens)

    def observe_restore(self, size: int, seconds: float) -> None:
        """Learn from a restore."""
        if _usable(size, seconds):
            self._restore.observe(size, max(0.0, seconds - _RESTORE_LATENCY))

    def observe_save(self, size: int, seconds: float) -> None:
        """Learn from a save."""
        if _usable(size, seconds):
            self._save.observe(size, max(0.0, seconds - _SAVE_LATENCY))

    def observe_size(self, n_tokens: int, size: int) -> None:
        """Learn from a state's size."""
        if _usable(n_tokens, size):
            self._size.observe(n_tokens, size)

    def observe_text(self, size: int, n_tokens: int) -> None:
        """Learn from a request of ``size`` bytes that turned out to be ``n_tokens`` long."""
        if n_tokens >= _MIN_TOKENS and _usable(size):
            self._text.observe(n_tokens, size)

    def to_json(self) -> dict[str, Any]:
        """Return what was learned, as plain JSON values, to survive a restart."""
        return {name: list(part.sums) for name, part in self._parts().items()}

    @classmethod
    def from_json(cls, data: object) -> Costs:
        """Take up what ``to_json`` gave; what makes no sense of it falls back to the guesses."""
        costs = cls()
        if not isinstance(data, Mapping):
            return costs
        for name, part in costs._parts().items():
            sums = _numbers(data.get(name), len(part.sums))
            if sums is not None:
                part.sums = sums
        return costs

    def _parts(self) -> dict[str, _Line | _Ratio]:
        return {
            "prefill": self._prefill,
            "restore": self._restore,
            "save": self._save,
            "size": self._size,
            "text": self._text,
        }
