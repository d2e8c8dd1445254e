"""Settings: sources, their order, and the quality of the complaints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from proxy.config import Config, load
from proxy.core.normalise import RULES
from proxy.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """Where a test writes its configuration file."""
    return tmp_path / "config.toml"


def problems(
    path: Path | None = None,
    flags: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """What ``load`` complains about."""
    with pytest.raises(ConfigError) as caught:
        load(path, flags, environ)
    return caught.value.problems


def test_example_is_the_defaults_and_complete() -> None:
    """The example file loads, changes nothing, and names every setting there is."""
    text = EXAMPLE.read_text(encoding="utf-8")
    assert load(EXAMPLE, {}, {}) == Config() == load(None, {}, {})
    named: dict[str, set[str]] = {}
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif setting := re.match(r"(\w+) = ", line):
            named.setdefault(section, set()).add(setting[1])
    assert named == {name: set(type(part).model_fields) for name, part in dict(Config()).items()}


def test_every_setting_of_the_example_is_explained() -> None:
    """A comment stands right above each setting."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    for above, line in pairwise(lines):
        if re.match(r"\w+ = ", line):
            assert above.startswith("# "), line


def test_order_of_sources(toml: Path) -> None:
    """Flags win over the environment, the environment over the file, the file over defaults."""
    toml.write_text('[server]\nport = 1\nhost = "::1"\nmax_queue = 1\n')
    environ = {"SLOTKEEPER_SERVER__PORT": "2", "slotkeeper_server__host": "localhost"}
    server = load(toml, {"server.port": 3}, environ).server
    assert (server.port, server.host, server.max_queue) == (3, "localhost", 1)
    assert server.ping_interval == 10


def test_lists_in_the_environment() -> None:
    """A list is written with commas in a variable."""
    environ = {"SLOTKEEPER_SERVER__KEYS": "a, b", "SLOTKEEPER_SERVER__ALLOWED_HOSTS": "x.org"}
    server = load(None, {}, environ).server
    assert server.keys == (SecretStr("a"), SecretStr("b"))
    assert server.allowed_hosts == ("x.org",)


def test_variables_of_kubernetes_are_left_alone() -> None:
    """A service named slotkeeper makes Kubernetes set SLOTKEEPER_PORT; that is no setting."""
    environ = {"SLOTKEEPER_PORT": "tcp://10.0.0.1:8088", "SLOTKEEPER_SERVICE_HOST": "10.0.0.1"}
    assert load(None, {}, environ) == Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0), (0, 0), (17, 17), ("17", 17), ("1KB", 1000), ("1KiB", 1024), ("2 MB", 2_000_000),
        ("1.5GiB", 3 * 2**29), ("20GiB", 20 * 2**30), ("1TiB", 2**40), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text: object, expected: int) -> None:
    """Sizes are numbers of bytes or carry a unit."""
    assert load(None, {"cache.keep_free": text}, {}).cache.keep_free == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [(0.5, 0.5), ("3", 3), ("90s", 90), ("2m", 120), ("1h", 3600), ("2d", 172800)],
)
def test_times(text: object, expected: float) -> None:
    """Times are seconds or carry a unit."""
    assert load(None, {"cache.idle_seconds": text}, {}).cache.idle_seconds == expected


@pytest.mark.parametrize(
    "text", ["-1", -1, "1 parsec", "", True, float("nan"), float("inf"), [], 2**70]
)
def test_no_sizes(text: object) -> None:
    """What is no size is refused, with an example of one."""
    (problem,) = problems(flags={"cache.keep_free": text})
    assert 'expected a size in bytes, or like "20GiB"' in problem


def test_limit_of_the_store() -> None:
    """Automatic is a tenth of the free space, never more than 20 GiB; a figure is itself."""
    assert Config().cache.limit(1000) == 100
    assert Config().cache.limit(10**15) == 20 * 2**30
    assert load(None, {"cache.max_bytes": "5KB"}, {}).cache.limit(1000) == 5000


