"""Streams through the proxy: equal to direct ones, at once, and honest when something breaks.

About proxy.server.chat and proxy.server.relay.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from proxy.server.chat import Chat
from proxy.server.record import Exchange
from tests.integration.conftest import Serve
from tests.integration.fake_faults import Kind
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import (
    CHAT,
    DONE,
    LONG,
    Answer,
    Proxy,
    chat,
    event,
    posts,
    settled,
    until,
    whole,
)
from tests.integration.raw import chunked, raw_server

PROMPT = {"prompt": LONG, "n_predict": 5, "max_tokens": 5}
TARGETS = [
    pytest.param(CHAT, chat(LONG), id="chat"),
    pytest.param("/chat/completions", chat(LONG), id="chat-alias"),
    pytest.param("/v1/completions", PROMPT, id="completions"),
    pytest.param("/completion", PROMPT, id="native"),
    pytest.param("/completions", PROMPT, id="native-alias"),
    pytest.param("/infill", {"input_prefix": LONG, "n_predict": 5}, id="infill"),
]


async def direct(client: aiohttp.ClientSession, url: str, body: Any) -> Answer:
    """The second answer of the fake itself: its slot 0 then holds the prompt already."""
    for _ in range(2):
        async with client.post(url, data=orjson.dumps(body)) as answer:
            got = await whole(answer)
    return got


@pytest.mark.parametrize(("target", "body"), TARGETS)
@pytest.mark.parametrize(
    "asked",
    [{}, {"stream_options": {"include_usage": True}}, {"return_progress": True}],
    ids=["plain", "usage", "progress"],
)
async def test_stream_equals_direct(
    proxy: Proxy, fake: FakeLlamaServer, target: str, body: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Byte for byte what the backend sends by itself: progress and usage only as asked for."""
    body = {**body, **asked, "stream": True, "id_slot": 0}
    wanted = await direct(proxy.client, fake.url + target, body)
    got = await proxy.ask(target, body)
    assert posts(fake)[-1].json["return_progress"] is True
    assert got.raw == wanted.raw
    assert got.status == 200
    assert got.headers["content-type"] == wanted.headers["content-type"]
    assert got.headers["x-accel-buffering"] == "no"
    assert (b"prompt_progress" in got.raw) == ("return_progress" in asked)
    timings = orjson.loads(wanted.raw.split(b'"timings":')[1].partition(b"}")[0] + b"}")
    reused = timings["cache_n"]
    assert got.said == f"pinned; slot=0; reused={reused}; prompt={reused + 1}"


@pytest.mark.parametrize(("target", "body"), TARGETS)
async def test_whole_equals_direct(
    proxy: Proxy, fake: FakeLlamaServer, target: str, body: dict[str, Any]
) -> None:
    """What is put together from a stream has every field, in the order, of the direct answer."""
    body = {**body, "id_slot": 0}
    wanted = await direct(proxy.client, fake.url + target, body)
    got = await proxy.ask(target, body)
    assert posts(fake)[-1].json["stream"] is True
    assert got.json == wanted.json
    assert got.headers["content-type"] == wanted.headers["content-type"]


