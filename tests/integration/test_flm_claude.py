"""A coding agent over ``/v1/messages`` before the emulated FastFlowLM (issue 4, line 3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import orjson
import pytest

from proxy.backends import fastflowlm
from proxy.dialects import DIALECTS
from tests.emulators.fastflowlm import Emulator, Options, Record
from tests.emulators.fastflowlm.client import ask
from tests.emulators.fastflowlm.tokens import tokenizer_json
from tests.integration.conftest import Serve
from tests.integration.flm_agent import (
    CHAT,
    Figures,
    Ideal,
    Session,
    allowed,
    scripted,
    title,
    title_of,
)
from tests.integration.proxies import Proxy
from tests.traffic import Body

TURNS = 6
TITLED = {0, 2, 4}  # turns beside which a title is asked for
CONTEXT = 65_536
CKPT, HIST = "qwen3.5:4b", "qwen3-it:4b"  # both with templates that show tools


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)


@asynccontextmanager
async def emulated(spelling: str, **options: Any) -> AsyncIterator[Emulator]:
    """An emulator whose model uses tools."""
    async with Emulator(Options(**{"ctx_len": CONTEXT, **options})) as emu:
        emu.script = partial(scripted, spelling)
        yield emu


class Traffic:
    """The session through the proxy, with the vendor's own client."""

    def __init__(self, client: anthropic.AsyncAnthropic, *, stream: bool) -> None:
        """``stream``: as the agent does; else whole answers."""
        self._client = client
        self._stream = stream
        self.bodies: list[Body] = []  # in the order of asking
        self.cached: list[int] = []  # what the answers to the main conversation say

    async def run(self, seed: int = 0) -> None:
        """All turns; a title is asked for beside the second step of a loop."""
        session = Session(seed)
        for turn in range(TURNS):
            session.ask(turn)
            beside: list[asyncio.Task[anthropic.types.Message]] = []
            more, step = True, 0
            while more:
                main = asyncio.create_task(self._send(session.body()))
                if step == 1 and turn in TITLED:
                    beside.append(asyncio.create_task(self._send(session.title(turn))))
                answer = await main
                usage = answer.usage
                self.cached.append(usage.cache_read_input_tokens or 0)
                dumped = [block.model_dump(exclude_none=True) for block in answer.content]
                more = session.heard([_sendable(block) for block in dumped])
                step += 1
            for answer in await asyncio.gather(*beside):
                assert "".join(b.text for b in answer.content if b.type == "text")

    async def _send(self, body: Body) -> anthropic.types.Message:
        self.bodies.append(body)
        rest = dict(body)
        known = {name: rest.pop(name) for name in ("model", "max_tokens", "messages")}
        if not self._stream:
            message: anthropic.types.Message = await self._client.messages.create(
                **known, extra_body=rest
            )
            return message
        async with self._client.messages.stream(**known, extra_body=rest) as stream:
            return await stream.get_final_message()


def _sendable(block: dict[str, Any]) -> dict[str, Any]:
    """A block with the fields a request may have."""
    names = ("type", "text", "thinking", "signature", "id", "name", "input")
    return {name: block[name] for name in names if name in block}


async def through(proxy: Proxy, *, stream: bool, seed: int = 0) -> Traffic:
    """The whole session."""
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="k", max_retries=0) as client:
        traffic = Traffic(client, stream=stream)
        await traffic.run(seed)
    return traffic


def served(bodies: list[Body], chats: list[Record]) -> list[Body]:
    """The agent's requests in the order in which the server answered them."""
    titles = iter([body for body in bodies if title_of(body)])
    mains = iter([body for body in bodies if not title_of(body)])
    return [next(titles if title(chat.body["messages"]) else mains) for chat in chats]


async def missed(traffic: Traffic, emu: Emulator, perfect: Emulator) -> list[int]:
    """Which requests reused less than the best; ``perfect`` is asked the same in the same order.

    By ``Ideal``, who knows nothing of the proxy. A hit is worth all of the request before it
    (fastflowlm.md 3.3).
    """
    chats = emu.chats()
    order = served(traffic.bodies, chats)
    assert len(order) == len(traffic.bodies)
    ideal = Ideal(perfect)
    for body in order:
        await ideal.send(body)
    best = allowed(perfect.chats(), chats, whole=emu.options.model == HIST)
    return [n for n, (chat, most) in enumerate(zip(chats, best, strict=True)) if chat.kept != most]


@pytest.mark.parametrize(
    ("model", "spelling"), [(CKPT, "spaced"), (HIST, "spaced"), (HIST, "compact")]
)
@pytest.mark.parametrize(("profile", "stream"), [("0.9.45", True), ("1.0.8", False)])
async def test_an_agents_session(
    serve: Serve, tmp_path: Path, profile: str, model: str, spelling: str, stream: bool
) -> None:
    """Each request reuses what the same one of a client without a mistake would, and says so.

    With the model's tokenizer, which tells from an answer's length how the model writes arguments.
    """
    named = tmp_path / "tokenizer.json"
    named.write_text(tokenizer_json())
    async with (
        emulated(spelling, model=model, profile=profile) as emu,
        emulated(spelling, model=model, profile=profile) as perfect,
        emulated(spelling, model=model, profile=profile) as bare,
    ):
        proxy = await serve(url=emu.url, slot_dir=None, tokenizer=str(named))
        traffic = await through(proxy, stream=stream)
        late = await missed(traffic, emu, perfect)
        for body in served(traffic.bodies, emu.chats()):
            chat = {**DIALECTS["/v1/messages"].parse(orjson.dumps(body)).body, "stream": True}
            assert (await ask(bare.url, CHAT, {**chat, "model": model})).status == 200
        for name, run in ("through", emu), ("best", perfect), ("direct", bare):
            figures = Figures.of(name, run)
            print(f"{profile} {model} {spelling} stream={stream}, {figures}")
        assert late == []
        mains = [c.kept for c in emu.chats() if not title(c.body["messages"])]
        assert traffic.cached == mains
        assert emu.counters["loads"] == 0
        await proxy.stop()


@pytest.mark.parametrize(("spelling", "learning"), [("spaced", 0), ("compact", 1)])
async def test_without_a_tokenizer(serve: Serve, spelling: str, learning: int) -> None:
    """How a model writes arguments is learned by a miss, once: not by the next proxy again.

    The server tells all models' arguments alike, and the first guess must be some spelling: no
    client could know more before its first call comes back.
    """
    for seed, misses in enumerate((learning, 0)):
        async with (
            emulated(spelling, model=HIST) as emu,
            emulated(spelling, model=HIST) as perfect,
        ):
            proxy = await serve(url=emu.url, slot_dir=None)
            traffic = await through(proxy, stream=True, seed=seed)
            await proxy.stop()
            late = await missed(traffic, emu, perfect)
            for name, run in ("through", emu), ("best", perfect):
                print(f"proxy {seed + 1}, {spelling}, no tokenizer, {Figures.of(name, run)}")
            assert len(late) == misses
