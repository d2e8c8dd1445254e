"""What the engine says of its own work."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.timings import Observed


def test_the_first_progress_tells_the_reuse() -> None:
    """Later progress and the timings do not change it; the prompt is done when all is processed."""
    seen = Observed()
    seen.progress({"total": 10, "cache": 4, "processed": 4})
    assert (seen.cache_n, seen.prompt_n, seen.prefilled) == (4, 10, False)
    seen.progress({"total": 10, "cache": 0, "processed": 10})
    seen.event({"timings": {"cache_n": 1, "prompt_n": 2}})
    assert (seen.cache_n, seen.prompt_n, seen.prefilled) == (4, 10, True)
    assert seen.timings == {"cache_n": 1, "prompt_n": 2}


def test_without_progress_the_timings_tell() -> None:
    """The prompt is what was cached and what was computed."""
    seen = Observed()
    seen.event({"timings": {"cache_n": 3, "prompt_n": 2}, "truncated": False})
    assert (seen.cache_n, seen.prompt_n, seen.truncated) == (3, 5, False)


def test_a_shifted_context_is_noted() -> None:
    """It stays noted whatever comes after."""
    seen = Observed()
    seen.event({"truncated": True})
    seen.event({"truncated": False})
    assert seen.truncated


@pytest.mark.parametrize("progress", [{}, {"total": "10", "cache": 1}, {"total": 10}])
def test_odd_progress_tells_nothing(progress: dict[str, Any]) -> None:
    """Another server's idea of progress is no knowledge."""
    seen = Observed()
    seen.progress(progress)
    seen.event({"timings": [1]})
    seen.event({"timings": {"cache_n": "1"}})
    assert seen.cache_n is None
    assert not seen.prefilled
