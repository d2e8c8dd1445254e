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
    for seq in (1, 9):
        history.explain(seq, {"cause": "template"})
    assert [one.cold for one in history.recent(2)] == [None, {"cause": "template"}]


def test_what_is_forgotten_is_not_quoted() -> None:
    """The causes stay, the quotes of that conversation go."""
    history = History()
    cold = {"cause": "system", "sentence": "s", "before": "canary", "after": "canary"}
    for number, name in enumerate(("mine", "other", "mine")):
        why = cold if number < 2 else None
        history.add(replace(_decision(number), conversation=name, cold=why, title="canary"))
    history.forget("mine")
    assert [one.cold for one in history.recent(3)] == [None, cold, {"cause": "system"}]
    assert [one.title for one in history.recent(3)] == ["", "canary", ""]


def test_what_is_forgotten_while_it_runs_is_not_quoted_afterwards() -> None:
    """A request that ends after that, and a cause found even later, bring nothing back."""
    history = History()
    told: list[str] = []
    history.listen(lambda decision, _new: told.append(repr(decision)))
    history.forget("mine")
    seq = history.add(replace(_decision(1), conversation="mine", title="canary"))
    history.explain(seq, {"cause": "system", "sentence": "canary"})
    history.add(replace(_decision(2), title="of none"))
    assert [(one.title, one.cold) for one in history.recent(3)] == [
        ("of none", None),
        ("", {"cause": "system"}),
    ]
    assert "canary" not in "".join(told)


def test_found_by_id_and_by_what_came_after() -> None:
    """The newest of an id; what is newer than one that is here, else all."""
    history = History()
    for number in range(4):
        history.add(_decision(number))
    history.add(replace(_decision(1), status=500))
    found = history.get("r1")
    assert found is not None
    assert found.status == 500
    assert history.get("r9") is None
    assert [one.request_id for one in history.recent(9, after="r2")] == ["r1", "r3"]
    assert [one.request_id for one in history.recent(1, after="r2")] == ["r1"]
    assert len(history.recent(9, after="r9")) == 5


def test_an_id_that_several_have() -> None:
    """Each has a number of its own; the newest is found, the right one explained, none missed."""
    history = History(limit=4)
    for status in (1, 2, 3):
        history.add(replace(_decision(7), status=status))
    history.add(_decision(8))
    assert [one.seq for one in history.recent(9)] == [4, 3, 2, 1]
    assert history.shared() == {"r7": 3}
    history.explain(2, {"cause": "template"})
    assert [one.cold is not None for one in history.recent(9)] == [False, False, True, False]
    found = history.get("r7")
    assert found is not None
    assert (found.status, found.seq) == (3, 3)
    assert [one.seq for one in history.recent(9, after="r7")] == [4, 3, 2]
    for number in (1, 2):
        history.add(_decision(number))
    assert history.shared() == {}, "those that are gone are not counted"


def test_a_quote_stays_with_its_conversation() -> None:
    """Two conversations under one request id: forgetting the quoted one leaves no quote."""
    history = History()
    mine = history.add(replace(_decision(1), conversation="mine"))
    history.add(replace(_decision(1), conversation="other"))
    history.explain(mine, {"cause": "system", "before": "canary"})
    assert [one.cold is not None for one in history.recent(2)] == [False, True]
    history.forget("mine")
    assert "canary" not in repr(history.recent(2))


def test_first_tokens_of_the_last_hour() -> None:
    """Ascending, without those that had none and those that came before."""
    history = History()
    for number, first in enumerate((3.0, None, 1.0, 2.0)):
        history.add(replace(_decision(number), at=float(number), first_token=first))
    assert history.first_tokens(1.0) == [1.0, 2.0]


def test_listeners_hear_of_every_change() -> None:
    """A new row, one that was explained, one that was forgotten."""
    history = History()
    heard: list[tuple[str, bool]] = []
    history.listen(lambda decision, new: heard.append((decision.request_id, new)))
    history.add(replace(_decision(1), conversation="mine"))
    history.explain(1, {"cause": "template"})
    history.explain(9, {"cause": "template"})
    history.forget("mine")
    assert heard == [("r1", True), ("r1", False), ("r1", False)]


def test_what_was_computed() -> None:
    """Prompt tokens less those reused; None where the engine did not tell."""
    assert _decision(1).computed is None
    assert replace(_decision(1), prompt=9, reused=4).computed == 5


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
    kept_out = {"at", "costs", "note", "title", "seq"}
    logged = {"prompt" if name == "prompt_tokens" else name for name in _decision(1).for_log()}
    assert logged | kept_out == {field.name for field in fields(Decision)}
