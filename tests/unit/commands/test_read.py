"""Commands that look: what they ask for, what a person and what a program sees."""

from __future__ import annotations

import orjson
import pytest

from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import (
    COLD,
    CONVERSATION,
    LOG,
    REQUEST,
    RUNNING,
    SLOT,
    STATUS,
    FakeApi,
)


def test_status(run: Run, api: FakeApi) -> None:
    """A line for each thing one wants to know."""
    api.answers["GET api/status"] = STATUS
    result = run("status")
    assert result.exit_code == 0
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert {name: " ".join(text.split()) for name, text in lines.items()} == {
        "slotkeeper": "9.9, up 2 h 3 min",
        "state": "ready",
        "mode": "exclusive: it was proved",
        "backend": "up llama-server http://127.0.0.1:8080 smol 2 slots of 8,192 tokens",
        "store": "/s 3 snapshots, 1.5 KiB of 1.0 GiB; 1.0 TiB free, 10.0 GiB are left alone",
        "queue": "2 running, 1 waiting",
        "prompts": "12 requests; 80 % of 1,000 tokens not computed (600 in slots,"
        " 200 from snapshots)",
        "saved": "4 min 10 s of computing since start",
        "snapshots": "4 saved, 5 restored, 6 removed; restores are in use",
        "first token": "half within 200 ms, 95 % within 3.0 s, 12 in the last hour",
    }


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"ready": False}, 1, "not ready"),
        ({"ready": False, "draining": True}, 1, "shutting down"),
        ({"paused": True}, 0, "caching is paused"),
        ({"store": None}, 0, "none: nothing is saved"),
        ({"advice": "llama-server -m x"}, 0, "llama-server -m x"),
        ({"backend": STATUS["backend"] | {"up": False, "restarts": 2}}, 0, "2 restarts"),
        ({"first_token": {"p50": None, "p95": None, "count": 0}}, 0, "none in the last hour"),
    ],
)
def test_status_of_other_kinds(
    run: Run, api: FakeApi, changes: dict[str, object], code: int, said: str
) -> None:
    """What is not as usual is said, and a proxy that is not ready is a problem."""
    api.answers["GET api/status"] = STATUS | changes
    result = run("status")
    assert result.exit_code == code
    assert said in result.stdout


