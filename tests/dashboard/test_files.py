"""The page's files: what is vendored is unchanged, what is ours asks for nothing elsewhere."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.dashboard.files import AXE, DASHBOARD, ROOT

VENDOR = DASHBOARD / "vendor"
OURS = sorted(path for path in DASHBOARD.iterdir() if path.is_file())
SCRIPTS = [path for path in OURS if path.suffix == ".js"]


@pytest.mark.parametrize("folder", [VENDOR, AXE.parent], ids=["page", "tests"])
def test_vendored_files_are_unchanged(folder: Path) -> None:
    """Each vendored file, licences included, has the digest it was taken with."""
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split() for line in lines)}
    files = {path.name for path in folder.iterdir()} - {"SHA256SUMS", "README.md"}
    assert set(sums) == files
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("folder", [VENDOR, AXE.parent], ids=["page", "tests"])
def test_vendored_files_have_a_licence(folder: Path) -> None:
    """The list of vendored files names each and its licence."""
    table = (folder / "README.md").read_text(encoding="utf-8")
    for path in (*folder.glob("*.js"), *folder.glob("*.css")):
        (row,) = [line for line in table.splitlines() if f"`{path.name}`" in line]
        assert re.search(r"\b(MIT|Apache-2\.0|MPL-2\.0)\b", row)
    assert list(folder.glob("LICENSE.*.txt"))


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_address_elsewhere(path: Path) -> None:
    """No file of ours names another host, so the page works offline."""
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_keep_the_rules(path: Path) -> None:
    """Small modules; no markup out of data, no code out of text; what they import exists."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
    for name in re.findall(r'from "\./([^"]+)"', text):
        assert (DASHBOARD / name).is_file(), name


def test_the_page_has_no_inline_code() -> None:
    """The strict policy allows none: scripts and styles are files, and those named exist."""
    text = (DASHBOARD / "index.html").read_text(encoding="utf-8")
    assert "<style" not in text
    assert not re.search(r"\s(style|on\w+)=", text)
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    for name in re.findall(r'(?:src|href)="([\w./]+\.(?:js|css|svg))"', text):
        assert (DASHBOARD / name).is_file(), name


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    """An installed proxy has every file of the page, licences included."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    wanted = {path.relative_to(ROOT).as_posix() for path in DASHBOARD.rglob("*") if path.is_file()}
    assert wanted <= shipped
