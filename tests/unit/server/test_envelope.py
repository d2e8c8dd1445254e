"""Whatever goes wrong, the client gets one shape of answer."""

from __future__ import annotations

import asyncio
import re
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from structlog.testing import capture_logs

from proxy.errors import (
    BackendUnreachableError,
    OverloadedError,
    SlotkeeperError,
    UnauthorizedError,
)
from proxy.server.envelope import REQUEST_ID, install, json_response

Client = TestClient[web.Request, web.Application]
Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[Client]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server with one handler behind the envelope."""
    clients: list[Client] = []

    async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Client:
        app = web.Application()
        install(app)
        app.router.add_route("*", "/x", handler)
        app.router.add_route("*", "/v1/messages{rest:.*}", handler)
        client = TestClient(TestServer(app, skip_url_asserts=True, handler_cancellation=True))
        await client.start_server()
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()


@asynccontextmanager
async def connected(client: Client) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    """A bare connection to the server."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def raising(error: BaseException) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that does nothing else."""

    async def handler(_request: web.Request) -> web.StreamResponse:
        raise error

    return handler


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (OverloadedError("Full.", hint="Wait.", retry_after=7), {"Retry-After": "7"}),
        (UnauthorizedError("Key?"), {"WWW-Authenticate": "Bearer"}),
        (BackendUnreachableError("Gone."), {}),
    ],
)
async def test_our_errors(serve: Serve, error: SlotkeeperError, headers: dict[str, str]) -> None:
    """One of our errors arrives with its status, its envelope and its headers."""
    client = await serve(raising(error))
    answer = await client.get("/x")
    assert answer.status == error.status
    assert orjson.loads(await answer.read()) == error.envelope()
    assert answer.content_type == "application/json"
    assert headers.items() <= dict(answer.headers).items()
    assert answer.headers["Connection"] == "close"


async def test_errors_on_anthropics_paths(serve: Serve) -> None:
    """They have Anthropic's shape there, whoever raised them; headers stay."""
    client = await serve(raising(OverloadedError("Full.", hint="Wait.", retry_after=7)))
    answer = await client.post("/v1/messages/count_tokens")
    error = {"type": "overloaded_error", "message": "Full.", "source": "slotkeeper"}
    assert orjson.loads(await answer.read()) == {
        "type": "error",
        "error": {**error, "hint": "Wait."},
    }
    assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
    for raised, status, kind in (
        (web.HTTPRequestEntityTooLarge(1, 2), 413, "request_too_large"),
        (ValueError("canary"), 500, "api_error"),
    ):
        client = await serve(raising(raised))
        answer = await client.post("/v1/messages")
        body = orjson.loads(await answer.read())
        assert (answer.status, body["type"], body["error"]["type"]) == (status, "error", kind)


async def test_errors_of_the_framework(serve: Serve) -> None:
    """What aiohttp raises keeps its status and Allow, in our shape."""
    client = await serve(raising(web.HTTPMethodNotAllowed("PUT", ["GET"])))
    answer = await client.put("/x")
    error = orjson.loads(await answer.read())["error"]
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")
    assert error == {
        "message": "Method Not Allowed.", "type": "invalid_request_error", "code": 405,
        "source": "slotkeeper",
    }  # fmt: skip
    answer = await client.get("/nothing-here")
    error = orjson.loads(await answer.read())["error"]
    assert (answer.status, error["code"], error["type"]) == (404, 404, "not_found_error")


async def test_rare_status_of_the_framework(serve: Serve) -> None:
    """A status we have no class for is kept all the same."""
    client = await serve(raising(web.HTTPGone()))
    answer = await client.get("/x")
    assert (answer.status, orjson.loads(await answer.read())["error"]["code"]) == (410, 410)


async def test_redirects_are_no_errors(serve: Serve) -> None:
    """A redirect passes as it is."""
    client = await serve(raising(web.HTTPFound("/y")))
    answer = await client.get("/x", allow_redirects=False)
    assert (answer.status, answer.headers["Location"]) == (302, "/y")


async def test_unexpected_errors_tell_nothing(serve: Serve) -> None:
    """A bug is logged once, and the client learns only where to look."""
    client = await serve(raising(ValueError("canary")))
    with capture_logs() as logged:
        answer = await client.get("/x", headers={"X-Request-Id": "abc"})
    body = await answer.read()
    assert answer.status == 500
    assert b"canary" not in body
    assert b"ValueError" not in body
    assert "abc" in orjson.loads(body)["error"]["hint"]
    assert [(line["event"], line["error"]) for line in logged] == [
        ("unexpected error", "ValueError")
    ]


async def test_request_id(serve: Serve) -> None:
    """The handler finds the id, and every answer carries it: errors and streams too."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request[REQUEST_ID])
        if request.method == "PUT":
            raise OverloadedError("no")
        response = web.StreamResponse(headers={"X-Request-Id": "the backend's own"})
        await response.prepare(request)
        await response.write_eof(b"1")
        return response

    client = await serve(handler)
    for method in ("GET", "PUT"):
        answer = await client.request(method, "/x", headers={"X-Request-Id": "mine-1"})
        assert answer.headers.getall("X-Request-Id") == ["mine-1"]
        answer = await client.request(method, "/x", headers={"X-Request-Id": "a b"})
        assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["X-Request-Id"])
        assert seen[-2:] == ["mine-1", answer.headers["X-Request-Id"]]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_error_after_the_beginning(serve: Serve, version: str) -> None:
    """A stream that fails is cut off, also where the end of the connection would end the answer."""
    broken = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await broken.wait()
        raise ValueError("canary")

    client = await serve(handler)
    async with connected(client) as (reader, writer):
        writer.write(f"GET /x HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
        head = await reader.readuntil(b"data: 1\n\n")
        assert head.startswith(f"HTTP/{version} 200".encode())
        broken.set()
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_broken_body(serve: Serve) -> None:
    """A body that breaks its own framing is the client's fault."""
    client = await serve(raising(web.RequestPayloadError("canary")))
    answer = await client.post("/x")
    assert answer.status == 400
    assert b"canary" not in await answer.read()


async def test_cancellation_passes(serve: Serve) -> None:
    """When the client leaves, the handler is cancelled and nothing is answered or logged."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise
        return web.Response()

    client = await serve(handler)
    with capture_logs() as logged:
        async with connected(client) as (_, writer):
            writer.write(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
            await begun.wait()
        await ended.wait()
    assert logged == []


async def test_refused_body_is_not_the_next_request(serve: Serve) -> None:
    """A request hidden in the body of a refused one is not answered."""
    client = await serve(raising(OverloadedError("no")))
    hidden = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
    head = f"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: {len(hidden)}\r\n\r\n"
    async with connected(client) as (reader, writer):
        writer.write(head.encode() + hidden)
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_json_response_is_not_cached(serve: Serve) -> None:
    """Our own answers are current and are what they say they are."""

    async def handler(_request: web.Request) -> web.StreamResponse:
        return json_response({"a": 1}, headers={"X": "y"})

    client = await serve(handler)
    answer = await client.get("/x")
    assert await answer.json() == {"a": 1}
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X"] == "y"
