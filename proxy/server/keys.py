"""Which key goes where.

- ``server.keys`` empty: the client's ``Authorization`` and ``X-Api-Key`` go on to the backend,
  unless ``backend.key`` is set: the driver then sends that instead.
- ``server.keys`` set: the gate checks the client's key; it ends here, and only ``backend.key``,
  if any, goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.server.gate import client_headers

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp import web


def client_key(request: web.Request) -> str:
    """What tells one client from another: conversations never cross keys."""
    headers = request.headers
    bearer = headers.get("Authorization", "").removeprefix("Bearer ")
    return bearer or headers.get("X-Api-Key", "")


def upstream(request: web.Request, drop: Collection[str] = ()) -> list[tuple[str, str]]:
    """The client's headers for the driver, those of the lower-case names ``drop`` left out."""
    return [(name, value) for name, value in client_headers(request) if name.lower() not in drop]
