"""What the owner can have done to conversations, snapshots and the proxy itself.

The gate has checked who asks, and that no page of another site does. All need the header
``Content-Type: application/json``, which such a page cannot send without asking first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import orjson
import structlog
from aiohttp import web

from proxy.errors import (
    BadRequestError,
    NotFoundError,
    SlotkeeperError,
    UnsupportedMediaError,
)
from proxy.server.dry_run import question
from proxy.server.envelope import Handler, json_response
from proxy.server.gate import OWN

if TYPE_CHECKING:
    from proxy.server.dry_run import Question

log = structlog.get_logger("slotkeeper.actions")

T = TypeVar("T")
JSON = "application/json"
CONVERSATIONS = f"{OWN}/api/conversations"
SNAPSHOTS = f"{OWN}/api/snapshots"


class Store(Protocol):
    """The snapshots, as their owner handles them (``proxy.curator.Curator``)."""

    async def pin(self, snapshot_id: str, *, pinned: bool) -> bool:
        """Keep it, or no longer; False when it is not there."""

    async def remove(self, snapshot_id: str) -> bool:
        """Delete it; False when it is not there."""

    async def verify(self) -> tuple[int, list[str]]:
        """How many were read, and which are damaged."""

    async def prune(self) -> tuple[list[str], int]:
        """What was removed, and its bytes."""


class Switch(Protocol):
    """Caching on and off (``proxy.keeper.Keeper``)."""

    paused: bool

    def pause(self) -> None:
        """Only forward."""

    def resume(self) -> None:
        """Cache again."""


@dataclass(frozen=True, slots=True)
class Powers:
    """Who does it. ``store`` None: nothing is ever saved.

    ``body`` reads a request's body within its deadline. ``drain`` begins the end of the process.
    """

    forget: Callable[[str], Awaitable[int | None]]
    store: Store | None
    switch: Switch
    drain: Callable[[], None]
    explain: Callable[[Question], Awaitable[Mapping[str, Any]]]
    warm: Callable[[web.Request, web.Request, Question], Awaitable[Mapping[str, Any]]]
    body: Callable[[web.Request], Awaitable[bytes]]


class Actions:
    """The handlers."""

    def __init__(self, powers: Powers) -> None:
        """See ``Powers``."""
        self._powers = powers

    def table(self) -> dict[tuple[str, str], Handler]:
        """Handlers by method and path."""
        return {
            ("POST", f"{CONVERSATIONS}/{{id}}/forget"): self._forget,
            ("POST", f"{SNAPSHOTS}/{{id}}/pin"): self._pin,
            ("DELETE", f"{SNAPSHOTS}/{{id}}"): self._remove,
            ("POST", f"{SNAPSHOTS}/verify"): self._verify,
            ("POST", f"{SNAPSHOTS}/prune"): self._prune,
            ("POST", f"{OWN}/api/pause"): self._pause,
            ("POST", f"{OWN}/api/resume"): self._resume,
            ("POST", f"{OWN}/api/drain"): self._drain,
            ("POST", f"{OWN}/api/explain"): self._explain,
            ("POST", f"{OWN}/api/warm"): self._warm,
        }

    async def _forget(self, request: web.Request) -> web.Response:
        await self._body(request)
        snapshots = await self._powers.forget(request.match_info["id"])
        if snapshots is None:
            raise NotFoundError("No such conversation.", hint=f"See {CONVERSATIONS}.")
        return json_response({"forgotten": True, "snapshots": snapshots})

    async def _pin(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        pinned = body.get("pinned")
        if not isinstance(pinned, bool):
            raise BadRequestError("'pinned' must be true or false.")
        found = await _done(self._store.pin(request.match_info["id"], pinned=pinned))
        return _found(found, {"pinned": pinned})

    async def _remove(self, request: web.Request) -> web.Response:
        await self._body(request)
        return _found(await _done(self._store.remove(request.match_info["id"])), {"removed": True})

    async def _verify(self, request: web.Request) -> web.Response:
        await self._body(request)
        checked, bad = await _done(self._store.verify())
        return json_response({"checked": checked, "bad": bad})

    async def _prune(self, request: web.Request) -> web.Response:
        await self._body(request)
        removed, size = await _done(self._store.prune())
        return json_response({"removed": removed, "bytes": size})

    async def _pause(self, request: web.Request) -> web.Response:
        await self._body(request)
        self._powers.switch.pause()
        return json_response({"paused": True})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._body(request)
        self._powers.switch.resume()
        return json_response({"paused": False})

    async def _drain(self, request: web.Request) -> web.Response:
        await self._body(request)
        self._powers.drain()
        return json_response({"draining": True})

    async def _explain(self, request: web.Request) -> web.Response:
        asked = question(await self._body(request))
        return json_response(await self._powers.explain(asked))

    async def _warm(self, request: web.Request) -> web.Response:
        spare = request.clone()
        asked = question(await self._body(request))
        return json_response(await self._powers.warm(request, spare, asked))

    @property
    def _store(self) -> Store:
        if self._powers.store is None:
            raise NotFoundError("Nothing is saved here.", hint=f"See 'why' at {OWN}/readyz.")
        return self._powers.store

    async def _body(self, request: web.Request) -> Mapping[str, Any]:
        """The JSON object sent, an empty one for no body."""
        if request.content_type != JSON:
            raise UnsupportedMediaError(f"This needs the header 'Content-Type: {JSON}'.")
        raw = await self._powers.body(request) or b"{}"
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadRequestError("The body is not valid JSON.") from error
        if not isinstance(body, dict):
            raise BadRequestError("The body must be a JSON object.")
        return body


async def _done(work: Awaitable[T]) -> T:
    try:
        return await work
    except OSError as error:
        log.warning("disk.refused", error=type(error).__name__, why=str(error))
        raise SlotkeeperError("The disk refuses.", hint="Try again; the log says more.") from error


def _found(found: bool, answer: Mapping[str, Any]) -> web.Response:  # noqa: FBT001 - what was found
    if not found:
        raise NotFoundError("No such snapshot.", hint=f"See {SNAPSHOTS}.")
    return json_response(answer)
