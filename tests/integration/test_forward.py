"""Mode forward, requests that name no slot, and everything that only passes through."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import ClientError
from yarl import URL

from proxy.core.records import Mode
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, Proxy, chat, posts, until, whole
from tests.integration.raw import raw_server

WIDE = [
    pytest.param(CHAT, chat("x", n=2), id="n"),
    pytest.param("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, id="array"),
    pytest.param("/completion", {"prompt": ["a", [1, 2]], "n_predict": 2}, id="native-array"),
    pytest.param("/v1/embeddings", {"input": "x"}, id="embeddings"),
    pytest.param("/v1/some-day/new", {"input": "x"}, id="unknown"),
    pytest.param(CHAT, b"\xef\xbb\xbf" + orjson.dumps(chat("x")), id="unreadable"),
]


@pytest.fixture
async def forwarding(serve: Serve, fake: FakeLlamaServer) -> Proxy:
    """A proxy in front of default flags: the RAM cache is on."""
    await fake.restart(ram_cache=True)
    proxy = await serve()
    assert proxy.app.scheduler.mode is Mode.FORWARD
    fake.requests.clear()
    return proxy


async def test_no_slot_is_ever_named(forwarding: Proxy, fake: FakeLlamaServer) -> None:
    """With the RAM cache on nothing is pinned, saved or restored, also not where a client asks."""
    ready = await forwarding.page("readyz")
    assert (ready["ready"], ready["mode"]) == (True, "forward")
    assert "RAM cache" in ready["why"]
    assert "--cache-ram 0" in ready["advice"]
    bodies: list[Any] = [chat(LONG), chat(LONG, stream=True), chat("x", id_slot=1), chat("x", n=2)]
    bodies += [chat("x", id_slot=0.0), chat("x", id_slot=7)]
    for body in bodies:
        answer = await forwarding.ask(CHAT, body)
        assert (answer.status, answer.reason) == (200, "forward")
        sent = posts(fake)[-1].json.get("id_slot")
        assert sent == (-1 if "id_slot" in body else None)
    await forwarding.look(Mode.FORWARD)
    assert not [one for one in fake.requests if "action=" in one.target]


async def test_as_many_as_there_are_slots(forwarding: Proxy, fake: FakeLlamaServer) -> None:
    """Forwarding is as parallel as the backend: a permit per slot, of whatever kind."""
    stall = fake.fail("stall", on="/v1/", times=2)
    first = asyncio.create_task(forwarding.chat("one"))
    second = asyncio.create_task(forwarding.ask("/v1/embeddings", {"input": "x"}))
    await fake.until(lambda: not fake.faults)
    third = asyncio.create_task(forwarding.chat("three"))
    await until(lambda: forwarding.queued() == 1)
    assert len(fake.seen(CHAT)) == 1
    stall.release.set()
    assert [(await task).status for task in (first, second, third)] == [200, 200, 200]


@pytest.mark.parametrize(("target", "body"), WIDE)
async def test_wide_requests_run_alone(
    proxy: Proxy, fake: FakeLlamaServer, target: str, body: Any
) -> None:
    """They start when nothing runs, nothing starts beside them, and no slot is named."""
    held = fake.fail("stall", on=CHAT)
    running = asyncio.create_task(proxy.chat("running"))
    await held.hit.wait()
    fake.requests.clear()
    wide = asyncio.create_task(proxy.ask(target, body))
    await until(lambda: proxy.queued() == 1)
    behind = asyncio.create_task(proxy.chat("behind"))
    await until(lambda: proxy.queued() == 2)
    assert not fake.seen(target)
    stall = fake.fail("stall", on=target)
    held.release.set()
    await stall.hit.wait()
    await running
    assert proxy.queued() == 1
    (seen,) = fake.seen(target)
    assert b"id_slot" not in seen.body
    stall.release.set()
    answer = await wide
    assert answer.reason == "wide"
    assert (await behind).status == 200


async def test_wide_requests_leave_what_they_did_not_touch(
    proxy: Proxy, fake: FakeLlamaServer
) -> None:
    """Afterwards only the slots that changed are unknown."""
    for name in ("one", "two"):
        await proxy.chat(f"{name} {LONG}")
    before = proxy.tokens()
    assert None not in before
    await proxy.ask("/v1/embeddings", {"input": "x"})
    await proxy.quiet()
    used = fake.seen("/v1/embeddings")[0].slot
    for index, tokens in enumerate(proxy.tokens()):
        assert tokens == (None if index == used else before[index])
    assert (await proxy.chat("next")).status == 200


async def test_what_computes_nothing_needs_no_slot(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Pages and counting are answered while every slot is busy and others wait."""
    stall = fake.fail("stall", on=CHAT, times=2)
    tasks = [asyncio.create_task(proxy.chat(word)) for word in ("one", "two", "three")]
    await fake.until(lambda: not fake.faults)
    await until(lambda: proxy.queued() == 1)
    for target, body in (
        ("/tokenize", {"content": "a b"}),
        ("/apply-template", chat("x")),
        ("/v1/chat/completions/input_tokens", chat("x")),
    ):
        assert (await proxy.ask(target, body)).reason == "pass"
    for target in ("/props", "/slots", "/v1/models", "/health", "/nowhere"):
        answer = await proxy.ask(target, method="GET")
        assert (answer.reason, answer.status) == ("pass", 404 if target == "/nowhere" else 200)
    stall.release.set()
    await asyncio.gather(*tasks)


