"""Which key goes where.

- ``server.keys`` empty: the client's ``Authorization`` and ``X-Api-Key`` go on to the backend,
  unless ``backend.key`` is set: the driver then sends that instead.
- ``server.keys`` set: the gate checks the client's key; it ends here, and only ``backend.key``,
  if any, goes on.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from proxy.backends.transport import OWNER
from proxy.server.gate import client_headers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from aiohttp import web


def key_of(headers: Mapping[str, str]) -> str:
    """What tells one client from another: conversations never cross keys; ``""`` for none.

    ``headers`` are found whatever their case.
    """
    bearer = headers.get("Authorization", "").removeprefix("Bearer ")
    return bearer or headers.get("X-Api-Key", "")


def namespace(headers: Mapping[str, str]) -> bytes:
    """A digest of the key in them: no key is kept in what is remembered; 16 bytes."""
    key = key_of(headers).encode("utf-8", "surrogateescape")  # headers may hold any byte
    return blake2b(key, digest_size=16).digest()


def upstream(
    request: web.Request, drop: Collection[str] = (), *, whose: bytes | None = None
) -> list[tuple[str, str]]:
    """The client's headers for the driver, those of the lower-case names ``drop`` left out.

    One more says whose request it is (``whose``: its ``namespace``, where that is known), also
    where the key ends here. No driver sends it on.
    """
    headers = client_headers(request, (*drop, OWNER))
    headers.append((OWNER, (whose or namespace(request.headers)).hex()))
    return headers
