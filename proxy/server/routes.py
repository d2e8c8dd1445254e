"""Every path, in one table: the cached ones, the proxy's own, and everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from proxy.dialects import DIALECTS, TRANSLATIONS
from proxy.server import count

if TYPE_CHECKING:
    from proxy.server.chat import Chat
    from proxy.server.count import Count
    from proxy.server.passthrough import Passthrough


def table(
    chat: Chat, counter: Count, passthrough: Passthrough, own: list[web.RouteDef]
) -> list[web.RouteDef]:
    """In order of precedence; ``own``: the proxy's own pages."""
    return [
        *(web.post(path, chat.handle) for path in {**DIALECTS, **TRANSLATIONS}),
        web.post(count.PATH, counter.handle),
        *own,
        web.route("*", "/{tail:.*}", passthrough.handle),
    ]
