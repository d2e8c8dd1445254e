"""``slotkeeper explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.commands.explain import difference
from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import COLD, OPTION, FakeApi

FOUND: dict[str, Any] = {
    "client": "claude-code",
    "side": "",
    "conversation": "c" * 32,
    "known": 12,
    "rules": [{"rule": "clock", "where": "system text"}],
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
    for text in (
        "claude-code",
        "cccccccccccc, 12 messages are known",
        "3,660 tokens, by a snapshot (abababababab)",
        "clock  system text",
        '-  "system": "it is 14:03"',
        '+  "system": "it is 14:02"',
        COLD["advice"],
    ):
        assert text in result.stdout, text
    assert any(line.startswith(">") and "restored" in line for line in result.stdout.splitlines())
    assert api.lines == ["POST api/explain"]


def test_a_new_conversation_in_mode_forward(run: Run, api: FakeApi, request_file: str) -> None:
    """What there is nothing to say about is said in words."""
    api.answers["POST api/explain"] = NEW
    shown = run("explain", request_file).stdout
    for text in ("not recognised (beside the conversation: title)", "a new one", "nothing of it",
                 "the client's own bytes go out", "the backend would choose"):  # fmt: skip
        assert text.lower() in shown.lower(), text


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
