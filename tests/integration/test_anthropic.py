"""Anthropic's API through the proxy: events in order, pings, refusals, counting, one cache.

About proxy.dialects.anthropic, proxy.server.count and what proxy.server.chat, proxy.server.relay
and proxy.server.envelope do for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import anthropic
import orjson
import pytest

from proxy.core.sse import Parser
from tests.integration.conftest import Serve
from tests.integration.fake_faults import Kind
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, Answer, Proxy, chat, posts, whole
from tests.integration.raw import chunked, raw_server

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HEAD = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream; each has the name of its type."""
    found = []
    for event in Parser().feed(answer.raw):
        found.append(orjson.loads(event.data))
        assert event.raw.startswith(b"event: %b\n" % found[-1]["type"].encode())
    return found


def kinds(answer: Answer) -> list[str]:
    """Their types."""
    return [event["type"] for event in events_of(answer)]


async def next_kind(answer: aiohttp.ClientResponse) -> str:
    """The name of the next event, as soon as it is there."""
    raw = await answer.content.readuntil(b"\n\n")
    return raw.splitlines()[0].removeprefix(b"event: ").decode()


async def test_a_stream(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Anthropic's events in Anthropic's order, sent to chat with what the proxy adds."""
    body = chat(LONG, stream=True, system="Be brief.")
    got = await proxy.ask(f"{MESSAGES}?beta=true", body)
    assert kinds(got) == [
        "message_start", "content_block_start", *["content_block_delta"] * 4,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert got.status == 200
    assert got.headers["content-type"].startswith("text/event-stream")
    assert b"[DONE]" not in got.raw
    start, end = events_of(got)[0]["message"], events_of(got)[-2]
    assert start["id"] == "msg_fake"
    assert start["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 300
    assert end["usage"]["output_tokens"] == 4
    assert end["delta"]["stop_reason"] == "max_tokens"
    sent = posts(fake)[-1]
    assert sent.target == CHAT
    assert sent.json["id_slot"] in {0, 1}
    assert sent.json["return_progress"] is True
    assert sent.json["messages"][0] == {"role": "system", "content": "Be brief."}
    assert proxy.app.history.recent(1)[0].path == MESSAGES


async def test_a_whole_answer(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The message, put together from a stream; the same words as the events have."""
    got = await proxy.ask(MESSAGES, chat(LONG))
    assert posts(fake)[-1].json["stream"] is True
    streamed = await proxy.ask(MESSAGES, chat(LONG, stream=True))
    said = "".join(e["delta"].get("text", "") for e in events_of(streamed) if "delta" in e)
    assert got.json["content"] == [{"type": "text", "text": said}]
    assert (got.json["type"], got.json["role"]) == ("message", "assistant")
    assert got.json["stop_reason"] == "max_tokens"
    assert got.headers["content-type"].startswith("application/json")
    first, second = got.json["usage"], events_of(streamed)[-2]["usage"]
    assert (first["cache_read_input_tokens"], second["input_tokens"]) == (0, 1)
    assert second["cache_read_input_tokens"] == first["input_tokens"] - 1


async def test_what_cannot_be_streamed_is_converted_whole(
    proxy: Proxy, fake: FakeLlamaServer
) -> None:
    """A request with stop sequences gets its one answer in Anthropic's shape."""
    got = await proxy.ask(MESSAGES, chat("hello", stop_sequences=["never"]))
    assert "stream" not in posts(fake)[-1].json
    assert got.json["type"] == "message"
    assert got.json["usage"]["output_tokens"] == 4


async def test_headers_leave_with_message_start(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Before the prompt is computed; it is no first token."""
    stall = fake.fail("stall", on=CHAT, at="progress")
    async with proxy.open(MESSAGES, chat(LONG, stream=True)) as answer:
        assert await next_kind(answer) == "message_start"
        assert stall.hit.is_set()
        assert answer.headers["x-slotkeeper"].startswith("cold; slot=")
        stall.release.set()
        assert kinds(await whole(answer))[-1] == "message_stop"


@pytest.mark.parametrize("silent", ["/apply-template", CHAT])
async def test_pings(serve: Serve, fake: FakeLlamaServer, silent: str) -> None:
    """While nothing is known they come alone; the answer is whole all the same."""
    proxy = await serve(ping_interval=0.005)
    stall = fake.fail("stall", on=silent)
    async with proxy.open(MESSAGES, chat("hello", stream=True)) as answer:
        assert [await next_kind(answer) for _ in range(2)] == ["ping", "ping"]
        stall.release.set()
        got = await whole(answer)
    said = [kind for kind in kinds(got) if kind != "ping"]
    assert (said[0], said[-1]) == ("message_start", "message_stop")
    assert said.count("content_block_delta") == 4


async def test_the_real_client_skips_pings(serve: Serve, fake: FakeLlamaServer) -> None:
    """It reads an answer that began with pings, and one that did not stream."""
    proxy = await serve(ping_interval=0.005)
    stall = fake.fail("stall", on="/apply-template")
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="k", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "m",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "hello"}],
        }
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_release_after_pings(proxy, stall.release))
            async with client.messages.stream(**asked) as stream:
                streamed: Any = await stream.get_final_message()
        message: Any = await client.messages.create(**asked)
    assert proxy.metric("pings_total") >= 2
    assert [block.text for block in message.content] == [block.text for block in streamed.content]
    assert streamed.usage.output_tokens == 4
    assert message.usage.cache_read_input_tokens


async def _release_after_pings(proxy: Proxy, release: asyncio.Event) -> None:
    while proxy.metric("pings_total") < 2:  # noqa: ASYNC110 - a counter has no event
        await asyncio.sleep(0)
    release.set()


@pytest.mark.parametrize("kind", ["400", "503", "reset", "cut", "cut-late"])
async def test_errors_after_a_ping(serve: Serve, fake: FakeLlamaServer, kind: str) -> None:
    """An error event in Anthropic's shape ends the stream; it does not look like an answer."""
    proxy = await serve(ping_interval=0.005)
    stall = fake.fail("stall", on="/apply-template")
    if kind.isdigit():
        fake.fail("error", on=CHAT, status=int(kind))
    else:
        broken: Kind = "reset" if kind == "reset" else "cut"
        fake.fail(broken, on=CHAT, at="stream" if kind == "cut-late" else "headers")
    async with proxy.open(MESSAGES, chat("hello", stream=True)) as answer:
        assert await next_kind(answer) == "ping"
        stall.release.set()
        got = await whole(answer)
    assert kinds(got)[-1] == "error"
    assert "message_stop" not in kinds(got)
    error = events_of(got)[-1]
    wanted = {"400": "invalid_request_error", "503": "overloaded_error"}.get(kind, "api_error")
    assert (error["type"], error["error"]["type"]) == ("error", wanted)
    assert kind.isdigit() or error["error"]["source"] == "backend"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (500, "api_error"), (503, "overloaded_error")],
)
async def test_refusals_of_the_backend(
    proxy: Proxy, fake: FakeLlamaServer, stream: bool, status: int, kind: str
) -> None:
    """Its status and words in Anthropic's shape."""
    fake.fail("error", on=CHAT, status=status)
    got = await proxy.ask(MESSAGES, chat("hello", stream=stream))
    words = "Loading model" if status == 503 else "it broke"
    assert got.status == status
    assert got.json == {"type": "error", "error": {"type": kind, "message": words}}
    assert got.headers["content-type"].startswith("application/json")
    assert proxy.app.history.recent(1)[0].status == status


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_refusals_of_the_proxy(proxy: Proxy, fake: FakeLlamaServer, path: str) -> None:
    """Everything the proxy itself says on these paths has Anthropic's shape, too."""
    posted = len(posts(fake))
    got = await proxy.ask(path, {"messages": [{"role": "tool", "content": "x"}]})
    assert (got.status, got.json["type"]) == (400, "error")
    assert got.json["error"]["type"] == "invalid_request_error"
    assert got.json["error"]["source"] == "slotkeeper"
    assert "messages[0].role" in got.json["error"]["message"]
    foreign = await proxy.ask(path, {}, headers={"Host": "evil.example"})
    assert (foreign.status, foreign.json["type"]) == (421, "error")
    assert len(posts(fake)) == posted


