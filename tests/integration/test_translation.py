"""Client APIs that the emulated FastFlowLM lacks or breaks, spoken by their own clients.

About proxy.dialects.retelling, proxy.dialects.completion_as_chat, proxy.dialects.ollama,
proxy.dialects.responses, proxy.server.count, and what proxy.server.chat does for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ollama
import openai
import orjson
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from proxy.core.sse import Parser
from proxy.dialects import TRANSLATIONS
from tests.emulators.fastflowlm import Answer, Emulator
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, Proxy, posts, until
from tests.integration.test_fastflowlm import emulated, user

TOOL = {"name": "ls", "description": "List", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL: Any = {"type": "function", "function": TOOL}
CALL = ("ls", '{"path": "/", "deep": 1}')
COUNT = "/v1/messages/count_tokens"


@pytest.fixture
async def both(serve: Serve) -> AsyncIterator[tuple[Emulator, Proxy]]:
    """The emulator, and a proxy before it."""
    async with emulated(serve) as pair:
        yield pair


@pytest.fixture
async def llama(both: tuple[Emulator, Proxy]) -> AsyncIterator[ollama.AsyncClient]:
    """Ollama's own client."""
    async with ollama.AsyncClient(host=both[1].url) as client:
        yield client


@pytest.fixture
async def api(both: tuple[Emulator, Proxy]) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    url = f"{both[1].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def only_chat(emu: Emulator) -> bool:
    """The server was asked for chat, and never for what it lacks or breaks."""
    asked = {record.path for record in emu.records}
    return CHAT in asked and asked.isdisjoint(TRANSLATIONS)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_completions(
    both: tuple[Emulator, Proxy], api: openai.AsyncOpenAI, stream: bool
) -> None:
    """A text's continuation is a chat's answer, and its figures are the server's."""
    emu, _ = both
    asked: Any = {"model": "gpt-4o", "prompt": "Once upon", "max_tokens": 50}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await api.completions.create(**asked)]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert {chunk.id[:5] for chunk in chunks} == {"cmpl-"}
        usage = chunks[-1].usage
    else:
        got = await api.completions.create(**asked)
        text, usage = got.choices[0].text, got.usage
        assert (got.object, got.choices[0].finish_reason) == ("text_completion", "stop")
    assert text.endswith("Once upon")
    (chat,) = emu.chats()
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (chat.prompt, chat.completion)
    assert only_chat(emu)


@pytest.mark.parametrize("stream", [False, True])
async def test_ollamas_chat(
    both: tuple[Emulator, Proxy], llama: ollama.AsyncClient, stream: bool
) -> None:
    """A tool is called with its result given back; the second request reuses the first."""
    emu, proxy = both
    emu.answers.append(Answer("", calls=(CALL,)))
    messages: list[Any] = [user("list")]

    async def ask() -> Any:
        asked: Any = {"model": "llama3.2", "messages": messages, "tools": [CHAT_TOOL]}
        asked["options"] = {"num_predict": 99, "num_ctx": 4096, "seed": 1}
        if not stream:
            return (await llama.chat(**asked)).message
        parts = [part async for part in await llama.chat(**asked, stream=True)]
        assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
        whole = parts[-2 if parts[-2].message.tool_calls else 0].message
        whole.content = "".join(part.message.content or "" for part in parts)
        return whole

    message = await ask()
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("ls", {"path": "/", "deep": 1})
    messages += [message, {"role": "tool", "tool_name": "ls", "content": "bin"}]
    assert (await ask()).content.strip().endswith("bin")
    first, second = emu.chats()
    assert second.kept == first.prompt
    assert second.body["max_tokens"] == 99
    assert "num_ctx" not in second.body
    *_, asked, result = second.body["messages"]
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert only_chat(emu)
    assert proxy.app.history.recent(1)[0].path == "/api/chat"


async def test_ollamas_lines(both: tuple[Emulator, Proxy]) -> None:
    """Streamed unless told not to, as lines of JSON, the last one with counts and nanoseconds."""
    emu, proxy = both
    body = {"model": "m", "messages": [user("a")], "keep_alive": 0}
    got = await proxy.ask("/api/chat", body)
    assert got.headers["content-type"] == "application/x-ndjson"
    lines = [orjson.loads(line) for line in got.raw.splitlines()]
    said = "".join(line["message"]["content"] for line in lines)
    assert said.strip().endswith("a")
    assert "".join(line["message"].get("thinking", "") for line in lines)
    (chat,) = emu.chats()
    last = lines[-1]
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", "m")
    assert (last["prompt_eval_count"], last["eval_count"]) == (chat.prompt, chat.completion)
    assert last["prompt_eval_duration"] > 0
    whole = (await proxy.ask("/api/chat", {**body, "stream": False})).json
    assert whole["message"]["content"].strip() == said.strip()
    assert whole.keys() == last.keys()
    assert whole["created_at"].endswith("Z")


