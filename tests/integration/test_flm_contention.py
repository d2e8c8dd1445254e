"""Report 733, twice at once: clients whose time-outs are shorter than what they ask for.

Each of them alone would be answered at its second attempt. On one process they must not break off
each other's prefill, or none of them ever is. Emulated time alone decides, as in test_flm_retry;
so ten real seconds are none here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from proxy.backends import fastflowlm
from proxy.core import hold
from proxy.core.records import Mode
from tests.emulators.fastflowlm import Answer, Emulator, Options, Record
from tests.emulators.fastflowlm.engine import Engine
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT, Proxy
from tests.integration.test_flm_retry import ATTEMPTS, MODEL, PATIENCE, WORDS, Alarms, impatient

Body = dict[str, Any]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is, and whoever leaves has waited long."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(fastflowlm, "CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(hold, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(hold, "TURN_SECONDS", 0.0)


def quoted(record: Record, _engine: Engine) -> Answer:
    """An answer that says to whom."""
    return Answer("for " + str(record.body["messages"][0]["content"]).partition(" ")[0])


def asks(name: str, words: int = WORDS, *, stream: bool = False) -> Body:
    """A conversation of its own that takes 90 s to compute."""
    said = [{"role": "user", "content": f"{name} " + "word " * words}]
    said += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
    return {"messages": said, "stream": stream}


async def text(proxy: Proxy, body: Body, key: str = "k") -> str:
    """The answer's text."""
    got = await proxy.ask(CHAT, body, headers={"Authorization": f"Bearer {key}"})
    assert got.status == 200, got.raw
    if not body["stream"]:
        return str(got.json["choices"][0]["message"]["content"])
    deltas = [e["choices"][0]["delta"] for e in got.events[:-1] if e["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


@asynccontextmanager
async def before(
    serve: Serve, clock: Alarms, n: int = 1
) -> AsyncIterator[tuple[list[Emulator], Proxy]]:
    """``n`` processes on one NPU, and a proxy."""
    emus = [Emulator(Options(model=MODEL, ctx_len=65_536), clock=clock) for _ in range(n)]
    for emu in emus:
        emu.script = quoted
        await emu.start()
    proxy = await serve(url=",".join(emu.url for emu in emus), slot_dir=None)
    assert proxy.app.scheduler.mode is Mode.ROUTED
    yield emus, proxy
    await proxy.stop()
    for emu in emus:
        await emu.settled()
        assert (emu.counters["leaked"], emu.active) == (0, 0)
        assert not any(record.race for record in emu.records)
        await emu.stop()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("clients", [2, 3])
async def test_they_are_all_answered(serve: Serve, stream: bool, n: int, clients: int) -> None:
    """One prefill each, whoever comes when, and each its own answer."""
    clock = Alarms()
    async with before(serve, clock, n) as (emus, proxy):
        names = "abc"[:clients]
        bodies = [asks(name, stream=stream) for name in names]
        got = await asyncio.gather(
            *(impatient(clock, partial(text, proxy, body)) for body in bodies)
        )
        chats = [chat for emu in emus for chat in emu.chats()]
        print(f"{clients} clients, {n} processes, stream={stream}: attempts "
              f"{[attempts for attempts, _ in got]}, {sum(c.prefill_seconds for c in chats):.0f} s "
              f"of prefill, all answered after {clock.now:.0f} s")  # fmt: skip
        assert [answer for _, answer in got] == [f"for {name}" for name in names]
        assert [chat.finish for chat in chats] == ["stop"] * clients
        assert all(attempts < ATTEMPTS for attempts, _ in got)
        assert all(PATIENCE < chat.prefill_seconds < 2 * PATIENCE for chat in chats)
