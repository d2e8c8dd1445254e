"""Which handler a path goes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from proxy.backends.transport import OWNER, forward_headers
from proxy.dialects import DIALECTS
from proxy.server import admin, keys, routes
from proxy.server.actions import Actions
from proxy.server.health import healthz
from proxy.server.pages import Pages
from proxy.server.passthrough import NOT_COMPUTING


async def chat(_request: web.Request) -> web.StreamResponse:
    """The cached path."""
    return web.Response()


async def count(_request: web.Request) -> web.StreamResponse:
    """Token counts of the Anthropic API."""
    return web.Response()


async def passthrough(_request: web.Request) -> web.StreamResponse:
    """Everything else."""
    return web.Response()


@pytest.fixture
def app() -> web.Application:
    """An application with all routes."""
    made = web.Application()
    cached: Any = SimpleNamespace(handle=chat)
    other: Any = SimpleNamespace(handle=passthrough)
    counter: Any = SimpleNamespace(handle=count)
    nobody: Any = SimpleNamespace()
    own = admin.routes(nobody, Actions(nobody), nobody, Pages())
    made.add_routes(routes.table(cached, counter, other, own))
    return made


@pytest.mark.parametrize(
    ("line", "handler"),
    [
        ("POST /v1/chat/completions", chat),
        ("POST /chat/completions", chat),
        ("POST /v1/completions", chat),
        ("POST /completion", chat),
        ("POST /completions", chat),
        ("POST /infill", chat),
        ("POST /v1/messages", chat),
        ("POST /v1/messages/count_tokens", count),
        ("GET /v1/messages", passthrough),
        ("HEAD /api/hello", passthrough),
        ("GET /v1/chat/completions", passthrough),
        ("OPTIONS /v1/chat/completions", passthrough),
        ("POST /v1/chat/completions/", passthrough),
        ("POST /v1/chat/completions/input_tokens", passthrough),
        ("POST /v1/embeddings", passthrough),
        ("GET /", passthrough),
        ("DELETE /a//b%2fc", passthrough),
        ("BREW /tea", passthrough),
        ("GET /_slotkeeperx", passthrough),
        ("GET /_slotkeeper/healthz", healthz),
        ("GET /_slotkeeper", None),
        ("POST /_slotkeeper/healthz", None),
        ("GET /_slotkeeper/any/thing", None),
    ],
)
async def test_table(app: web.Application, line: str, handler: Any) -> None:
    """The cached paths by POST, the proxy's own under their prefix, all else passes through."""
    method, path = line.split()
    match = await app.router.resolve(make_mocked_request(method, path))
    if handler is None:
        assert match.handler not in (chat, count, passthrough)
        assert match.http_exception is None
    else:
        assert match.handler is handler


def test_what_computes_nothing_is_no_cached_path() -> None:
    """The two tables exclude each other."""
    assert not NOT_COMPUTING & set(DIALECTS)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"Authorization": "Bearer a"}, "a"),
        ({"X-Api-Key": "a"}, "a"),
        ({"X-Api-Key": "b"}, "b"),
        ({"X-Api-Key": "b", "Authorization": "Bearer a"}, "a"),
    ],
)
def test_whose_request(headers: dict[str, str], key: str) -> None:
    """Clients are told apart by what they send as a key, in whichever header."""
    assert keys.key_of(make_mocked_request("POST", "/", headers=headers).headers) == key
    assert keys.namespace(headers) == keys.namespace({"X-Api-Key": key})


def test_any_byte_may_be_in_a_key() -> None:
    """Such a client has a namespace like others, and not one with others."""
    found = {keys.namespace({"X-Api-Key": key}) for key in ("\udcff", "\udcfe", "?", "")}
    assert len(found) == 4


def test_headers_for_the_driver() -> None:
    """Names to drop are compared without case; what is left keeps its order.

    Whose request it is, no client can say: it follows from the key, and never leaves the proxy.
    """

    def got(key: str) -> list[tuple[str, str]]:
        headers = {"B": "1", "Content-Type": "x", "A": "2", "Authorization": key, OWNER: "me"}
        return keys.upstream(make_mocked_request("POST", "/", headers=headers), ("content-type",))

    *kept, (name, whose) = got("Bearer k")
    assert kept == [("B", "1"), ("A", "2"), ("Authorization", "Bearer k")]
    assert (name, got("Bearer k")[-1], got("Bearer l")[-1] != (name, whose)) == (
        OWNER, (name, whose), True,
    )  # fmt: skip
    assert forward_headers(got("Bearer k")) == kept
