"""``slotkeeper cache``."""

from __future__ import annotations

import orjson
import pytest

from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import OTHER_SNAPSHOT, SNAPSHOT, FakeApi


@pytest.fixture(autouse=True)
def there(api: FakeApi) -> None:
    """Two snapshots whose ids begin alike."""
    api.answers["GET api/snapshots"] = {"snapshots": [SNAPSHOT, OTHER_SNAPSHOT]}


def test_ls(run: Run) -> None:
    """One line per snapshot."""
    head, *lines = run("cache", "ls").stdout.splitlines()
    assert head.split()[:3] == ["SNAPSHOT", "TOKENS", "SIZE"]
    assert [line.split()[0] for line in lines] == ["ab" * 6, "ac" * 6]


def test_show(run: Run) -> None:
    """By the beginning of its id; as JSON it is the row itself."""
    assert "prompt_tokens  3,600 tokens" in run("cache", "show", "ab").stdout
    assert orjson.loads(run("cache", "show", "ab", "--json").stdout) == SNAPSHOT
    assert run("cache", "show", "a").exit_code == 1
    assert run("cache", "show", "ff").exit_code == 1


def test_verify(run: Run, api: FakeApi) -> None:
    """A damaged file is named, and a problem."""
    api.answers["POST api/snapshots/verify"] = {"checked": 2, "bad": []}
    result = run("cache", "verify")
    assert (result.exit_code, result.stdout) == (0, "2 snapshots read, 0 damaged\n")
    api.answers["POST api/snapshots/verify"] = {"checked": 2, "bad": ["ac" * 16]}
    result = run("cache", "verify")
    assert result.exit_code == 1
    assert "ac" * 16 in result.stdout
    assert run("cache", "verify", "--json").exit_code == 1


def test_prune(run: Run, api: FakeApi) -> None:
    """How many went, and what that freed."""
    api.answers["POST api/snapshots/prune"] = {"removed": ["x"], "bytes": 2**20}
    assert run("cache", "prune").stdout == "1 snapshot removed, 1.0 MiB freed\n"
    assert orjson.loads(run("cache", "prune", "--json").stdout)["bytes"] == 2**20


@pytest.mark.parametrize(("words", "pinned"), [((), True), (("--off",), False)])
def test_pin(run: Run, api: FakeApi, words: tuple[str, ...], pinned: bool) -> None:
    """The whole id is sent, whatever was given."""
    api.answers[f"POST api/snapshots/{SNAPSHOT['id']}/pin"] = {}
    assert run("cache", "pin", "ab", *words).exit_code == 0
    assert api.asked[-1][1] == {"pinned": pinned}


def test_rm(run: Run, api: FakeApi) -> None:
    """Each is removed; one that is not known stops it before anything is."""
    for one in (SNAPSHOT, OTHER_SNAPSHOT):
        api.answers[f"DELETE api/snapshots/{one['id']}"] = {}
    assert run("cache", "rm", "ab", "ff", "--yes").exit_code == 1
    assert not any(line.startswith("DELETE") for line in api.lines)
    assert run("cache", "rm", "ab", "ac", "--yes").exit_code == 0
    assert [line for line in api.lines if line.startswith("DELETE")] == [
        f"DELETE api/snapshots/{one['id']}" for one in (SNAPSHOT, OTHER_SNAPSHOT)
    ]


def test_rm_asks_first(run: Run, api: FakeApi) -> None:
    """Nobody at a terminal, no --yes: nothing is removed."""
    result = run("cache", "rm", "ab")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert api.lines == ["GET api/snapshots"]
