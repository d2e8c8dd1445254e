"""Conversations before one or several emulated FastFlowLM: who gets which, in which order.

Prefill seconds are emulated ones. What clients waited for is told beside all that was computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.backends import fastflowlm
from proxy.core import hold, priming
from proxy.core.records import Mode
from tests.emulators.fastflowlm import Answer, Emulator, Options, Record
from tests.emulators.fastflowlm.client import ask
from tests.emulators.fastflowlm.engine import Engine
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT, Proxy, until
from tests.unit.factories import chat, content

CKPT, HIST = "qwen3.5:4b", "llama3.2:3b"
MODELS = pytest.mark.parametrize("model", [CKPT, HIST])
STEPS, TURNS = 3, 3
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
NAMING = "You are naming a coding session. Answer with a title."
Messages = list[dict[str, Any]]
Ask = Callable[[Messages], Awaitable[dict[str, Any]]]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(fastflowlm, "CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(hold, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(priming, "IDLE_SECONDS", 0.0)


def names(record: Record) -> bool:
    """Whether it is the request for a title."""
    return NAMING in str(record.body["messages"][0]["content"])


def loops(record: Record, _engine: Engine) -> Answer | None:
    """A tool call per step, then a text; whoever has no tools gets an echo."""
    if names(record):
        return Answer("A title")
    messages = record.body["messages"]
    newest = max(n for n, message in enumerate(messages) if message["role"] == "user")
    done = sum(message["role"] == "assistant" for message in messages[newest:])
    return Answer("", calls=(("read", f'{{"n": {done}}}'),)) if done < STEPS else None


@dataclass
class Setup:
    """Emulated processes, and the proxy before them if there is one."""

    emus: list[Emulator]
    proxy: Proxy | None
    primes: list[Record] = field(default_factory=list)

    async def say(self, messages: Messages, **more: Any) -> dict[str, Any]:
        """The answer's message."""
        body = {"messages": messages, "tools": TOOLS, **more}
        if self.proxy is None:
            return (await ask(self.emus[0].url, CHAT, body)).json["choices"][0]["message"]  # type: ignore[no-any-return]
        got = await self.proxy.ask(CHAT, body)
        assert got.status == 200, got.raw
        return got.json["choices"][0]["message"]  # type: ignore[no-any-return]

    async def title(self) -> None:
        """A client's side request, and its answer."""
        body = {"messages": [system(NAMING), user("name it")], "tools": [], "max_tokens": 9}
        await self.say(**body)  # type: ignore[arg-type]

    async def idle(self) -> None:
        """Some seconds without any request: what the keeper does then is done."""
        if self.proxy is not None:
            before = {id(chat) for chat in self.chats()}
            await self.proxy.look(Mode.ROUTED)
            primer = self.proxy.app.keeper._primer
            await until(lambda: primer is None or primer._task is None)
            self.primes += [chat for chat in self.chats() if id(chat) not in before]

    def chats(self) -> list[Record]:
        """All that was computed."""
        return [chat for emu in self.emus for chat in emu.chats()]

    def total(self) -> float:
        """Seconds of prefill."""
        return sum(emu.prefill_seconds for emu in self.emus)

    def waited(self) -> float:
        """The part of them a client waited for."""
        return self.total() - sum(record.prefill_seconds for record in self.primes)

    def cold(self) -> int:
        """How many conversations' requests reused nothing."""
        idle = {id(record) for record in self.primes}
        return sum(
            not chat.kept and id(chat) not in idle and not names(chat) for chat in self.chats()
        )


def system(text: str) -> dict[str, Any]:
    """A message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": text}


@dataclass
class Agent:
    """A conversation with a long system prompt; each turn is a loop of tool calls."""

    name: str
    setup: Setup
    messages: Messages = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages.append(system(f"{self.name} " * 4000))

    async def turn(self) -> None:
        """From the user's words to the answer that calls no tool."""
        self.messages.append(user(f"Turn {len(self.messages)} of {self.name}"))
        while True:
            message = await self.setup.say(self.messages)
            self.messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                return
            self.messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls
            ]


@asynccontextmanager
async def before(serve: Serve, model: str, n: int, **settings: Any) -> AsyncIterator[Setup]:
    """``n`` processes behind a proxy; 0: one, and no proxy."""
    async with AsyncExitStack() as stack:
        emus = [
            await stack.enter_async_context(Emulator(Options(model=model))) for _ in range(n or 1)
        ]
        for emu in emus:
            emu.script = loops
        proxy = None
        if n:
            urls = ",".join(emu.url for emu in emus)
            proxy = await serve(url=urls, slot_dir=None, **settings)
            scheduler = proxy.app.scheduler
            assert (scheduler.mode, scheduler.total_slots) == (Mode.ROUTED, n)
        setup = Setup(emus, proxy)
        yield setup
        for emu in emus:
            assert not any(record.race for record in emu.records)
        if proxy is not None:
            await proxy.stop()


