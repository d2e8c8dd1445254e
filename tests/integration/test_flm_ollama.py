"""Requests of Ollama's clients that say nothing: they load a model, or unload it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import ollama
import pytest

from proxy.errors import BadRequestError
from tests.emulators.fastflowlm import Emulator
from tests.integration.conftest import Serve
from tests.integration.proxies import Proxy
from tests.integration.test_fastflowlm import emulated

GENERATE, CHAT = "/api/generate", "/api/chat"


@pytest.fixture
async def both(serve: Serve) -> AsyncIterator[tuple[Emulator, Proxy]]:
    """The emulator, and a proxy before it."""
    async with emulated(serve) as pair:
        yield pair


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": False}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {}),
        (GENERATE, {"prompt": ""}),
        (GENERATE, {"prompt": None, "system": "Be brief.", "keep_alive": "5m"}),
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": None, "options": {"num_ctx": 9}, "keep_alive": -1}),
    ],
)
async def test_loading(
    both: tuple[Emulator, Proxy], path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    """It is done at once, in one object whether streamed or not, and the server hears nothing."""
    emu, proxy = both
    before = len(emu.records)
    got = await proxy.ask(path, {"model": "qwen", **body, **more})
    assert got.status == 200
    assert got.headers["content-type"] == "application/json; charset=utf-8"
    said = (
        {"response": ""} if path == GENERATE else {"message": {"role": "assistant", "content": ""}}
    )
    told = got.json
    at = datetime.fromisoformat(told.pop("created_at"))
    assert abs(datetime.now(UTC) - at) < timedelta(hours=1)
    assert told == {"model": "qwen", **said, "done": True, "done_reason": "load"}
    assert len(emu.records) == before


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        (0, "unload"), (0.0, "unload"), ("0", "unload"), ("0s", "unload"), ("0h0m0.00s", "unload"),
        ("-0ms", "unload"), (1, "load"), (-1, "load"), ("10s", "load"), ("0.5s", "load"),
        ("", "load"), ("0x", "load"), (None, "load"), ([], "load"),
    ],
)  # fmt: skip
async def test_unloading(both: tuple[Emulator, Proxy], keep_alive: Any, reason: str) -> None:
    """A model that is kept for no time goes; here it stays, for the server has no other."""
    _, proxy = both
    for path in (GENERATE, CHAT):
        got = await proxy.ask(path, {"model": "m", "keep_alive": keep_alive})
        assert (got.json["done"], got.json["done_reason"]) == (True, reason)


async def test_its_own_client(both: tuple[Emulator, Proxy]) -> None:
    """Understands it, streamed too; then a prompt is answered, and kept for no time as well."""
    emu, proxy = both
    async with ollama.AsyncClient(host=proxy.url) as client:
        assert (await client.generate(model="m")).done_reason == "load"
        assert (await client.generate(model="m", keep_alive=0)).done_reason == "unload"
        assert (await client.chat(model="m", messages=[])).done_reason == "load"
        parts = [part async for part in await client.generate(model="m", stream=True)]
        assert [(part.done, part.done_reason) for part in parts] == [(True, "load")]
        answer = await client.generate(model="m", prompt="Once", keep_alive=0)
        assert ("Once" in (answer.response or ""), answer.done_reason) == (True, "stop")
    assert len(emu.chats()) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"prompt": 0, "model": "m"}), (GENERATE, {"prompt": [], "model": "m"}),
        (GENERATE, {"raw": True, "model": "m"}), (GENERATE, {"system": 5, "model": "m"}),
        (CHAT, {"messages": {}, "model": "m"}), (CHAT, {"messages": "", "model": "m"}),
        (GENERATE, {}), (CHAT, {"messages": []}), (CHAT, {"model": 7}), (CHAT, {"model": ""}),
    ],
)  # fmt: skip
async def test_what_is_no_such_request(
    both: tuple[Emulator, Proxy], path: str, body: dict[str, Any]
) -> None:
    """Something else in the place of words is refused as before."""
    emu, proxy = both
    got = await proxy.ask(path, body)
    assert (got.status, got.json["source"]) == (BadRequestError.status, "slotkeeper")
    assert emu.chats() == []
