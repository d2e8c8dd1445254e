"""The proxy's own pages under ``/_slotkeeper/``: what it does, what it holds, what it decided.

The gate has already checked who asks: the admin key, or this machine. Only therefore may pages
quote prompts and show titles. What changes something is in ``actions``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from proxy.errors import BadRequestError, NotFoundError
from proxy.server import events
from proxy.server.envelope import Handler, json_response
from proxy.server.gate import OWN
from proxy.server.health import Readiness, healthz, readyz
from proxy.telemetry import limits
from proxy.telemetry.logs import LEVELS

if TYPE_CHECKING:
    from proxy.server.actions import Actions
    from proxy.server.events import Hub
    from proxy.server.pages import Pages

_SPANS = {"1h": 3600.0, "6h": 6 * 3600.0, "24h": 24 * 3600.0}
_REQUESTS = f"{OWN}/api/requests"


class AdminView(Readiness, Protocol):
    """What the pages show, as plain JSON values."""

    def status(self) -> Mapping[str, Any]:
        """The headline."""

    def slots(self) -> Sequence[Mapping[str, Any]]:
        """One row per slot."""

    def running(self) -> Sequence[Mapping[str, Any]]:
        """One row per request that waits or runs."""

    def snapshots(self) -> Sequence[Mapping[str, Any]]:
        """One row per snapshot."""

    def requests(self, limit: int, after: str = "") -> Sequence[Mapping[str, Any]]:
        """The decision log, newest first, at most ``limit`` rows, newer than ``after``."""

    def request(self, request_id: str) -> Mapping[str, Any] | None:
        """One row of it."""

    def conversations(self) -> Sequence[Mapping[str, Any]]:
        """One row per conversation, the last used first."""

    def history(self, seconds: float) -> Mapping[str, Any]:
        """Minute by minute."""

    def logs(self, limit: int, level: str = "debug", after: int = 0) -> Sequence[Mapping[str, Any]]:
        """The newest lines of the log, oldest first."""

    def metrics(self) -> tuple[bytes, str]:
        """The Prometheus exposition and its content type."""


def routes(view: AdminView, actions: Actions, hub: Hub, pages: Pages) -> list[web.RouteDef]:
    """All pages and actions, and the refusal of everything else under the prefix."""
    shown = {**_state(view), **_logs(view, hub)}
    done = actions.table()
    one = f"{_REQUESTS}/{{id}}"
    allowed: dict[str, list[str]] = {path: ["GET", "HEAD"] for path in (*shown, one, *pages.paths)}
    for method, path in done:
        allowed.setdefault(path, []).append(method)
    forms = {path: re.escape(path).replace(r"\{id\}", "[^/]+") for path in allowed}

    async def other(request: web.Request) -> web.Response:
        here = [path for path, form in forms.items() if re.fullmatch(form, request.path)]
        if here:
            raise web.HTTPMethodNotAllowed(request.method, [m for p in here for m in allowed[p]])
        names = [path for path in allowed if path not in pages.paths]
        raise NotFoundError(f"No such page; there are {', '.join(names)}.")

    return [
        *pages.routes(),
        *(web.get(path, handler) for path, handler in shown.items()),
        web.get(one, _request(view)),
        *(web.route(method, path, handler) for (method, path), handler in done.items()),
        web.route("*", OWN + "{tail:(?:/.*)?}", other),
    ]


def _state(view: AdminView) -> dict[str, Handler]:
    async def metrics(_request: web.Request) -> web.Response:
        body, content_type = view.metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def status(_request: web.Request) -> web.Response:
        return json_response(view.status())

    async def slots(_request: web.Request) -> web.Response:
        return json_response({"slots": view.slots()})

    async def running(_request: web.Request) -> web.Response:
        return json_response({"running": view.running()})

    async def snapshots(_request: web.Request) -> web.Response:
        return json_response({"snapshots": view.snapshots()})

    async def conversations(_request: web.Request) -> web.Response:
        return json_response({"conversations": view.conversations()})

    return {
        f"{OWN}/healthz": healthz,
        f"{OWN}/readyz": readyz(view),
        f"{OWN}/metrics": metrics,
        f"{OWN}/api/status": status,
        f"{OWN}/api/slots": slots,
        f"{OWN}/api/running": running,
        f"{OWN}/api/snapshots": snapshots,
        f"{OWN}/api/conversations": conversations,
    }


def _logs(view: AdminView, hub: Hub) -> dict[str, Handler]:
    async def requests(request: web.Request) -> web.Response:
        limit = _number(request, "limit", 100, limits.REQUESTS)
        return json_response({"requests": view.requests(limit, request.query.get("after", ""))})

    async def history(request: web.Request) -> web.Response:
        return json_response(view.history(_SPANS[_choice(request, "span", "1h", list(_SPANS))]))

    async def logs(request: web.Request) -> web.Response:
        limit = _number(request, "limit", 100, limits.LOG_LINES)
        level = _choice(request, "level", LEVELS[0], LEVELS)
        after = _number(request, "after", 0, 2**53, least=0)
        return json_response({"logs": view.logs(limit, level, after)})

    async def watch(request: web.Request) -> web.StreamResponse:
        return await events.serve(hub, request)

    return {
        f"{OWN}/api/requests": requests,
        f"{OWN}/api/history": history,
        f"{OWN}/api/logs": logs,
        f"{OWN}/api/events": watch,
    }


def _request(view: AdminView) -> Handler:
    async def request(request: web.Request) -> web.Response:
        row = view.request(request.match_info["id"])
        if row is None:
            hint = f"The last {limits.REQUESTS} are remembered: see {_REQUESTS}."
            raise NotFoundError("No such request.", hint=hint)
        return json_response(row)

    return request


def _number(request: web.Request, name: str, default: int, most: int, *, least: int = 1) -> int:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,16}", text) or not least <= int(text) <= most:
        raise BadRequestError(f"{name} must be {least} to {most}.")
    return int(text)


def _choice(request: web.Request, name: str, default: str, choices: Sequence[str]) -> str:
    found = request.query.get(name, default)
    if found not in choices:
        raise BadRequestError(f"{name} must be one of {', '.join(choices)}.")
    return found
