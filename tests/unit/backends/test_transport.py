"""The transport against raw sockets."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.transport import HOP_BY_HOP, Transport, answer_headers, forward_headers
from proxy.engine import free_port
from proxy.errors import (
    BackendBrokenError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)
from tests.unit.backends.raw import http, raw_server, read_request, saying


@asynccontextmanager
async def transport(url: str, *, silence: float = 20) -> AsyncIterator[Transport]:
    """A transport, closed at the end."""
    made = Transport(url, connect_timeout=2, silence_timeout=silence)
    try:
        yield made
    finally:
        await made.close()


def test_forward_headers_keeps_order_and_duplicates() -> None:
    """End-to-end headers go on as they came, repeated ones too."""
    sent = [("Accept", "a"), ("X-Two", "1"), ("x-two", "2"), ("Authorization", "Bearer k")]
    assert forward_headers(sent) == sent


def test_forward_headers_takes_out() -> None:
    """Hop-by-hop headers, those Connection names, and what the proxy sets or answers itself."""
    sent = [
        ("Connection", "X-Hop, keep-alive"),
        ("x-hop", "1"),
        ("HOST", "evil"),
        ("content-length", "3"),
        ("Transfer-Encoding", "chunked"),
        ("Upgrade", "websocket"),
        ("Expect", "100-continue"),
        ("X-Conversation-Id", "c1"),
        ("X-Mine", "secret"),
        ("Cookie", "c"),
    ]
    assert forward_headers(sent, {"X-MINE"}) == [("Cookie", "c")]


@given(st.lists(st.tuples(st.sampled_from([*sorted(HOP_BY_HOP), "A", "b"]), st.text())))
def test_filtering_twice_is_filtering_once(sent: list[tuple[str, str]]) -> None:
    """Filtering is idempotent and never invents or reorders anything."""
    kept = forward_headers(sent)
    assert forward_headers(kept) == kept
    rest = iter(sent)
    assert all(pair in rest for pair in kept)
    assert not HOP_BY_HOP & {name.lower() for name, _ in answer_headers(sent)}


async def test_request_goes_out_byte_for_byte() -> None:
    """Target, headers and body arrive as given; nothing is invented but Host and length."""
    seen: list[bytes] = []
    async with raw_server(saying(http(b"ok"), seen)) as server, transport(server.url) as client:
        target = "/a//b/../c%2Fd?q=%7B%22a%22:1%7D&q=+%20'"
        headers = [("X-A", "1"), ("X-A", "2"), ("Connection", "close")]
        async with client.send("POST", target, headers, b'{"x": 1.0}') as got:
            assert (got.status, await got.read()) == (200, b"ok")
    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == f"POST {target} HTTP/1.1".encode()
    host = server.url.removeprefix("http://").encode()
    assert sorted(lines[1:]) == sorted(
        [b"Host: " + host, b"X-A: 1", b"X-A: 2", b"Content-Length: 10", b"Connection: close"]
    )
    assert body == b'{"x": 1.0}'


@pytest.mark.parametrize("target", ["http://other/", "a", "", "/a b", "/a\r\nX: y", "/\x00"])
async def test_targets_that_are_no_paths(target: str) -> None:
    """A target that could change host or framing is refused before anything is sent."""
    async with transport("http://127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="target"):
            client.send("GET", target, [], None)


async def test_base_url_with_a_prefix() -> None:
    """A path in the base URL (``--api-prefix``) comes before the target."""
    seen: list[bytes] = []
    async with (
        raw_server(saying(http(b""), seen)) as server,
        transport(server.url + "/api/") as client,
        client.send("GET", "/health", [], None) as got,
    ):
        await got.read()
    assert seen[0].startswith(b"GET /api/health HTTP/1.1")


async def test_encoded_body_and_redirect_pass_untouched() -> None:
    """Compressed bodies stay compressed, redirects are the client's business."""
    packed = gzip.compress(b"hello")
    extra = "Content-Encoding: gzip\r\nLocation: /x\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
    async with (
        raw_server(saying(http(packed, "302 Found", extra))) as server,
        transport(server.url) as client,
        client.send("GET", "/", [], None) as got,
    ):
        assert got.status == 302
        assert await got.read() == packed
        names = [name for name, _ in got.headers]
        assert names == ["Content-Length", "Content-Encoding", "Location", *["Set-Cookie"] * 2]


