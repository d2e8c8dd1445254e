"""The proxy's own pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from proxy.server.actions import Actions
from proxy.server.admin import routes
from proxy.server.envelope import install
from proxy.server.pages import Pages
from proxy.telemetry.metrics import Metrics

Client = TestClient[web.Request, web.Application]


class View:
    """A proxy with one slot and one snapshot."""

    def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """It is."""
        return True, {"mode": "exclusive", "why": "proved"}

    def slots(self) -> Sequence[Mapping[str, Any]]:
        """One."""
        return [{"index": 0, "state": "free"}]

    def snapshots(self) -> Sequence[Mapping[str, Any]]:
        """One."""
        return [{"id": "a", "tokens": 5}]

    def status(self) -> Mapping[str, Any]:
        """A headline."""
        return {"version": "0"}

    def running(self) -> Sequence[Mapping[str, Any]]:
        """None."""
        return []

    def requests(self, limit: int, after: str = "") -> Sequence[Mapping[str, Any]]:
        """As many as asked for."""
        return [{"n": n, "after": after} for n in range(limit)]

    def request(self, request_id: str) -> Mapping[str, Any] | None:
        """There is one."""
        return {"request_id": "a"} if request_id == "a" else None

    def history(self, seconds: float) -> Mapping[str, Any]:
        """How much was asked for."""
        return {"rows": seconds}

    def logs(self, limit: int, level: str = "debug", after: int = 0) -> Sequence[Mapping[str, Any]]:
        """What was asked for."""
        return [{"limit": limit, "level": level, "after": after}]

    def conversations(self) -> Sequence[Mapping[str, Any]]:
        """One."""
        return [{"id": "a", "title": "Rivers"}]

    async def forget(self, conversation: str) -> int | None:
        """It had three snapshots."""
        return 3 if conversation == "a" else None

    def metrics(self) -> tuple[bytes, str]:
        """The real ones."""
        return Metrics().render()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """A server with our pages and a catch-all, as the proxy has it, but without a dashboard."""

    async def backend(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="the backend")

    app = web.Application()
    install(app)
    nobody: Any = SimpleNamespace()
    powers: Any = SimpleNamespace(forget=View().forget, body=web.Request.read, store=None)
    own = routes(View(), Actions(powers), nobody, Pages(tmp_path))
    app.router.add_routes([*own, web.route("*", "/{path:.*}", backend)])
    async with TestClient(TestServer(app)) as found:
        yield found


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("healthz", {"alive": True}),
        ("readyz", {"ready": True, "mode": "exclusive", "why": "proved"}),
        ("api/slots", {"slots": [{"index": 0, "state": "free"}]}),
        ("api/snapshots", {"snapshots": [{"id": "a", "tokens": 5}]}),
        ("api/conversations", {"conversations": [{"id": "a", "title": "Rivers"}]}),
        ("api/status", {"version": "0"}),
        ("api/running", {"running": []}),
        ("api/requests?limit=1&after=r", {"requests": [{"n": 0, "after": "r"}]}),
        ("api/requests/a", {"request_id": "a"}),
        ("api/history", {"rows": 3600.0}),
        ("api/history?span=24h", {"rows": 86400.0}),
        ("api/logs", {"logs": [{"limit": 100, "level": "debug", "after": 0}]}),
        (
            "api/logs?limit=5&level=error&after=7",
            {"logs": [{"limit": 5, "level": "error", "after": 7}]},
        ),
    ],
)
async def test_pages(client: Client, page: str, expected: object) -> None:
    """Each page shows what the view says, as JSON; HEAD works too."""
    answer = await client.get(f"/_slotkeeper/{page}")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert orjson.loads(await answer.read()) == expected
    assert (await client.head(f"/_slotkeeper/{page}")).status == 200


JSON = {"Content-Type": "application/json"}


async def test_forget(client: Client) -> None:
    """A conversation goes with its snapshots; one that nobody knows is not found."""
    page = "/_slotkeeper/api/conversations/{}/forget"
    answer = await client.post(page.format("a"), headers=JSON)
    assert (answer.status, orjson.loads(await answer.read())) == (
        200,
        {"forgotten": True, "snapshots": 3},
    )
    for unknown in ("b", "%2e%2e", "a%2Fb", "ö"):
        answer = await client.post(page.format(unknown), headers=JSON)
        assert answer.status == 404, unknown
        error = orjson.loads(await answer.read())["error"]
        assert "/_slotkeeper/api/conversations" in error["message"] + error.get("hint", "")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_form_cannot_forget(client: Client, kind: str) -> None:
    """What a page of another site can send without asking first is refused."""
    page = "/_slotkeeper/api/conversations/a/forget"
    answer = await client.post(page, headers={"Content-Type": kind} if kind else {})
    assert answer.status == 415


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
async def test_forgetting_is_a_post(client: Client, method: str) -> None:
    """A link, an image or a crawler forgets nothing."""
    answer = await client.request(method, "/_slotkeeper/api/conversations/a/forget", headers=JSON)
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("line", "allow"),
    [
        ("GET api/snapshots/verify", "DELETE,POST"),
        ("PUT api/snapshots/a", "DELETE"),
        ("GET api/pause", "POST"),
        ("POST api/events", "GET,HEAD"),
        ("DELETE api/requests/a", "GET,HEAD"),
    ],
)
async def test_other_methods(client: Client, line: str, allow: str) -> None:
    """A path that exists says what may be done to it."""
    method, path = line.split()
    answer = await client.request(method, f"/_slotkeeper/{path}", headers=JSON)
    assert (answer.status, answer.headers["Allow"]) == (405, allow)


async def test_a_head_of_the_events_ends(client: Client) -> None:
    """It would else wait for what is never sent."""
    assert (await client.head("/_slotkeeper/api/events")).status == 200


async def test_metrics(client: Client) -> None:
    """The exposition comes with the type Prometheus wants."""
    answer = await client.get("/_slotkeeper/metrics")
    assert answer.headers["Content-Type"] == Metrics().render()[1]
    assert b"slotkeeper_backend_up 0.0" in await answer.read()


async def test_limit(client: Client) -> None:
    """The decision log is cut to 1 to 512 rows, 100 if nothing is said."""
    for query, count in (("", 100), ("?limit=1", 1), ("?limit=512", 512)):
        answer = await client.get(f"/_slotkeeper/api/requests{query}")
        assert len(orjson.loads(await answer.read())["requests"]) == count
    for wrong in ("0", "513", "-1", "x", "", "1e2", "٣", "9" * 5000):
        answer = await client.get("/_slotkeeper/api/requests", params={"limit": wrong})
        assert answer.status == 400, wrong


@pytest.mark.parametrize("path", ["/_slotkeeper", "/_slotkeeper/", "/_slotkeeper/api/nothing"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_unknown_pages(client: Client, path: str, method: str) -> None:
    """What is under our prefix never goes to the backend; the answer names the pages."""
    answer = await client.request(method, path)
    error = orjson.loads(await answer.read())["error"]
    assert (answer.status, error["type"]) == (404, "not_found_error")
    assert "/_slotkeeper/api/slots" in error["message"]


async def test_wrong_method(client: Client) -> None:
    """A page that exists answers another method with 405 and says which are allowed."""
    answer = await client.post("/_slotkeeper/metrics")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")
    assert orjson.loads(await answer.read())["error"]["code"] == 405


async def test_other_paths(client: Client) -> None:
    """A path that only begins like ours is the backend's."""
    assert await (await client.get("/_slotkeeperx")).text() == "the backend"
