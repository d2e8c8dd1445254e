"""What the gate lets in and what it refuses, byte by byte, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from proxy.errors import ForbiddenError
from proxy.server.envelope import install
from proxy.server.gate import GateRules, check, client_headers

Ask = Callable[..., Awaitable[int]]
CANARY = "canary-7f3a"


class Door:
    """A server that is nothing but envelope, gate, and a handler that notes what came through."""

    def __init__(self, server: TestServer, passed: list[list[tuple[str, str]]]) -> None:
        """``passed``: the headers of each request that came through."""
        self._server = server
        self.passed = passed
        self.body = b""

    async def ask(
        self, target: str = "/v1/x", *headers: str, method: str = "GET", version: str = "1.1",
        host: str | None = "localhost", body: str = "",
    ) -> int:  # fmt: skip
        """Send exactly these bytes; the status of the answer."""
        lines = [f"{method} {target} HTTP/{version}", *headers, "Connection: close"]
        lines[1:1] = [] if host is None else [f"Host: {host}"]
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            writer.write("\r\n".join([*lines, "", body]).encode("utf-8", "surrogateescape"))
            head, _, self.body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        return int(head.split()[1])


Build = Callable[[GateRules], Awaitable[Door]]


@pytest.fixture
async def door() -> AsyncIterator[Build]:
    """Builds doors, each with its own rules."""
    servers: list[TestServer] = []

    async def build(rules: GateRules) -> Door:
        passed: list[list[tuple[str, str]]] = []

        async def handler(request: web.Request) -> web.StreamResponse:
            passed.append(client_headers(request))
            return web.Response()

        app = web.Application()
        install(app, lambda request: check(request, rules))
        app.router.add_route("*", "/{path:.*}", handler)
        servers.append(TestServer(app, host="127.0.0.1"))
        await servers[-1].start_server()
        return Door(servers[-1], passed)

    yield build
    for server in servers:
        await server.close()


@pytest.mark.parametrize(
    ("status", "request_line", "headers"),
    [
        (200, "GET /v1/x HTTP/1.1", []),
        (200, "GET /v1/x HTTP/1.0", []),
        (200, "GET /a..b/...?x=../.. HTTP/1.1", []),
        (400, "GET /v1/x HTTP/0.9", []),
        (400, "GET /v1/x HTTP/2.0", []),
        (400, "GET /v1/x HTTP/1.2", []),
        (400, "POST /v1/x HTTP/1.0", ["Transfer-Encoding: chunked"]),
        (400, "GET http://localhost/v1/x HTTP/1.1", []),
        (400, "GET http://elsewhere.org/v1/x HTTP/1.1", []),
        (400, "OPTIONS * HTTP/1.1", []),
        (400, "CONNECT localhost:80 HTTP/1.1", []),
        (400, "GET /../../etc/passwd HTTP/1.1", []),
        (400, "GET /a/%2e%2E/b HTTP/1.1", []),
        (400, "GET /a/..%2fb HTTP/1.1", []),
        (400, "GET /a/.. HTTP/1.1", []),
        (501, "GET /v1/x HTTP/1.1", ["Upgrade: websocket"]),
        (501, "GET /v1/x HTTP/1.1", ["Upgrade: h2c, websocket"]),
        (200, "GET /v1/x HTTP/1.1", ["Upgrade: h2c", "HTTP2-Settings: AAA"]),
        (415, "POST /v1/x HTTP/1.1", ["Content-Encoding: gzip", "Content-Length: 0"]),
        (415, "POST /v1/x HTTP/1.1", ["Content-Encoding: identity, br", "Content-Length: 0"]),
        (200, "POST /v1/x HTTP/1.1", ["Content-Encoding: identity", "Content-Length: 0"]),
    ],
)
async def test_framing_and_target(
    door: Build, status: int, request_line: str, headers: list[str]
) -> None:
    """What aiohttp's parser lets through and a backend may read otherwise is refused."""
    there = await door(GateRules())
    method, target, version = request_line.split(" ")
    version = version.removeprefix("HTTP/")
    body = "0\r\n\r\n" if "Transfer-Encoding: chunked" in headers else ""
    found = await there.ask(target, *headers, method=method, version=version, body=body)
    assert found == status
    assert len(there.passed) == (status == 200)