async def test_bytes_of_the_client_go_on(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Big numbers, spaces, order and unknown fields reach the backend as they were written."""
    raw = b'{ "x":123456789012345678901234567890,"messages": [{"role":"user","content":"\\u00e9"}]'
    await proxy.ask(CHAT, raw + b', "max_tokens":1 }')
    assert posts(fake)[-1].body.startswith(raw + b', "max_tokens":1')


async def test_first_byte_when_it_arrives(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The client has the first word while the backend still holds the second one back."""
    stall = fake.fail("stall", on=CHAT, at="stream")
    async with proxy.open(CHAT, chat("hello", stream=True)) as answer:
        assert (await event(answer))["choices"][0]["delta"]["role"] == "assistant"
        assert (await event(answer))["choices"][0]["delta"]["content"].startswith(" w")
        assert stall.hit.is_set()
        stall.release.set()
        assert (await whole(answer)).events[-1] == DONE


@pytest.mark.parametrize("silent", ["template", "headers", "progress", "queue"])
@pytest.mark.parametrize(("target", "body"), [TARGETS[0], TARGETS[2], TARGETS[3]])
async def test_pings(
    serve: Serve, fake: FakeLlamaServer, silent: Any, target: str, body: dict[str, Any]
) -> None:
    """While the backend is silent, wherever the request is, empty events come; one id for all."""
    proxy = await serve(ping_interval=0.005)
    straight = await direct(proxy.client, fake.url + target, {**body, "stream": True})
    wanted = [one for one in straight.events if one != DONE]
    on = "/tokenize" if silent == "template" else target
    at = "progress" if silent == "progress" else "headers"
    stall = fake.fail("stall", on=on, at=at, times=2 if silent == "queue" else 1)
    held = [
        asyncio.create_task(proxy.ask(target, {**body, "prompt": word, "messages": [word]}))
        for word in ("one", "two")
        if silent == "queue"
    ]
    if held:
        await fake.until(lambda: not fake.faults)
    new = {"messages": [{"role": "user", "content": "other"}], "prompt": "other words"}
    async with proxy.open(target, {**body, **new, "stream": True}) as answer:
        pings = [await event(answer) for _ in range(2)]
        stall.release.set()
        rest = await whole(answer)
    await asyncio.gather(*held)
    got = [one for one in [*pings, *rest.events] if one != DONE]
    if silent != "progress":
        assert rest.headers["x-slotkeeper"].startswith("pending")
    assert len({one.get("id") for one in got}) == 1
    assert all(set(one) <= set(wanted[0]) for one in pings)
    assert all(text(one) == "" for one in pings)
    spoken = [one for one in got if text(one)]
    assert len(spoken) == len([one for one in wanted if text(one)])
    assert proxy.metric("pings_total") >= 2


def text(one: dict[str, Any]) -> str:
    """What an event says."""
    choice = (one.get("choices") or [one])[0]
    found = choice.get("delta", choice)
    return found.get("content") or found.get("text") or ""


async def test_no_pings_for_whole_answers(serve: Serve, fake: FakeLlamaServer) -> None:
    """A client that does not stream gets its answer and nothing before it."""
    proxy = await serve(ping_interval=0.005)
    stall = fake.fail("stall", on=CHAT, times=2)
    quiet = asyncio.create_task(proxy.chat("quiet"))
    async with proxy.open(CHAT, chat("pinged", stream=True)) as answer:
        await event(answer)
        await event(answer)
        stall.release.set()
    assert (await quiet).json["choices"][0]["message"]["content"]


async def test_no_ping_behind_a_refusal(
    serve: Serve, fake: FakeLlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is clear that the answer is a refusal, no ping may send other headers before it."""
    proxy = await serve()
    fake.fail("error", on=CHAT, status=400)
    armed: list[bool] = []
    refused = Chat._refused

    async def watched(self: Chat, exchange: Exchange, *rest: Any) -> web.StreamResponse:
        answer = await refused(self, exchange, *rest)
        timer = exchange.client._timer
        armed.append(timer is None or not timer.cancelled())
        return answer

    monkeypatch.setattr(Chat, "_refused", watched)
    assert (await proxy.ask(CHAT, chat("hello", stream=True))).status == 400
    assert armed == [False]


LOST: dict[str, Kind] = {"reset": "reset", "cut": "cut", "die": "die", "cut-late": "cut"}


@pytest.mark.parametrize("kind", ["400", "500", *LOST])
async def test_errors_after_a_ping(serve: Serve, fake: FakeLlamaServer, kind: str) -> None:
    """When a ping has committed the headers, what goes wrong is an error event, and no [DONE]."""
    proxy = await serve(ping_interval=0.005)
    stall = fake.fail("stall", on="/apply-template")
    if kind in {"400", "500"}:
        fake.fail("error", on=CHAT, status=int(kind))
    else:
        late = kind == "cut-late"
        fake.fail(LOST[kind], on=CHAT, at="stream" if late else "headers")
    async with proxy.open(CHAT, chat("hello", stream=True)) as answer:
        assert text(await event(answer)) == ""
        stall.release.set()
        got = await whole(answer)
    assert answer.status == 200
    assert DONE not in got.events
    error = got.events[-1]["error"]
    assert error["code"] == (int(kind) if kind.isdigit() else 502)
    assert proxy.app.history.recent(1)[0].status == error["code"]
    if not kind.isdigit():
        assert error["source"] == "backend"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 500, 503])
async def test_refusals_before_any_byte(
    proxy: Proxy, fake: FakeLlamaServer, stream: bool, status: int
) -> None:
    """The backend's own refusal arrives as it is: status, type and words."""
    fake.fail("error", on=CHAT, status=status, times=2)
    body = chat("hello", stream=stream)
    async with proxy.client.post(fake.url + CHAT, data=orjson.dumps(body)) as answer:
        wanted = await whole(answer)
    got = await proxy.ask(CHAT, body)
    assert (got.status, got.raw) == (status, wanted.raw)
    assert got.headers["content-type"] == wanted.headers["content-type"]
    assert got.headers["content-length"] == wanted.headers["content-length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["reset", "cut", "die"])
async def test_lost_before_any_byte(
    proxy: Proxy, fake: FakeLlamaServer, stream: bool, kind: Any
) -> None:
    """A connection that breaks before the answer began is a 502 that blames the backend."""
    fake.fail(kind, on=CHAT)
    got = await proxy.chat("hello", stream=stream)
    assert got.status == 502
    assert got.json["error"]["source"] == "backend"
    assert not got.broken


async def test_a_slow_refusal(serve: Serve) -> None:
    """A refusal whose body comes late: a ping may go before it, never into it."""
    head = (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n"
    )
    async with raw_server([head, b'{"error":', b' "late"}'], gated=True) as raw:
        proxy = await serve(url=raw.url, slot_dir=None, ping_interval=0.005)
        async with proxy.open(CHAT, chat("hello", stream=True)) as answer:
            assert text(await event(answer)) == ""
            while not raw.sent:
                await event(answer)
            raw.gate.set()
            got = await whole(answer)
    assert got.events[-1] == {"error": "late"}
    assert not got.broken


def recorded() -> list[bytes]:
    """The events of a chat stream with usage."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": 0, "finish_reason": None}
    words = [{**head, "choices": [{**choice, "delta": {"content": w}}]} for w in ("one", " two")]
    last = {**head, "choices": [{**choice, "delta": {}, "finish_reason": "stop"}]}
    return [b"data: %b\n\n" % orjson.dumps(e) for e in (*words, last)] + [b"data: [DONE]\n\n"]


def offsets() -> Iterator[int]:
    """Every place near a border of event or chunk, and some between."""
    stream = chunked(*recorded())
    borders = [i for i in range(len(stream)) if stream[i : i + 2] in (b"\r\n", b"\n\n")]
    near = {border + d for border in borders for d in range(-2, 4)}
    yield from sorted(n for n in near | set(range(0, len(stream), 13)) if 0 <= n < len(stream))


@pytest.mark.parametrize("stream", [False, True])
async def test_cut_anywhere(serve: Serve, stream: bool) -> None:
    """Wherever the backend's answer is cut, what the client gets never looks complete."""
    data = chunked(*recorded())
    events = recorded()
    async with raw_server([]) as raw:
        proxy = await serve(url=raw.url, slot_dir=None)
        for at in offsets():
            raw.pieces = [data[:at]]
            got = await proxy.chat("hello", stream=stream)
            done = data.find(b"[DONE]\n\n") + 8 <= at
            if not stream or got.status != 200:
                assert got.status == 502, at
                assert got.json["error"]["source"] == "backend"
                continue
            sent = got.raw.split(b"data: ")[1:]
            assert b"data: " + sent[-1] not in events[:-1], at
            assert (b"[DONE]\n\n" in sent) == done, at
            assert got.broken or "error" in got.events[-1], at
        raw.pieces = [data]
        got = await proxy.chat("hello", stream=stream)
        assert got.raw == b"".join(events) if stream else got.json["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body", [b'data: {"choices": [\n\n', b"data: {}", b"data: nonsense\n\ndata: [DONE]\n\n"]
)
async def test_nonsense_is_the_backends_fault(serve: Serve, stream: bool, body: bytes) -> None:
    """An orderly end in the middle of an event, or an event that is no JSON, is no answer."""
    async with raw_server([chunked(body)]) as raw:
        proxy = await serve(url=raw.url, slot_dir=None)
        got = await proxy.chat("hello", stream=stream)
    if stream and body.endswith(b"\n\n"):
        assert got.raw == body, "what the proxy need not read is not the proxy's business"
    else:
        assert (got.status, got.json["error"]["source"]) == (502, "backend")


async def test_a_reader_that_does_not_read(serve: Serve) -> None:
    """Back-pressure reaches the backend: what it has to send does not pile up in the proxy."""
    piece = b"data: " + orjson.dumps({"choices": [], "x": "x" * 65536}) + b"\n\n"
    total = 1000
    head, end = chunked().split(b"0\r\n\r\n")[0], b"0\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
    async with raw_server([head, *[chunk] * total, end]) as raw:
        proxy = await serve(url=raw.url, slot_dir=None)
        body = orjson.dumps(chat("hello", stream=True))
        host, port = proxy.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )
        await until(lambda: raw.sent > 0)
        sent = await settled(lambda: raw.sent)
        assert sent < total * len(chunk) / 2
        read = 0
        while got := await reader.read(1 << 20):
            read += len(got)
        assert read > total * len(piece)
        writer.close()
        await writer.wait_closed()
