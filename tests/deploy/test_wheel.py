"""The wheel: it holds all of the package and nothing else, and runs where the source is not."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from proxy import __version__
from tests.deploy.files import ROOT

PACKAGE = ROOT / "proxy"


def run(*arguments: str | Path, cwd: Path = ROOT, **environ: str) -> str:
    """The output of this Python with these arguments, which must succeed."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the Dockerfile builds it."""
    place = tmp_path_factory.mktemp("dist")
    quiet = ["--quiet", "--disable-pip-version-check"]
    options: list[str | Path] = ["--no-deps", "--no-build-isolation", "--no-index", "-w", place]
    run("-m", "pip", "wheel", *quiet, *options, ".")
    (found,) = place.glob("*.whl")
    return found


def test_its_name_tells_the_version(wheel: Path) -> None:
    """Pure Python, for every system."""
    assert wheel.name == f"slotkeeper-{__version__}-py3-none-any.whl"


def test_it_holds_the_whole_package(wheel: Path) -> None:
    """Every file of the package, with the marker for type checkers and the architecture page."""
    source = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"proxy/py.typed", "proxy/ARCHITECTURE.md", "proxy/cli.py"} <= source
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == source


def test_it_says_what_it_is(wheel: Path) -> None:
    """Licence, entry point and the least Python are in its description."""
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        about = archive.read(f"{info}/METADATA").decode()
        entry = archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/licenses/LICENSE")
    assert "Requires-Python: >=3.11" in about
    assert "slotkeeper = proxy.cli:main" in entry


def test_it_runs_where_the_source_is_not(wheel: Path, tmp_path: Path) -> None:
    """Installed into a folder of its own: the command there answers, from there."""
    place = tmp_path / "site"
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run("-m", "pip", "install", *quiet, "--target", place, wheel)
    told = run("-c", "import proxy; print(proxy.__file__)", cwd=tmp_path, PYTHONPATH=str(place))
    assert Path(told.strip()).parent == place / "proxy"
    assert run("-m", "proxy", "version", cwd=tmp_path, PYTHONPATH=str(place)).endswith(
        f"{__version__}\n"
    )
    told = run("-m", "proxy", "serve", "--check-config", cwd=tmp_path, PYTHONPATH=str(place))
    assert told.startswith("configuration is valid")
