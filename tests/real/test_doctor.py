"""``slotkeeper doctor --probe`` on the real engine: the five servers users have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.engine import free_port
from tests.real.conftest import EngineFactory
from tests.real.proxies import REPO

pytestmark = pytest.mark.real


def examine(url: str, folder: Path) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit status, findings by subject, and the launch line."""
    command = [sys.executable, "-m", "proxy", "doctor", "--probe", "--json"]
    command += ["--backend", url, "--slot-save-path", str(folder)]
    settings = {
        "SLOTKEEPER_CACHE__KEEP_FREE": "0",
        "SLOTKEEPER_SERVER__PORT": str(free_port()),
    }
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, **settings}, cwd=REPO, check=False
    )
    assert done.stderr == b""
    found = orjson.loads(done.stdout)
    return done.returncode, {one["subject"]: one for one in found["findings"]}, found["launch"]


def test_right_flags(engine: EngineFactory, tiny_model: Path) -> None:
    """Nothing is wrong; the state came back whole; the batch that was set is seen."""
    handle = engine(tiny_model, batch=128)
    status, found, _ = examine(handle.url, handle.slot_dir)
    assert status == 0
    assert found["mode"]["text"].startswith("exclusive")
    assert found["memory"]["text"].startswith("class A")
    assert found["round trip"]["text"].endswith("560 reused")
    assert found["batch"]["text"].startswith("128 tokens at a time")
    assert list(handle.slot_dir.iterdir()) == []


def test_default_flags(engine: EngineFactory, tiny_model: Path) -> None:
    """The RAM cache is found out, and the line has what lifts it."""
    handle = engine(tiny_model, defaults=True)
    status, found, launch = examine(handle.url, handle.slot_dir)
    assert status == 1
    assert "RAM cache is on" in found["mode"]["text"]
    assert "--cache-ram 0 -sps 0" in launch
    assert f"-m {tiny_model}" in launch


def test_wrong_directory(engine: EngineFactory, tiny_model: Path, tmp_path: Path) -> None:
    """The file is not where it should be."""
    status, found, _ = examine(engine(tiny_model).url, tmp_path)
    assert status == 1
    assert found["same folder"]["level"] == "problem"
    assert "another folder" in found["same folder"]["text"]


def test_no_save_path(engine: EngineFactory, tiny_model: Path, tmp_path: Path) -> None:
    """llama-server's 501 becomes the flag that is missing."""
    handle = engine(tiny_model, slot_save_path=None)
    status, found, launch = examine(handle.url, tmp_path)
    assert status == 1
    assert found["same folder"]["text"] == "the server runs without --slot-save-path"
    assert f"--slot-save-path {tmp_path}" in launch


def test_backend_down(tmp_path: Path) -> None:
    """The address is named, and what to ask oneself."""
    url = f"http://127.0.0.1:{free_port()}"
    status, found, _ = examine(url, tmp_path)
    assert status == 1
    assert url in found["backend"]["text"]
    assert "mode" not in found
