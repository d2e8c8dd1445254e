"""``proxy.telemetry.limits``: one figure each, whoever names it."""

from __future__ import annotations

from pathlib import Path

from proxy.telemetry import limits
from proxy.telemetry.history import History
from proxy.telemetry.logs import Ring

API = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")


def test_what_is_kept() -> None:
    """Decision log and log keep so many, and the page for programs says so."""
    assert History()._decisions.maxlen == limits.REQUESTS
    assert Ring()._rows.maxlen == limits.LOG_LINES
    assert f"the last {limits.REQUESTS} requests" in API
    assert f"the last {limits.LOG_LINES:,} lines" in API
