"""The dashboard's files as they are served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from proxy.server.pages import Pages

Client = TestClient[web.Request, web.Application]


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    """A page, a script in a folder, and what is for nobody."""
    (tmp_path / "vendor").mkdir()
    (tmp_path / "index.html").write_text("<p>ä</p>", encoding="utf-8")
    (tmp_path / "vendor" / "a.js").write_text("1", encoding="utf-8")
    (tmp_path / "icon.svg").write_text("<svg/>", encoding="utf-8")
    (tmp_path / "vendor" / "SHA256SUMS").write_text("x", encoding="utf-8")
    return Pages(tmp_path)


@pytest.fixture
async def client(pages: Pages) -> AsyncIterator[Client]:
    """A server with nothing else."""
    app = web.Application()
    app.add_routes(pages.routes())
    async with TestClient(TestServer(app)) as found:
        yield found


def test_the_paths(pages: Pages, tmp_path: Path) -> None:
    """One per file of a known kind, and the way to the first; none without files."""
    assert pages.paths == {
        "/_slotkeeper", "/_slotkeeper/", "/_slotkeeper/vendor/a.js", "/_slotkeeper/icon.svg",
    }  # fmt: skip
    for empty in (Pages(tmp_path / "no-such"), Pages(tmp_path / "vendor" / "none")):
        assert (empty.paths, empty.routes()) == (frozenset(), [])


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/_slotkeeper/", "text/html; charset=utf-8"),
        ("/_slotkeeper/vendor/a.js", "text/javascript; charset=utf-8"),
        ("/_slotkeeper/icon.svg", "image/svg+xml"),
    ],
)
async def test_headers(client: Client, path: str, kind: str) -> None:
    """A strict policy, no guessing, always asked for anew and seldom sent again."""
    answer = await client.get(path)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == kind
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-cache"
    again = await client.get(path, headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status, await again.read()) == (304, b"")
    assert again.headers["ETag"] == answer.headers["ETag"]


async def test_the_way_in(client: Client) -> None:
    """Without its slash the address leads to the page."""
    answer = await client.get("/_slotkeeper", allow_redirects=False)
    assert (answer.status, answer.headers["Location"]) == (308, "/_slotkeeper/")
    for path in ("vendor/SHA256SUMS", "vendor/", "../pages.py", "vendor/%2e%2e/index.html"):
        assert (await client.get(f"/_slotkeeper/{path}")).status == 404, path


def test_the_packages_own() -> None:
    """What is shipped has a first page."""
    assert "/_slotkeeper/" in Pages().paths
