"""What each client of the crowd may do (see ``flm_crowd``)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.integration.flm_crowd import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    EMBEDDINGS,
    MESSAGES,
    OK,
    WRONG,
    Body,
    Got,
    Kind,
    Leave,
    Message,
    Mix,
    Talk,
    ended,
)

FAILED, NOT_THERE = 500, 501  # the second: the server was not started for it
TOOL = {"name": "look", "description": "looks", "parameters": {"type": "object"}}


def asked(talk: Talk, rng: random.Random) -> Body:
    """The next request of a conversation as chat."""
    last = talk.messages[-1] if talk.messages else {}
    if last.get("tool_calls"):
        new = [
            {"role": "tool", "tool_call_id": call["id"], "content": talk.says()}
            for call in last["tool_calls"]
        ]
    else:
        system = {"role": "system", "content": f"You talk to {talk.word}z0. " + "Be brief. " * 50}
        new = [] if talk.messages else [system]
        new.append({"role": "user", "content": talk.says()})
    body: Body = {"messages": [*talk.messages, *new], "stream": rng.random() < 0.6}
    if talk.tools:
        body["tools"] = [{"type": "function", "function": TOOL}]
    return body


def heard(talk: Talk, body: Body, got: Got) -> None:
    """Keep what was said."""
    if got.left or got.status != OK:
        return
    if not body["stream"]:
        message = got.json["choices"][0]["message"]
    else:
        ended(got)
        deltas = [e["choices"][0]["delta"] for e in got.events if e != "[DONE]" and e["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
        text = "".join(delta.get("content") or "" for delta in deltas)
        message = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
    talk.messages = [*body["messages"], message]


async def chat(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """A turn, streamed or not."""
    body = asked(talk, rng)
    got = await mix.post(CHAT, body, talk.key)
    mix.told(name, got, talk)
    heard(talk, body, got)


async def messages(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """A conversation of two turns over Anthropic's API."""
    talk = Talk(talk.key, f"canary{rng.getrandbits(32):08x}", tools=False)
    said: list[Message] = []
    for _ in range(2):
        said.append({"role": "user", "content": talk.says()})
        stream = rng.random() < 0.6
        body = {"model": "claude", "max_tokens": 300, "messages": said, "stream": stream}
        got = await mix.post(MESSAGES, body, talk.key)
        mix.told(name, got, talk)
        if stream:
            ended(got)
            deltas = [e["delta"] for e in got.events if e["type"] == "content_block_delta"]
            content: Any = "".join(delta.get("text", "") for delta in deltas)
        else:
            content = got.json["content"]
        said.append({"role": "assistant", "content": content})