@pytest.mark.parametrize(
    ("command", "page", "answer"),
    [
        (["status"], "api/status", STATUS),
        (["slots"], "api/slots", {"slots": [SLOT]}),
        (["conversations"], "api/conversations", {"conversations": [CONVERSATION]}),
        (["requests", "-n", "3"], "api/requests?limit=3", {"requests": [REQUEST]}),
        (["requests", "r2"], "api/requests/r2", REQUEST),
        (["logs", "-n", "3", "--level", "info"], "api/logs?limit=3&level=info", {"logs": [LOG]}),
        (["cache", "ls"], "api/snapshots", {"snapshots": []}),
    ],
)
def test_json_is_the_answer_itself(
    run: Run, api: FakeApi, command: list[str], page: str, answer: object
) -> None:
    """``--json`` prints what the API said, nothing added and nothing left out."""
    api.answers[f"GET {page}"] = answer
    result = run(*command, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert orjson.loads(result.stdout) == answer
    assert api.lines == [f"GET {page}"]


def test_slots(run: Run, api: FakeApi) -> None:
    """One line per slot, dashes for what is not known, hostile titles defused."""
    empty = dict.fromkeys(SLOT) | {"index": 0, "state": "free"}
    api.answers["GET api/slots"] = {"slots": [empty, SLOT | {"title": "[red]\x1b[2J"}]}
    first, second, third = run("slots").stdout.splitlines()
    assert first.split()[:3] == ["SLOT", "STATE", "TOKENS"]
    assert second.split() == ["0", "free", *["-"] * 6]
    assert third.split()[:4] == ["1", "leased", "3,667", "3,660"]
    assert third.rstrip().endswith("claude-code  [red]\ufffd[2J")


def test_conversations(run: Run, api: FakeApi) -> None:
    """Ids are cut to what ``forget`` understands."""
    api.answers["GET api/conversations"] = {"conversations": [CONVERSATION]}
    _, line = run("conversations").stdout.splitlines()
    assert line.split()[0] == "c" * 12
    assert line.rstrip().endswith("12   3,660  4.0 KiB  claude-code  Rivers")


def test_requests(run: Run, api: FakeApi) -> None:
    """The newest last, with what was reused and the sentence why not more."""
    newer = REQUEST | {"request_id": "r3", "reason": "refused", "status": 503, "note": "full"}
    api.answers["GET api/requests"] = {"requests": [newer, REQUEST | {"cold": COLD}]}
    older, last = run("requests").stdout.splitlines()
    assert "cold      200        0 of   3,667 reused  slot 0     2.5 s  goose  Rivers" in older
    assert older.endswith(COLD["sentence"])
    assert "refused   503" in last
    assert last.endswith("full")


def test_one_request_in_full(run: Run, api: FakeApi) -> None:
    """All its fields, the rules, the cost table and both sides of the difference."""
    api.answers["GET api/requests/r2"] = REQUEST | {"cold": COLD}
    shown = run("requests", "r2").stdout
    for text in ("first_token", "rules", "clock", "PREFILL", "0.058", "14:02", "14:03"):
        assert text in shown, text


def test_one_request_that_is_gone(run: Run, api: FakeApi) -> None:
    """The proxy's own words, status 1."""
    result = run("requests", "nothing")
    assert (result.exit_code, result.stderr) == (1, "slotkeeper: No such page.\n")


def test_requests_followed(run: Run, api: FakeApi) -> None:
    """What is there, then what comes, each once; the cause found later is told once more.

    Two requests to which their client gave one id are two.
    """
    api.answers["GET api/requests"] = {"requests": [REQUEST]}
    found = REQUEST | {"cold": COLD}
    new = REQUEST | {"request_id": "r4"}
    again = new | {"at": REQUEST["at"] + 1}
    api.events = [("request", one) for one in (REQUEST, found, new, new, again)] + [("log", LOG)]
    result = run("requests", "-f", "--json")
    assert result.exit_code == 3, "the proxy ended the connection"
    rows = [orjson.loads(line) for line in result.stdout.splitlines()]
    assert rows == [REQUEST, found, new, again]


def test_logs(run: Run, api: FakeApi) -> None:
    """Time, level, event and its fields."""
    api.answers["GET api/logs"] = {"logs": [LOG]}
    assert run("logs").stdout.split()[1:] == ["warning", "mode", "why=RAM", "cache"]


def test_logs_followed_from_a_level_on(run: Run, api: FakeApi) -> None:
    """What is less than the level asked for is left out of what comes, too."""
    api.answers["GET api/logs"] = {"logs": [LOG]}
    api.events = [("log", LOG | {"seq": 8, "level": "info"}), ("log", LOG | {"seq": 9})]
    result = run("logs", "-f", "--level", "warning", "--json")
    assert [orjson.loads(line)["seq"] for line in result.stdout.splitlines()] == [7, 9]


def test_watch(run: Run, api: FakeApi) -> None:
    """Every state is drawn with slots and running requests below, until the proxy ends."""
    api.events = [
        ("slots", {"slots": [SLOT]}),
        ("running", {"running": [RUNNING]}),
        ("snapshots", {}),
        ("status", STATUS),
        ("status", STATUS | {"paused": True}),
    ]
    result = run("status", "--watch")
    assert result.exit_code == 3
    assert result.stdout.count("Rivers") == 2
    assert result.stdout.count("Mountains") == 2
    assert "caching is paused" in result.stdout


def test_watch_for_programs(run: Run, api: FakeApi) -> None:
    """One line of JSON for each state."""
    api.events = [("status", STATUS), ("slots", {"slots": []}), ("status", STATUS)]
    lines = run("status", "--watch", "--json").stdout.splitlines()
    assert [orjson.loads(line) for line in lines] == [STATUS, STATUS]
