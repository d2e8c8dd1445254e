"""A release without a cache: what only serves a cache is left out, and costs nothing."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.backends import fastflowlm
from tests.emulators.fastflowlm import Emulator, Options
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT
from tests.integration.test_fastflowlm import direct, emulated, say, user

MODELS = pytest.mark.parametrize("model", ["qwen3.5:4b", "llama3.2:3b"])
TURNS = 5


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)


def system(turn: int) -> dict[str, Any]:
    """A client that tells the time at the top of each request."""
    text = f"{'You help. ' * 200}\nCurrent time: 2026-10-09 14:{turn:02}:07\n"
    return {"role": "system", "content": text}


async def conversation(ask: Any) -> None:
    """Some turns; ``ask`` gives the answer's message."""
    said: list[dict[str, Any]] = []
    for turn in range(TURNS):
        said.append(user(f"Question {turn}"))
        said.append(await ask([system(turn), *said]))


@MODELS
async def test_prefill_is_that_of_a_direct_client(serve: Serve, model: str) -> None:
    """Each request goes out with the time the client wrote, and with nothing more."""
    async with (
        emulated(serve, model=model, profile="0.9.20") as (emu, proxy),
        Emulator(Options(model=model, profile="0.9.20")) as bare,
    ):
        await conversation(lambda messages: say(proxy, messages))
        await conversation(lambda messages: direct(bare.url, messages))
        assert [chat.prompt for chat in emu.chats()] == [chat.prompt for chat in bare.chats()]
        assert emu.prefill_seconds == pytest.approx(bare.prefill_seconds)
        for turn, chat in enumerate(emu.chats()):
            assert chat.body["messages"][0] == system(turn)
            assert chat.body["messages"][-1] == user(f"Question {turn}")


@MODELS
async def test_elsewhere_the_time_is_frozen_and_told(serve: Serve, model: str) -> None:
    """The same conversation before a release with a cache: one system text, and every turn hits."""
    async with emulated(serve, model=model, profile="0.9.45") as (emu, proxy):
        await conversation(lambda messages: say(proxy, messages))
        chats = emu.chats()
        assert {chat.body["messages"][0]["content"] for chat in chats} == {system(0)["content"]}
        assert all(chat.kept for chat in chats[1:])
        assert "14:04:07" in chats[-1].body["messages"][-1]["content"]


async def test_an_upgrade(serve: Serve) -> None:
    """What was told fresh before is no reason to be cold for ever: from then on it stays."""
    async with (
        emulated(serve, profile="0.9.20") as (_, before),
        Emulator(Options(model="qwen3.5:4b", profile="0.9.45")) as emu,
    ):
        await conversation(lambda messages: say(before, messages))
        after = await serve(url=emu.url, slot_dir=None)
        said = [user("Question 0")]
        for turn in range(7, 10):
            got = await after.ask(CHAT, {"messages": [system(turn), *said]})
            said += [got.json["choices"][0]["message"], user(f"More {turn}")]
        assert [bool(chat.kept) for chat in emu.chats()] == [False, True, True]
        await after.stop()