async def completion(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """A text completion."""
    body = {"prompt": talk.says(), "stream": rng.random() < 0.5, "max_tokens": 200}
    mix.told(name, await mix.post(COMPLETIONS, body, talk.key), talk)


async def embeddings(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """Vectors, which have an engine of their own and the same lock."""
    path = rng.choice((EMBEDDINGS, "/api/embeddings"))
    got = await mix.post(path, {"model": "embed-gemma:300m", "input": talk.says()}, talk.key)
    mix.told(name, got, talk, whole=False)
    assert got.status == OK, got.raw
    assert len(got.json["data"]) == 1


async def ollama(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """One question over one of Ollama's own two paths."""
    said, stream = talk.says(), rng.random() < 0.6
    body: Body = {"model": "x:latest", "stream": stream, "options": {"num_predict": 300}}
    if rng.random() < 0.5:
        got = await mix.post("/api/generate", {**body, "prompt": said}, talk.key)
    else:
        given = [{"role": "user", "content": said}]
        got = await mix.post("/api/chat", {**body, "messages": given}, talk.key)
    mix.told(name, got, talk)
    assert (got.lines if stream else [got.json])[-1]["done"] is True


async def responses(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """One question over the newer of OpenAI's APIs."""
    body = {"model": "x", "input": talk.says(), "max_output_tokens": 300}
    stream = rng.random() < 0.6
    got = await mix.post("/v1/responses", {**body, "stream": stream}, talk.key)
    mix.told(name, got, talk)
    if stream:
        ended(got)


async def count(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """How many tokens a request of Anthropic's API has."""
    body = {"model": "x", "messages": [{"role": "user", "content": talk.says()}]}
    got = await mix.post("/v1/messages/count_tokens", body, talk.key)
    mix.told(name, got, talk, whole=False)


NULLS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "model",
    "repetition_penalty", "max_tokens", "max_completion_tokens", "think", "reasoning_effort",
    "stream_options", "tool_choice", "parallel_tool_calls", "user", "request_id", "stop", "n",
    "response_format", "logprobs", "seed",
)  # fmt: skip


async def nulls(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """A turn with nulls where a value may stand."""
    body = asked(talk, rng)
    got = await mix.post(CHAT, body | dict.fromkeys(rng.sample(NULLS, 4)), talk.key)
    mix.told(name, got, talk)
    heard(talk, body, got)


async def unknown_model(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """A turn that names a model nobody has, or one by half its name."""
    body = asked(talk, rng)
    model = rng.choice(("gpt-4o", "qwen3", "Ollama/x", "", "LLAMA"))
    got = await mix.post(CHAT, {**body, "model": model}, talk.key)
    mix.told(name, got, talk)
    heard(talk, body, got)


async def overflow(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """More than the context holds."""
    body = asked(talk, rng)
    body["messages"][-1]["content"] += " word" * (2 * CONTEXT)
    got = await mix.post(CHAT, body, talk.key)
    mix.told(name, got, talk, whole=False)
    assert got.status == WRONG, (got.status, got.raw)


WRONG_FIELDS: tuple[Body, ...] = (
    {"messages": "x"}, {"messages": []}, {"messages": [5]}, {"messages": {}},
    {"messages": [{"role": 5, "content": "x"}]}, {"messages": [{"role": "user", "content": 7}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": 5}]}, {"messages": [{"content": "x"}]},
    {"temperature": "hot"}, {"top_k": 2.7}, {"min_p": 0.05}, {"top_p": [1]}, {"think": "no"},
    {"max_tokens": "many"}, {"max_tokens": 1e30}, {"max_tokens": -1}, {"max_tokens": 0},
    {"stream": "yes"}, {"stream_options": 3}, {"model": 5}, {"model": []}, {"tools": 7},
    {"tools": [{"x": 1}]}, {"tools": [5]}, {"tools": [{"type": "function", "function": {}}]},
    {"tool_choice": "nonsense", "tools": [{"type": "function", "function": TOOL}]},
    {"tool_choice": {"type": "function"}, "tools": [{"type": "function", "function": TOOL}]},
    {"parallel_tool_calls": "x", "tools": [{"type": "function", "function": TOOL}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"request_id": 17}, {"request_id": {"a": 1}}, {"request_id": []}, {"reasoning_effort": 3},
    {"image-max-tokens": "x"}, {"stop": 5}, {"n": 3}, {"logprobs": True}, {"id_slot": "x"},
)  # fmt: skip
WRONG_BYTES = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe{}",
    b"[" * 5000,
    b'{"messages":NaN}',
    b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1' + b"0" * 30 + b"}",
)
WRONG_ELSEWHERE: tuple[tuple[str, Any], ...] = (
    (COMPLETIONS, {}), (COMPLETIONS, {"prompt": 5}), (COMPLETIONS, {"prompt": None}),
    (COMPLETIONS, {"prompt": ["a", "b"]}), (EMBEDDINGS, {}), (EMBEDDINGS, {"model": "e"}),
    (MESSAGES, {}), (MESSAGES, {"messages": 5}), (MESSAGES, {"max_tokens": 9, "messages": []}),
    ("/v1/nothing", {"a": 1}), ("/v1/chat/completions/", {"a": 1}),
    ("/v1/audio/transcriptions", {"model": "whisper"}), ("/api/show", {}),
    ("/api/show", {"model": "x", "request_id": 17}), ("/api/pull", {"request_id": {}}),
    ("/api/chat", {}), ("/api/chat", {"messages": 5}), ("/api/chat", {"messages": [5]}),
    ("/api/generate", {}), ("/api/generate", {"prompt": 5}), ("/v1/responses", {}),
    ("/v1/responses", {"input": 5}), ("/api/embeddings", {"model": "e", "input": [5]}),
    (EMBEDDINGS, {"model": "e", "input": None}), (EMBEDDINGS, {"model": None, "input": "x"}),
)  # fmt: skip


def wrong_body(text: str, *, stream: bool, fields: Body) -> Body:
    """A chat with something wrong in it."""
    return {"messages": [{"role": "user", "content": text}], "stream": stream, **fields}


async def wrong(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """What no client should send: an answer, or an error that says so."""
    which = rng.random()
    path: str = CHAT
    body: Any
    if which < 0.7:
        body = wrong_body(talk.says(), stream=rng.random() < 0.5, fields=rng.choice(WRONG_FIELDS))
    elif which < 0.85:
        body = rng.choice(WRONG_BYTES)
    else:
        path, body = rng.choice(WRONG_ELSEWHERE)
    got = await mix.post(path, body, talk.key)
    mix.told(name, got, talk, whole=False)
    assert got.status < FAILED or got.status == NOT_THERE, (path, body, got.raw)


async def leaves(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """A client that goes, before, during or after the answer, and mostly asks the same again."""
    body = asked(talk, rng)
    leave: Leave = rng.choice(("before", "during", "after"))
    got = await mix.post(CHAT, body, talk.key, leave=leave, after=rng.random() * 0.05)
    mix.told(f"{name} {leave}", got, talk)
    if got.left and rng.random() < 0.7:
        got = await mix.post(CHAT, body, talk.key)
        mix.told("asks again", got, talk)
    heard(talk, body, got)


async def cancel(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """A turn under an id of the client's own, and the server's own way to cancel it."""
    body = asked(talk, rng)
    async with asyncio.TaskGroup() as both:
        asking = both.create_task(mix.post(CHAT, {**body, "request_id": talk.word}, talk.key))
        for cancelled in ({"request_id": talk.word}, {}, {"request_id": 5}, {"request_id": "x"}):
            got = await mix.post("/api/cancel", cancelled, talk.key)
            mix.told(name, got, talk, whole=False)
            assert got.status < FAILED, got.raw
    mix.told("cancelled", asking.result(), talk, whole=False)


async def looks(mix: Mix, rng: random.Random, talk: Talk, name: str) -> None:
    """Questions that need no turn."""
    path = rng.choice(("/v1/models", "/api/tags", "/api/version", "/api/npu/status"))
    headers = {"Authorization": f"Bearer {talk.key}"}
    async with mix.session.get(mix.url + path, headers=headers) as answer:
        mix.told(name, Got(answer.status, await answer.read()), talk, whole=False)
        assert answer.status == OK


KINDS: tuple[tuple[int, str, Kind], ...] = (
    (30, "chat", chat),
    (12, "messages", messages),
    (5, "completion", completion),
    (5, "embeddings", embeddings),
    (5, "nulls", nulls),
    (4, "unknown model", unknown_model),
    (4, "overflow", overflow),
    (12, "wrong", wrong),
    (16, "leaves", leaves),
    (4, "cancel", cancel),
    (3, "looks", looks),
    (6, "ollama", ollama),
    (4, "responses", responses),
    (2, "count", count),
)
"""Weight, name, what to do."""
