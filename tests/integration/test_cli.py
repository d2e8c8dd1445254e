"""The command line against ``slotkeeper serve`` as a process of its own, before the fake."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from typer.testing import CliRunner

from proxy.cli import app
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, chat

ROOT = Path(__file__).parents[2]
ADMIN = "admin-51d0"
CANARY = "canary-77aa"


@dataclass
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, parsed."""
        return orjson.loads(self.out)


@dataclass
class Running:
    """A proxy, and the command line that asks it."""

    fake: FakeLlamaServer
    slot_dir: Path
    url: str = ""

    async def start(self, port: int) -> None:
        """Until it listens; 0 takes any port."""
        environ = {
            **os.environ,
            "SLOTKEEPER_CACHE__KEEP_FREE": "0",
            "SLOTKEEPER_CACHE__IDLE_SECONDS": "0",
            "SLOTKEEPER_SERVER__LOG_FORMAT": "json",
            "SLOTKEEPER_SERVER__ADMIN_KEY": ADMIN,
        }
        flags = ["--backend", self.fake.url, "--slot-save-path", str(self.slot_dir)]
        self.process = await begin(["serve", *flags, "--port", str(port)], environ)
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            event = orjson.loads(line)
            if event["event"] == "listening":
                self.url = event["url"]
                break
        assert self.url
        self._rest = asyncio.create_task(self.process.stderr.read())

    async def restart(self) -> None:
        """After its end, at the address it had."""
        await self._rest
        await self.start(int(self.url.rpartition(":")[2]))

    async def kill(self) -> None:
        """At the end of a test, if it still runs."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._rest

    async def slotkeeper(self, *words: str, stdin: str = "", key: str = ADMIN) -> Said:
        """One command, in a thread of this process: a start of Python takes longer than most."""
        environ = {"SLOTKEEPER_URL": self.url, "SLOTKEEPER_ADMIN_KEY": key}
        result = await asyncio.to_thread(
            CliRunner().invoke, app, list(words), input=stdin, env=environ
        )
        return Said(result.exit_code, result.stdout, result.stderr)


async def begin(words: Sequence[str], environ: dict[str, str]) -> asyncio.subprocess.Process:
    """``python -m proxy`` with these words."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *words),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=ROOT,
        env=environ,
    )


@pytest.fixture
async def proxy(fake: FakeLlamaServer, slot_dir: Path) -> AsyncIterator[Running]:
    """It listens, has proved the mode, and has an admin key."""
    started = Running(fake, slot_dir)
    await started.start(0)
    yield started
    await started.kill()


async def test_what_it_shows(proxy: Running, client: aiohttp.ClientSession) -> None:
    """After one conversation: status, slots, conversations, decision log, log, snapshots."""
    body = chat(f"{CANARY} {LONG}", stream=True)
    async with client.post(proxy.url + CHAT, json=body) as answer:
        assert answer.status == 200
        await answer.read()
    status = (await proxy.slotkeeper("status", "--json")).json
    assert (status["mode"], status["totals"]["requests"]) == ("exclusive", 1)
    text = await proxy.slotkeeper("status")
    assert text.code == 0
    assert "exclusive: pinning, saving and restoring were proved" in text.out
    (row,) = (await proxy.slotkeeper("conversations", "--json")).json["conversations"]
    slots = (await proxy.slotkeeper("slots", "--json")).json["slots"]
    assert row["id"] in {slot["conversation"] for slot in slots}
    assert row["id"][:12] in (await proxy.slotkeeper("slots")).out
    (decision,) = (await proxy.slotkeeper("requests", "--json")).json["requests"]
    full = await proxy.slotkeeper("requests", decision["request_id"])
    assert "first token" in full.out
    assert "cold" in (await proxy.slotkeeper("requests")).out
    logs = await proxy.slotkeeper("logs", "--level", "info")
    assert "listening" in logs.out
    assert CANARY not in logs.out
    assert ADMIN not in logs.out + text.out