async def test_size(door: Build) -> None:
    """The announced size is held against the limit before a byte is read."""
    there = await door(GateRules(max_body=10))
    assert await there.ask("/", "Content-Length: 10", method="POST", body="x" * 10) == 200
    assert await there.ask("/", "Content-Length: 11", method="POST", body="x" * 11) == 413
    assert orjson.loads(there.body)["error"]["hint"] == "Raise server.max_body."


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("127.0.0.1", "localhost", 200),
        ("127.0.0.1", "LocalHost.:8088", 200),
        ("127.0.0.1", "127.0.0.1:8088", 200),
        ("127.0.0.1", "127.8.8.8", 200),
        ("127.0.0.1", "[::1]:8088", 200),
        ("127.0.0.1", "[::ffff:127.0.0.1]", 200),
        ("127.0.0.1", "llm.example.org:8088", 200),
        ("127.0.0.1", "LLM.example.org.", 200),
        ("127.0.0.1", "evil.org", 421),
        ("127.0.0.1", "localhost.evil.org", 421),
        ("127.0.0.1", "localhost@evil.org", 421),
        ("127.0.0.1", "127.0.0.1.evil.org", 421),
        ("127.0.0.1", "192.168.1.5", 421),
        ("127.0.0.1", "2130706433", 421),
        ("127.0.0.1", "", 421),
        ("127.0.0.1", "[::1", 421),
        ("192.168.1.5", "192.168.1.5:8088", 200),
        ("192.168.1.5", "192.168.1.6:8088", 421),
        ("box.lan", "BOX.lan", 200),
        ("0.0.0.0", "192.168.1.5:8088", 200),
        ("::", "[fe80::1]:8088", 200),
        ("::", "10.0.0.1", 200),
        ("0.0.0.0", "evil.org", 421),
    ],
)
async def test_host(door: Build, bound: str, host: str, status: int) -> None:
    """Only names of this proxy are answered to; bound to everything, any address is one."""
    there = await door(GateRules(host=bound, allowed_hosts=("llm.example.org:443",)))
    assert await there.ask(host=host) == status


async def test_no_host(door: Build) -> None:
    """HTTP/1.0 has no Host header, and whoever sends none is no browser."""
    there = await door(GateRules())
    assert await there.ask(version="1.0", host=None) == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:1", 200),
        ("http://[::1]:1", 200),
        ("https://llm.example.org", 200),
        ("https://evil.org", 403),
        ("null", 403),
        ("http://[", 403),
        ("", 403),
        ("https://localhost.evil.org", 403),
    ],
)
async def test_cross_site(door: Build, origin: str, status: int) -> None:
    """A page of another site may not post to our own pages; elsewhere the backend decides."""
    there = await door(GateRules(allowed_hosts=("llm.example.org",)))
    host = "llm.example.org"
    header = f"Origin: {origin}"
    assert await there.ask("/_slotkeeper/x", header, method="POST", host=host) == status
    assert await there.ask("/_slotkeeper/x", header, method="GET", host=host) == 200
    assert await there.ask("/v1/x", header, method="POST", host=host) == 200


@pytest.mark.parametrize(
    ("site", "status"),
    [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403), ("", 403)],
)
async def test_a_page_on_another_port(door: Build, site: str, status: int) -> None:
    """Its Origin is this machine, like that of our own pages; the browser says what it is."""
    there = await door(GateRules())
    headers = (f"Sec-Fetch-Site: {site}", "Origin: http://localhost:3000")
    assert await there.ask("/_slotkeeper/x", *headers, method="POST") == status
    assert await there.ask("/_slotkeeper/x", *headers, method="GET") == 200
    assert await there.ask("/_slotkeeper/api/x", *headers, method="GET") == status
    assert await there.ask("/v1/x", *headers, method="POST") == 200


KEYS = GateRules(keys=("one", "two"), admin_key="boss")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Authorization: Bearer one", 200),
        ("authorization: bearer  two ", 200),
        ("X-Api-Key: two", 200),
        ("X-Other: one", 401),
        ("Authorization: Bearer", 401),
        ("Authorization: Bearer ", 401),
        ("Authorization: Basic one", 401),
        ("Authorization: one", 401),
        ("Authorization: Bearer on", 401),
        ("Authorization: Bearer boss", 401),
        ("X-Api-Key: onetwo", 401),
        ("X-Api-Key: \udcff", 401),
        ("X-Api-Key: ö", 401),
    ],
)
async def test_client_keys(door: Build, header: str, status: int) -> None:
    """One of the keys, in one of two headers; the backend never sees it."""
    there = await door(KEYS)
    assert await there.ask("/v1/x", header, "X-Kept: 1") == status
    for headers in there.passed:
        assert {name.lower() for name, _ in headers} == {"host", "x-kept", "connection"}


async def test_refusals_do_not_quote_keys(door: Build) -> None:
    """No refusal repeats what was sent as a key, nor what would have been right."""
    there = await door(GateRules(keys=("right-7f3a",), admin_key="boss-7f3a"))
    for target, method in (("/v1/x", "GET"), ("/_slotkeeper/x", "GET"), ("/props", "POST")):
        assert await there.ask(target, f"Authorization: Bearer {CANARY}", method=method) == 401
        assert b"7f3a" not in there.body
    assert "7f3a" not in repr(GateRules(keys=("right-7f3a",), admin_key="boss-7f3a"))


async def test_without_keys_all_goes_on(door: Build) -> None:
    """Where the proxy asks for no key, the client's keys are the backend's."""
    there = await door(GateRules(admin_key="boss"))
    assert (
        await there.ask("/v1/x", "Authorization: Bearer x", "X-Api-Key: y", "A: 1", "A: 2") == 200
    )
    assert [pair for pair in there.passed[0] if pair[0] not in {"Host", "Connection"}] == [
        ("Authorization", "Bearer x"), ("X-Api-Key", "y"), ("A", "1"), ("A", "2"),
    ]  # fmt: skip


