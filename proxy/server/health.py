"""Two pages for supervisors, open to all: is the process alive, can it serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web

from proxy.server.envelope import Handler, json_response


class Readiness(Protocol):
    """Who knows whether requests can be served."""

    def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """The verdict, and what explains it: ``mode`` and ``why``."""


async def healthz(_request: web.Request) -> web.Response:
    """200 as long as the loop runs."""
    return json_response({"alive": True})


def readyz(readiness: Readiness) -> Handler:
    """200 when requests can be served, else 503; both say why."""

    async def handle(_request: web.Request) -> web.Response:
        ready, details = readiness.ready()
        return json_response({"ready": ready, **details}, status=200 if ready else 503)

    return handle
