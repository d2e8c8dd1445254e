"""What the commands share: where the proxy is, which key goes there, how a command ends."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from proxy.cli import app
from proxy.commands import common
from proxy.config import Config, Server
from proxy.engine import free_port
from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import SLOT, STATUS, FakeApi, refusal


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:9"), ("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9"),
     ("llm.lan", "http://llm.lan:9")],
)  # fmt: skip
def test_the_address_of_a_configuration(host: str, url: str) -> None:
    """An address to listen on becomes one to ask."""
    assert common.own_url(Config(server=Server(host=host, port=9))) == url


def test_the_configuration_says_where_and_with_which_key(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --url the file's host, port and admin key are used."""
    monkeypatch.delenv("SLOTKEEPER_URL", raising=False)
    api.answers |= {"GET api/slots": {"slots": [SLOT]}, "GET api/status": STATUS}
    file = tmp_path / "c.toml"
    file.write_text(f'[server]\nport = {api.server.server_port}\nadmin_key = "from-file"\n')
    assert CliRunner().invoke(app, ["slots", "-c", str(file)]).exit_code == 0
    assert api.asked == [
        (f"GET api/{page}", None, "Bearer from-file") for page in ("slots", "status")
    ]


def test_the_configurations_key_goes_to_no_other_address(
    api: FakeApi, tmp_path: Path, run: Run
) -> None:
    """With an address of its own a call takes only a key of its own."""
    api.answers["GET api/conversations"] = {"conversations": []}
    file = tmp_path / "c.toml"
    file.write_text('[server]\nadmin_key = "from-file"\n')
    run("conversations", "--url", api.url, "-c", str(file))
    run("conversations", "--key", "given")
    assert [key for _, _, key in api.asked] == [None, "Bearer given"]


def test_nobody_there_is_3(run: Run) -> None:
    """What happened, where and what to do on stderr; nothing on stdout."""
    url = f"http://127.0.0.1:{free_port()}"
    result = run("status", "--url", url)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith(f"slotkeeper: cannot reach the proxy at {url}")
    assert "slotkeeper serve" in result.stderr


def test_no_is_1(run: Run, api: FakeApi) -> None:
    """A refusal is printed with its hint, and no key with it."""
    api.answers["POST api/pause"] = (403, refusal("These pages are open to this machine only."))
    result = run("pause", "--key", "hunter2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "slotkeeper: These pages are open to this machine only.\n"
        "  Give the proxy's server.admin_key as SLOTKEEPER_ADMIN_KEY or --key.\n"
    )


def test_usage_is_2(run: Run, tmp_path: Path) -> None:
    """A wrong address, a wrong configuration, a wrong option."""
    wrong = tmp_path / "c.toml"
    wrong.write_text("[server]\nprot = 1\n")
    assert run("slots", "--url", "nonsense").exit_code == 2
    assert run("check-config", "-c", str(wrong)).exit_code == 2
    assert run("logs", "--level", "loud").exit_code == 2
    assert run("nonsense").exit_code == 2


def test_the_help_shows_no_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable's name is there, its value is not."""
    monkeypatch.setenv("SLOTKEEPER_ADMIN_KEY", "hunter2")
    help_text = run("status", "--help").output
    assert "SLOTKEEPER_ADMIN_KEY" in help_text
    assert "hunter2" not in help_text


def test_ctrl_c_is_no_success() -> None:
    """What was to be done may not have been: 130, as shells have it."""
    with pytest.raises(typer.Exit) as left, common.talking("http://h", None, None):
        raise KeyboardInterrupt
    assert left.value.exit_code == common.INTERRUPTED == 130


@pytest.mark.parametrize(("answer", "ends"), [(True, False), (False, True)])
def test_at_a_terminal_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: bool,
    ends: bool,
) -> None:
    """Without --yes the answer decides; no is no wrong usage, and is told plainly."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(typer, "confirm", lambda _: answer)
    if ends:
        with pytest.raises(typer.Exit) as left:
            common.sure("Remove it?", False)
        assert left.value.exit_code == 1
        assert capsys.readouterr() == ("nothing was done\n", "")
    else:
        common.sure("Remove it?", False)


def test_ctrl_c_instead_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as Ctrl-C does anywhere."""

    def confirm(_: str) -> bool:
        raise typer.Abort

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(typer, "confirm", confirm)
    with pytest.raises(typer.Exit) as left:
        common.sure("Remove it?", False)
    assert left.value.exit_code == common.INTERRUPTED


def test_ids_by_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    """An exact id, or the only one that begins so; else it is said what is wrong."""
    known = ["abc", "abcd", "x1"]
    assert common.one_of("snapshot", "abc", known) == "abc"
    assert common.one_of("snapshot", "x", known) == "x1"
    for wrong in ("ab", "y", ""):
        with pytest.raises(typer.Exit):
            common.one_of("snapshot", wrong, known)
    told = capsys.readouterr().err
    assert "2 snapshots begin with ab" in told
    assert "no snapshot is, or begins with, y" in told
    assert "no snapshot is named" in told
    with pytest.raises(typer.Exit):
        common.one_of("snapshot", "", ["the only one"])


def test_a_terminal_gets_colours_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours on a terminal, none with NO_COLOR, none in a pipe."""

    class Terminal:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert common.console().color_system is None
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert common.console().color_system
    monkeypatch.setenv("NO_COLOR", "1")
    assert common.console().no_color
