"""``forget``, ``warm``, ``pause``, ``resume``, ``drain``."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import CONVERSATION, FakeApi


@pytest.mark.parametrize("verb", ["pause", "resume", "drain"])
def test_verbs(run: Run, api: FakeApi, verb: str) -> None:
    """Each is one POST, and says what it did."""
    api.answers[f"POST api/{verb}"] = {}
    result = run(verb)
    assert result.exit_code == 0
    assert result.stdout
    assert api.asked == [(f"POST api/{verb}", {}, None)]


def test_forget(run: Run, api: FakeApi) -> None:
    """By the beginning of its id, and only when it is meant."""
    api.answers["GET api/conversations"] = {"conversations": [CONVERSATION]}
    api.answers[f"POST api/conversations/{'c' * 32}/forget"] = {"forgotten": True, "snapshots": 2}
    assert run("forget", "cc").exit_code == 2
    assert len(api.asked) == 1
    result = run("forget", "cc", "-y")
    assert result.exit_code == 0
    assert "2 snapshots with it" in result.stdout


@pytest.mark.parametrize(
    ("snapshot", "said"), [("ab", "saved as snapshot ab"), (None, "not saved")]
)
def test_warm(run: Run, api: FakeApi, tmp_path: Path, snapshot: str | None, said: str) -> None:
    """The file's request goes to the path that was said; the figures come back."""
    done = {"prompt": 3660, "cached": 600, "computed": 3060, "seconds": 2.5, "snapshot": snapshot}
    api.answers["POST api/warm"] = done
    file = tmp_path / "r.json"
    file.write_text('{"messages": []}')
    result = run("warm", str(file), "--path", "/v1/messages")
    assert result.exit_code == 0
    assert "3,660 tokens: 600 reused, 3,060 computed in 2.5 s" in result.stdout
    assert said in result.stdout
    assert api.asked[0][1] == {"path": "/v1/messages", "request": {"messages": []}}
    assert orjson.loads(run("warm", str(file), "--json").stdout) == done


def test_a_request_from_stdin(run: Run, api: FakeApi) -> None:
    """``-`` reads it there."""
    api.answers["POST api/warm"] = (200, {"prompt": 1, "cached": 0, "computed": 1, "seconds": 1,
                                          "snapshot": None})  # fmt: skip
    assert run("warm", "-", input='{"messages": []}').exit_code == 0
    assert api.asked[0][1]["request"] == {"messages": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read"), ("{,}", "not JSON: line 1, column 2"), ("[1]", "a JSON object")],
)
@pytest.mark.parametrize("command", ["warm", "explain"])
def test_files_that_are_no_request(
    run: Run, api: FakeApi, tmp_path: Path, command: str, text: str | None, said: str
) -> None:
    """It is said what is wrong, without a word of what is in it, and nothing is asked."""
    file = tmp_path / "r.json"
    if text is not None:
        file.write_text(text)
    result = run(command, str(file))
    assert result.exit_code == 2
    assert said in result.stderr
    assert api.asked == []
