"""A scripted engine: llama-server's HTTP before a real, tiny llama.cpp.

Completions come from ``script.py``; every other page is the real engine's, so prompts are rendered
by llama.cpp itself with a named template. Every completion request is recorded.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web

from proxy.engine import Engine, EngineOptions
from tests.clients import script
from tests.real import tiny_gguf

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
# Both render tools and system messages anywhere. Qwen2.5 knows no reasoning; Qwen3 renders it since
# the user's last word and drops it from earlier turns, whatever a client or proxy does.
TEMPLATES: Mapping[str, str] = {
    "qwen2.5": tiny_gguf.TOOLS_TEMPLATE,
    "qwen3": Path(__file__).with_name("qwen3.jinja").read_text(encoding="utf-8"),
}
CONTEXT = 65_536  # tokens; the largest client opens with 80 kB
RENDERED = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "json_schema", "response_format",
    "parallel_tool_calls", "reasoning_effort",
)  # fmt: skip
SHOWS_PROMPTS = "LLAMA_SERVER_SLOTS_DEBUG"  # the only way to see what /v1/messages is rendered to


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it reached the engine: unix seconds, path, body."""

    at: float
    path: str
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        """Parsed."""
        parsed: dict[str, Any] = orjson.loads(self.raw)
        return parsed


@contextmanager
def renderer(folder: Path, template: str) -> Iterator[Engine]:
    """A tiny real engine with the named template and one slot."""
    model = tiny_gguf.build(
        folder / f"{template}.gguf",
        "llama",
        context_length=CONTEXT,
        chat_template=TEMPLATES[template],
    )
    options = EngineOptions(slots=1, context=CONTEXT, batch=2048)
    os.environ[SHOWS_PROMPTS] = "1"
    try:
        engine = Engine(model, options, log=folder / f"{template}.log")
    finally:
        del os.environ[SHOWS_PROMPTS]
    try:
        engine.wait_healthy()
        yield engine
    finally:
        engine.terminate()


async def render(engine: aiohttp.ClientSession, asked: Asked) -> str:
    """The prompt a recorded request becomes, by llama.cpp."""
    body = asked.body
    if asked.path == CHAT:
        return await render_chat(engine, body)
    await _ask(engine, MESSAGES, {**body, "max_tokens": 1, "stream": False})
    async with engine.get("/slots") as answer:
        return str((await answer.json())[0]["prompt"])


async def render_chat(engine: aiohttp.ClientSession, body: Mapping[str, Any]) -> str:
    """The prompt of a chat request."""
    wanted = {name: body[name] for name in RENDERED if name in body}
    return str((await _ask(engine, "/apply-template", wanted))["prompt"])


async def _ask(engine: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Any:
    async with engine.post(path, data=orjson.dumps(body)) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        return found


class ScriptedEngine:
    """``async with ScriptedEngine(engine.url) as scripted``: ``url`` and ``requests``."""

    def __init__(self, engine_url: str) -> None:
        """``engine_url``: of :func:`renderer`."""
        self.requests: list[Asked] = []
        self.url = ""
        self._engine_url = engine_url
        self._held: list[list[int]] = []

    async def __aenter__(self) -> Self:
        self._engine = aiohttp.ClientSession(self._engine_url)
        app = web.Application(client_max_size=2**26)
        app.router.add_post(CHAT, self._chat)
        app.router.add_post(MESSAGES, self._messages)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()
        await self._engine.close()

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        async with self._engine.request(request.method, request.path_qs, data=body) as answer:
            kind = answer.headers.get("Content-Type", "text/plain").split(";")[0]
            return web.Response(status=answer.status, body=await answer.read(), content_type=kind)

    async def _reuse(self, body: Mapping[str, Any]) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them any earlier prompt begins with."""
        question = {"content": await render_chat(self._engine, body), "parse_special": True}
        tokens: list[int] = (await _ask(self._engine, "/tokenize", question))["tokens"]
        cached = max((_common(tokens, held) for held in self._held), default=0)
        self._held.append(tokens)
        return len(tokens), min(cached, len(tokens) - 1)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._record(request)
        said = script.answer(body, *await self._reuse(body))
        if not body.get("stream"):
            whole = orjson.dumps(script.chat_whole(said))
            return web.Response(body=whole, content_type="application/json")
        response = await _stream(request)
        for data in script.chat_events(said, body):
            await response.write(b"data: " + data + b"\n\n")
        return response

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        said = script.answer(await self._record(request))
        response = await _stream(request)
        for name, data in script.message_events(said):
            payload = orjson.dumps({"type": name, **data})
            await response.write(f"event: {name}\ndata: ".encode() + payload + b"\n\n")
        return response

    async def _record(self, request: web.Request) -> dict[str, Any]:
        self.requests.append(Asked(time.time(), request.path, await request.read()))
        return self.requests[-1].body


def _common(one: list[int], two: list[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return sum(1 for _ in pairs)


async def _stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response
