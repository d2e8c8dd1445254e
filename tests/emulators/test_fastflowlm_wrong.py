"""What the emulator makes of requests with holes in them (fastflowlm.md 1.3 and 1.4)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.emulators.fastflowlm import Emulator, Options
from tests.emulators.fastflowlm.acceptance import CKPT
from tests.emulators.fastflowlm.client import Wire, ask, until
from tests.emulators.fastflowlm.transport import to_json

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


def part(**fields: Any) -> dict[str, Any]:
    """A chat whose only message has one part."""
    return {"messages": [{"role": "user", "content": [fields]}]}


HOLES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, part(type="text"), "text"),
    (CHAT, part(type="image_url"), "image_url"),
    (CHAT, part(type="image_url", image_url={}), "url"),
    (CHAT, part(type="input_audio", input_audio={}), "data"),
    (EMBEDDINGS, {"input": "x"}, "model"),
    (EMBEDDINGS, {"model": "e"}, "input"),
    ("/v1/completions", {}, "prompt"),
    ("/api/chat", {}, "messages"),
    ("/api/show", {}, "model"),
]
TYPES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, part(type="text", text=5), "type must be string, but is number"),
    (CHAT, part(type="image_url", image_url=5), "with number"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "must be array, but is number"),
    (EMBEDDINGS, {"model": "e", "input": 5}, "but is number"),
    (EMBEDDINGS, {"model": "e", "input": [5]}, "type must be string, but is number"),
    (EMBEDDINGS, {"model": "e", "input": None}, "but is null"),
    ("/api/chat", {"messages": [5]}, "but is number"),
    ("/api/chat", {"messages": [], "options": None}, "type must be object, but is null"),
]


@pytest.mark.parametrize(("path", "body", "hole"), HOLES)
async def test_a_hole_ends_the_process(path: str, body: dict[str, Any], hole: str) -> None:
    """A member that is not there is undefined behaviour; the emulator says which one it was."""
    async with Emulator(Options(model=CKPT, embed=True)) as emu:
        assert (await ask(emu.url, path, body)).status == 0
        assert emu.crashed
        assert hole in emu.died_of


@pytest.mark.parametrize(("path", "body", "said"), TYPES)
async def test_another_type_is_an_error(path: str, body: dict[str, Any], said: str) -> None:
    """A member of another type throws, which comes with HTTP 200, and the lock is free again."""
    async with Emulator(Options(model=CKPT, embed=True)) as emu:
        got = await ask(emu.url, path, body)
        assert (got.status, emu.crashed, emu.npu.busy) == (200, False, False)
        assert said in str(got.json["error"])


async def test_a_locked_npu_stays_locked() -> None:
    """The lock a thread died with is not given back by one that dies without it."""
    async with Emulator(Options(model=CKPT)) as emu:
        wires = []
        for path in (CHAT, "/v1/completions"):
            wires.append(Wire(emu.url))
            await wires[-1].open()
            await wires[-1].send("POST", path, to_json({"request_id": 17}))
            await until(lambda: emu.active == len(wires) == len(emu.records))
        assert emu.npu.poisoned
        for wire in wires:
            await wire.close()


async def test_a_client_that_gives_up_closes() -> None:
    """``ask`` leaves when it is cancelled, so that the server can notice."""
    async with Emulator(Options(model=CKPT)) as emu:
        hold = emu.hold("prefill")
        asking = asyncio.create_task(ask(emu.url, CHAT, part(type="text", text="Hello")))
        await hold.reached.wait()
        asking.cancel()
        await until(lambda: emu.records[-1].disconnected)
        hold.release.set()
        await emu.settled()
        assert emu.records[-1].finish == "cancel"
