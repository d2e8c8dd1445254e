"""What no client should send, one by one, before a FastFlowLM that dies of what it does not check.

Its handlers read members that are not there (fastflowlm.md 1.4), throw at other types (1.5), and a
``request_id`` that is no string locks the NPU for ever (1.3).
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from proxy.backends import fastflowlm
from tests.emulators.fastflowlm import Emulator, Options
from tests.integration.conftest import Serve
from tests.integration.flm_crowd import CHAT, KEYS, Mix, Talk
from tests.integration.flm_kinds import WRONG_BYTES, WRONG_ELSEWHERE, WRONG_FIELDS, wrong_body

CASES = [
    pytest.param(CHAT, wrong_body("x", stream=stream, fields=fields), id=f"{fields} {stream}")
    for fields in WRONG_FIELDS
    for stream in (True, False)
]
CASES += [pytest.param(CHAT, raw, id=str(raw[:40])) for raw in WRONG_BYTES]
CASES += [pytest.param(path, body, id=f"{path} {body}") for path, body in WRONG_ELSEWHERE]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_a_wrong_request_harms_nobody(
    serve: Serve, client: aiohttp.ClientSession, path: str, body: Any
) -> None:
    """It is answered, or refused as the client's mistake; the next request is served."""
    async with Emulator(Options(model="qwen3.5:4b", profile="1.0.8", embed=True)) as emu:
        proxy = await serve(url=emu.url, slot_dir=None)
        mix = Mix(proxy.url, client, seed=0)
        async with asyncio.timeout(10):
            got = await mix.post(path, body, KEYS[0])
        mix.told("wrong", got, Talk(KEYS[0], "canary", tools=False), whole=False)
        assert not emu.crashed, emu.died_of
        assert not emu.npu.poisoned
        assert got.status < 500 or got.status == 501, (got.status, got.raw)
        assert (await proxy.chat("b")).status == 200
        await proxy.stop()


async def test_who_asks_what_is_loaded_harms_nobody(serve: Serve) -> None:
    """``/api/ps``, which clients poll, is no end of a server that has loaded nothing yet (1.4)."""
    async with Emulator(Options()) as emu:
        proxy = await serve(url=emu.url, slot_dir=None)
        got = await proxy.ask("/api/ps", method="GET")
        assert not emu.crashed
        assert got.status == 200
        assert got.json == {"models": []}
        await proxy.stop()


async def test_a_question_with_a_body_harms_nobody(serve: Serve) -> None:
    """What comes with a GET is read by the server too, and would take one of its threads."""
    async with Emulator(Options(model="qwen3.5:4b")) as emu:
        proxy = await serve(url=emu.url, slot_dir=None)
        async with asyncio.timeout(10):
            json = {"Content-Type": "application/json"}
            got = await proxy.ask("/api/version", {"request_id": 17}, method="GET", headers=json)
        assert got.status == 200
        await proxy.stop()


@pytest.mark.parametrize("path", ["/api/cancel", "/api/show", "/api/pull"])
async def test_what_needs_no_turn_waits_for_none(serve: Serve, path: str) -> None:
    """While an answer is generated the server's other questions are answered."""
    async with Emulator(Options(model="qwen3.5:4b")) as emu:
        proxy = await serve(url=emu.url, slot_dir=None)
        hold = emu.hold("decode", after=2)
        asking = asyncio.create_task(proxy.chat("a"))
        await hold.reached.wait()
        async with asyncio.timeout(10):
            got = await proxy.ask(path, {"model": "x", "request_id": "mine"})
        hold.release.set()
        assert got.status in {200, 501}
        assert (await asking).status == 200
        await proxy.stop()
