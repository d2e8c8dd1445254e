"""Mixed requests from many clients before the emulated FastFlowLM (issue 4, line 5).

Some of them in every test run; 2,000 per release, with figures, by ``make soak``.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from proxy.backends import fastflowlm
from proxy.core import hold
from tests.emulators.fastflowlm import Emulator, Options
from tests.integration.conftest import Serve
from tests.integration.flm_crowd import CHAT, CONTEXT, KEYS, Mix, tells
from tests.integration.flm_kinds import KINDS

CKPT, HIST = "qwen3.5:4b", "qwen3-it:4b"
RUNS = [("0.9.45", CKPT), ("1.0.8", HIST), ("0.9.42", CKPT)]
SCALE = 0.001  # real seconds per emulated one
LIMIT = 0.3  # seconds per request; beyond that something hangs


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(fastflowlm, "CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(fastflowlm, "CLAIM_SECONDS", 0.2)
    for name in (
        "TOOL_SECONDS",
        "TURN_SECONDS",
        "SIDE_PATIENCE",
        "LEAST_PATIENCE",
        "MOST_PATIENCE",
    ):
        monkeypatch.setattr(hold, name, getattr(hold, name) * SCALE)


def emulated(profile: str, model: str) -> Emulator:
    """A server that dies of whatever the real one would."""
    options = Options(
        model=model,
        profile=profile,
        ctx_len=CONTEXT,
        time_scale=SCALE,
        embed=True,
        ub="crash",
        clear_window=5.0,  # half of the driver's pause, shortened as it is
    )
    emu = Emulator(options)
    emu.script = tells
    return emu


async def soak(
    serve: Serve, client: aiohttp.ClientSession, profile: str, model: str, count: int
) -> None:
    """Run the mix, then look at what is left of the server."""
    async with emulated(profile, model) as emu:
        proxy = await serve(url=emu.url, slot_dir=None, keys=KEYS, admin_key="key-admin")
        mix = Mix(proxy.url, client, seed=count, kinds=KINDS)
        began = time.monotonic()
        try:
            async with asyncio.timeout(count * LIMIT):
                await mix.run(count)
                await proxy.quiet()
        finally:
            print(f"crashed: {emu.died_of}" if emu.crashed else "")
        took = time.monotonic() - began
        print(f"{profile} {model}: {count} requests in {took:.0f} s, "
              f"{emu.clock.now:.0f} s of emulated time")  # fmt: skip
        for name, number in sorted(mix.outcomes.items()):
            print(f"  {name:30} {number:5}")
        plain = {"messages": [{"role": "user", "content": "Still there?"}]}
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        got = await proxy.ask(CHAT, plain, headers=headers)
        assert got.status == 200, got.raw
        await proxy.stop()
        async with asyncio.timeout(10):
            await emu.settled()
        print(f"  {dict(emu.counters)}")
        assert (emu.crashed, emu.npu.poisoned, emu.npu.busy) == (False, False, False)
        assert emu.counters["loads"] == 0
        assert (emu.active, emu.counters["leaked"], emu.counters["refused"]) == (0, 0, 0)
        assert not any(record.race for record in emu.records)
        assert not any(record.last_only for record in emu.records)


@pytest.mark.parametrize(("profile", "model", "count"), [(*RUNS[0], 300), (*RUNS[1], 150)])
async def test_everybody_gets_an_answer(
    serve: Serve, client: aiohttp.ClientSession, profile: str, model: str, count: int
) -> None:
    """Everybody who stays gets an answer of his own or a clear error; the server is as before."""
    await soak(serve, client, profile, model, count)


@pytest.mark.soak
@pytest.mark.parametrize(("profile", "model"), RUNS)
async def test_two_thousand(
    serve: Serve, client: aiohttp.ClientSession, profile: str, model: str
) -> None:
    """The same for longer, and what becomes of the server without the proxy."""
    await soak(serve, client, profile, model, 2000)
    await direct(client, profile, model)


async def test_without_the_proxy_it_does_not_live_long(client: aiohttp.ClientSession) -> None:
    """The same requests, sent to the server itself, end it: so they are worth sending."""
    await direct(client, *RUNS[0])


async def direct(client: aiohttp.ClientSession, profile: str, model: str) -> None:
    """Send the mix until the server serves nobody any more."""
    async with emulated(profile, model) as emu:

        def dead() -> bool:
            return emu.crashed or emu.npu.poisoned or emu.counters["leaked"] >= emu.options.socket

        mix = Mix(emu.url, client, seed=2000, kinds=KINDS, patience=2.0, dead=dead)
        await mix.run(2000)
        if emu.crashed:
            how = f"crashed, {emu.died_of},"
        else:
            how = "locked for ever" if emu.npu.poisoned else "all connections lost"
        print(f"\n{profile} {model} without the proxy: {how} after {mix.outcomes.total()} requests")
        assert dead()
