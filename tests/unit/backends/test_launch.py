"""The line that starts llama-server: it can be pasted as it is."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.backends import launch
from proxy.backends.base import Facts

FACTS = Facts("llama-server", "", 3, 512, "m", "/m/my model.gguf", {}, port=8081)


def value(line: str, flag: str) -> str:
    """What stands behind a flag."""
    words = shlex.split(line)
    return words[words.index(flag) + 1]


def test_all_is_filled_in(tmp_path: Path) -> None:
    """Figures, port and names of the server that runs, spelled for a shell."""
    line = launch.line(FACTS, tmp_path, port=9, batch=256)
    assert shlex.split(line)[:3] == ["llama-server", "-m", "/m/my model.gguf"]
    wanted = {"-np": "3", "-c": "1536", "--port": "8081", "-b": "256", "--cache-ram": "0"}
    assert {flag: value(line, flag) for flag in wanted} == wanted
    assert value(line, "--slot-save-path") == str(tmp_path)


def test_its_own_default_is_taken_for_no_choice() -> None:
    """Four slots are what nobody chose, and 8080 is where it listens anyway."""
    line = launch.line(replace(FACTS, total_slots=4, port=8080), None)
    assert (value(line, "-np"), value(line, "-c")) == ("2", "1024")
    assert "--port" not in line


@pytest.mark.parametrize("port", [0, 9])
def test_of_a_server_that_is_not_there(port: int) -> None:
    """What cannot be known is a name in capitals."""
    line = launch.line(None, None, port=port)
    assert (value(line, "-m"), value(line, "--slot-save-path")) == ("MODEL.gguf", "DIR")
    assert ("--port 9" in line) is bool(port)