async def test_a_wrong_key(serve: Serve) -> None:
    """The gate's refusal as well."""
    proxy = await serve(keys=["right"])
    got = await proxy.ask(MESSAGES, chat("hello"), headers={"X-Api-Key": "wrong"})
    assert (got.status, got.json["error"]["type"]) == (401, "authentication_error")
    good = await proxy.ask(MESSAGES, chat("hello"), headers={"X-Api-Key": "right"})
    assert good.status == 200


@pytest.mark.parametrize("kind", ["reset", "bad-json"])
async def test_a_broken_backend(proxy: Proxy, fake: FakeLlamaServer, kind: Any) -> None:
    """A lost connection and an answer that is none are the backend's fault."""
    fake.fail(kind, on=CHAT)
    got = await proxy.ask(MESSAGES, chat("hello", stop_sequences=["x"]))
    assert (got.status, got.json["error"]["type"]) == (502, "api_error")
    assert got.json["error"]["source"] == "backend"


async def test_an_error_in_mid_stream(serve: Serve) -> None:
    """It is relayed as an error event, or as an error answer with its status."""
    word = {**HEAD, "choices": [{"index": 0, "finish_reason": None, "delta": {"content": "a"}}]}
    error = {"error": {"code": 500, "message": "Compute error", "type": "server_error"}}
    pieces = [b"data: %b\n\n" % orjson.dumps(one) for one in (word, error)]
    async with raw_server([chunked(*pieces)]) as raw:
        proxy = await serve(url=raw.url, slot_dir=None)
        got = await proxy.ask(MESSAGES, chat("hello", stream=True))
        whole_answer = await proxy.ask(MESSAGES, chat("hello"))
    shape = {"type": "error", "error": {"type": "api_error", "message": "Compute error"}}
    assert kinds(got) == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert events_of(got)[-1] == shape
    assert (whole_answer.status, whole_answer.json) == (500, shape)


