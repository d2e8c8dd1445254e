"""Several ``flm serve``, one of which dies: its requests are answered by another."""

from __future__ import annotations

import asyncio
import io

import pytest

from proxy.backends import fastflowlm
from proxy.core import hold
from proxy.core.records import Mode
from tests.emulators.fastflowlm import Emulator
from tests.emulators.fastflowlm.records import Hold
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT
from tests.integration.test_flm_routing import CKPT, Agent, before, system, user

MOVED = "pool.moved"
SIZES = {"alpha ": 400, "bravo ": 4000, "charlie ": 400}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(hold, "TURN_SECONDS", 0.0)


async def dies(emu: Emulator, at: Hold) -> None:
    """Of the request that comes there."""
    await at.reached.wait()
    stopping = asyncio.create_task(emu.stop())
    at.release.set()
    await stopping


@pytest.mark.parametrize("stream", [True, False])
async def test_a_killed_process(serve: Serve, log: io.StringIO, stream: bool) -> None:
    """A request for it is answered by the other one, once, and nobody had to look first.

    The next turn goes where the conversation is now, and finds it.
    """
    async with before(serve, CKPT, 2) as setup:
        proxy, (first, second) = setup.proxy, setup.emus
        assert proxy is not None
        messages = [system("alpha " * 400), user("One?")]
        messages.append(await setup.say(messages, tools=[]))
        assert (len(first.chats()), len(second.chats())) == (1, 0)
        await first.stop()
        messages.append(user("Two?"))
        got = await proxy.ask(CHAT, {"messages": messages, "tools": [], "stream": stream})
        assert got.status == 200, got.raw
        assert len(second.chats()) == 1
        assert log.getvalue().count(MOVED) == 1
        await proxy.look(Mode.ROUTED)
        assert (await proxy.page("readyz"))["advice"] == (
            "no answer from the servers 0 (counted from 0)"
        )


@pytest.mark.parametrize("stream", [True, False])
async def test_one_that_dies_while_it_computes(serve: Serve, stream: bool) -> None:
    """Before a byte of the answer: the client gets a whole one, of the other process."""
    async with before(serve, CKPT, 2) as setup:
        proxy, (first, second) = setup.proxy, setup.emus
        assert proxy is not None
        dying = asyncio.create_task(dies(first, first.hold("prefill")))
        body = {"messages": [system("alpha " * 400), user("One?")], "stream": stream}
        assert (await proxy.ask(CHAT, body)).status == 200
        await dying
        assert len(second.chats()) == 1


async def test_a_request_that_kills_its_process(serve: Serve) -> None:
    """It takes a second one with it, and no third, whoever asks again."""
    async with before(serve, CKPT, 4) as setup:
        proxy = setup.proxy
        assert proxy is not None
        body = {"messages": [system("alpha " * 400), user("One?")]}
        holds = [emu.hold("prefill") for emu in setup.emus]
        dying = [
            asyncio.create_task(dies(emu, at)) for emu, at in zip(setup.emus, holds, strict=True)
        ]
        dead = []
        for _ in range(2):
            assert (await proxy.ask(CHAT, body)).status == 502
            dead.append(sum(at.reached.is_set() for at in holds))
        assert dead == [2, 3]
        assert proxy.metric("moved_total") == 1
        dying[holds.index(next(at for at in holds if not at.reached.is_set()))].cancel()
        await asyncio.gather(*dying, return_exceptions=True)


async def test_one_that_dies_while_it_speaks(serve: Serve) -> None:
    """What a client has begun to read is not begun anew: the stream ends with an error."""
    async with before(serve, CKPT, 2) as setup:
        proxy, (first, second) = setup.proxy, setup.emus
        assert proxy is not None
        first.fault("drop", after=3)
        body = {"messages": [system("alpha " * 400), user("One?")], "stream": True}
        got = await proxy.ask(CHAT, body)
        assert (got.status, "error" in got.events[-1]) == (200, True)
        assert second.chats() == []


async def test_both_are_dead(serve: Serve) -> None:
    """Then it is said, once both were asked."""
    async with before(serve, CKPT, 2) as setup:
        proxy = setup.proxy
        assert proxy is not None
        for emu in setup.emus:
            await emu.stop()
        got = await proxy.ask(CHAT, {"messages": [user("One?")]})
        assert (got.status, got.json["error"]["source"]) == (502, "backend")
        for emu in setup.emus:
            emu.boot()
            await emu.start()
        await proxy.look(Mode.ROUTED)
        assert (await proxy.ask(CHAT, {"messages": [user("One?")]})).status == 200


async def test_the_one_that_took_over_holds_it(serve: Serve) -> None:
    """The next turn goes there and is hot; the answer and the log say where it was computed.

    What that one held before is known to be lost: its next turn does not go there for nothing.
    """
    async with before(serve, CKPT, 3) as setup:
        proxy = setup.proxy
        assert proxy is not None
        talks = [[system(word * size), user("One?")] for word, size in SIZES.items()]
        for talk in talks:  # the second one, which is used the least lately, is the dearest to lose
            talk.append(await setup.say(talk, tools=[]))
        assert [len(emu.chats()) for emu in setup.emus] == [1, 1, 1]
        await setup.emus[0].stop()
        mine = talks[0]
        mine.append(user("Two?"))
        got = await proxy.ask(CHAT, {"messages": mine, "tools": []})
        assert "slot=1" in got.said
        rows = (await proxy.page("api/requests"))["requests"]
        assert rows[0]["slot"] == 1
        assert proxy.metric("moved_total") == 1
        held = [row.content for row in proxy.app.scheduler.table]
        assert [content is not None for content in held] == [False, True, True]
        mine += [got.json["choices"][0]["message"], user("Three?")]
        await setup.say(mine, tools=[])
        last = setup.emus[1].chats()[-1]
        assert (len(setup.emus[1].chats()), bool(last.kept)) == (3, True)


async def test_an_agent_goes_on(serve: Serve) -> None:
    """Its process dies between two turns: the next one is cold, the one behind it is not."""
    async with before(serve, CKPT, 2) as setup:
        agent = Agent("alpha", setup)
        await agent.turn()
        await setup.emus[0].stop()
        await agent.turn()
        assert setup.proxy is not None
        await setup.proxy.look(Mode.ROUTED)
        cold = setup.cold()
        await agent.turn()
        assert setup.cold() == cold
