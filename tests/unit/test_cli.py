"""The command line, as a user meets it: its frame, and what ``proxy.commands.run`` starts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import proxy
from proxy import __version__
from proxy.cli import app
from proxy.commands import run as commands_run
from proxy.config import Backend, Config

run = CliRunner().invoke


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What ``serve`` handed to the service, which ends with status 7 here."""
    seen: list[Config] = []

    def run_service(config: Config, on_ready: object, load: Callable[[], Config]) -> int:
        assert on_ready is None, "no terminal, no banner"
        assert load() == config
        seen.append(config)
        return 7

    service = ModuleType("proxy.service")
    vars(service)["run"] = run_service
    monkeypatch.setitem(sys.modules, "proxy.service", service)
    monkeypatch.setattr(proxy, "service", service, raising=False)
    vars(service)["TRYING"] = "trying out"
    monkeypatch.setattr("proxy.checks.machine.taken", lambda *_: False)
    monkeypatch.setattr("proxy.client.Client.is_slotkeeper", lambda _: False)
    return seen


def test_version() -> None:
    """``version`` prints name and version, and so does the option everybody tries first."""
    for word in ("version", "--version"):
        result = run(app, [word])
        assert (result.exit_code, result.stdout) == (0, f"slotkeeper {__version__}\n")


@pytest.mark.parametrize("other", [True, False])
def test_a_slotkeeper_is_no_model_server(
    served: list[Config], monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """Neither another one nor itself: requests would go round and round."""
    monkeypatch.setattr("proxy.client.Client.is_slotkeeper", lambda _: other)
    url = "http://h:1" if other else "http://localhost:9"
    result = run(app, ["serve", "--backend", url, "--port", "9"])
    assert (result.exit_code, served) == (2, [])
    assert result.stderr.startswith(f"slotkeeper: {url} is a slotkeeper\n  Name the model server")


def test_serve_says_what_takes_long(
    served: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Somebody at a terminal waits for the slots to be tried out, and is told so."""
    monkeypatch.setattr(commands_run, "greeter", lambda _: str)
    monkeypatch.setattr("proxy.service.run", lambda *_: 0)
    assert served == []
    assert run(app, ["serve", "--slot-save-path", str(tmp_path)]).stderr == "trying out\n"
    assert run(app, ["serve"]).stderr == ""


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
    assert result.stderr.startswith("slotkeeper: 2 problems in the configuration:\n--")
    assert "--backend: backend.url: expected" in result.stderr
    assert "--port: server.port: must be" in result.stderr
    assert served == []


def test_check_config(served: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """``--check-config`` only says whether the settings are good, and what is odd about them."""
    monkeypatch.setenv("SLOTKEEPER_BACKEND__KIND", "llama_server")
    result = run(app, ["serve", "--check-config", "--host", "0.0.0.0"])
    assert result.exit_code == 0
    first, *warnings = result.stdout.splitlines()
    assert first == "configuration is valid"
    assert [line.split(":")[:2] for line in warnings] == [
        ["warning", " server.host"],
        ["warning", " backend.slot_save_path"],
    ]
    assert served == []


def test_a_port_that_is_taken(served: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is opened, with what to do."""
    monkeypatch.setattr("proxy.checks.machine.taken", lambda host, port: (host, port) == ("::", 9))
    result = run(app, ["serve", "--host", "::", "--port", "9"])
    assert (result.exit_code, served) == (1, [])
    assert result.stderr == "slotkeeper: port 9 is taken: try --port\n"


def test_module_is_the_command() -> None:
    """``python -m proxy`` does the same, fails with the same status, and shows no traceback."""
    command = [sys.executable, "-m", "proxy", "serve", "--check-config", "--backend", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(
        "slotkeeper: 1 problem in the configuration:\n--backend: backend.url:"
    )
    assert "Traceback" not in result.stderr


def test_the_configuration_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload reads the file as it is then; the flags of the start still win."""
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 1\nmax_queue = 5\n")
    monkeypatch.setenv("SLOTKEEPER_SERVER__MAX_QUEUE", "6")
    assert commands_run.reread(file, {"server.port": 9}).server.max_queue == 6
    monkeypatch.delenv("SLOTKEEPER_SERVER__MAX_QUEUE")
    file.write_text("[server]\nport = 1\nmax_queue = 7\n")
    again = commands_run.reread(file, {"server.port": 9})
    assert (again.server.port, again.server.max_queue) == (9, 7)


def test_the_banner(tmp_path: Path) -> None:
    """What runs where; and, where nothing is saved, who can say why."""
    text = commands_run.banner(Config(), "http://h:1")
    for line in ("http://h:1   (", "http://h:1/_slotkeeper/", "http://127.0.0.1:8080", "doctor"):
        assert line in text
    saving = Config(backend=Backend(slot_save_path=str(tmp_path)))
    assert str(tmp_path / "slotkeeper") in commands_run.banner(saving, "http://h:1")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_banner_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, served: list[Config], terminal: bool
) -> None:
    """On a terminal it is printed to stderr once requests are taken; elsewhere the log says it."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", out)
    greet = commands_run.greeter(Config())
    assert (greet is not None) is terminal
    if greet is not None:
        greet("http://h:1")
        assert "http://h:1/_slotkeeper/" in out.getvalue()


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the demo, whose status becomes the command's."""
    monkeypatch.setattr("proxy.demo.main", lambda: 5)
    assert run(app, ["demo"]).exit_code == 5


def test_demo_without_the_engine(tmp_path: Path) -> None:
    """Where the extra is not installed it is said how to install it, with status 1."""
    code = "import sys; sys.modules['xllamacpp'] = None; sys.argv = ['slotkeeper', 'demo']\n"
    code += "import importlib.util as u; real = u.find_spec\n"
    code += "u.find_spec = lambda n, *a: None if n == 'xllamacpp' else real(n, *a)\n"
    code += "from proxy.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "DEMO_STATE": str(tmp_path / "state")},
    )
    assert result.returncode == 1
    assert "pip install '.[demo]'" in result.stderr


def test_completion() -> None:
    """A shell can complete the commands."""
    environ = {"_SLOTKEEPER_COMPLETE": "complete_bash", "COMP_WORDS": "slotkeeper che",
               "COMP_CWORD": "1"}  # fmt: skip
    command = [sys.executable, "-c", "from proxy.cli import main; main()"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
        check=True,
    )
    assert result.stdout.split() == ["check-config"]