async def test_a_named_slot(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """A client's id_slot is obeyed where it exists; a request for a busy one waits for it."""
    for index in (1, 0, 1):
        answer = await proxy.chat(f"slot {index}", id_slot=index)
        assert (answer.reason, posts(fake)[-1].slot) == ("pinned", index)
    refused = await proxy.chat("x", id_slot=2)
    assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")
    assert (await proxy.chat("x", id_slot=-1)).reason != "pinned"
    stall = fake.fail("stall", on=CHAT)
    first = asyncio.create_task(proxy.chat("first", id_slot=0))
    await stall.hit.wait()
    second = asyncio.create_task(proxy.chat("second", id_slot=0))
    await until(lambda: proxy.queued() == 1)
    other = await proxy.chat("other", id_slot=1)
    assert other.status == 200
    stall.release.set()
    assert [(await task).status for task in (first, second)] == [200, 200]


@pytest.mark.parametrize(
    ("more", "headers"),
    [
        ({"cache_prompt": False}, {}),
        ({}, {"X-Slotkeeper-No-Store": "1"}),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}),
    ],
)
async def test_not_stored(
    proxy: Proxy, fake: FakeLlamaServer, more: dict[str, Any], headers: dict[str, str]
) -> None:
    """What must not be stored is in no snapshot: at idle, when displaced, or at the end."""
    body = {**chat(LONG), **more}
    assert (await proxy.ask(CHAT, body, headers=headers)).status == 200
    await proxy.look()
    for index in (0, 1):
        await proxy.ask(CHAT, chat("small", id_slot=index), headers={"X-Slotkeeper-No-Store": ""})
    await proxy.app.keeper.drain(1.0)
    assert len(fake.seen("save")) == 2, "the probe's own"


HOP = {
    "Connection": "keep-alive, X-Mine",
    "X-Mine": "hop",
    "Keep-Alive": "timeout=5",
    "TE": "trailers",
    "Proxy-Authorization": "Basic eA==",
    "X-Conversation-Id": "c1",
    "Upgrade": "h2c",
}
GOOD = [("X-Twice", "1"), ("X-Twice", "2"), ("User-Agent", "me/1"), ("Accept-Language", "eo")]


@pytest.mark.parametrize("target", [CHAT, "/v1/embeddings", "/tokenize", "/v1/models"])
async def test_headers_of_the_client(proxy: Proxy, fake: FakeLlamaServer, target: str) -> None:
    """End-to-end headers arrive, repetitions too; hop-by-hop ones, a conversation id do not."""
    fake.requests.clear()
    body = {**chat("x"), "input": "x", "content": "x"}
    method = "GET" if target == "/v1/models" else "POST"
    headers = [*HOP.items(), *GOOD, ("Accept-Encoding", "gzip")]
    await proxy.ask(target, body if method == "POST" else None, method=method, headers=headers)
    (seen,) = fake.seen(target)
    names = [name.lower() for name, _ in seen.headers]
    assert not {name.lower() for name in HOP} & set(names) - {"connection"}
    assert [pair for pair in seen.headers if pair in GOOD] == GOOD
    assert ("accept-encoding" in names) == (target != CHAT), "a cached answer is read here"
    assert names.count("host") == 1
    assert dict(seen.headers)["Host"] == fake.url.removeprefix("http://")


