"""Sizes, deadlines, hosts, ids and pages, asked of the whole proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import orjson
import pytest

from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, Proxy, chat, posts, until


async def endless() -> AsyncIterator[bytes]:
    """A body of unknown length."""
    for _ in range(100):
        yield b"x" * 100


async def test_too_large(serve: Serve, fake: FakeLlamaServer) -> None:
    """A body over the limit is a 413, announced or not, and nothing of it is forwarded."""
    proxy = await serve(max_body=2000)
    fake.requests.clear()
    for target in (CHAT, "/v1/embeddings"):
        for data in (b"x" * 2001, endless()):
            async with proxy.client.post(proxy.url + target, data=data) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["source"] == "slotkeeper"
    assert posts(fake) == []
    assert (await proxy.chat("x" * 1000)).status == 200


@pytest.mark.parametrize("target", [CHAT, "/v1/embeddings"])
async def test_a_body_that_does_not_come(serve: Serve, fake: FakeLlamaServer, target: str) -> None:
    """A 408 after the configured time; no lease was taken for it."""
    proxy = await serve(body_timeout=0.02)
    fake.requests.clear()
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.split()[1] == b"408"
    writer.close()
    await writer.wait_closed()
    assert posts(fake) == []
    assert proxy.metric("leases_active") == 0


@pytest.mark.parametrize(
    ("target", "body"),
    [
        (CHAT, b"{"),
        (CHAT, b"[]"),
        (CHAT, b""),
        (CHAT, b'{"messages": "x"}'),
        (CHAT, b'{"messages": [], "stream": 1}'),
        ("/v1/completions", b"{}"),
        ("/completion", b'{"prompt": []}'),
    ],
)
async def test_bad_requests(proxy: Proxy, fake: FakeLlamaServer, target: str, body: bytes) -> None:
    """What no backend could read is refused in OpenAI's shape, before any slot is taken."""
    fake.requests.clear()
    answer = await proxy.ask(target, body)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["source"] == "slotkeeper"
    assert posts(fake) == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Upgrade": "websocket", "Connection": "upgrade"}, 501),
        ({"Content-Encoding": "gzip"}, 415),
    ],
)
async def test_refused_at_the_gate(
    proxy: Proxy, fake: FakeLlamaServer, headers: dict[str, str], status: int
) -> None:
    """Other hosts, upgrades and compressed bodies do not get in."""
    fake.requests.clear()
    answer = await proxy.ask(CHAT, orjson.dumps(chat("x")), headers=headers)
    assert (answer.status, answer.json["error"]["code"]) == (status, status)
    assert posts(fake) == []


async def test_request_ids(proxy: Proxy) -> None:
    """A harmless id of the client's comes back and is in the decision log; else a new one."""
    for target in (CHAT, "/v1/embeddings", "/props", "/_slotkeeper/healthz", "/nowhere"):
        method = "GET" if target.startswith(("/props", "/_", "/no")) else "POST"
        body = None if method == "GET" else {**chat("x"), "input": "x"}
        mine = await proxy.ask(target, body, method=method, headers={"X-Request-Id": "a.b-1"})
        assert mine.headers["x-request-id"] == "a.b-1"
        odd = await proxy.ask(target, body, method=method, headers={"X-Request-Id": "a b"})
        assert len(odd.headers["x-request-id"]) == 32
    logged = [row["request_id"] for row in (await proxy.page("api/requests"))["requests"]]
    assert "a.b-1" in logged
    stream = await proxy.chat("x", stream=True)
    assert (
        stream.headers["x-request-id"]
        == (await proxy.page("api/requests"))["requests"][0]["request_id"]
    )


async def test_pages(proxy: Proxy) -> None:
    """Slots, snapshots, decisions and metrics show what happened, and nothing is cached."""
    await proxy.ask("/v1/embeddings", {"input": "x"})
    assert (await proxy.chat("hello")).status == 200
    await proxy.look()
    slots = (await proxy.page("api/slots"))["slots"]
    assert [(row["index"], row["state"]) for row in slots] == [(0, "free"), (1, "free")]
    assert sorted(row["tokens"] is not None for row in slots) == [False, True]
    (row,) = [row for row in (await proxy.page("api/requests"))["requests"] if row["path"] == CHAT]
    assert (row["reason"], row["status"], row["reused"]) == ("cold", 200, 0)
    assert row["costs"]
    page = await proxy.ask("/_slotkeeper/metrics", method="GET")
    assert page.headers["content-type"].startswith("text/plain")
    found = 'requests_total{path_class="chat",reason="cold",status_class="2xx"} 1.0'
    assert f"slotkeeper_{found}" in page.raw.decode()
    assert proxy.metric('slots{state="free"}') == 2
    assert (await proxy.ask("/_slotkeeper/nope", method="GET")).status == 404
    assert (await proxy.ask("/_slotkeeper/metrics", b"")).status == 405
    assert page.headers.get("cache-control", "no-store") == "no-store"


async def test_queue_limits(serve: Serve, fake: FakeLlamaServer) -> None:
    """A full queue and a deadline are 503s that say when to come again; nothing was sent."""
    proxy = await serve(max_queue=1, queue_timeout=0.05)
    stall = fake.fail("stall", on=CHAT, times=2)
    held = []
    for word in ("one", "two"):  # one after the other: who is looked at is in the queue, too
        held.append(asyncio.create_task(proxy.chat(word)))
        await fake.until(lambda: len(fake.seen(CHAT)) == len(held))
    waiting = asyncio.create_task(proxy.chat("waits"))
    await until(lambda: proxy.queued() == 1)
    full = await proxy.chat("too many")
    late = await waiting
    for answer in (full, late):
        assert answer.status == 503
        assert answer.headers["retry-after"] == "10"
        assert answer.json["error"]["type"] == "overloaded_error"
    stall.release.set()
    assert [(await task).status for task in held] == [200, 200]
    assert len(fake.seen(CHAT)) == 2
    rows = (await proxy.page("api/requests"))["requests"]
    assert sorted(row["reason"] for row in rows).count("refused") == 2


async def test_two_on_one_port(serve: Serve) -> None:
    """A port that is taken is said to be taken, and nothing is left behind."""
    first = await serve(slot_dir=None)
    port = int(first.url.rpartition(":")[2])
    with pytest.raises(OSError, match="address already in use"):
        await serve(slot_dir=None, port=port)
    async with aiohttp.request("GET", first.url + "/_slotkeeper/healthz") as answer:
        assert answer.status == 200
