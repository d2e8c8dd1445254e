"""What FastFlowLM's users are told, and that it is told once."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from proxy.backends import fastflowlm
from proxy.backends.fastflowlm import FastFlowLM
from proxy.backends.flm_advice import Advice, Hint
from proxy.backends.flm_memory import Cache
from proxy.errors import BackendUnreachableError
from tests.emulators.fastflowlm import Emulator, Options
from tests.unit.backends.raw import raw_server
from tests.unit.backends.test_flm_driver import TOOLS, post, say, user


@pytest.mark.parametrize(
    ("cache", "want"),
    [(Cache.NONE, [Hint.STATELESS]), (Cache.DELTA, [Hint.LEGACY]), (Cache.WHOLE, [])],
)
def test_old_releases(cache: Cache, want: list[Hint]) -> None:
    """Whoever has one is told to upgrade, once."""
    advice = Advice()
    with capture_logs() as logged:
        advice.release(cache)
        advice.release(cache)
    assert [line["advice"] for line in logged] == want


async def test_no_connection_slots_left() -> None:
    """A server that closes at once may have lost them all (#680)."""

    async def close(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        pass

    async with raw_server(close) as server:
        backend = FastFlowLM(server.url, connect_timeout=2, silence_timeout=20)
        with capture_logs() as logged:
            for _ in range(2):
                with pytest.raises(BackendUnreachableError):
                    await backend.facts()
        await backend.close()
    assert [line["advice"] for line in logged] == [Hint.CROWDED]


async def test_what_the_server_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools nobody sees and fields nobody reads are named, and no word of a prompt."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.0)
    async with Emulator(Options(model="llama3.2:3b")) as emu:
        backend = FastFlowLM(emu.url, connect_timeout=2, silence_timeout=20, model="llama3.2:3b")
        with capture_logs() as logged:
            for _ in range(2):
                await post(backend, {"messages": [user("secret")], "tools": TOOLS, "seed": 1})
        await backend.close()
    assert [(line["advice"], line["about"]) for line in logged] == [
        (Hint.BLIND, "llama3.2:3b"), (Hint.UNREAD, "seed"),
    ]  # fmt: skip


async def test_an_old_template() -> None:
    """The stock template loses the prefix at the first question behind a tool loop (3.3)."""
    async with Emulator(Options(model="qwen3:4b")) as emu:
        backend = FastFlowLM(emu.url, connect_timeout=2, silence_timeout=20, model="qwen3:4b")
        call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
        loop = [
            user("a"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        with capture_logs() as logged:
            answer = await say(backend, loop, tools=TOOLS)
            await say(backend, [*loop, answer, user("b")], tools=TOOLS)
        await backend.close()
        assert emu.chats()[-1].kept == 0
    assert [line["advice"] for line in logged] == [Hint.MISSED]
