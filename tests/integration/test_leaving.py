"""Clients that leave, wherever their request is: the backend stops, slots and leases return."""

from __future__ import annotations

import asyncio
import io
from contextlib import suppress
from typing import Any

import pytest

from proxy.core.slots import SlotState
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, Answer, Proxy, event, settled, until


async def left(task: asyncio.Task[Answer]) -> None:
    """The client goes: its connection closes."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def consistent(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Every slot is free, and no belief claims what the slot does not hold."""
    for row, slot in zip(proxy.app.scheduler.table, fake.engine.slots, strict=True):
        assert row.state is SlotState.FREE
        assert not slot.busy
        if row.content is not None:
            assert row.content.n_tokens == len(slot.tokens)
            known = row.content.tokens
            assert known is None or known.tolist() == slot.tokens[: len(known)]
    assert proxy.metric("leases_active") == 0
    assert proxy.metric("queue_length") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", ["headers", "progress", "stream"])
async def test_while_the_backend_works(
    proxy: Proxy, fake: FakeLlamaServer, at: Any, stream: bool
) -> None:
    """Upstream is cancelled at once, and a retry finds what was computed so far."""
    stall = fake.fail("stall", on=CHAT, at=at)
    task = asyncio.create_task(proxy.chat(LONG, stream=stream))
    await stall.hit.wait()
    await left(task)
    await fake.until(lambda: fake.seen(CHAT)[0].cancelled)
    computed = max(len(slot.tokens) for slot in fake.engine.slots)
    await proxy.quiet()
    consistent(proxy, fake)
    again = (await proxy.chat(LONG)).json["timings"]
    assert again["cache_n"] == min(computed, again["cache_n"] + again["prompt_n"] - 1)
    row = proxy.app.history.recent(2)[1]
    assert row.status == 499
    assert proxy.metric("disconnects_total") == 1


@pytest.mark.parametrize("on", ["/apply-template", "/tokenize"])
async def test_while_the_prompt_is_looked_at(proxy: Proxy, fake: FakeLlamaServer, on: str) -> None:
    """Nothing was sent, nothing is held."""
    stall = fake.fail("stall", on=on)
    task = asyncio.create_task(proxy.chat("hello"))
    await stall.hit.wait()
    await left(task)
    await fake.until(lambda: fake.seen(on)[-1].cancelled)
    await proxy.quiet()
    consistent(proxy, fake)
    assert not fake.seen(CHAT)


@pytest.mark.parametrize("wide", [False, True])
async def test_in_the_queue(proxy: Proxy, fake: FakeLlamaServer, wide: bool) -> None:
    """A client that leaves the queue is forgotten; who waited behind it goes on."""
    stall = fake.fail("stall", on=CHAT, times=2)
    held = [asyncio.create_task(proxy.chat(word)) for word in ("one", "two")]
    await fake.until(lambda: not fake.faults)
    gone = asyncio.create_task(proxy.chat("gone", **({"n": 2} if wide else {})))
    await until(lambda: proxy.queued() == 1)
    behind = asyncio.create_task(proxy.chat("behind"))
    await until(lambda: proxy.queued() == 2)
    await left(gone)
    stall.release.set()
    assert [(await task).status for task in [*held, behind]] == [200, 200, 200]
    assert len(fake.seen(CHAT)) == 3
    await proxy.quiet()
    consistent(proxy, fake)


async def fill(proxy: Proxy, *names: str) -> None:
    """Conversations that are long enough to be worth saving, one after the other; then saved."""
    for name in names:
        assert (await proxy.chat(f"{name} {LONG}")).status == 200
    await proxy.look()


@pytest.mark.parametrize("action", ["save", "erase", "restore"])
async def test_during_a_transfer(proxy: Proxy, fake: FakeLlamaServer, action: str) -> None:
    """A save or restore that has begun is finished; the slot then holds what was restored."""
    await fill(proxy, "one", "two", "three")
    if action == "save":
        for name in ("four", "five"):
            await proxy.chat(f"{name} {LONG}")
    stall = fake.fail("stall", on=action)
    task = asyncio.create_task(proxy.chat(f"one {LONG}"))
    await stall.hit.wait()
    await left(task)
    stall.release.set()
    sent = len(fake.seen(CHAT))
    await proxy.quiet()
    consistent(proxy, fake)
    assert not fake.seen(action)[-1].cancelled
    again = await proxy.chat(f"one {LONG}")
    assert again.json["timings"]["cache_n"] > 300
    assert len(fake.seen(CHAT)) == sent + 1


async def test_before_an_unstreamed_answer(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """An answer that has to be asked for a second time is cancelled like any other."""
    fake.script = lambda body: ["", ""]
    first = fake.fail("stall", on=CHAT, at="stream")
    task = asyncio.create_task(proxy.chat(LONG))
    await first.hit.wait()
    second = fake.fail("stall", on=CHAT)
    first.release.set()
    await second.hit.wait()
    await left(task)
    await fake.until(lambda: fake.seen(CHAT)[-1].cancelled)
    assert [one.json.get("stream") for one in fake.seen(CHAT)] == [True, None]
    await proxy.quiet()
    consistent(proxy, fake)


async def test_many(serve: Serve, fake: FakeLlamaServer, log: io.StringIO) -> None:
    """Connections reset in the middle of busy streams: everything returns, nothing is an error."""
    proxy = await serve()
    fake.script = lambda body: [f" word{i}" for i in range(2000)]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}

    async def one() -> None:
        async with proxy.open(CHAT, body) as answer:
            await event(answer)
            assert answer.connection is not None
            assert answer.connection.transport is not None
            answer.connection.transport.abort()

    for _ in range(5):
        await asyncio.gather(*(one() for _ in range(6)))
    await settled(lambda: len(proxy.app.history.recent(99)))
    await proxy.quiet()
    consistent(proxy, fake)
    assert proxy.metric("disconnects_total") == 30
    assert "unexpected" not in log.getvalue()
    assert "Traceback" not in log.getvalue()
    assert (await proxy.chat("still here")).status == 200


async def test_passthrough(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """What is passed through is cancelled, too, and gives every slot back."""
    stall = fake.fail("stall", on="/v1/embeddings")
    task = asyncio.create_task(proxy.ask("/v1/embeddings", {"input": "x"}))
    await stall.hit.wait()
    assert proxy.metric("leases_active") == 1
    await left(task)
    await fake.until(lambda: fake.seen("/v1/embeddings")[0].cancelled)
    await proxy.quiet()
    consistent(proxy, fake)