async def test_headers_of_the_backend(serve: Serve) -> None:
    """The backend's end-to-end headers arrive, repetitions too; hop-by-hop ones do not."""
    raw_answer = (
        b"HTTP/1.1 203 Odd\r\nServer: llama.cpp\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Odd: \xc3\xa9\r\n"
        b"Content-Encoding: x-odd\r\nContent-Type: application/x-odd\r\n"
        b"Content-Length: 3\r\n\r\nabc"
    )
    async with raw_server([raw_answer]) as raw:
        raw.target = "/odd?a=%2F&b"
        proxy = await serve(url=raw.url, slot_dir=None)
        headers = {"Accept-Encoding": "x-odd", "X-Request-Id": "mine-1"}
        url = URL(proxy.url + "/odd?a=%2F&b", encoded=True)
        async with proxy.client.get(url, headers=headers) as answer:
            assert await answer.read() == b"abc"
    found = answer.headers
    assert answer.status == 203
    assert found.getall("Set-Cookie") == ["a=1", "b=2"]
    assert (found["Server"], found["Content-Encoding"]) == ("llama.cpp", "x-odd")
    assert (found["Content-Type"], found["Content-Length"]) == ("application/x-odd", "3")
    assert (found["X-Odd"], found["X-Request-Id"]) == ("é", "mine-1")
    assert not {"X-Hop", "Keep-Alive"} & set(found)
    assert "gzip" not in raw.heads[0].decode()


async def test_bodies_pass_byte_for_byte(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """What is passed through is not looked into: no byte of it changes, whatever its type."""
    raw = b'{"input":  "x", "n": 1E400}\n'
    await proxy.ask("/v1/unknown", raw, headers={"Content-Type": "text/odd; a=b"})
    assert posts(fake)[-1].body == raw
    assert dict(posts(fake)[-1].headers)["Content-Type"] == "text/odd; a=b"


async def test_unreadable_json_is_the_backends_to_read(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """A byte order mark, depth: bytes go on as they are, with every slot; so does the answer."""
    for raw in (
        b"\xef\xbb\xbf" + orjson.dumps(chat("x")),
        b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}",
    ):
        answer = await proxy.ask(CHAT, raw)
        assert answer.reason == "wide"
        assert posts(fake)[-1].body == raw
        async with proxy.client.post(fake.url + CHAT, data=raw) as direct:
            assert (answer.status, answer.raw) == (direct.status, (await whole(direct)).raw)
    await proxy.quiet()


async def test_head_and_empty_answers(serve: Serve) -> None:
    """An answer without a body keeps its headers and does not hang."""
    for method, head in (
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n"),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"),
        ("OPTIONS", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ("GET", b"HTTP/1.1 302 Found\r\nLocation: /there\r\nContent-Length: 0\r\n\r\n"),
    ):
        async with raw_server([head]) as raw:
            raw.target = "/here"
            proxy = await serve(url=raw.url, slot_dir=None)
            async with proxy.client.request(
                method, proxy.url + "/here", allow_redirects=False
            ) as answer:
                assert await answer.read() == b""
                assert answer.status == int(head.split()[1])
                assert answer.headers.get("Content-Length", "") in (
                    "70000" if method == "HEAD" else "0", "",
                )  # fmt: skip
                assert b"70000" not in head or answer.headers["Content-Length"] == "70000"


@pytest.mark.parametrize("target", ["/v1/embeddings", "/tokenize"])
async def test_lost_while_passing_through(proxy: Proxy, fake: FakeLlamaServer, target: str) -> None:
    """A connection that breaks before the answer is a 502, and nothing is believed any more."""
    await proxy.chat(LONG)
    fake.fail("reset", on=target)
    answer = await proxy.ask(target, {"input": "x", "content": "x"})
    assert (answer.status, answer.json["error"]["source"]) == (502, "backend")
    await proxy.quiet()
    assert proxy.app.scheduler.mode is Mode.FORWARD
    await proxy.look(Mode.EXCLUSIVE)
    assert (await proxy.ask(target, {"input": "x", "content": "x"})).status == 200


@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 9\r\n\r\n1234", b"Transfer-Encoding: chunked\r\n\r\n4\r\n1234\r\n"],
)
async def test_cut_while_passing_through(serve: Serve, framing: bytes) -> None:
    """A body that breaks off breaks off for the client, too: no orderly end makes it look whole."""
    async with raw_server([b"HTTP/1.1 200 OK\r\n" + framing]) as raw:
        raw.target = "/v1/embeddings"
        proxy = await serve(url=raw.url, slot_dir=None)
        try:
            answer = await proxy.ask("/v1/embeddings", {"input": "x"})
        except ClientError:  # the reset overtook the answer's beginning
            return
    assert answer.broken
    assert answer.raw in (b"", b"1234")