def told(what: str, figures: dict[int, Setup]) -> None:
    """One line of figures."""
    names = {0: "without the proxy", 1: "with it", 2: "with two processes"}
    parts = [
        f"{names[n]} {setup.waited():.0f} s waited for, {setup.total():.0f} s in all"
        for n, setup in figures.items()
    ]
    print(f"{what}: {'; '.join(parts)}")


async def everywhere(
    serve: Serve, model: str, run: Callable[[Setup], Awaitable[None]]
) -> dict[int, Setup]:
    """The same without the proxy, with it, and with two processes."""
    done = {}
    for n in (0, 1, 2):
        async with before(serve, model, n) as setup:
            await run(setup)
            done[n] = setup
    return done


@MODELS
async def test_two_agents_at_once(serve: Serve, model: str) -> None:
    """A loop of tool calls is not interrupted: only its first step may find the slot taken."""

    async def run(setup: Setup) -> None:
        async def work(agent: Agent) -> None:
            for _ in range(TURNS):
                await agent.turn()
                await asyncio.sleep(0.02)  # its user reads

        await asyncio.gather(work(Agent("alpha", setup)), work(Agent("beta", setup)))

    done = await everywhere(serve, model, run)
    told(f"{model}, two agents at once", done)
    assert done[0].cold() > 2 * TURNS
    assert done[1].cold() <= 2 * TURNS
    assert done[2].cold() == 2
    assert done[2].total() < done[1].total() < done[0].total() / 2


@MODELS
async def test_two_conversations_in_turns(serve: Serve, model: str) -> None:
    """One process cannot hold both; two can, and each goes back to its own."""

    async def run(setup: Setup) -> None:
        agents = [Agent("alpha", setup), Agent("beta", setup)]
        for _ in range(TURNS):
            for agent in agents:
                await agent.turn()
                await setup.idle()

    done = await everywhere(serve, model, run)
    told(f"{model}, two conversations in turns", done)
    assert done[1].cold() == 2 * TURNS <= done[0].cold()
    assert done[1].total() <= done[0].total() * 1.01
    assert done[2].cold() == 2
    assert done[2].waited() < done[1].waited() * 0.6


@MODELS
async def test_a_title_after_each_turn(serve: Serve, model: str) -> None:
    """What it displaced is computed again while nobody waits, or it runs in another process."""

    async def run(setup: Setup) -> None:
        agent = Agent("alpha", setup)
        for _ in range(TURNS):
            await agent.turn()
            await setup.title()
            await setup.idle()

    done = await everywhere(serve, model, run)
    told(f"{model}, a title after each turn", done)
    assert done[0].cold() >= TURNS
    assert (done[1].cold(), done[2].cold()) == (1 if model == CKPT else TURNS, 1)
    assert len(done[1].primes) == (TURNS if model == CKPT else 0)
    assert not done[2].primes
    assert done[1].waited() <= done[0].waited() * 1.01
    if model == CKPT:
        assert done[1].waited() == pytest.approx(done[2].waited(), rel=0.05)


async def test_embeddings_leave_the_conversation_alone(serve: Serve) -> None:
    """They take their turn, and the next turn of the conversation is as hot as without them."""
    async with before(serve, CKPT, 2) as setup:
        agent = Agent("alpha", setup)
        await agent.turn()
        assert setup.proxy is not None
        got = await setup.proxy.ask("/v1/embeddings", {"model": "embed-gemma:300m", "input": "x"})
        assert got.reason == "forward"
        await agent.turn()
        assert setup.cold() == 1
        assert [len(emu.chats()) for emu in setup.emus] == [2 * STEPS + 2, 0]


async def test_a_process_that_goes_and_comes_back(serve: Serve) -> None:
    """The others go on; who was there starts anew elsewhere; afterwards it is used again."""
    async with before(serve, CKPT, 2) as setup:
        proxy, (first, second) = setup.proxy, setup.emus
        assert proxy is not None
        alpha, beta = Agent("alpha", setup), Agent("beta", setup)
        await alpha.turn()
        await beta.turn()
        assert [setup.cold(), bool(first.chats()), bool(second.chats())] == [2, True, True]
        await first.stop()
        await proxy.look(Mode.ROUTED)
        ready = await proxy.page("readyz")
        assert (ready["mode"], "servers 0 " in ready["advice"]) == ("routed", True)
        await beta.turn()
        assert setup.cold() == 2
        await alpha.turn()
        assert setup.cold() == 3
        first.boot()
        await first.start()
        await proxy.look(Mode.ROUTED)
        assert (await proxy.page("readyz"))["advice"] == ""
        await beta.turn()  # alpha has displaced it, and keeps its place
        await alpha.turn()
        assert setup.cold() == 4


