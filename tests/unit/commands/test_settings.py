"""``check-config``, ``config show``, ``config schema``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import orjson
import pytest

from proxy.config import Config
from tests.unit.commands.conftest import Run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration with keys in it."""
    path = tmp_path / "c.toml"
    path.write_text(
        '[server]\nport = 9\nkeys = ["hunter2"]\n'
        '[backend]\nkind = "llama_server"\nkey = "hunter3"\n'
    )
    return path


def test_check_config(run: Run, file: Path) -> None:
    """Good settings are called so, with what is odd about them."""
    result = run("check-config", "-c", str(file))
    assert result.exit_code == 0
    assert result.stdout.startswith("configuration is valid\nwarning: backend.slot_save_path:")


def test_check_config_for_programs(run: Run, file: Path, tmp_path: Path) -> None:
    """Valid or not, the same three fields, and status 2 where it is not."""
    result = run("check-config", "-c", str(file), "--json")
    found = orjson.loads(result.stdout)
    assert (result.exit_code, found["valid"], found["problems"]) == (0, True, [])
    file.write_text("[server]\nprot = 1\nport = 70000\n")
    result = run("check-config", "-c", str(file), "--json")
    found = orjson.loads(result.stdout)
    assert (result.exit_code, found["valid"], len(found["problems"])) == (2, False, 2)


def test_config_show(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting with its value and the place it comes from; keys are not shown."""
    monkeypatch.setenv("SLOTKEEPER_CACHE__KEEP_FREE", "1GiB")
    result = run("config", "show", "-c", str(file), "--json")
    assert result.exit_code == 0
    rows = {row["setting"]: row for row in orjson.loads(result.stdout)["settings"]}
    assert set(rows) == {f"{s}.{name}" for s, part in Config() for name in type(part).model_fields}
    assert rows["server.port"] | {"from": ""} == {"setting": "server.port", "value": 9, "from": ""}
    assert rows["server.port"]["from"].endswith("c.toml:2")
    assert rows["cache.keep_free"]["value"] == 2**30
    assert rows["cache.keep_free"]["from"] == "environment variable SLOTKEEPER_CACHE__KEEP_FREE"
    assert rows["cache.policy"]["from"] == "default"
    assert "hunter" not in result.stdout
    plain = run("config", "show", "-c", str(file)).stdout
    assert "hunter" not in plain
    assert "(set, not shown)" in plain
    for shown in (
        "cache.max_bytes auto default",
        "cache.enabled true default",
        "cache.daily_write 200.0 GiB default",
        "cache.max_files 256 default",
        "cache.idle_seconds 3 s default",
        "server.queue_timeout 1 h 0 min default",
    ):
        assert any(" ".join(line.split()) == shown for line in plain.splitlines()), shown


def test_config_show_of_a_wrong_one(run: Run, file: Path) -> None:
    """Nothing is shown but the problems."""
    file.write_text("[server]\nport = 70000\n")
    result = run("config", "show", "-c", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "server.port: must be" in result.stderr


def test_config_schema(run: Run) -> None:
    """It is JSON schema, knows every setting the example has, and allows sizes with a unit."""
    schema = orjson.loads(run("config", "schema").stdout)
    example = tomllib.loads((ROOT / "config.example.toml").read_text())
    for section, settings in example.items():
        name = schema["properties"][section].get("$ref", "").rpartition("/")[2]
        known = schema["$defs"][name or section.title()]["properties"]
        assert set(settings) <= set(known)
    size = schema["$defs"]["Cache"]["properties"]["keep_free"]
    assert {"type": "string"} in size["anyOf"]
