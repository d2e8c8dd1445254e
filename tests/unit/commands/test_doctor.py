"""``slotkeeper doctor``: how the report is printed, and with which status it ends.

About ``proxy.commands.doctor``; what is in a report is ``tests/integration/test_doctor.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from proxy.checks.finding import Finding, Level
from proxy.config import Config
from proxy.doctor import Report
from proxy.engine import free_port
from tests.unit.commands.conftest import Run
from tests.unit.commands.fake_api import STATUS, FakeApi

GOOD = Finding("mode", Level.OK, "exclusive: it was proved")
ODD = Finding("batch", Level.WARNING, "too large", "Start it with -b 256.")
BAD = Finding("backend", Level.PROBLEM, "not \x1b[2Jthere", "Start it.")


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    """The doctor silences the log of this process."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """``report(findings...)``: what the doctor finds; gives what it was asked."""

    def prepare(*findings: Finding, folders: list[Any] | None = None) -> list[Any]:
        asked: list[Any] = []
        folders = [] if folders is None else folders

        async def examine(config: Config, ready: Any, *, probe: bool, at: str, step: Any) -> Report:
            asked.append((config.backend.url, ready, probe, at))
            folders.append(config.slot_dir)
            step("looking")
            return Report(findings, "llama-server -m M")

        monkeypatch.setattr("proxy.doctor.examine", examine)
        return asked

    return prepare


def test_no_problem(
    run: Run,
    report: Callable[..., list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warnings are no problem; what to do stands below each, the launch line at the end."""
    monkeypatch.delenv("SLOTKEEPER_URL")
    monkeypatch.setenv("SLOTKEEPER_SERVER__PORT", str(free_port()))  # no proxy that runs here
    asked = report(GOOD, ODD)
    folder = ["--slot-save-path", str(tmp_path)]
    result = run("doctor", "--probe", "--backend", "http://h:1", *folder)
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "ok       mode   exclusive: it was proved",
        "warning  batch  too large",
        "                Start it with -b 256.",
        "",
        "llama-server as it should be started (-c: slots times tokens per slot):",
        "  llama-server -m M",
        "",
        "0 problems, 1 warning",
    ]
    assert asked == [("http://h:1", None, True, "")]


def test_a_problem(run: Run, report: Callable[..., list[Any]]) -> None:
    """Status 1, and nothing the server said reaches the terminal as a command."""
    report(GOOD, BAD)
    result = run("doctor")
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert result.stdout.endswith("1 problem, 0 warnings\n")


def test_for_programs(run: Run, report: Callable[..., list[Any]]) -> None:
    """Findings as rows, the verdict and the line beside them."""
    report(BAD)
    result = run("doctor", "--json")
    found = orjson.loads(result.stdout)
    assert result.exit_code == 1
    assert (found["good"], found["launch"]) == (False, "llama-server -m M")
    assert found["findings"][0]["level"] == "problem"


def test_a_running_proxy_is_asked(
    run: Run, report: Callable[..., list[Any]], api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readiness goes to the doctor, who then leaves its slots alone."""
    asked = report(GOOD)
    api.answers["GET readyz"] = (503, {"ready": False})
    monkeypatch.delenv("SLOTKEEPER_URL")
    monkeypatch.setenv("SLOTKEEPER_SERVER__PORT", str(api.server.server_port))
    assert run("doctor").exit_code == 0
    assert asked[0][1] == {"ready": False}
    api.answers["GET api/status"] = STATUS
    monkeypatch.setenv("SLOTKEEPER_SERVER__ADMIN_KEY", "from-settings")
    assert run("doctor").exit_code == 0
    assert asked[1][1] == STATUS
    assert api.asked[-2:] == [
        ("GET readyz", None, None),
        ("GET api/status", None, "Bearer from-settings"),
    ]


def test_an_address_that_cannot_be(
    run: Run, report: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No proxy can be there, and the report is made all the same."""
    asked = report(GOOD)
    monkeypatch.delenv("SLOTKEEPER_URL")
    monkeypatch.setenv("SLOTKEEPER_SERVER__HOST", "no host")
    assert run("doctor", "--backend", "http://h:1").exit_code == 0
    assert asked == [("http://h:1", None, False, "")]
    assert run("doctor", "--url", "nonsense").exit_code == 2


def test_the_proxy_that_was_named_is_asked(
    run: Run, report: Callable[..., list[Any]], api: FakeApi, tmp_path: Path
) -> None:
    """By SLOTKEEPER_URL or --url, with its own key; what it serves is looked at."""
    folders: list[Any] = []
    asked = report(GOOD, folders=folders)
    served = {"backend": {"url": "http://h:1, http://h:2"}, "store": {"slot_dir": str(tmp_path)}}
    api.answers |= {"GET readyz": {"ready": True}, "GET api/status": STATUS | served}
    assert run("doctor", "--key", "given").exit_code == 0
    assert asked == [("http://h:1,http://h:2", STATUS | served, False, api.url)]
    assert folders == [tmp_path]
    assert api.asked[-1] == ("GET api/status", None, "Bearer given")


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
def test_what_the_user_named_is_looked_at(
    run: Run,
    report: Callable[..., list[Any]],
    api: FakeApi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Not what the running proxy serves, and a folder that is not there is not taken over."""
    asked = report(GOOD)
    served = {"store": {"slot_dir": str(tmp_path / "gone")}}
    api.answers |= {"GET readyz": {"ready": True}, "GET api/status": STATUS | served}
    words = []
    if how == "flag":
        words = ["--backend", "http://h:3"]
    elif how == "variable":
        monkeypatch.setenv("SLOTKEEPER_BACKEND__URL", "http://h:3")
    else:
        (tmp_path / "c.toml").write_text('[backend]\nurl = "http://h:3"\n')
        words = ["-c", str(tmp_path / "c.toml")]
    assert run("doctor", *words).exit_code == 0
    assert asked[0][0] == "http://h:3"
    monkeypatch.delenv("SLOTKEEPER_BACKEND__URL", raising=False)
    assert run("doctor").exit_code == 0
    assert asked[1][0] == STATUS["backend"]["url"]


def test_nobody_where_a_proxy_was_named(
    run: Run, report: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor needs none, and is told where it was looked for."""
    asked = report(GOOD)
    monkeypatch.setenv("SLOTKEEPER_URL", url := f"http://127.0.0.1:{free_port()}")
    assert run("doctor", "--backend", "http://h:1").exit_code == 0
    assert asked == [("http://h:1", None, False, url)]
