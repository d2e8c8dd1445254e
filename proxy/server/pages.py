"""The dashboard's files, read once from the package: nothing else can be asked for.

They hold no data, so they need no key; the page asks for one and sends it with each request. A
strict Content-Security-Policy lets it run its own scripts and talk to this proxy, and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import web

from proxy.server.envelope import Handler
from proxy.server.gate import OWN

INDEX = "index.html"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One file. ``kind``: its media type."""

    body: bytes
    kind: str
    tag: str


class Pages:
    """All of them by path."""

    def __init__(self, folder: Traversable | None = None) -> None:
        """``folder``: the package's own if None."""
        found = resources.files("proxy") / "dashboard" if folder is None else folder
        self._pages = dict(_pages(found, f"{OWN}/")) if found.is_dir() else {}

    @property
    def paths(self) -> frozenset[str]:
        """What is open to all: the files, and the way to the first of them."""
        return frozenset({OWN, *self._pages}) if self._pages else frozenset()

    def routes(self) -> list[web.RouteDef]:
        """One per file."""
        if not self._pages:
            return []
        found = [web.get(path, _shown(page)) for path, page in self._pages.items()]
        return [web.get(OWN, _moved), *found]


def _pages(folder: Traversable, path: str) -> Iterator[tuple[str, Page]]:
    for entry in folder.iterdir():
        name = entry.name
        if entry.is_dir():
            yield from _pages(entry, f"{path}{name}/")
        elif (kind := _TYPES.get(name[name.rfind(".") :])) is not None:
            body = entry.read_bytes()
            page = Page(body, kind, f'"{sha256(body).hexdigest()[:32]}"')
            yield path if name == INDEX else f"{path}{name}", page


def _shown(page: Page) -> Handler:
    headers = {**_HEADERS, "ETag": page.tag}

    async def show(request: web.Request) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == page.tag:
            return web.Response(status=304, headers=headers)
        text = page.kind.startswith("text/")
        return web.Response(
            body=page.body,
            content_type=page.kind,
            charset="utf-8" if text else None,
            headers=headers,
        )

    return show


async def _moved(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPPermanentRedirect(f"{OWN}/")