async def test_explain_changes_nothing_and_warm_does(proxy: Running) -> None:
    """A request that is explained leaves no trace; warmed, it is held the next time."""
    request = orjson.dumps({"messages": chat(LONG)["messages"]}).decode()
    before = (await proxy.slotkeeper("slots", "--json")).json
    found = await proxy.slotkeeper("explain", "-", "--json", stdin=request)
    assert found.code == 0
    assert (found.json["conversation"], found.json["prefix"]["tokens"]) == (None, 0)
    shown = await proxy.slotkeeper("explain", "-", stdin=request)
    assert "the client's own bytes go out" in shown.out
    assert (await proxy.slotkeeper("slots", "--json")).json == before
    assert (await proxy.slotkeeper("conversations", "--json")).json == {"conversations": []}
    warmed = (await proxy.slotkeeper("warm", "-", "--json", stdin=request)).json
    assert warmed["computed"] > 0
    assert warmed["snapshot"]
    again = await proxy.slotkeeper("explain", "-", "--json", stdin=request)
    assert again.json["prefix"]["tokens"] > 0


async def test_explain_shows_what_a_rule_changes(proxy: Running) -> None:
    """A volatile field is in the difference, with the rule's name."""
    block = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12c;"}
    system = [block, {"type": "text", "text": "You are Claude Code."}]
    request = {"model": "m", "max_tokens": 4, "system": system, **chat("hello")}
    said = await proxy.slotkeeper(
        "explain", "-", "--path", "/v1/messages", stdin=orjson.dumps(request).decode()
    )
    assert said.code == 0
    assert "billing-header" in said.out
    assert any(line.startswith("-") and "cch=" in line for line in said.out.splitlines())


async def test_snapshots(proxy: Running) -> None:
    """Listed, shown, pinned, verified, pruned, removed; the file goes with the row."""
    request = orjson.dumps({"messages": chat(LONG)["messages"]}).decode()
    await proxy.slotkeeper("warm", "-", stdin=request)
    (row,) = (await proxy.slotkeeper("cache", "ls", "--json")).json["snapshots"]
    short = row["id"][:8]
    assert (await proxy.slotkeeper("cache", "pin", short)).code == 0
    shown = (await proxy.slotkeeper("cache", "show", short, "--json")).json
    assert shown["pinned"] is True
    assert "0 damaged" in (await proxy.slotkeeper("cache", "verify")).out
    assert (await proxy.slotkeeper("cache", "prune")).code == 0
    assert (await proxy.slotkeeper("cache", "pin", short, "--off")).code == 0
    files = [path for path in proxy.slot_dir.glob("slotkeeper/*/*.kv") if path.stem == row["id"]]
    assert len(files) == 1
    assert (await proxy.slotkeeper("cache", "rm", short)).code == 2
    assert (await proxy.slotkeeper("cache", "rm", short, "--yes")).code == 0
    assert not files[0].exists()


async def test_a_damaged_snapshot_is_found(proxy: Running) -> None:
    """``cache verify`` names it and ends with status 1."""
    request = orjson.dumps({"messages": chat(LONG)["messages"]}).decode()
    await proxy.slotkeeper("warm", "-", stdin=request)
    (row,) = (await proxy.slotkeeper("cache", "ls", "--json")).json["snapshots"]
    (file,) = [one for one in proxy.slot_dir.glob("slotkeeper/*/*.kv") if one.stem == row["id"]]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said = await proxy.slotkeeper("cache", "verify")
    assert said.code == 1
    assert row["id"] in said.out


async def test_forget(proxy: Running, client: aiohttp.ClientSession) -> None:
    """The conversation is gone, by the beginning of its id."""
    async with client.post(proxy.url + CHAT, json=chat("hello")) as answer:
        await answer.read()
    (row,) = (await proxy.slotkeeper("conversations", "--json")).json["conversations"]
    assert (await proxy.slotkeeper("forget", row["id"][:6], "--yes")).code == 0
    assert (await proxy.slotkeeper("conversations", "--json")).json == {"conversations": []}
    assert (await proxy.slotkeeper("forget", row["id"], "--yes")).code == 1


