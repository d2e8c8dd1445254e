"""Closes connections that do not get a request out in time.

aiohttp has no deadline for a request's headers: a client that sends none, or one a second, holds
its connection for ever (style-and-reliability.md 0.2). A connection's later requests need no
guard: the keep-alive timer runs until the next one is complete.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_TICKS = 4


class HeaderDeadline:
    """``heard`` is told every request, ``watch`` runs beside the server."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: the deadline; a connection may live half as long again."""
        self._seconds = seconds
        self._heard: set[object] = set()

    def heard(self, request: web.Request) -> None:
        """Its connection got one out."""
        self._heard.add(request.protocol)

    async def watch(self, server: web.Server) -> None:
        """Never returns; cancel it at the end. ``server`` is ``runner.server`` after ``setup``."""
        clock = asyncio.get_running_loop().time
        since: dict[object, float] = {}
        while True:
            await asyncio.sleep(self._seconds / _TICKS)
            connections = server.connections
            self._heard.intersection_update(connections)
            silent = [one for one in connections if one not in self._heard]
            since = {one: since.get(one, clock()) for one in silent}
            for one in silent:
                if clock() - since[one] >= self._seconds and one.transport is not None:
                    one.transport.abort()