def test_all_problems_at_once_each_with_its_place(toml: Path) -> None:
    """Every problem of every source is told, with line, variable or flag."""
    toml.write_text(
        "port = 3\n[sever]\nx = 1\n[server]\nprot = 8\n\npolicy = 'lru'\nmax_queue = -1\n"
        "[backend]\nurl = 'ftp://x'\nslot_save_path = '/no/such'\ntokenizer = '/no/such.json'\n"
        "[cache]\nmax_files = 'many'\npolicy = 'best'\nprewarm = 7\n[cache.deep]\nx = 1\n"
    )
    found = problems(
        toml,
        {"server.port": 70000},
        {"SLOTKEEPER_SERVER__LOG_LV": "x", "SLOTKEEPER_CACHE__MAX_AGE": "0"},
    )
    variable = "environment variable SLOTKEEPER_"
    gone = 'no such directory: "/no/such"'
    assert sorted(found) == sorted(
        [
            f'{toml}:1: port: unknown setting; did you mean "server.port"?',
            f'{toml}:2: sever: unknown section or setting; did you mean "server"?',
            f'{toml}:5: server.prot: unknown setting; did you mean "port"?',
            f'{toml}:7: server.policy: unknown setting; did you mean "cache.policy"?',
            f"{toml}:8: server.max_queue: must be greater than or equal to 0, got -1",
            f'{toml}:10: backend.url: expected an address like "http://127.0.0.1:8080", got "ftp://x"',
            f"{toml}:11: backend.slot_save_path: {gone}; mkdir -p -m 700 /no/such",
            f'{toml}:12: backend.tokenizer: no such file: "/no/such.json"',
            f'{toml}:14: cache.max_files: expected a whole number, got "many"',
            f"{toml}:15: cache.policy: expected one of 'value' or 'lru', got \"best\"",
            f"{toml}:16: cache.prewarm: expected true or false, got 7",
            f"{toml}:17: cache.deep: unknown setting",
            "--port: server.port: must be less than or equal to 65535, got 70000",
            f'{variable}CACHE__MAX_AGE: cache.max_age: must be greater than 0, got "0"',
            f'{variable}SERVER__LOG_LV: server.log_lv: unknown setting; did you mean "log_level"?',
        ]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nport = \n", ":2: not TOML: Invalid value"),
        ("[server\nport = 1\n", ":1: not TOML: "),
        ("[server]\nport = [1,\n2", ":3: not TOML: "),
        ("server = 5", ":1: server: expected a section: [server]"),
        ("[[server]]\nport = 1", ":1: server: expected a section: [server]"),
        ("server.prot = 5\n", ':1: server.prot: unknown setting; did you mean "port"?'),
        ("server = { prot = 5 }\n", ':1: server.prot: unknown setting; did you mean "port"?'),
    ],
)  # fmt: skip
def test_faults_of_the_file_itself(toml: Path, text: str, expected: str) -> None:
    """A file that is no TOML, or has another shape, is told with its line."""
    toml.write_text(text)
    (problem,) = problems(toml)
    assert problem.startswith(f"{toml}{expected}")


def test_a_broken_file_does_not_hide_other_problems(toml: Path) -> None:
    """Flags and environment are checked even if the file cannot be read."""
    found = problems(toml, {"server.port": "x"})
    assert found == [
        f"{toml}: cannot be read: No such file or directory",
        '--port: server.port: expected a whole number, got "x"',
    ]
    toml.write_bytes(b"\xff")
    assert problems(toml) == [f"{toml}: cannot be read: not UTF-8"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "http://",
        "http://h:x",
        "http://h:99999",
        "http://[::1",
        "file:///x",
        "http://h:0",
        "http://h/?a=1",
        "http://h/#a",
    ],
)
def test_bad_addresses(url: str) -> None:
    """Only an address of a server, without decoration."""
    assert len(problems(flags={"backend.url": url})) == 1


def test_trailing_slash_of_the_address_is_dropped() -> None:
    """Targets begin with a slash, so the address must not end with one."""
    assert load(None, {"backend.url": "https://h:1/v/"}, {}).backend.url == "https://h:1/v"


@given(
    st.sampled_from(["server.keys", "server.admin_key", "backend.key", "backend.url"]), st.data()
)
def test_secrets_are_never_shown(setting: str, data: st.DataObject) -> None:
    """Neither a complaint nor a representation contains a key."""
    canary = "canary-7f3a"
    good = {"server.keys": [canary], "backend.url": "http://h"}.get(setting, canary)
    bad = data.draw(
        st.sampled_from(
            [["", f"{canary} x"], {"a": canary}, [[canary]], [f"{canary},"]]
            if setting == "server.keys"
            else [f"http://u:{canary}@h", f"http://{canary}:x@"]
            if setting == "backend.url"
            else [f"{canary} x", f"{canary},", [canary], f"{canary}\n", f"{canary}ö"]
        )
    )
    assert canary not in "\n".join(problems(flags={setting: bad}))
    config = load(None, {setting: good}, {})
    assert canary not in f"{config!r} {config} {config.model_dump_json()}"


def test_empty_keys_are_refused() -> None:
    """An empty key would match an empty Authorization header."""
    (problem,) = problems(environ={"SLOTKEEPER_SERVER__KEYS": "a,,b"})
    assert "empty key" in problem


def test_frozen() -> None:
    """Nobody changes a setting at run time."""
    with pytest.raises(ValidationError):
        Config().server.port = 1


def test_directories(tmp_path: Path) -> None:
    """The store is by default inside the slot directory; without one there are no snapshots."""
    assert (Config().slot_dir, Config().store_dir) == (None, None)
    here = {"backend.slot_save_path": str(tmp_path)}
    assert load(None, here, {}).slot_dir == tmp_path
    assert load(None, here, {}).store_dir == tmp_path / "slotkeeper"
    assert load(None, here | {"cache.store": "/other"}, {}).store_dir == Path("/other")
    assert load(None, here | {"cache.enabled": False}, {}).store_dir is None