async def test_cookies_are_not_kept() -> None:
    """No cookie of one client ever reaches the backend with another's request."""
    seen: list[bytes] = []
    raw = http(b"", headers="Set-Cookie: a=1; Path=/\r\n")
    async with raw_server(saying(raw, seen)) as server, transport(server.url) as client:
        for _ in range(2):
            async with client.send("GET", "/", [], None) as got:
                await got.read()
    assert b"Cookie" not in seen[1]


@pytest.mark.parametrize(("keep", "connections"), [(True, 1), (False, 3)])
async def test_connections_are_reused_only_where_that_is_safe(
    *, keep: bool, connections: int
) -> None:
    """Calls of the driver share one; a forwarded request, which may be a stream, has its own.

    llama-server closes after a stream without saying so: the next POST would meet that and fail.
    """
    async with raw_server(saying(http(b"x"))) as server, transport(server.url) as client:
        for _ in range(3):
            async with client.send("POST", "/", [], b"{}", keep=keep) as got:
                await got.read()
    assert server.connections == connections


async def test_pieces_come_as_they_arrive() -> None:
    """The first bytes are there before the backend has sent the rest."""
    more = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await writer.drain()
        await more.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        await writer.drain()

    async with (
        raw_server(handle) as server,
        transport(server.url) as client,
        client.send("GET", "/", [], None) as got,
    ):
        assert await got.read_some() == b"one"
        waiting = asyncio.create_task(got.read_some())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        more.set()
        assert await got.read_some() == b"two"
        assert await got.read_some() == b""


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("started", [True, False])
async def test_leaving_closes_the_connection(*, started: bool, keep: bool) -> None:
    """Leaving before the end, or being cancelled before the answer began, closes the socket.

    Kept, it would give this answer to the next request.
    """
    asked, gone = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if started:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            await writer.drain()
        asked.set()
        assert await reader.read() == b""
        gone.set()

    async with raw_server(handle) as server, transport(server.url) as client:

        async def ask() -> None:
            async with client.send("POST", "/", [], b"{}", keep=keep) as got:
                await got.read_some()

        task = asyncio.create_task(ask())
        await asked.wait()
        if started:
            await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait_for(gone.wait(), 10)


async def test_nobody_listens() -> None:
    """No listener: unreachable, with a hint."""
    async with transport(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(BackendUnreachableError) as caught:
            async with client.send("GET", "/", [], None):
                pass
    assert caught.value.hint


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", BackendUnreachableError),
        (b"HTTP/1.1 200", BackendUnreachableError),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", BackendBrokenError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", BackendBrokenError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", BackendUnreachableError),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
            BackendUnreachableError,
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
            BackendBrokenError,
        ),
    ],
    ids=["nothing", "half-head", "ssh", "bad-length", "short", "cut-chunks", "bad-chunk"],
)
async def test_failures_have_names(raw: bytes, expected: type[SlotkeeperError]) -> None:
    """Each way an answer can fail becomes one error of ours, also in mid-body."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(raw)
        await writer.drain()

    async with raw_server(handle) as server, transport(server.url) as client:
        with pytest.raises(expected):
            async with client.send("POST", "/", [], b"{}") as got:
                await got.read()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
async def test_silence_is_a_timeout(head: bytes) -> None:
    """A backend that holds the connection and says nothing (more) times out."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        await reader.read()

    async with raw_server(handle) as server, transport(server.url, silence=0.05) as client:
        with pytest.raises(BackendTimeoutError):
            async with client.send("POST", "/", [], b"{}") as got:
                await got.read()


async def test_a_post_is_never_sent_twice() -> None:
    """A connection that breaks under a POST is an error even where a retry might succeed."""
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(http(b"x"))
        await writer.drain()
        seen.append(await read_request(reader))

    async with raw_server(handle) as server, transport(server.url) as client:
        async with client.send("POST", "/", [], b"1", keep=True) as got:
            await got.read()
        with pytest.raises(BackendUnreachableError):
            async with client.send("POST", "/", [], b"2", keep=True):
                pass
    assert [request[-1:] for request in seen] == [b"1", b"2"]