async def test_verbs(proxy: Running) -> None:
    """Paused and resumed as status says; drained, the process ends well and is not reached."""
    assert (await proxy.slotkeeper("pause")).code == 0
    assert (await proxy.slotkeeper("status", "--json")).json["paused"] is True
    assert (await proxy.slotkeeper("resume")).code == 0
    assert (await proxy.slotkeeper("status", "--json")).json["paused"] is False
    assert (await proxy.slotkeeper("drain")).code == 0
    assert await proxy.process.wait() == 0
    gone = await proxy.slotkeeper("status")
    assert (gone.code, gone.out) == (3, "")


async def test_following(proxy: Running, client: aiohttp.ClientSession) -> None:
    """``requests -f`` prints a request as it ends, goes on when the proxy was started again, says
    both on stderr, and ends well with Ctrl-C; so does ``status --watch``.
    """
    environ = {**os.environ, "SLOTKEEPER_URL": proxy.url, "SLOTKEEPER_ADMIN_KEY": ADMIN}
    follower = await begin(["requests", "-f", "--json"], environ)
    watcher = await begin(["status", "--watch", "--json"], environ)
    assert follower.stdout is not None
    assert follower.stderr is not None
    assert watcher.stdout is not None
    assert orjson.loads(await watcher.stdout.readline())["mode"] == "exclusive"
    for _ in range(2):
        async with client.post(proxy.url + CHAT, json=chat("hello")) as answer:
            await answer.read()
            request_id = answer.headers["X-Request-Id"]
        assert orjson.loads(await follower.stdout.readline())["request_id"] == request_id
        await proxy.slotkeeper("drain")
        await proxy.process.wait()
        assert b"; trying again, until Ctrl-C" in await follower.stderr.readline()
        await proxy.restart()
        assert await follower.stderr.readline() == b"slotkeeper: connected again\n"
    for process in (follower, watcher):
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert b"Traceback" not in out


async def test_a_wrong_key(proxy: Running) -> None:
    """It is refused with what to do, and is not repeated in what is said."""
    said = await proxy.slotkeeper("slots", key="wrong-9b")
    assert (said.code, said.out) == (1, "")
    assert "SLOTKEEPER_ADMIN_KEY" in said.err
    assert "wrong-9b" not in said.err


async def test_the_doctor_leaves_a_running_proxys_slots_alone(
    proxy: Running, fake: FakeLlamaServer
) -> None:
    """It tells the proxy's own verdict and asks nothing of the slots."""
    port = proxy.url.rpartition(":")[2]
    environ = {**os.environ, "SLOTKEEPER_SERVER__PORT": port, "SLOTKEEPER_CACHE__KEEP_FREE": "0"}
    before = [len(fake.seen(what)) for what in ("save", "restore", "/completion")]
    process = await begin(
        ["doctor", "--probe", "--backend", fake.url, "--slot-save-path", str(proxy.slot_dir)],
        environ,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert "exclusive: pinning, saving and restoring were proved" in out.decode()
    assert [len(fake.seen(what)) for what in ("save", "restore", "/completion")] == before


async def test_the_doctor_compares_the_slot_folder(
    proxy: Running, fake: FakeLlamaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one than the running proxy's is a problem, and both are named."""
    monkeypatch.setenv("SLOTKEEPER_SERVER__PORT", proxy.url.rpartition(":")[2])
    monkeypatch.setenv("SLOTKEEPER_SERVER__ADMIN_KEY", ADMIN)
    monkeypatch.setenv("SLOTKEEPER_CACHE__KEEP_FREE", "0")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    said = {}
    for folder in (other, proxy.slot_dir):
        words = ["doctor", "--backend", fake.url, "--slot-save-path", str(folder)]
        process = await begin(words, dict(os.environ))
        out, _ = await process.communicate()
        said[folder] = process.returncode, out.decode()
    assert (said[other][0], said[proxy.slot_dir][0]) == (1, 0)
    assert f"the running proxy's slot folder is {proxy.slot_dir}, not {other}" in said[other][1]