async def test_preflight_needs_no_key(door: Build) -> None:
    """Browsers send no key with OPTIONS, which computes nothing."""
    there = await door(KEYS)
    assert await there.ask("/v1/x", method="OPTIONS") == 200
    assert await there.ask("/slots/0", method="OPTIONS") == 200
    assert await there.ask("/_slotkeeper/x", method="OPTIONS") == 401


@pytest.mark.parametrize(
    ("target", "key", "status"),
    [
        ("/_slotkeeper/healthz", "", 200),
        ("/_slotkeeper/readyz?x=1", "", 200),
        ("/_slotkeeper/metrics", "", 401),
        ("/_slotkeeper/metrics", "one", 401),
        ("/_slotkeeper/metrics", "boss", 200),
        ("/_slotkeeper/api/requests", "one", 401),
        ("/_slotkeeper/api/conversations", "", 401),
        ("/_slotkeeper/api/conversations/a/forget", "one", 401),
        ("/_slotkeeper", "one", 401),
        ("//_slotkeeper/healthz", "one", 401),
        ("/./_slotkeeper/metrics", "one", 401),
        ("/%5Fslotkeeper/metrics", "one", 401),
        ("/_slotkeeper%2Fmetrics", "one", 401),
        ("/_slotkeeperx", "one", 200),
    ],
)
async def test_own_pages_with_admin_key(door: Build, target: str, key: str, status: int) -> None:
    """The admin key opens our pages, a client's does not; health is open; spelling is no way in."""
    there = await door(KEYS)
    assert await there.ask(target, f"Authorization: Bearer {key}") == status
    assert all(name != "Authorization" for headers in there.passed for name, _ in headers)


async def test_files_without_data_are_open(door: Build) -> None:
    """The dashboard's files need no key, whatever else does; no spelling widens that."""
    there = await door(replace(KEYS, open=frozenset({"/_slotkeeper/app.js"})))
    assert await there.ask("/_slotkeeper/app.js?v=1") == 200
    assert await there.ask("/_slotkeeper/app.js/../metrics") == 400
    assert await there.ask("/_slotkeeper/app.js%3f") == 401
    assert await there.ask("/_slotkeeper/api/status") == 401


@pytest.mark.parametrize("header", ["Forwarded: for=1.2.3.4", "X-Forwarded-For: x", "X-Real-IP: x"])
async def test_own_pages_without_admin_key(door: Build, header: str) -> None:
    """Without an admin key this machine may look; what another proxy relays is not this machine."""
    there = await door(GateRules(keys=("one",)))
    assert await there.ask("/_slotkeeper/metrics") == 200
    assert await there.ask("/_slotkeeper/metrics", header) == 403
    assert b"server.admin_key" in there.body
    assert await there.ask("/_slotkeeper/healthz", header) == 200


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("page", ["metrics", "api/requests", "api/conversations"])
def test_own_pages_are_for_this_machine(peer: str, allowed: bool, page: str) -> None:
    """Without an admin key the peer's address decides; some pages quote prompts."""
    request = make_mocked_request("GET", f"/_slotkeeper/{page}", {"Host": "localhost"})
    request = request.clone(remote=peer)
    if allowed:
        check(request, GateRules())
    else:
        with pytest.raises(ForbiddenError, match="this machine only"):
            check(request, GateRules())


STATEFUL = [
    "POST /slots/0?action=erase",
    "POST /slots/0",
    "PUT /slots/0",
    "POST //slots//0",
    "POST /./slots/0",
    "POST /%73lots/0",
    "POST /slots%2F0",
    "POST /prefix/slots/0",
    "POST /props",
    "POST /lora-adapters",
    "POST /models/load",
    "POST /models/unload",
    "POST /models",
    "DELETE /models",
    "DELETE /v1/stream?conv_id=x",
    "POST /v1/streams/lookup",
]


@pytest.mark.parametrize("line", STATEFUL)
async def test_state_of_the_backend(door: Build, line: str) -> None:
    """What changes the backend behind our back needs the admin key, and one must be configured."""
    method, target = line.split(" ")
    there = await door(KEYS)
    assert await there.ask(target, "Authorization: Bearer one", method=method) == 401
    assert await there.ask(target, "Authorization: Bearer boss", method=method) == 200
    assert [name for name, _ in there.passed[0]] == ["Host", "Connection"]
    there = await door(GateRules())
    assert await there.ask(target, method=method) == 403
    assert b"server.admin_key" in there.body
    assert there.passed == []


HARMLESS = [
    "GET /slots",
    "GET /props",
    "HEAD /props",
    "GET /models",
    "GET /lora-adapters",
    "GET /v1/stream?conv_id=x",
    "POST /tokenize",
    "POST /v1/chat/completions",
    "POST /slotsx/0",
]


@pytest.mark.parametrize("line", HARMLESS)
async def test_reading_the_backend(door: Build, line: str) -> None:
    """Reading, and what only computes, needs no admin key."""
    method, target = line.split(" ")
    there = await door(GateRules())
    assert await there.ask(target, method=method) == 200
