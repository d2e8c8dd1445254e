"""``slotkeeper cache``."""

from __future__ import annotations

import orjson
import pytest

from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import NOW, OTHER_SNAPSHOT, SNAPSHOT, FakeApi, refusal


@pytest.fixture(autouse=True)
def there(api: FakeApi) -> None:
    """Two snapshots whose ids begin alike."""
    api.answers["GET api/snapshots"] = {"snapshots": [SNAPSHOT, OTHER_SNAPSHOT]}


def test_ls(run: Run) -> None:
    """One line per snapshot."""
    head, *lines, _ = run("cache", "ls").stdout.splitlines()
    assert head.split()[:3] == ["SNAPSHOT", "TOKENS", "SIZE"]
    assert [line.split()[0] for line in lines] == ["ab" * 6, "ac" * 6]


def test_show(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the beginning of its id: words, units and what decides; as JSON it is the row itself."""
    monkeypatch.setattr("time.time", lambda: NOW + 200)
    shown = " ".join(run("cache", "show", "ab").stdout.split())
    for text in (
        "holds 3,660 tokens: 3,600 of prompt, 60 of answer",
        "size 1.0 MiB",
        "last used 3 min ago (",
        "restored 2 times",
        "can save about 20.9 s of prefill",
        "stays pinned: no limit",
    ):
        assert text in shown, text
    assert orjson.loads(run("cache", "show", "ab", "--json").stdout) == SNAPSHOT
    assert run("cache", "show", "a").exit_code == 1
    assert run("cache", "show", "ff").exit_code == 1


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"value": 0.1}, "goes first: it is number 1 of 2 to go"),
        ({"value": 0.9}, "goes first: it is number 2 of 2 to go"),
        ({"value": None}, "for its size and age goes first"),
        ({"barred": True}, "barred not restored"),
        ({"restores": 0}, "restored never"),
        ({"seconds_saved": 0.0}, "can save nothing: its prompt is held elsewhere too"),
        ({"seconds_saved": None}, "can save -"),
    ],
)
def test_show_of_other_kinds(
    run: Run, api: FakeApi, changes: dict[str, object], shown: str
) -> None:
    """Its place among those that may go, and what is not as usual about it."""
    row = SNAPSHOT | {"pinned": False} | changes
    rival = SNAPSHOT | {"id": "ac" * 16, "pinned": False, "value": 0.5}
    api.answers["GET api/snapshots"] = {"snapshots": [row, rival]}
    assert shown in " ".join(run("cache", "show", "ab").stdout.split())


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
    """Which went, how many, and what that freed; or that nothing had to go."""
    page = "POST api/snapshots/prune"
    api.answers[page] = {"removed": [SNAPSHOT["id"], "x"], "bytes": 2**21}
    assert run("cache", "prune").stdout.splitlines() == [
        f"removed {'ab' * 16}  3,660 tokens  1.0 MiB  Rivers",
        "removed x  of another model or other settings",
        "2 snapshots removed, 2.0 MiB freed",
    ]
    assert orjson.loads(run("cache", "prune", "--json").stdout) == api.answers[page]
    api.answers[page] = {"removed": [], "bytes": 0}
    assert run("cache", "prune").stdout == (
        "nothing was removed: what is not pinned is within the limits\n"
    )


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
    result = run("cache", "rm", "ab", "ac", "ab", "--yes")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == [
        f"removed {'ac' * 16}  3,660 tokens  1.0 MiB  Rivers",
        "2 snapshots removed, 2.0 MiB freed",
    ]
    assert [line for line in api.lines if line.startswith("DELETE")] == [
        f"DELETE api/snapshots/{one['id']}" for one in (SNAPSHOT, OTHER_SNAPSHOT)
    ]


def test_rm_of_what_goes_meanwhile(run: Run, api: FakeApi) -> None:
    """What is gone when its turn comes is no error, and is not counted; another refusal is one."""
    page = f"DELETE api/snapshots/{SNAPSHOT['id']}"
    api.answers[page] = (404, refusal("No such snapshot."))
    result = run("cache", "rm", "ab", "-y")
    assert (result.exit_code, result.stdout) == (
        0,
        "nothing was removed: they were gone already\n",
    )
    api.answers[page] = (500, refusal("The disk refuses."))
    result = run("cache", "rm", "ab", "-y")
    assert (result.exit_code, result.stdout) == (1, "")


def test_rm_asks_first(run: Run, api: FakeApi) -> None:
    """Nobody at a terminal, no --yes: nothing is removed."""
    result = run("cache", "rm", "ab")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert api.lines == ["GET api/snapshots"]
