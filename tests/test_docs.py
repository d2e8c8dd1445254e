"""The documents: what they name exists, what exists is named, and their commands are understood."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from proxy.backends import launch
from proxy.cli import app
from proxy.commands import common
from proxy.config import FLAGS, PREFIX, Config, load
from proxy.core.normalise import RULES
from proxy.core.records import Mode, Reason
from proxy.core.why import Cold
from proxy.dialects import DIALECTS
from proxy.errors import ConfigError, SlotkeeperError
from proxy.reload import LIVE
from proxy.server.actions import Actions
from proxy.server.gate import OWN
from proxy.telemetry.logs import LEVELS
from proxy.telemetry.metrics import Metrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "proxy" / "ARCHITECTURE.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
FOR_USERS = "\n".join([README, *PAGES.values()])
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "proxy" / "ARCHITECTURE.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
README_LINES = 300
SETTINGS = {f"{s}.{name}" for s, part in Config() for name in type(part).model_fields}
LOGS = {**{name: name for name in LEVELS}, "exception": "error"}  # the level of each method


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str = FOR_USERS) -> list[list[str]]:
    """The lines of the shell blocks, as words."""
    lines = "\n".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line]


def split(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables set before a command, and the command."""
    n = next(i for i, word in enumerate(command) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in command[:n]), command[n:]


def slotkeeper_commands() -> Iterator[tuple[dict[str, str], list[str]]]:
    """The documents' calls of the command line."""
    for variables, words in map(split, commands()):
        if words[0] == "slotkeeper":
            yield variables, words[1:]


def levels(code: ast.AST) -> list[str]:
    """Of the methods of a ``log`` that are named in it."""
    return [
        LOGS[node.attr]
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute) and node.attr in LOGS
        if isinstance(node.value, ast.Name) and node.value.id in ("log", "_log")
    ]


def logged(source: str) -> dict[str, set[str]]:
    """The events of a module, with their levels; one that cannot be found is an error."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    chosen = {ast.unparse(one.targets[0]): at for one in assigned if (at := levels(one.value))}
    found: dict[str, set[str]] = {}
    direct: list[str] = []
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        direct += (here := levels(call.func))
        if named := here or chosen.get(ast.unparse(call.func)):
            assert isinstance(call.args[0], ast.Constant), ast.unparse(call)
            found.setdefault(str(call.args[0].value), set()).update(named)
    assert len(direct) + sum(map(len, chosen.values())) == len(levels(tree))
    return found


def every_event() -> dict[str, set[str]]:
    """What the proxy logs, with the levels."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "proxy").rglob("*.py"):
        for event, at in logged(path.read_text(encoding="utf-8")).items():
            found.setdefault(event, set()).update(at)
    return found


def test_every_reason_and_mode_is_explained() -> None:
    """There is a row for each reason, and an item in README for each mode."""
    for reason in Reason:
        assert f"\n| `{reason}` |" in PAGES["requests"], reason
    for mode in Mode:
        assert f"\n- **{mode}**:" in README, mode


def test_every_cause_is_explained() -> None:
    """There is a row for each cause of a cold answer."""
    for cause in Cold:
        assert f"\n| `{cause}` |" in PAGES["requests"], cause


def test_every_status_is_explained() -> None:
    """The table of errors has each status that an error of the proxy's own can have."""
    rows = re.findall(r"^\| (\d{3}(?:, \d{3})*) \| ", PAGES["requests"], re.MULTILINE)
    internal = {SlotkeeperError.status}
    made = {error.status for error in SlotkeeperError.__subclasses__()} - internal
    assert {int(status) for row in rows for status in row.split(", ")} == made


def test_every_metric_is_listed_and_no_other() -> None:
    """The metrics of the page are those the proxy has, and the other documents name no other."""
    text = Metrics().render()[0].decode()
    made = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    made = {name for name in made if not name.endswith("_created")}
    assert set(re.findall(r"`(slotkeeper_\w+)`", PAGES["metrics"])) == made
    assert set(re.findall(r"`(slotkeeper_\w+)`", FOR_USERS)) == made


def test_every_label_is_listed() -> None:
    """A metric's row names its labels."""
    text = Metrics().render()[0].decode()
    page = PAGES["metrics"]
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        family = re.sub(r"_(bucket|count|sum|created)$", "", name)
        family = family if f"`{family}`" in page else f"{family}_total"
        row = next(line for line in page.splitlines() if f"`{family}`" in line)
        for label in set(re.findall(r"(\w+)=", labels)) - {"le"}:
            assert f"`{label}`" in row, (family, label)


