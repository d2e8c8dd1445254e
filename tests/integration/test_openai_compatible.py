"""The whole proxy before a server that knows nothing but OpenAI's API, and is strict about it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.core.records import Mode
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT, chat
from tests.listening import killed

KNOWN = {"messages", "model", "max_tokens", "stream", "stream_options", "temperature"}
USAGE = {
    "prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8},
}  # fmt: skip


async def complete(request: web.Request) -> web.StreamResponse:
    """Two words, streamed or not; 400 for a field it does not know."""
    body = await request.json()
    if unknown := set(body) - KNOWN:
        return web.json_response({"error": {"message": f"unknown {sorted(unknown)}"}}, status=400)
    head = {"id": "c", "created": 1, "model": "toy"}
    if not body.get("stream"):
        message = {"role": "assistant", "content": "a b"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({**head, "choices": [choice], "usage": USAGE})
    deltas: list[Any] = [{"role": "assistant", "content": "a"}, {"content": " b"}, {}]
    events = [
        {**head, "choices": [{"index": 0, "delta": d, "finish_reason": None if d else "stop"}]}
        for d in deltas
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": USAGE})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def models(request: web.Request) -> web.Response:
    """One model."""
    return web.json_response({"object": "list", "data": [{"id": "toy", "object": "model"}]})


@pytest.fixture
async def toy() -> AsyncIterator[str]:
    """Its address."""
    app = web.Application()
    app.add_routes([web.post(CHAT, complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await killed(runner)


async def test_it_only_sees_what_it_knows(serve: Serve, toy: str) -> None:
    """Streaming or not, the answer comes, with the reuse the server tells."""
    proxy = await serve(url=toy, slot_dir=None)
    assert proxy.app.scheduler.mode is Mode.FORWARD
    assert (proxy.app.scheduler.total_slots, proxy.app.keeper.up) == (0, True)
    got = await proxy.chat("hello")
    assert (got.status, got.said) == (200, "forward; reused=8; prompt=12")
    assert got.json["choices"][0]["message"]["content"] == "a b"
    for more in ({}, {"stream_options": {"include_usage": True}}):
        got = await proxy.chat("hello", stream=True, **more)
        text = [e["choices"][0]["delta"].get("content") for e in got.events[:3]]
        assert (got.status, text, got.events[-1]) == (200, ["a", " b", None], b"[DONE]")


async def test_anthropic(serve: Serve, toy: str) -> None:
    """``/v1/messages`` works there, too."""
    proxy = await serve(url=toy, slot_dir=None, kind="openai_compatible")
    body = {**chat("hello"), "model": "claude"}
    got = await proxy.ask("/v1/messages", body)
    assert got.json["content"][0]["text"] == "a b"
    assert got.json["usage"]["cache_read_input_tokens"] == 8


async def test_no_advice_that_does_not_help(serve: Serve, toy: str, tmp_path: Any) -> None:
    """A slot directory changes nothing for a server without slots, and it is not probed."""
    proxy = await serve(url=toy)
    assert (proxy.app.scheduler.mode, proxy.app.keeper.up) == (Mode.FORWARD, True)
    verdict = proxy.app.keeper.verdict
    assert ("no slots" in verdict.why, verdict.advice) == (True, "")


async def test_tokens_are_estimated(serve: Serve, toy: str) -> None:
    """It has no counter: what it said of earlier prompts is the measure."""
    proxy = await serve(url=toy, slot_dir=None)
    body = {**chat("hello"), "model": "claude"}
    await proxy.ask("/v1/messages", body)
    got = await proxy.ask("/v1/messages/count_tokens", body)
    assert (got.status, got.headers["x-slotkeeper-count"]) == (200, "estimate")
    assert got.json["input_tokens"] == USAGE["prompt_tokens"]