@pytest.mark.parametrize("stream", [False, True])
async def test_ollamas_generate(
    both: tuple[Emulator, Proxy], llama: ollama.AsyncClient, stream: bool
) -> None:
    """A prompt with its system text and no thinking."""
    emu, _ = both
    asked: Any = {"model": "m", "prompt": "Once", "system": "Be brief.", "think": False}
    if stream:
        parts = [part async for part in await llama.generate(**asked, stream=True)]
        text, last = "".join(part.response or "" for part in parts), parts[-1]
    else:
        last = await llama.generate(**asked)
        text = last.response or ""
    assert text.strip().endswith("Once")
    (chat,) = emu.chats()
    assert [message["role"] for message in chat.body["messages"]] == ["system", "user"]
    assert chat.body["think"] is False
    assert (last.done, last.prompt_eval_count) == (True, chat.prompt)
    assert only_chat(emu)


async def heard(llama: ollama.AsyncClient, text: str, *, stream: bool) -> None:
    """An answer, to its end."""
    asked: Any = {"model": "m", "messages": [user(text)], "stream": stream}
    given: Any = await llama.chat(**asked)
    if stream:
        async for _ in given:
            pass


async def test_ollamas_errors(both: tuple[Emulator, Proxy], llama: ollama.AsyncClient) -> None:
    """What is refused, by the proxy or the server, is a text under ``error``."""
    emu, proxy = both
    with pytest.raises(ollama.ResponseError, match="'context' cannot be served") as refused:
        await llama.generate(model="m", prompt="a", context=[1])
    assert refused.value.status_code == 400
    broken = await proxy.ask("/api/chat", b"{")
    assert (broken.status, broken.json["source"]) == (400, "slotkeeper")
    assert broken.json["error"].startswith("The request body is not valid JSON")
    for stream in (False, True):
        emu.fault("error")
        with pytest.raises(ollama.ResponseError):
            await heard(llama, f"{stream}", stream=stream)
    emu.fault("drop", after=3)
    got = await proxy.ask("/api/chat", {"model": "m", "messages": [user("a")]})
    assert isinstance(orjson.loads(got.raw.splitlines()[-1])["error"], str)


async def respond(api: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    """The response, from its events or as it is."""
    if not stream:
        return await api.responses.create(**asked)
    async with api.responses.stream(**asked) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == sorted(numbers)
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(
    both: tuple[Emulator, Proxy], api: openai.AsyncOpenAI, stream: bool
) -> None:
    """Two functions are called, their results given back; the second request reuses the first."""
    emu, _ = both
    emu.answers.append(Answer("", calls=(CALL, ("files__cat", '{"path": "/b"}'))))
    spoken: list[Any] = [user("list")]
    cat = {"type": "function", "name": "cat", "parameters": {"type": "object", "properties": {}}}
    asked: Any = {
        "model": "gpt-5",
        "instructions": "Be brief.",
        "tools": [
            {"type": "function", **TOOL},
            {"type": "namespace", "name": "files", "description": "Files", "tools": [cat]},
            {"type": "web_search"},
        ],
        "max_output_tokens": 200,
        "store": False,
    }
    got = await respond(api, stream, input=spoken, **asked)
    assert [item.type for item in got.output[:2]] == ["reasoning", "message"]  # two line ends
    calls = got.output[2:]
    assert [(call.namespace, call.name) for call in calls] == [(None, "ls"), ("files", "cat")]
    assert orjson.loads(calls[0].arguments) == {"path": "/", "deep": 1}
    spoken += [item.model_dump(exclude_none=True) for item in got.output]
    spoken += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "bin"} for call in calls
    ]
    got = await respond(api, stream, input=spoken, **asked)
    assert got.output_text.strip().endswith("bin")
    assert (got.status, got.model, got.instructions) == ("completed", "gpt-5", "Be brief.")
    first, second = emu.chats()
    assert second.kept == first.prompt
    assert [m["role"] for m in second.body["messages"]] == [
        "system", "user", "assistant", "tool", "tool",
    ]  # fmt: skip
    assert got.usage.input_tokens_details.cached_tokens == second.kept
    assert (got.usage.input_tokens, got.usage.output_tokens) == (second.prompt, second.completion)
    assert only_chat(emu)


