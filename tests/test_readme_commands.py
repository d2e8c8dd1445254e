"""The documents' commands, run: each shell block marked ``<!-- run -->``, in order, as it stands.

Only the two addresses are others than in the text: a fake llama-server has a free port, and so has
the proxy, which README's own line starts.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from tests.integration.fake_llama_server import FakeLlamaServer

ROOT = Path(__file__).parent.parent
BACKGROUND, TWICE = "in the background", "twice"
MARKED = re.compile(rf"<!-- run(?: ({BACKGROUND}|{TWICE}))? -->\n```sh\n(.*?)```\n", re.DOTALL)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    if MARKED.search(path.read_text(encoding="utf-8"))
)


@dataclass
class Shell:
    """A user's shell in a folder of its own, in front of a running proxy."""

    folder: Path
    environ: Mapping[str, str]
    ports: Mapping[str, str]

    async def start(self, script: str, pipe: int | None) -> asyncio.subprocess.Process:
        """A script whose first fault ends it; ``pipe``: where its log goes."""
        for written, real in self.ports.items():
            script = script.replace(f"127.0.0.1:{written}", f"127.0.0.1:{real}")
        return await asyncio.create_subprocess_exec(
            *("sh", "-e", "-c", script),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=pipe,
            cwd=self.folder,
            env=dict(self.environ),
        )

    async def run(self, script: str) -> str:
        """What a block prints; it must end well."""
        process = await self.start(script, asyncio.subprocess.STDOUT)
        out = (await process.communicate())[0].decode()
        assert process.returncode == 0, f"{script}\n{out}"
        return out


def marked(page: str) -> list[tuple[str, str]]:
    """How each marked block of a page is to be run, and its text."""
    return MARKED.findall((ROOT / page).read_text(encoding="utf-8"))


def surroundings() -> dict[str, str]:
    """This process's environment without settings, the installed command first on the path."""
    kept = {name: value for name, value in os.environ.items() if "SLOTKEEPER" not in name}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "SLOTKEEPER_SERVER__PORT": "0",
        "SLOTKEEPER_SERVER__LOG_FORMAT": "json",
        "SLOTKEEPER_CACHE__KEEP_FREE": "0",
    }


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    """README's background block runs, in a folder that has what the documents speak of."""
    for program in ("sh", "curl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    (tmp_path / "DIR").mkdir(mode=0o700)
    shutil.copy(ROOT / "config.example.toml", tmp_path)
    (script,) = [text for how, text in marked("README.md") if how == BACKGROUND]
    async with FakeLlamaServer(tmp_path / "DIR") as fake:
        ports = {"8080": str(fake.port)}
        before = Shell(tmp_path, surroundings(), ports)
        process = await before.start(f"exec {script}", asyncio.subprocess.PIPE)
        port, rest = await _listening(process)
        environ = {**before.environ, "SLOTKEEPER_SERVER__PORT": port}
        yield Shell(tmp_path, environ, {**ports, "8088": port})
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        await rest


async def _listening(process: asyncio.subprocess.Process) -> tuple[str, asyncio.Task[bytes]]:
    """The proxy's port as soon as it serves, and who reads the rest of its log."""
    assert process.stderr is not None
    async for line in process.stderr:
        event = orjson.loads(line)
        if event["event"] == "listening":
            rest = asyncio.create_task(process.stderr.read())
            return event["url"].rpartition(":")[2], rest
    raise AssertionError(f"ended with {await process.wait()}")


@pytest.mark.parametrize("page", PAGES)
async def test_marked_blocks_run(shell: Shell, page: str) -> None:
    """Each ends with status 0, and no answer is an error."""
    for how, script in marked(page):
        if how == BACKGROUND:
            continue
        for _ in range(2 if how == TWICE else 1):
            out = await shell.run(script)
            assert '"error"' not in out, out


async def test_readme_keeps_its_word(shell: Shell) -> None:
    """Sent twice, the demo's request is hot; the checks say ``exclusive``, with no problem."""
    (demo,) = [script for how, script in marked("README.md") if how == TWICE]
    assert "X-Slotkeeper: cold" in await shell.run(demo)
    assert "X-Slotkeeper: slot-hit" in await shell.run(demo)
    (check,) = [script for _, script in marked("README.md") if "readyz" in script]
    out = await shell.run(check)
    assert out.count("exclusive") == 3
    assert "0 problems" in out


def test_marks_are_understood() -> None:
    """Each mark is one of the three and stands directly before a shell block."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert len(MARKED.findall(text)) == text.count("<!--"), path.name
