"""The decision log."""

from __future__ import annotations

import orjson

from proxy.core.records import Reason
from proxy.telemetry.history import Decision, History


def _decision(number: int) -> Decision:
    return Decision(f"r{number}", 1.5, "/v1/chat/completions", Reason.COLD, 200, total=0.5)


def test_bounded_newest_first() -> None:
    """Only the newest stay, and they are told newest first."""
    history = History(limit=3)
    for number in range(5):
        history.add(_decision(number))
    assert [one.request_id for one in history.recent(10)] == ["r4", "r3", "r2"]
    assert [one.request_id for one in history.recent(2)] == ["r4", "r3"]
    assert history.recent(0) == history.recent(-1) == []


def test_as_json() -> None:
    """A decision is plain JSON, costs included."""
    costs = [{"option": "cold", "work": 1.0}]
    decision = Decision("r", 1.0, "/x", Reason.SLOT_HIT, 200, 1.0, slot=0, reused=5, costs=costs)
    found = orjson.loads(orjson.dumps(decision.as_json()))
    assert found["reason"] == "slot-hit"
    assert found["costs"] == costs
    assert (found["slot"], found["reused"], found["prompt"]) == (0, 5, None)
