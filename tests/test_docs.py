"""The documents: what they name exists, what exists is named, and their commands are understood."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from proxy.cli import app
from proxy.commands import common
from proxy.config import FLAGS, PREFIX, Config, load
from proxy.core.normalise import RULES
from proxy.core.records import Mode, Reason
from proxy.core.why import Cold
from proxy.dialects import DIALECTS
from proxy.errors import ConfigError
from proxy.server.actions import Actions
from proxy.server.gate import OWN
from proxy.telemetry.metrics import Metrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "proxy" / "ARCHITECTURE.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "proxy" / "ARCHITECTURE.md",
    ROOT / "tests" / "README.md",
]
SETTINGS = {f"{s}.{name}" for s, part in Config() for name in type(part).model_fields}


def commands() -> list[list[str]]:
    """The lines of README's shell blocks, as words."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line]


def split(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables set before a command, and the command."""
    n = next(i for i, word in enumerate(command) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in command[:n]), command[n:]


def slotkeeper_commands() -> Iterator[tuple[dict[str, str], list[str]]]:
    """README's calls of the command line."""
    for variables, words in map(split, commands()):
        if words[0] == "slotkeeper":
            yield variables, words[1:]


def test_every_reason_and_mode_is_explained() -> None:
    """README has a row for each reason and an item for each mode."""
    for reason in Reason:
        assert f"\n| `{reason}` |" in README, reason
    for mode in Mode:
        assert f"\n- **{mode}**:" in README, mode


def test_every_cause_is_explained() -> None:
    """README has a row for each cause of a cold answer."""
    for cause in Cold:
        assert f"\n| `{cause}` |" in README, cause


def test_every_metric_is_listed_and_no_other() -> None:
    """README's metrics are those the proxy has."""
    text = Metrics().render()[0].decode()
    made = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    made = {name for name in made if not name.endswith("_created")}
    assert set(re.findall(r"`(slotkeeper_\w+)`", README)) == made


def test_every_label_is_listed() -> None:
    """A metric's row in README names its labels."""
    text = Metrics().render()[0].decode()
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        family = re.sub(r"_(bucket|count|sum|created)$", "", name)
        family = family if f"`{family}`" in README else f"{family}_total"
        row = next(line for line in README.splitlines() if f"`{family}`" in line)
        for label in set(re.findall(r"(\w+)=", labels)) - {"le"}:
            assert f"`{label}`" in row, (family, label)


def test_every_rule_is_listed() -> None:
    """README's table of rules is the table the proxy has, in its order, with its defaults."""
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \| (on|known|off) \|$", README, re.MULTILINE)
    assert rows == [(rule.name, rule.what, rule.where, rule.default) for rule in RULES]


def test_every_cached_path_is_listed() -> None:
    """README names each path of the cached path in its table of requests."""
    (row,) = [line for line in README.splitlines() if "the cached path, streaming or not" in line]
    assert set(re.findall(r"(/[\w/]+)`", row)) == set(DIALECTS)


def test_every_setting_that_is_named_exists() -> None:
    """Settings in README are written as the configuration knows them."""
    named = re.findall(r"`((?:server|backend|cache|normalise)\.\w+)[ `]", README)
    assert named
    assert set(named) <= SETTINGS


def test_the_command_lines_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ``slotkeeper`` call in README is a valid one, its files and folders given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    shutil.copy(ROOT / "config.example.toml", "config.toml")
    calls = list(slotkeeper_commands())
    assert calls
    for variables, words in calls:
        parsed(words)
        assert variables == {} or load(None, {}, variables) != Config()
        if words[0] == "serve":
            result = CliRunner().invoke(app, [*words, "--check-config"], env=variables)
            assert result.exit_code == 0, (words, result.output)


def parsed(words: list[str]) -> None:
    """Fails unless these words are a command with options it has; nothing is run."""
    command: Any = get_command(app)
    context = command.make_context("slotkeeper", list(words))
    while context._protected_args:
        name, command, rest = command.resolve_command(
            context, context._protected_args + context.args
        )
        context = command.make_context(name, rest, parent=context)


def every_command(group: Any, before: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each command's full name and its options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, f"{before}{name} ")
        else:
            yield before + name, [option for one in command.params for option in one.opts]


def test_every_command_and_option_is_listed() -> None:
    """README's table of commands is what the command line has, each with its own options; those
    that many share stand in the table below it.
    """
    section = README.partition("\n## Commands\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z][a-z -]*)` \| .* \| (.*) ?\|$", section, re.MULTILINE))
    shared = re.findall(r"^\| (`-.*?) \| .* \| .* \|$", section, re.MULTILINE)
    for_many = {option for row in shared for option in re.findall(r"`(-[\w-]+)`", row)}
    commands = dict(every_command(get_command(app)))
    assert set(rows) == set(commands)
    used: set[str] = set()
    for name, found in commands.items():
        options = {option for option in found if option.startswith("-")}
        used |= options
        assert set(re.findall(r"`(-[\w-]+)`", rows[name])) == options - for_many, name
    assert for_many - used == {"--help"}


def test_every_exit_status_is_listed() -> None:
    """README's table has the four, and the help names them too."""
    codes = [0, common.PROBLEM, common.USAGE, common.UNREACHABLE]
    assert [int(code) for code in re.findall(r"^\| (\d) \| ", README, re.MULTILINE)] == codes
    help_text = CliRunner().invoke(app, ["--help"]).output
    for code in codes:
        assert re.search(rf"\b{code} [a-z]", help_text), code


def test_every_flag_is_named() -> None:
    """README names each flag that sets something, and those of ``serve`` that do not."""
    for flag in (*FLAGS.values(), "--check-config", "-c"):
        assert re.search(rf"[` ]{flag}[` \n]", README), flag


def test_a_wrong_variable_would_be_noticed() -> None:
    """A variable that names no setting is an error, so the examples above prove something."""
    with pytest.raises(ConfigError):
        load(None, {}, {f"{PREFIX}SERVER__KEY": "alice"})


def test_make_targets_exist() -> None:
    """Each ``make`` in README is a target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [words[1] for _, words in map(split, commands()) if words[0] == "make"]
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_demo_variables_exist() -> None:
    """The demo reads each ``DEMO_`` variable in README, and README names each it reads."""
    demo = (ROOT / "proxy" / "demo.py").read_text(encoding="utf-8")
    named = set(re.findall(r"DEMO_[A-Z]+", README))
    assert named == set(re.findall(r"\"(DEMO_[A-Z]+)\"", demo))


def test_the_first_screen() -> None:
    """What a newcomer needs comes first: the two commands, the launch line, the one URL."""
    at = [README.index(words) for words in ("make demo", "curl -i", "make test", "llama-server -m")]
    assert at == sorted(at)
    assert README.index("change one URL") < README.index("## What it does")


def test_the_proxys_own_pages_are_listed() -> None:
    """README's table of pages is the table the server has."""
    source = (ROOT / "proxy" / "server" / "admin.py").read_text(encoding="utf-8")
    pages = {f"{OWN}{path}" for path in re.findall(r"\{OWN\}(/[\w/]+)\"", source)}
    assert set(re.findall(rf"^\| `({OWN}[\w/]+)", README, re.MULTILINE)) == pages


def test_the_proxys_own_actions_are_listed() -> None:
    """README's table of actions is the table the server has."""
    nobody: Any = None
    made = {f"{method} {path}" for method, path in Actions(nobody).table()}
    listed = re.findall(rf"^\| `((?:POST|DELETE) {OWN}/[\w/]+)`", README, re.MULTILINE)
    assert {line.replace("/ID", "/{id}") for line in listed} == made


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    """A relative link names a file, seen from the document's folder."""
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (document.parent / target).exists(), target


def test_the_modules_named_in_the_architecture_exist() -> None:
    """Each file and folder that ARCHITECTURE.md says does something is there."""
    text, _, _ = ARCHITECTURE.partition("\n## Where this differs")
    files = [p.relative_to(ROOT).as_posix() for p in ROOT.glob("proxy/**/*.py")]
    files += [p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/**/*.py")]
    for name in set(re.findall(r"`([\w/]+\.py)`", text)):
        assert any(f"/{file}".endswith(f"/{name}") for file in files), name
    for name in set(re.findall(r"`(\w+)/`", text)):
        assert (ROOT / "proxy" / name).is_dir(), name
