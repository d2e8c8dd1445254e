"""The proxy's own pages under ``/_slotkeeper/``: metrics, slots, conversations, decision log.

The gate has already checked who asks: the admin key, or this machine. Only therefore may pages
quote prompts and show titles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from proxy.errors import BadRequestError, NotFoundError, UnsupportedMediaError
from proxy.server.envelope import Handler, json_response
from proxy.server.gate import OWN
from proxy.server.health import Readiness, healthz, readyz

_MAX_REQUESTS = 512
_CONVERSATIONS = f"{OWN}/api/conversations"
_FORGET = f"{_CONVERSATIONS}/{{id}}/forget"


class AdminView(Readiness, Protocol):
    """What the pages show, as plain JSON values."""

    def slots(self) -> Sequence[Mapping[str, Any]]:
        """One row per slot."""

    def snapshots(self) -> Sequence[Mapping[str, Any]]:
        """One row per snapshot."""

    def requests(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The decision log, newest first, at most ``limit`` rows."""

    def conversations(self) -> Sequence[Mapping[str, Any]]:
        """One row per conversation, the last used first."""

    async def forget(self, conversation: str) -> int | None:
        """Remove one; how many snapshots went with it, None when nothing is known of it."""

    def metrics(self) -> tuple[bytes, str]:
        """The Prometheus exposition and its content type."""


def routes(view: AdminView) -> list[web.RouteDef]:
    """All pages, and the refusal of everything else under the prefix."""

    async def metrics(_request: web.Request) -> web.Response:
        body, content_type = view.metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def slots(_request: web.Request) -> web.Response:
        return json_response({"slots": view.slots()})

    async def snapshots(_request: web.Request) -> web.Response:
        return json_response({"snapshots": view.snapshots()})

    async def requests(request: web.Request) -> web.Response:
        return json_response({"requests": view.requests(_limit(request))})

    async def conversations(_request: web.Request) -> web.Response:
        return json_response({"conversations": view.conversations()})

    pages: dict[str, Handler] = {
        f"{OWN}/healthz": healthz,
        f"{OWN}/readyz": readyz(view),
        f"{OWN}/metrics": metrics,
        f"{OWN}/api/slots": slots,
        f"{OWN}/api/snapshots": snapshots,
        f"{OWN}/api/requests": requests,
        f"{OWN}/api/conversations": conversations,
    }

    async def other(request: web.Request) -> web.Response:
        if request.path in pages:
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
        if _is_forget(request.path):
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        raise NotFoundError(f"No such page; there are {', '.join((*pages, _FORGET))}.")

    return [
        *(web.get(path, handler) for path, handler in pages.items()),
        web.post(_FORGET, _forget(view)),
        web.route("*", OWN + "{tail:(?:/.*)?}", other),
    ]


def _forget(view: AdminView) -> Handler:
    async def forget(request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # what a web page's form cannot send
            raise UnsupportedMediaError(
                "Forgetting needs the header 'Content-Type: application/json'."
            )
        snapshots = await view.forget(request.match_info["id"])
        if snapshots is None:
            raise NotFoundError("No such conversation.", hint=f"See {_CONVERSATIONS}.")
        return json_response({"forgotten": True, "snapshots": snapshots})

    return forget


def _is_forget(path: str) -> bool:
    return re.fullmatch(rf"{_CONVERSATIONS}/[^/]+/forget", path) is not None


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", "100")
    if not re.fullmatch(r"[0-9]{1,3}", text) or not 1 <= int(text) <= _MAX_REQUESTS:
        raise BadRequestError(f"limit must be 1 to {_MAX_REQUESTS}.")
    return int(text)
