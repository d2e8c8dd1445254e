"""``slotkeeper serve`` as a process of its own: signals, exit status, one proxy per store."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.app import App
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, DONE, LONG, chat, event, settings, whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")
CANARY = "canary-51d0"


@dataclass
class Service:
    """A running ``slotkeeper serve`` and what it logged so far."""

    process: asyncio.subprocess.Process
    url: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    async def logs(self, wanted: str) -> dict[str, Any]:
        """The first line of this event, from now on; fails when the process ends without it."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                self.lines.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                self.other.append(line.decode())
                continue
            if self.lines[-1]["event"] == wanted:
                return self.lines[-1]
        raise AssertionError(f"it ended without {wanted}: {self.lines} {self.other}")

    async def ends(self) -> int:
        """Its exit status; reads the rest of its log."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.other.append(line.decode())
        return await self.process.wait()


Start = Callable[[], Awaitable[Service]]


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which event loop."""
    return str(request.param)


@pytest.fixture
async def start(fake: FakeLlamaServer, slot_dir: Path, kind: str) -> AsyncIterator[Start]:
    """Starts services in front of the fake, on each event loop; what runs at the end is killed."""
    services: list[Service] = []
    uvloop = kind == "uvloop"

    async def begin() -> Service:
        backend = fake.url.replace("127.0.0.1", "localhost") if uvloop else fake.url
        command = [sys.executable, "-m", "proxy", "serve", "--backend", backend, "--port", "0"]
        environ = {
            **os.environ,
            "PYTHONPATH": str(Path(sys.prefix) / "uvloop") if uvloop else "",
            "SLOTKEEPER_CACHE__KEEP_FREE": "0",
            "SLOTKEEPER_CACHE__IDLE_SECONDS": "3600",
            "SLOTKEEPER_SERVER__LOG_FORMAT": "json",
            "SLOTKEEPER_SERVER__LOG_LEVEL": "debug",
        }
        process = await asyncio.create_subprocess_exec(
            *command,
            "--slot-save-path",
            str(slot_dir),
            env=environ,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        services.append(Service(process))
        return services[-1]

    yield begin
    for service in services:
        if service.process.returncode is None:
            service.process.kill()
        await service.ends()


@pytest.fixture
async def service(start: Start, kind: str) -> Service:
    """One that listens."""
    one = await start()
    listening = await one.logs("listening")
    assert listening["loop"] == kind
    one.url = listening["url"]
    return one


def streamed(text: str) -> bytes:
    """A streaming chat request."""
    return orjson.dumps(chat(text, stream=True))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(
    service: Service,
    fake: FakeLlamaServer,
    client: aiohttp.ClientSession,
    slot_dir: Path,
    number: signal.Signals,
) -> None:
    """A running stream ends as it should, its slot is saved, nothing private was logged: 0."""
    stall = fake.fail("stall", on=CHAT, at="stream")
    async with client.post(service.url + CHAT, data=streamed(f"{CANARY} {LONG}")) as answer:
        await event(answer)
        await stall.hit.wait()
        service.process.send_signal(number)
        await service.logs("draining")
        assert service.process.returncode is None
        stall.release.set()
        assert (await whole(answer)).events[-1] == DONE
    assert await service.ends() == 0
    assert len(fake.seen("save")) == 3, "two by the probe"
    files = await asyncio.to_thread(lambda: list((slot_dir / "slotkeeper").glob("*/*.kv")))
    assert len([path for path in files if not path.name.startswith("probe")]) >= 1
    assert CANARY not in str(service.lines) + "".join(service.other)


async def test_a_second_signal_ends_at_once(
    service: Service, fake: FakeLlamaServer, client: aiohttp.ClientSession
) -> None:
    """Who asks twice is not made to wait for an answer that takes for ever."""
    stall = fake.fail("stall", on=CHAT, at="stream")
    async with client.post(service.url + CHAT, data=streamed("hello")) as answer:
        await event(answer)
        await stall.hit.wait()
        service.process.terminate()
        await service.logs("draining")
        service.process.terminate()
        assert await service.ends() == -signal.SIGTERM
        assert DONE not in (await whole(answer)).raw
    await fake.until(lambda: fake.seen(CHAT)[0].cancelled)
    assert len(fake.seen("save")) == 2, "the probe's"


async def test_one_proxy_per_store(service: Service, start: Start) -> None:
    """A second one on the same store is told so in one sentence and ends with status 1."""
    second = await start()
    assert await second.ends() == 1
    told = [line for line in second.other if line.startswith("slotkeeper: ")]
    assert len(told) == 1
    assert "another" in told[0]
    assert "Traceback" not in "".join(second.other)
    assert service.process.returncode is None


async def test_after_a_kill(
    service: Service,
    fake: FakeLlamaServer,
    client: aiohttp.ClientSession,
    slot_dir: Path,
) -> None:
    """A proxy that was killed leaves no lock behind."""
    async with client.post(service.url + CHAT, data=streamed("hello")) as answer:
        assert (await whole(answer)).events[-1] == DONE
    service.process.kill()
    await service.ends()
    app = App(settings(fake.url, slot_dir))
    try:
        assert (await app.start()).startswith("http://127.0.0.1:")
    finally:
        await app.stop()
