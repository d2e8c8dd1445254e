"""The llama-server driver on the real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import BackendRefusedError, BackendUnreachableError
from tests.real.conftest import EngineFactory, EngineHandle, complete, driver

pytestmark = pytest.mark.real

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def test_facts_across_a_restart(engine: EngineFactory, tiny_model: Path) -> None:
    """A restart changes the instance and nothing of the identity."""
    handle = engine(tiny_model)
    async with driver(handle.url) as backend:
        before = await backend.facts()
        assert before.instance == await backend.instance() != ""
        await asyncio.to_thread(handle.restart)
        after = await backend.facts()
    assert before.instance != after.instance
    assert before.identity == after.identity
    assert (before.total_slots, before.n_ctx) == (2, 2048)
    assert before.model_path == str(tiny_model)


async def test_save_erase_restore(engine: EngineFactory, tiny_model: Path) -> None:
    """A state goes to disk and comes back; every count agrees."""
    handle = engine(tiny_model)
    async with driver(handle.url) as backend:
        assert [view.n_tokens for view in await backend.slots()] == [None, None]
        await complete(backend, range(1000, 1064), 1)
        saved = await backend.save(1, "state.kv")
        assert saved.n_tokens == 64
        assert saved.n_bytes == (handle.slot_dir / "state.kv").stat().st_size
        assert saved.seconds > 0
        await backend.erase(1)
        assert (await backend.slots())[1].n_tokens == 0
        restored = await backend.restore(1, "state.kv")
        assert (restored.n_tokens, restored.n_bytes) == (64, saved.n_bytes)
        assert (await backend.slots())[1].n_tokens == 64


async def test_refusals_carry_the_status(engine: EngineFactory, tiny_model: Path) -> None:
    """A missing file is a refusal with 400, actions without a slot folder one with 501."""
    with_folder, without = engine(tiny_model), engine(tiny_model, slot_save_path=None)
    async with driver(with_folder.url) as backend:
        with pytest.raises(BackendRefusedError) as caught:
            await backend.restore(0, "missing.kv")
        assert caught.value.answer == 400
    async with driver(without.url) as backend:
        with pytest.raises(BackendRefusedError) as caught:
            await backend.save(0, "state.kv")
        assert caught.value.answer == 501


async def test_a_killed_backend_is_unreachable(engine: EngineFactory, tiny_model: Path) -> None:
    """After kill -9 every call says unreachable, and works again after a restart."""
    handle = engine(tiny_model)
    async with driver(handle.url) as backend:
        await backend.slots()
        await asyncio.to_thread(handle.kill)
        with pytest.raises(BackendUnreachableError):
            await backend.slots()
        await asyncio.to_thread(handle.restart)
        assert len(await backend.slots()) == 2


async def test_rendered_prompt_is_what_the_server_computes(tools_engine: EngineHandle) -> None:
    """Rendering and tokenising counts exactly the tokens of the real request, tools included."""
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "Weather in Oslo?"},
        ],
        "tools": [TOOL],
    }
    async with driver(tools_engine.url) as backend:
        prompt = await backend.render(body)
        assert "get_weather" in prompt
        assert "Answer briefly." in prompt
        tokens = await backend.tokenize(prompt)
        asked = orjson.dumps({**body, "max_tokens": 1, "temperature": 0})
        headers = [("Content-Type", "application/json")]
        async with backend.send("POST", "/v1/chat/completions", headers, asked) as answer:
            assert answer.status == 200
            usage = orjson.loads(await answer.read())["usage"]
    assert usage["prompt_tokens"] == len(tokens)


async def test_tool_calls_of_the_history_are_rendered(tools_engine: EngineHandle) -> None:
    """Calls and their results are part of the prompt, ``content: null`` is accepted."""
    call = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
    messages = [
        {"role": "user", "content": "Weather in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5 degrees"},
    ]
    async with driver(tools_engine.url) as backend:
        prompt = await backend.render({"messages": messages, "tools": [TOOL]})
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "<tool_response>\n5 degrees\n</tool_response>" in prompt
