"""deploy/README.md: what it names exists, and it names what exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from proxy.cli import app
from proxy.config import Config
from tests.deploy.files import DEPLOY, ROOT, read, read_yaml

README = read("README.md")
SETTINGS = {f"{s}.{name}" for s, part in Config() for name in type(part).model_fields}


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    """The lines of the shell blocks, as words."""
    return [shlex.split(line) for block in blocks("sh") for line in block.splitlines() if line]


def test_every_file_is_used() -> None:
    """A file is named by the page, mounted by compose.yaml, or found by Docker by its name."""
    found = {"docker/Dockerfile.dockerignore", "docker/compose.yaml", "README.md"}
    mounts = re.findall(r"- \"?\.\./([\w./-]+):|\[\"\.\./([\w./-]+):", read("docker/compose.yaml"))
    mounted = tuple(one or other for one, other in mounts)
    for path in DEPLOY.rglob("*"):
        name = path.relative_to(DEPLOY).as_posix()
        if path.is_file() and name not in found and not name.startswith(mounted):
            assert path.name in README, name


def test_files_in_commands_exist() -> None:
    """Each file of the repository that a command reads is there."""
    named = {word for words in commands() for word in words if word.startswith("deploy/")}
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def test_links_lead_somewhere() -> None:
    """Relative links name files."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (DEPLOY / target).exists(), target


def test_what_is_installed_is_removed() -> None:
    """Each place that the installation writes to is in the commands that undo it."""
    targets = {words[-1] for words in commands() if words[0] == "install"}
    targets |= {words[-1] for words in commands() if words[1:3] == ["-m", "venv"]}
    removed = {word for words in commands() if words[0] == "rm" for word in words[1:]}
    assert targets
    for target in targets:
        assert any(target == gone or target.startswith(f"{gone}/") for gone in removed), target


def test_units_find_what_is_installed() -> None:
    """The paths in the units are those that the commands make."""
    places = {words[-1] for words in commands() if words[0] == "install"}
    ours, theirs = read("systemd/slotkeeper.service"), read("systemd/llama-server.service")
    assert "ExecStart=/opt/slotkeeper/bin/slotkeeper serve --config /etc/slotkeeper/" in ours
    assert set(re.findall(r"--config (\S+)", ours)) <= places
    assert set(re.findall(r"EnvironmentFile=(\S+)", theirs)) <= places
    assert "/usr/local/bin/llama-server" in README
    assert "ExecStart=/usr/local/bin/llama-server" in theirs


def test_settings_exist() -> None:
    """Settings are written as the configuration knows them."""
    named = set(re.findall(r"`((?:server|backend|cache|normalise)\.\w+)`", README))
    assert named
    assert named <= SETTINGS


def test_every_alert_is_explained() -> None:
    """The table has each alert and no other."""
    named = set(re.findall(r"`(Slotkeeper[A-Z]\w+)`", README))
    assert named == {
        rule["alert"] for rule in read_yaml("prometheus/alerts.yml")["groups"][0]["rules"]
    }


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_can_be_read(block: str) -> None:
    """Each piece of YAML is valid, and about what the files have."""
    piece: dict[str, Any] = yaml.safe_load(block)
    assert set(piece) in ({"services"}, {"scrape_configs"})
    if "services" in piece:
        assert set(piece["services"]) <= set(read_yaml("docker/compose.yaml")["services"])


def test_the_check_of_the_configuration_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that checks the installed file is understood."""
    (line,) = [words for words in commands() if "--check-config" in words]
    assert line[:2] == ["/opt/slotkeeper/bin/slotkeeper", "serve"]
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # not on this machine
    file = tmp_path / "config.toml"
    file.write_text(read("systemd/config.toml"))
    words = [str(file) if word.startswith("/etc") else word for word in line[1:]]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
