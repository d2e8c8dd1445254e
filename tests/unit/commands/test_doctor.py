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

    def prepare(*findings: Finding) -> list[Any]:
        asked: list[Any] = []

        async def examine(config: Config, ready: Any, *, probe: bool, step: Any) -> Report:
            asked.append((config.backend.url, ready, probe))
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
    assert asked == [("http://h:1", None, True)]


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
    monkeypatch.setenv("SLOTKEEPER_SERVER__HOST", "no host")
    assert run("doctor", "--backend", "http://h:1").exit_code == 0
    assert asked == [("http://h:1", None, False)]
