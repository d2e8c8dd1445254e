"""Every path, in one table: the cached ones, the proxy's own, and everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from proxy.dialects import DIALECTS
from proxy.server import admin, count

if TYPE_CHECKING:
    from proxy.server.admin import AdminView
    from proxy.server.chat import Chat
    from proxy.server.count import Count
    from proxy.server.passthrough import Passthrough


def table(
    chat: Chat, counter: Count, passthrough: Passthrough, view: AdminView
) -> list[web.RouteDef]:
    """In order of precedence."""
    return [
        *(web.post(path, chat.handle) for path in DIALECTS),
        web.post(count.PATH, counter.handle),
        *admin.routes(view),
        web.route("*", "/{tail:.*}", passthrough.handle),
    ]
