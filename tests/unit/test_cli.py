"""The command line, as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import proxy
from proxy import __version__
from proxy.cli import app
from proxy.config import Config

run = CliRunner().invoke


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What ``serve`` handed to the service, which ends with status 7 here."""
    seen: list[Config] = []

    def run_service(config: Config) -> int:
        seen.append(config)
        return 7

    service = ModuleType("proxy.service")
    vars(service)["run"] = run_service
    monkeypatch.setitem(sys.modules, "proxy.service", service)
    monkeypatch.setattr(proxy, "service", service, raising=False)
    return seen


def test_version() -> None:
    """``version`` prints name and version."""
    result = run(app, ["version"])
    assert (result.exit_code, result.stdout) == (0, f"slotkeeper {__version__}\n")


def test_flags_reach_the_service(served: list[Config], tmp_path: Path) -> None:
    """Each flag is a setting, and the service's status becomes the command's."""
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 1\nmax_queue = 5\n")
    flags = ["--backend", "http://h:1", "--slot-save-path", str(tmp_path), "--host", "::1"]
    result = run(app, ["serve", *flags, "--port", "9", "-c", str(file)])
    assert result.exit_code == 7
    (config,) = served
    assert (config.backend.url, config.slot_dir) == ("http://h:1", tmp_path)
    assert (config.server.host, config.server.port, config.server.max_queue) == ("::1", 9, 5)


def test_environment_reaches_the_service(
    served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without flags the environment decides."""
    monkeypatch.setenv("SLOTKEEPER_BACKEND__URL", "http://h:2")
    assert run(app, ["serve"]).exit_code == 7
    assert served[0].backend.url == "http://h:2"


def test_all_problems_are_printed(served: list[Config]) -> None:
    """A bad configuration ends with status 2 and every problem on stderr; nothing is started."""
    result = run(app, ["serve", "--backend", "ftp://x", "--port", "70000"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("2 problems in the configuration:\n--")
    assert "--backend: backend.url: expected" in result.stderr
    assert "--port: server.port: must be" in result.stderr
    assert served == []


def test_check_config(served: list[Config]) -> None:
    """``--check-config`` only says whether the settings are good, and what is odd about them."""
    result = run(app, ["serve", "--check-config", "--host", "0.0.0.0"])
    assert result.exit_code == 0
    first, *warnings = result.stdout.splitlines()
    assert first == "configuration is valid"
    assert [line.split(":")[:2] for line in warnings] == [
        ["warning", " server.host"],
        ["warning", " backend.slot_save_path"],
    ]
    assert served == []


def test_module_is_the_command() -> None:
    """``python -m proxy`` does the same, fails with the same status, and shows no traceback."""
    command = [sys.executable, "-m", "proxy", "serve", "--check-config", "--backend", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("1 problem in the configuration:\n--backend: backend.url:")
    assert "Traceback" not in result.stderr