def kinds(raw: bytes) -> list[str]:
    """The types of a response's events; their names are the same, their numbers go up by one."""
    events = Parser().feed(raw)
    values = [orjson.loads(event.data) for event in events]
    assert [value["sequence_number"] for value in values] == [*range(len(values))]
    for event, value in zip(events, values, strict=True):
        assert event.raw.startswith(b"event: %b\n" % value["type"].encode())
    return [str(value["type"]).removeprefix("response.") for value in values]


async def test_pings_of_each_protocol(serve: Serve) -> None:
    """While the prompt is computed each client hears something it knows; the answer is whole."""
    async with emulated(serve) as (emu, _):
        proxy = await serve(url=emu.url, slot_dir=None, ping_interval=0.005)
        asked: dict[str, Any] = {
            "/v1/responses": {"input": "a"},
            "/api/chat": {"messages": [user("a")]},
            "/api/generate": {"prompt": "a"},
            "/v1/completions": {"prompt": "a"},
        }
        for path, body in asked.items():
            hold = emu.hold("prefill")
            before = proxy.metric("pings_total")
            asking = asyncio.create_task(proxy.ask(path, {**body, "stream": True}))
            await until(lambda n=before: proxy.metric("pings_total") > n + 2)  # type: ignore[misc]
            hold.release.set()
            got = await asking
            assert got.status == 200
            if path == "/v1/responses":
                heard = kinds(got.raw)
                assert heard[:3] == ["created", "in_progress", "in_progress"]
                assert heard[-1] == "completed"
            elif path.startswith("/api/"):
                assert orjson.loads(got.raw.splitlines()[0])["done"] is False
                assert orjson.loads(got.raw.splitlines()[-1])["done"] is True
            else:
                assert got.events[0]["choices"][0]["text"] == ""
                assert len({event["id"] for event in got.events[:-1]}) == 1


@pytest.mark.parametrize("path", sorted(TRANSLATIONS.keys() - {"/v1/responses"}))
async def test_servers_that_have_it_are_left_alone(
    proxy: Proxy, fake: FakeLlamaServer, path: str
) -> None:
    """llama-server gets the client's own path and body, whatever it makes of it."""
    body = {"prompt": "a", "input": "a", "messages": [user("a")], "odd": 1}
    await proxy.ask(path, body)
    (sent,) = [one for one in posts(fake) if one.target == path]
    assert sent.json["odd"] == 1


async def test_tokens_are_counted_without_a_counter(serve: Serve, tmp_path: Path) -> None:
    """An estimate that follows what was seen, or the tokenizer that is set; each says so."""
    plain = {"messages": [user("word " * 300)], "system": "S"}
    image = {"type": "base64", "media_type": "image/png", "data": "A" * 9000}
    parts = [{"type": "text", "text": "word " * 300}, {"type": "image", "source": image}]
    seen = {"messages": [user(parts)], "system": "S"}  # type: ignore[arg-type]
    async with emulated(serve) as (emu, proxy):
        first = await proxy.ask(COUNT, plain)
        await proxy.ask("/v1/messages", {**plain, "max_tokens": 9})
        second = await proxy.ask(COUNT, seen)
        true = emu.chats()[0].prompt
        assert first.headers["x-slotkeeper-count"] == "estimate"
        assert first.json["input_tokens"] > true
        assert second.json["input_tokens"] == pytest.approx(true, rel=0.05)
        words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(tmp_path / "tokenizer.json"))
        named = str(tmp_path / "tokenizer.json")
        other = await serve(url=emu.url, slot_dir=None, tokenizer=named)
        third = await other.ask(COUNT, plain)
        assert third.headers["x-slotkeeper-count"] == "tokenizer"
        assert third.json["input_tokens"] == 300 + 1 + len(["system", "user"])


def test_readme_names_what_is_translated() -> None:
    """README has each translated path in one row of its table of requests."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if "the cached path as chat" in line]
    assert all(f"{path}`" in row for path in TRANSLATIONS)