async def test_a_client_that_leaves(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """What it asked for is cancelled at the backend."""
    stall = fake.fail("stall", on=CHAT, at="stream")
    async with proxy.open(MESSAGES, chat(LONG, stream=True)) as answer:
        assert await next_kind(answer) == "message_start"
        await stall.hit.wait()
    await fake.until(lambda: posts(fake)[-1].cancelled or posts(fake)[-1].done)
    await proxy.quiet()
    assert fake.seen(CHAT)[-1].cancelled
    assert proxy.app.history.recent(1)[0].status == 499


async def test_count_tokens(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The number the prompt has when it is sent; no slot is taken for it."""
    messages = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    body = {"messages": messages, "system": "Be brief."}
    leases = len(proxy.app.history.recent(9))
    counted = await proxy.ask(f"{COUNT}?beta=true", body)
    assert list(counted.json) == ["input_tokens"]
    assert counted.said == "pass"
    assert len(proxy.app.history.recent(9)) == leases
    sent = (await proxy.ask(MESSAGES, {**body, "max_tokens": 1})).json["usage"]
    assert counted.json["input_tokens"] == sent["input_tokens"] + sent["cache_read_input_tokens"]
    assert set(fake.seen("/v1/chat/completions/input_tokens")[0].json) == {"messages"}


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("error", 503, "overloaded_error"),
        ("error", 500, "api_error"),
        ("bad-json", 502, "api_error"),
        ("reset", 502, "api_error"),
    ],
)
async def test_counting_that_fails(
    proxy: Proxy, fake: FakeLlamaServer, kind: Any, status: int, error: str
) -> None:
    """In Anthropic's shape, whoever failed."""
    fake.fail(kind, on="/v1/chat/completions/input_tokens", status=status)
    got = await proxy.ask(COUNT, chat("hello"))
    assert (got.status, got.json["type"], got.json["error"]["type"]) == (status, "error", error)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_what_only_the_backend_can_read(
    proxy: Proxy, fake: FakeLlamaServer, path: str
) -> None:
    """It goes to the backend's own page untouched."""
    raw = b"\xef\xbb\xbf" + orjson.dumps(chat("hello"))
    await proxy.ask(path, raw)
    assert (posts(fake)[-1].target, posts(fake)[-1].body) == (path, raw)


async def test_a_page_the_backend_does_not_have(proxy: Proxy) -> None:
    """Claude Code looks for it once and takes a 404."""
    assert (await proxy.ask("/api/hello", method="HEAD")).status == 404


async def test_one_conversation_two_apis(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Turn by turn through either API: the same slot, and only what is new is computed."""
    turns = [{"role": "user", "content": LONG}]
    first = (await proxy.ask(MESSAGES, {"messages": turns, "system": "S", "max_tokens": 4})).json
    turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "b"}]
    system = {"role": "system", "content": "S"}
    plain = [
        {**one, "content": first["content"][0]["text"]} if one["role"] == "assistant" else one
        for one in turns
    ]
    second = await proxy.ask(CHAT, {"messages": [system, *plain], "max_tokens": 4})
    assert second.reason == "slot-hit"
    words = second.json["choices"][0]["message"]["content"]
    reused = second.json["timings"]["cache_n"]
    usage = first["usage"]
    assert reused == usage["input_tokens"] + usage["output_tokens"] - 1
    turns += [{"role": "assistant", "content": words}, {"role": "user", "content": "c"}]
    third = await proxy.ask(MESSAGES, {"messages": turns, "system": "S", "max_tokens": 4})
    assert third.reason == "slot-hit"
    assert third.json["usage"]["cache_read_input_tokens"] > reused
    assert len({one.json["id_slot"] for one in fake.seen(CHAT) if one.target == CHAT}) == 1