def test_every_event_of_the_log_is_explained_and_no_other() -> None:
    """The page of the log has one row for each event, with its levels, and what it means."""
    made = every_event()
    assert made["mode"] == {"info", "warning"}  # the method is chosen before it is called
    lines = [line for line in PAGES["log"].splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert all(len(row) == len(("event", "level", "means", "do")) and row[2] for row in rows)
    assert sorted((event, level) for event, level, *_ in rows) == sorted(
        (f"`{event}`", ", ".join(level for level in LEVELS if level in at))
        for event, at in made.items()
    )


def test_every_rule_is_listed() -> None:
    """The table of rules is the one the proxy has, in its order, with its defaults."""
    row = re.compile(r"^\| `([\w-]+)` \| (.*) \| (.*) \| (on|known|off) \|$", re.MULTILINE)
    rows = row.findall(PAGES["prompts"])
    assert rows == [(rule.name, rule.what, rule.where, rule.default) for rule in RULES]


def test_every_cached_path_is_listed() -> None:
    """README names each path of the cached path in its table of requests."""
    (row,) = [line for line in README.splitlines() if "the cached path, streaming or not" in line]
    assert set(re.findall(r"(/[\w/]+)`", row)) == set(DIALECTS)


def test_every_setting_that_is_named_exists() -> None:
    """Settings are written as the configuration knows them."""
    named = re.findall(r"`((?:server|backend|cache|normalise)\.\w+)[ `]", FOR_USERS)
    assert named
    assert set(named) - every_event().keys() <= SETTINGS


def test_every_setting_is_listed(tmp_path: Path) -> None:
    """The page of settings has a row for each, with its default and what a reload makes of it."""
    row = re.compile(r"^\| `(\w+\.\w+)` \| `(.*?)` \| .+ \| (live|restart) \|$", re.MULTILINE)
    rows = row.findall(PAGES["settings"])
    assert [name for name, _, _ in rows] == [
        f"{section}.{name}" for section, part in Config() for name in type(part).model_fields
    ]
    file = tmp_path / "defaults.toml"
    file.write_text("".join(f"{name} = {default}\n" for name, default, _ in rows))
    assert load(file, {}, {}) == Config()
    assert {name for name, _, reload in rows if reload == "live"} == LIVE


def test_the_command_lines_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ``slotkeeper`` call in a document is a valid one, its files and folders given."""
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
    """The table of commands is what the command line has, each with its own options; those that
    many share stand in the table below it.
    """
    section = PAGES["commands"]
    rows = dict(re.findall(r"^\| `([a-z][a-z -]*)` \| .* \| (.*) ?\|$", section, re.MULTILINE))
    shared = re.findall(r"^\| (`-.*?) \| .* \| .* \|$", section, re.MULTILINE)
    for_many = {option for row in shared for option in re.findall(r"`(-[\w-]+)`", row)}
    there = dict(every_command(get_command(app)))
    assert set(rows) == set(there)
    used: set[str] = set()
    for name, found in there.items():
        options = {option for option in found if option.startswith("-")}
        used |= options
        assert set(re.findall(r"`(-[\w-]+)`", rows[name])) == options - for_many, name
    assert for_many - used == {"--help"}


def test_every_exit_status_is_listed() -> None:
    """The table has the four, and the help names them too."""
    codes = [0, common.PROBLEM, common.USAGE, common.UNREACHABLE]
    rows = re.findall(r"^\| (\d) \| ", PAGES["commands"], re.MULTILINE)
    assert [int(code) for code in rows] == codes
    help_text = CliRunner().invoke(app, ["--help"]).output
    for code in codes:
        assert re.search(rf"\b{code} [a-z]", help_text), code


def test_every_flag_is_named() -> None:
    """The page of settings names each flag that sets something, and those of ``serve``."""
    for flag in (*FLAGS.values(), "--check-config", "-c"):
        assert re.search(rf"[` ]{flag}[` \n]", PAGES["settings"]), flag


def test_a_wrong_variable_would_be_noticed() -> None:
    """A variable that names no setting is an error, so the examples above prove something."""
    with pytest.raises(ConfigError):
        load(None, {}, {f"{PREFIX}SERVER__KEY": "alice"})


def test_make_targets_exist() -> None:
    """Each ``make`` in a document is a target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [words[1] for _, words in map(split, commands()) if words[0] == "make"]
    targets += re.findall(r"`make (\w+)`", FOR_USERS)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_demo_variables_exist() -> None:
    """The demo reads each ``DEMO_`` variable in README, and README names each it reads."""
    demo = (ROOT / "proxy" / "demo.py").read_text(encoding="utf-8")
    named = set(re.findall(r"DEMO_[A-Z]+", README))
    assert named == set(re.findall(r"\"(DEMO_[A-Z]+)\"", demo))


def test_the_first_screen() -> None:
    """What a newcomer needs comes first: figures, the two commands, the launch line, the URL."""
    needed = ("| measured |", "make demo", "curl -i", "llama-server -m", "slotkeeper serve")
    at = [README.index(words) for words in (*needed, "Clients change one URL: ", "## Clients")]
    assert at == sorted(at)
    assert len(README.splitlines()) <= README_LINES


def test_every_page_can_be_found() -> None:
    """README links to each page under docs/."""
    for name in PAGES:
        assert f"](docs/{name}.md)" in README, name


@pytest.mark.parametrize(
    "client",
    [
        *("Claude Code", "OpenCode", "goose", "Open WebUI", "SillyTavern"),
        *("Codex", "Continue", "Home Assistant"),
    ],
)
def test_clients_have_a_recipe(client: str) -> None:
    """A row in README with the line to change, and a section with the whole of it."""
    assert re.search(rf"^\| {client} \| .*http://127\.0\.0\.1:8088", README, re.MULTILINE)
    section = PAGES["clients"].partition(f"\n## {client}\n")[2].partition("\n## ")[0]
    assert "http://127.0.0.1:8088" in section


def test_files_for_clients_can_be_read() -> None:
    """Each piece of a client's configuration is what it says it is, and has the address."""
    page = PAGES["clients"]
    parsers = {"json": orjson.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    found = [(text, parsers[kind]) for kind in parsers for text in blocks(page, kind)]
    assert len(found) == len(parsers)
    for text, parse in found:
        assert isinstance(parse(text), dict)
        assert "http://127.0.0.1:8088/v1" in text


def test_llama_server_is_started_as_doctor_says() -> None:
    """Each launch line has the flags of the one ``doctor`` prints."""
    flags = {word for word in launch.line(None, None).split() if word.startswith("-")}
    lines = [words for words in commands() if words[0] == "llama-server"]
    assert len(lines) > 1
    for words in lines:
        assert {word for word in words if word.startswith("-")} == flags


def test_the_proxys_own_pages_are_listed() -> None:
    """The table of pages is the one the server has."""
    source = (ROOT / "proxy" / "server" / "admin.py").read_text(encoding="utf-8")
    pages = {f"{OWN}{path}" for path in re.findall(r"\{OWN\}(/[\w/]+)\"", source)}
    assert set(re.findall(rf"^\| `({OWN}[\w/]+)", PAGES["api"], re.MULTILINE)) == pages


def test_the_proxys_own_actions_are_listed() -> None:
    """The table of actions is the one the server has."""
    nobody: Any = None
    made = {f"{method} {path}" for method, path in Actions(nobody).table()}
    row = re.compile(rf"^\| `((?:POST|DELETE) {OWN}/[\w/]+)`", re.MULTILINE)
    listed = row.findall(PAGES["api"])
    assert {line.replace("/ID", "/{id}") for line in listed} == made


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    """A relative link names a file, seen from the document's folder, and a heading that it has."""
    text = document.read_text(encoding="utf-8")
    for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]+))?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path = document.parent / target if target else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", line).lower().replace(" ", "-") for line in headings}
            assert anchor in slugs, (target, anchor)


def test_the_modules_named_in_the_architecture_exist() -> None:
    """Each file and folder that ARCHITECTURE.md says does something is there."""
    text, _, _ = ARCHITECTURE.partition("\n## Where this differs")
    files = [p.relative_to(ROOT).as_posix() for p in ROOT.glob("proxy/**/*.py")]
    files += [p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/**/*.py")]
    for name in set(re.findall(r"`([\w/]+\.py)`", text)):
        assert any(f"/{file}".endswith(f"/{name}") for file in files), name
    for name in set(re.findall(r"`(\w+)/`", text)):
        assert (ROOT / "proxy" / name).is_dir(), name
