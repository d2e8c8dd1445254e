"""``slotkeeper explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.commands.explain import difference
from proxy.core.normalise import RULES
from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import COLD, OPTION, FakeApi

RULE = RULES[0]
FOUND: dict[str, Any] = {
    "client": "claude-code",
    "side": "",
    "conversation": "c" * 32,
    "known": 12,
    "note": "",
    "rules": [{"rule": RULE.name, "where": "system text"}, {"rule": "newer", "where": "tools"}],
    "before": '{\n  "system": "it is 14:03"\n}',
    "after": '{\n  "system": "it is 14:02"\n}',
    "prompt_tokens": 3667,
    "options": [OPTION],
    "choice": OPTION,
    "prefix": {"slot": None, "snapshot": "ab" * 16, "tokens": 3660},
    "cold": COLD,
}
NEW = FOUND | {
    "client": "",
    "side": "title",
    "conversation": None,
    "rules": [],
    "after": FOUND["before"],
    "options": [],
    "choice": None,
    "prefix": {"slot": None, "snapshot": None, "tokens": 0},
    "cold": None,
}


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    """Some request."""
    (tmp_path / "r.json").write_text('{"messages": []}')
    return str(tmp_path / "r.json")


def test_a_known_conversation(run: Run, api: FakeApi, request_file: str) -> None:
    """Who, what is held, which rule changes what, the costs, and why it would be cold."""
    api.answers["POST api/explain"] = FOUND
    result = run("explain", request_file)
    assert result.exit_code == 0
    first = result.stdout.splitlines()[0]
    assert first == (
        "it would restore snapshot abababababab into slot 0: 3,660 of 3,667 tokens reused,"
        " about 58 ms to the first token"
    )
    for text in (
        "claude-code",
        "cccccccccccc, 12 messages are known",
        "3,660 tokens, by a snapshot (abababababab)",
        f"system text: {RULE.what}",
        "newer",
        '-  "system": "it is 14:03"',
        '+  "system": "it is 14:02"',
        COLD["advice"],
    ):
        assert text in result.stdout, text
    assert any(
        line.startswith(">") and "restore snapshot" in line for line in result.stdout.splitlines()
    )
    assert api.lines == ["POST api/explain"]


def test_next_to_no_wait(run: Run, api: FakeApi, request_file: str) -> None:
    """What costs nothing to speak of is not told as a time."""
    held = OPTION | {"snapshot": None, "reason": "slot-hit", "prefill": 0.0, "transfer": 0.0}
    api.answers["POST api/explain"] = FOUND | {"options": [held], "choice": held}
    first = run("explain", request_file).stdout.splitlines()[0]
    assert first.startswith("it would use slot 0 as it is: ")
    assert first.endswith("reused, next to no wait for the first token")


def test_a_new_conversation_in_mode_forward(run: Run, api: FakeApi, request_file: str) -> None:
    """What there is nothing to say about is said in words."""
    api.answers["POST api/explain"] = NEW | {"note": "caching is paused"}
    shown = run("explain", request_file).stdout
    for text in (
        "not recognised (beside the conversation: title)",
        "a new one",
        "nothing of it",
        "the client's own bytes go out",
        "the backend would choose",
        "caching is paused",
    ):
        assert text.lower() in shown.lower(), text


def test_each_slot_that_was_weighed_is_shown(run: Run, api: FakeApi, request_file: str) -> None:
    """Those that reuse next to nothing too: which is taken, and why, is the question."""
    cold = OPTION | {"reason": "cold", "hit": 9, "snapshot": None}
    rest = [cold | {"slot": slot, "cost": 20.0 - slot} for slot in range(1, 4)]
    api.answers["POST api/explain"] = FOUND | {"options": [*rest, OPTION], "choice": rest[0]}
    shown = run("explain", request_file).stdout
    assert shown.startswith("it would start cold in slot 1: 9 of 3,667 tokens reused, about ")
    assert any(line.startswith("> start cold in slot 1") for line in shown.splitlines())
    for slot in (2, 3):
        assert f"  start cold in slot {slot}" in shown


@pytest.mark.parametrize("command", ["explain", "warm"])
def test_headers(run: Run, api: FakeApi, request_file: str, command: str) -> None:
    """They go with the question; what is none is refused without being repeated."""
    run(command, request_file, "--header", "User-Agent: goose/1", "--header", "X:a:b")
    assert api.asked[0][1]["headers"] == {"User-Agent": "goose/1", "X": "a:b"}
    for wrong in ("Bearer hunter2", ":hunter2"):
        result = run(command, request_file, "--header", wrong)
        assert (result.exit_code, "NAME:VALUE" in result.stderr) == (2, True)
        assert "hunter2" not in result.stderr
    assert len(api.asked) == 1


def test_json(run: Run, api: FakeApi, request_file: str) -> None:
    """For programs, the answer itself."""
    api.answers["POST api/explain"] = FOUND
    assert orjson.loads(run("explain", request_file, "--json").stdout) == FOUND


def test_a_difference_in_a_long_text_is_a_line_of_it() -> None:
    """Line ends within a string break it; an n behind an escaped backslash does not."""
    text = r'"one\ntwo\nthree\nfour\nC:\\new\nsix"'
    changed = [line.plain for line in difference(text, text.replace("six", "seven"))]
    assert changed[3:] == [r" three\n", r" four\n", r" C:\\new\n", '-six"', '+seven"']


def test_a_difference_has_colours_and_commands_no_terminal() -> None:
    """Red and green lines; an escape sequence of the prompt is defused."""
    lines = list(difference("a\nb", "a\n\x1b[2Jc"))
    styles = {line.plain[:1]: line.style for line in lines}
    assert (styles["-"], styles["+"]) == ("red", "green")
    assert all("\x1b" not in line.plain for line in lines)
    assert list(difference("same", "same")) == []