async def test_a_crash_is_noticed_by_whoever_is_there(serve: Serve) -> None:
    """Its request and the next one get their answers without anybody having looked."""
    async with before(serve, CKPT, 2) as setup:
        proxy, (first, _) = setup.proxy, setup.emus
        assert proxy is not None
        await Agent("alpha", setup).turn()
        first.fault("crash")
        body = {"messages": [system("alpha " * 4000), user("?")]}
        assert [(await proxy.ask(CHAT, body)).status for _ in range(2)] == [200, 200]
        assert proxy.app.scheduler.mode is Mode.ROUTED


@pytest.mark.parametrize("shared", [True, False])
async def test_one_npu_or_several(serve: Serve, shared: bool) -> None:
    """On one NPU two processes never compute at once; with one each they do."""
    async with before(serve, CKPT, 2, shared_npu=shared) as setup:
        first, second = setup.emus
        holds = [first.hold("prefill"), second.hold("prefill")]
        asked = [
            asyncio.create_task(setup.say([system(name * 500), user("?")])) for name in ("a ", "b ")
        ]
        await holds[0].reached.wait()
        if not shared:
            await holds[1].reached.wait()
        assert bool(second.npu.busy) is not shared
        for each in holds:
            each.release.set()
        await asyncio.gather(*asked)


async def test_a_title_waits_for_the_conversations(serve: Serve) -> None:
    """It came first, and runs when none of them wants to any more."""
    async with before(serve, CKPT, 1) as setup:
        proxy, (emu,) = setup.proxy, setup.emus
        assert proxy is not None
        held = emu.hold("decode")
        tasks = [asyncio.create_task(setup.say([user("first")]))]
        await held.reached.wait()
        tasks.append(asyncio.create_task(setup.title()))  # type: ignore[arg-type]
        await until(lambda: proxy.queued() == 1)
        for n in range(2):
            tasks.append(asyncio.create_task(setup.say([system("s " * 900), user(f"{n}")])))
            await until(lambda n=n: proxy.queued() == n + 2)  # type: ignore[misc]
        held.release.set()
        await asyncio.gather(*tasks)
        assert [names(chat) for chat in emu.chats()] == [False, False, False, True]


async def test_who_gave_up_is_sent_back_to_its_prefill(serve: Serve) -> None:
    """The same request again finds the process that still works at it."""
    async with before(serve, CKPT, 2) as setup:
        proxy, emus = setup.proxy, setup.emus
        assert proxy is not None
        await Agent("alpha", setup).turn()
        mark = sum(len(emu.records) for emu in emus)
        at = emus[1].hold("prefill")
        messages = [system("beta " * 4000), user("?")]
        asking = asyncio.create_task(setup.say(messages))
        await at.reached.wait()
        asking.cancel()
        await until(lambda: not proxy.app.scheduler._running)
        again = asyncio.create_task(setup.say(messages))
        await until(lambda: len(proxy.app.scheduler._running) == 1)
        at.release.set()
        assert (await again)["role"] == "assistant"
        assert sum(len(emu.records) for emu in emus) == mark + 1


async def test_idle_work_gives_way(serve: Serve) -> None:
    """A request that comes while a conversation is computed again is served, and nothing races."""
    async with before(serve, CKPT, 1) as setup:
        proxy, (emu,) = setup.proxy, setup.emus
        assert proxy is not None
        agent = Agent("alpha", setup)
        await agent.turn()
        await setup.title()
        at = emu.hold("prefill")
        await proxy.look(Mode.ROUTED)
        await at.reached.wait()
        other = asyncio.create_task(setup.say([system("beta " * 4000), user("?")]))
        await until(lambda: any(record.path == "/api/cancel" for record in emu.records))
        at.release.set()
        await other
        assert proxy.metric('primes_total{outcome="broken-off"}') == 1
        await agent.turn()
        assert setup.cold() >= 2


async def test_what_was_left_makes_way_for_the_other_process(serve: Serve) -> None:
    """A prefill nobody waits for any more does not keep the NPU from a request elsewhere."""
    async with before(serve, CKPT, 2) as setup:
        proxy, (first, second) = setup.proxy, setup.emus
        assert proxy is not None
        beta = Agent("beta", setup)
        at = first.hold("prefill")
        asking = asyncio.create_task(setup.say([system("alpha " * 4000), user("?")]))
        await at.reached.wait()
        asking.cancel()
        await proxy.quiet()
        proxy.app.scheduler.board.table.hold(0, content(chat("dear"), 9000, used=time.time()))
        turn = asyncio.create_task(beta.turn())
        await until(lambda: any(record.path == "/api/cancel" for record in first.records))
        at.release.set()
        await turn
        assert len(second.chats()) == STEPS + 1
