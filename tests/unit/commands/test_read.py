"""Commands that look: what they ask for, what a person and what a program sees."""

from __future__ import annotations

import orjson
import pytest

from proxy.engine import free_port
from proxy.telemetry import limits
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

NOTHING = STATUS["totals"] | {
    "requests": 0,
    "prompt_tokens": dict.fromkeys(STATUS["totals"]["prompt_tokens"], 0),
}


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
        "store": "/s 3 snapshots, 1.5 KiB of 1.0 GiB; 1.0 TiB free, of which 10.0 GiB stay free",
        "queue": "2 running, 1 waiting",
        "prompts": "12 requests; 80 % of 1,000 tokens reused (600 from slots, 200 from snapshots)",
        "prefill": "4 min 10 s saved since the start",
        "snapshots": "4 saved, 5 restored, 6 evicted",
        "first token": "half within 200 ms, 95 % within 3.0 s; 12 requests in the last hour",
    }


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"ready": False}, 1, "not ready"),
        ({"ready": False, "draining": True}, 1, "shutting down"),
        ({"paused": True}, 0, "caching is paused"),
        ({"store": None}, 0, "none: nothing is saved"),
        ({"restores": "retired"}, 0, "6 evicted; restores are retired"),
        ({"advice": "llama-server -m x"}, 0, "llama-server -m x"),
        ({"backend": STATUS["backend"] | {"up": False, "restarts": 2}}, 0, "2 restarts"),
        (
            {"first_token": {"p50": None, "p95": None, "count": 0}},
            0,
            "token  no streamed request in",
        ),
        ({"totals": NOTHING}, 0, "0 requests; no prompts yet"),
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
    api.answers["GET api/status"] = STATUS
    first, second, third = run("slots").stdout.splitlines()
    assert first.split()[:3] == ["SLOT", "STATE", "TOKENS"]
    assert second.split() == ["0", "free", *["-"] * 6]
    assert third.split()[:5] == ["1", "answering", "3,667", "3,660", "saved"]
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
    head, older, last = run("requests").stdout.splitlines()
    assert older.split()[1] == "r2"
    assert (
        "cold             200        0 of   3,667 tokens reused  slot 0     2.5 s  goose" in older
    )
    for name, below in (
        ("GOT", "cold"),
        ("HTTP", "200"),
        ("REUSED", "     0 of"),
        ("PROMPT", " 3,667 tokens"),
        ("SLOT", "slot 0"),
        ("TOOK", ".5 s"),
        ("CLIENT", "goose"),
    ):
        assert older[head.index(name) :].startswith(below), name
    assert older.endswith("cold because system prompt changed at character 118: 14:02 → 14:03")
    assert "refused          503" in last
    assert last.endswith("full")


