"""Where the files are, and how the tests read them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def read(path: str) -> str:
    """The text of a file under deploy/."""
    return (DEPLOY / path).read_text(encoding="utf-8")


def read_yaml(path: str) -> Any:
    """A YAML file under deploy/, parsed."""
    return yaml.safe_load(read(path))


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a systemd unit by name, in the order given; sections do not matter here."""
    found: dict[str, list[str]] = {}
    for line in read(f"systemd/{name}").replace("\\\n", " ").splitlines():
        if match := re.match(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(" ".join(match[2].split()))
    return found


def tool(name: str, package: str) -> str:
    """The path of a program; the test is skipped where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {package})")
    return found
