"""Which key goes where.

- ``server.keys`` empty: the client's ``Authorization`` and ``X-Api-Key`` go on to the backend,
  unless ``backend.key`` is set, which then replaces them.
- ``server.keys`` set: the gate checks the client's key; it ends here, and only ``backend.key``,
  if any, goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.backends.transport import forward_headers
from proxy.server.gate import client_headers

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp import web

KEY_HEADERS = ("authorization", "x-api-key")


class Keys:
    """The rule above, for one configuration."""

    def __init__(self, backend: str) -> None:
        """``backend``: the backend's key or ``""``."""
        self._backend = backend

    def client_key(self, request: web.Request) -> str:
        """What tells one client from another: conversations never cross keys."""
        headers = request.headers
        return headers.get("Authorization", "") or headers.get("X-Api-Key", "")

    def upstream(self, request: web.Request, drop: Collection[str] = ()) -> list[tuple[str, str]]:
        """The request's headers as the backend is to get them, ``drop`` (lower case) left out."""
        taken = (*drop, *(KEY_HEADERS if self._backend else ()))
        headers = forward_headers(client_headers(request), taken)
        if self._backend:
            headers.append(("Authorization", f"Bearer {self._backend}"))
        return headers
