"""The decision log."""

from __future__ import annotations

from dataclasses import fields, replace

import orjson

from proxy.core.records import Reason
from proxy.telemetry.history import Decision, History
from proxy.telemetry.logs import SECRET_NAMES


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


def test_a_cause_found_later_is_put_in() -> None:
    """Only into the row of its request; of one that is gone nothing is heard."""
    history = History()
    history.add(_decision(1))
    history.add(_decision(2))
    for request_id in ("r1", "r9"):
        history.explain(request_id, {"cause": "template"})
    assert [one.cold for one in history.recent(2)] == [None, {"cause": "template"}]


def test_what_is_forgotten_is_not_quoted() -> None:
    """The causes stay, the quotes of that conversation go."""
    history = History()
    cold = {"cause": "system", "sentence": "s", "before": "canary", "after": "canary"}
    for number, name in enumerate(("mine", "other", "mine")):
        row = replace(_decision(number), conversation=name, cold=cold if number < 2 else None)
        history.add(row)
    history.forget("mine")
    assert [one.cold for one in history.recent(3)] == [None, cold, {"cause": "system"}]


def test_as_json() -> None:
    """A decision is plain JSON, costs included."""
    costs = [{"option": "cold", "work": 1.0}]
    decision = Decision("r", 1.0, "/x", Reason.SLOT_HIT, 200, 1.0, slot=0, reused=5, costs=costs)
    found = orjson.loads(orjson.dumps(decision.as_json()))
    assert found["reason"] == "slot-hit"
    assert found["costs"] == costs
    assert (found["slot"], found["reused"], found["prompt"]) == (0, 5, None)


def test_no_quote_of_a_prompt_gets_into_the_log() -> None:
    """Whatever field holds text of a request, the log has the cause alone."""
    canary = "canary-7f3a"
    cold = {"cause": "system"} | dict.fromkeys(("sentence", "before", "after", "advice"), canary)
    decision = replace(
        _decision(1),
        prompt=7,
        note=canary,
        costs=[{"option": canary}],
        conversation="c1",
        client="qwen-code",
        side="title",
        rules=["clock", "tool-order (shadow)"],
        cold=cold,
    )
    assert orjson.loads(orjson.dumps(decision.as_json()))["cold"] == cold
    line = decision.for_log()
    assert canary not in orjson.dumps(line).decode()
    assert line == {
        "request_id": "r1", "path": "/v1/chat/completions", "reason": "cold", "status": 200,
        "total": 0.5, "queued": 0.0, "slot": None, "reused": None, "first_token": None,
        "prompt_tokens": 7, "conversation": "c1", "client": "qwen-code", "side": "title",
        "rules": ["clock", "tool-order (shadow)"], "cold": "system",
    }  # fmt: skip
    assert not SECRET_NAMES & line.keys()
    assert _decision(1).for_log()["cold"] == ""


def test_a_new_field_is_not_logged_unless_it_is_said() -> None:
    """Each field of a decision is either named as fit for the log, or kept out of it on purpose."""
    kept_out = {"at", "costs", "note"}
    logged = {"prompt" if name == "prompt_tokens" else name for name in _decision(1).for_log()}
    assert logged | kept_out == {field.name for field in fields(Decision)}