def test_the_ledgers_folder() -> None:
    """As set; with the snapshots; else where this user's programs keep their state."""
    home, state, local = Path("/home/me"), Path("/state").absolute(), Path("/local").absolute()
    users = {"XDG_STATE_HOME": str(state), "LOCALAPPDATA": str(local)}
    config = Config()
    assert config.ledger_dir(users, home) == state / "slotkeeper" / "ledger"
    del users["XDG_STATE_HOME"]
    assert config.ledger_dir(users, home) == local / "slotkeeper" / "ledger"
    fallback = home / ".local" / "state" / "slotkeeper" / "ledger"
    assert config.ledger_dir({}, home) == fallback
    assert config.ledger_dir({"XDG_STATE_HOME": "here"}, home) == fallback
    stored = load(None, {"backend.slot_save_path": ".", "cache.store": "/s"}, {})
    assert stored.ledger_dir(users, home) == Path("/s/ledger")
    named = load(None, {"normalise.ledger": "/l", "cache.store": "/s"}, {})
    assert named.ledger_dir(users, home) == Path("/l")


def test_rules_are_switched_by_name(toml: Path) -> None:
    """Every rule of the table, on or off; in a variable with commas."""
    every = tuple(f"{sign}{rule.name}" for rule in RULES for sign in "+-")
    assert load(None, {"normalise.rules": list(every)}, {}).normalise.rules == every
    environ = {"SLOTKEEPER_NORMALISE__RULES": "-tool-order, +memory"}
    assert load(None, {}, environ).normalise.rules == ("-tool-order", "+memory")
    toml.write_text('[normalise]\nmode = "shadow"\nrules = ["-clock"]\n')
    assert load(toml, {}, {}).normalise.mode == "shadow"


def test_unknown_rules_are_told_each_with_the_nearest_name(toml: Path) -> None:
    """One problem for each; a sign left out is told too, and far from every name all are."""
    toml.write_text('[normalise]\n\nrules = ["+memry", "-clock", "tool-order", "-zzz", 5]\n')
    expected = f'{toml}:3: normalise.rules: expected "+" or "-" and the name of a rule'
    every = ", ".join(rule.name for rule in RULES)
    assert problems(toml) == [
        f'{expected}, like "+memory", got "+memry"',
        f'{expected}, like "-tool-order", got "tool-order"',
        f'{expected}, one of {every}, got "-zzz"',
        f"{toml}:3: normalise.rules: expected text in quotes, got 5",
    ]


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ({"cache.enabled": False}, []),
        ({"backend.kind": "llama_server"}, ["backend.slot_save_path"]),
        ({"backend.kind": "llama_server", "cache.enabled": False}, []),
        ({}, []),
        ({"cache.enabled": False, "server.host": "::1"}, []),
        ({"cache.enabled": False, "server.host": "localhost"}, []),
        ({"cache.enabled": False, "server.host": "0.0.0.0"}, ["server.host"]),
        ({"cache.enabled": False, "server.host": "box.lan"}, ["server.host"]),
        ({"cache.enabled": False, "server.host": "box.lan", "server.keys": ["k"]}, []),
        (
            {"cache.enabled": False, "server.keys": ["k"], "server.admin_key": "k"},
            ["server.admin_key"],
        ),
    ],
)
def test_warnings(flags: dict[str, object], warned: list[str]) -> None:
    """What is allowed and probably not meant is said, and nothing else."""
    assert [text.partition(":")[0] for text in load(None, flags, {}).warnings()] == warned


def test_several_addresses(tmp_path: Path) -> None:
    """A list in the file, commas elsewhere; each is checked, none is named twice."""
    toml = tmp_path / "c.toml"
    toml.write_text('[backend]\nurl = ["http://a:1/", "http://b:2"]\n')
    assert load(toml, {}, {}).backend.urls == ("http://a:1", "http://b:2")
    variable = {"SLOTKEEPER_BACKEND__URL": "http://a:1, http://b:2/"}
    assert load(None, {}, variable).backend.urls == ("http://a:1", "http://b:2")
    assert load(None, {}, {}).backend.urls == ("http://127.0.0.1:8080",)
    for bad in ("http://a:1,", "http://a:1,ftp://b", ["http://a:1", 3], [], "http://a,http://a/"):
        assert len(problems(flags={"backend.url": bad})) == 1


def test_one_llama_server() -> None:
    """Several of them are refused, for now; of other kinds they are not."""
    flags = {"backend.url": "http://a,http://b", "backend.kind": "llama_server"}
    (problem,) = problems(flags=flags)
    assert problem == "--backend: backend.url: only one address of a llama-server is possible"
    assert len(load(None, {**flags, "backend.kind": "fastflowlm"}, {}).backend.urls) == 2