@pytest.mark.parametrize("name", ["requests", "logs"])
def test_nothing_yet(run: Run, api: FakeApi, name: str) -> None:
    """It is said, beside the output."""
    api.answers[f"GET api/{name}"] = {name: []}
    result = run(name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"slotkeeper: no {name} yet\n"


def test_no_line_so_grave(run: Run, api: FakeApi) -> None:
    """That there are lines, and none of this level, is said."""
    api.answers["GET api/logs"] = {"logs": []}
    assert run("logs", "--level", "warning").stderr == "slotkeeper: no line of warning or worse\n"


def test_slots_while_the_backend_is_down(run: Run, api: FakeApi) -> None:
    """Nobody knows what is in them."""
    api.answers["GET api/slots"] = {"slots": [SLOT | {"state": "free", "tokens": None}]}
    api.answers["GET api/status"] = STATUS | {"backend": STATUS["backend"] | {"up": False}}
    assert run("slots").stdout.splitlines()[1].split()[:2] == ["1", "unknown"]


def test_a_request_without_a_conversation(run: Run, api: FakeApi) -> None:
    """Its path says what it was; its id is cut to what is enough."""
    unknown = {"conversation": "", "client": "", "title": None, "request_id": "d16d4b73" * 4}
    api.answers["GET api/requests"] = {"requests": [REQUEST | unknown | {"path": "/v1/rerank"}]}
    _, shown = run("requests").stdout.rstrip().splitlines()
    assert shown.split()[1] == "d16d4b73"
    assert shown.endswith("2.5 s  /v1/rerank")


def test_one_request_in_full(run: Run, api: FakeApi) -> None:
    """All its fields with their units, the rules, the cost table and both sides."""
    api.answers["GET api/requests"] = {"requests": [REQUEST | {"cold": COLD}]}
    shown = run("requests", "r2").stdout
    for text in (
        "first token   2.0 s",
        "reused        0 of 3,667 tokens, 3,667 computed",
        "got           cold: nothing was reused",
        "conversation  cccccccccccc  Rivers",
        "rules         clock",
        "restore snapshot abababababab into slot 0",
        "58 ms",
        "last time   14:02",
        "this time   14:03",
        "what to do  move the clock",
    ):
        assert text in shown, text
    assert orjson.loads(run("requests", "r2", "--json").stdout) == REQUEST | {"cold": COLD}


def test_one_request_by_the_beginning_of_its_id(run: Run, api: FakeApi) -> None:
    """What is unmistakable is enough; of two with one id it is the newer."""
    ids = ("d16d4b73" * 4, "d16e" * 8, "d16e" * 8)
    rows = [REQUEST | {"request_id": one, "at": REQUEST["at"] - n} for n, one in enumerate(ids)]
    api.answers["GET api/requests"] = {"requests": rows}
    assert orjson.loads(run("requests", "d16d", "--json").stdout) == rows[0]
    assert orjson.loads(run("requests", "d16e", "--json").stdout) == rows[1]
    assert api.lines == ["GET api/requests?limit=512"] * 2
    several = run("requests", "d16")
    assert (several.exit_code, "2 requests begin with d16" in several.stderr) == (1, True)
    gone = run("requests", "nothing")
    assert (gone.exit_code, gone.stdout) == (1, "")
    assert gone.stderr == "slotkeeper: no request is, or begins with, nothing\n"


def ended(monkeypatch: pytest.MonkeyPatch, after: int = 1) -> list[float]:
    """Ctrl-C instead of the last pause; the pauses that were made before each try."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == after:
            raise KeyboardInterrupt

    monkeypatch.setattr("proxy.commands.follow.time.sleep", sleep)
    return pauses


def test_requests_followed(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there, then what comes, each once; the cause found later is told once more.

    Two requests to which their client gave one id are two. What is older than asked for is not
    printed afterwards.
    """
    ended(monkeypatch)
    old = REQUEST | {"request_id": "r0"}
    api.answers["GET api/requests"] = {"requests": [REQUEST, old]}
    found = REQUEST | {"cold": COLD}
    new = REQUEST | {"request_id": "r4"}
    again = new | {"at": REQUEST["at"] + 1}
    api.events = [("request", one) for one in (old, REQUEST, found, new, new, again)]
    api.events.append(("log", LOG))
    result = run("requests", "-f", "-n", "1", "--json")
    assert result.exit_code == 0, "ended with Ctrl-C"
    rows = [orjson.loads(line) for line in result.stdout.splitlines()]
    assert rows == [REQUEST, found, new, again]


def test_following_goes_on_after_a_restart(
    run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said on stderr when the connection breaks and when it is back; nothing is told twice.

    A proxy that was started again numbers its lines from the start, and they are told all the same.
    """
    pauses = ended(monkeypatch, after=2)
    after = LOG | {"at": LOG["at"] + 60}
    logs = iter([[LOG], [LOG], [after]])
    api.answers["GET api/logs"] = lambda: {"logs": next(logs)}
    api.events = [("log", LOG)]
    result = run("logs", "-f", "--json")
    assert result.exit_code == 0
    told = [orjson.loads(line)["at"] for line in result.stdout.splitlines()]
    assert told == [LOG["at"], after["at"]]
    lost = f"the proxy at {api.url} ended the connection; trying again, until Ctrl-C"
    assert result.stderr.splitlines() == [
        f"slotkeeper: {what}" for what in (lost, "connected again", lost)
    ]
    assert pauses == [0.25, 0.5]


def test_nobody_to_follow(run: Run) -> None:
    """Who cannot be reached to begin with is not waited for."""
    url = f"http://127.0.0.1:{free_port()}"
    for words in (["requests", "-f"], ["logs", "-f"], ["status", "--watch"]):
        assert run(*words, "--url", url).exit_code == 3


def test_logs(run: Run, api: FakeApi) -> None:
    """Time, level, event and its fields."""
    api.answers["GET api/logs"] = {"logs": [LOG]}
    assert run("logs").stdout.split()[1:] == ["warning", "mode", "why=RAM", "cache"]


def test_as_many_as_are_kept(run: Run, api: FakeApi) -> None:
    """All that the proxy remembers can be asked for, and no more."""
    api.answers |= {"GET api/logs": {"logs": []}, "GET api/requests": {"requests": []}}
    for command, most in (("logs", limits.LOG_LINES), ("requests", limits.REQUESTS)):
        assert run(command, "-n", str(most)).exit_code == 0
        assert run(command, "-n", str(most + 1)).exit_code == 2


def test_logs_followed_from_a_level_on(
    run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is less than the level asked for is left out of what comes, too."""
    ended(monkeypatch)
    api.answers["GET api/logs"] = {"logs": [LOG]}
    api.events = [("log", LOG | {"seq": 8, "level": "info"}), ("log", LOG | {"seq": 9})]
    result = run("logs", "-f", "--level", "warning", "--json")
    assert [orjson.loads(line)["seq"] for line in result.stdout.splitlines()] == [7, 9]
    assert api.lines[0] == f"GET api/logs?limit={limits.LOG_LINES}&level=warning"


def test_watch(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state is drawn with slots and running requests below, until Ctrl-C."""
    ended(monkeypatch)
    api.events = [
        ("slots", {"slots": [SLOT]}),
        ("running", {"running": [RUNNING]}),
        ("snapshots", {}),
        ("status", STATUS),
        ("status", STATUS | {"paused": True}),
    ]
    result = run("status", "--watch")
    assert result.exit_code == 0
    assert result.stdout.count("Rivers") == 2
    assert result.stdout.count("Mountains") == 2
    assert "1,024 of 5,000 tokens" in result.stdout
    assert "caching is paused" in result.stdout


def test_watch_for_programs(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of JSON for each state."""
    ended(monkeypatch)
    api.events = [("status", STATUS), ("slots", {"slots": []}), ("status", STATUS)]
    lines = run("status", "--watch", "--json").stdout.splitlines()
    assert [orjson.loads(line) for line in lines] == [STATUS, STATUS]
