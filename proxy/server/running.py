"""Requests under way, as the owner's page shows them: where each is, how far its prompt is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.core.records import Reason
from proxy.server.envelope import REQUEST_ID
from proxy.server.gate import OWN
from proxy.server.record import EXCHANGE, LEASE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from proxy.core.queue import Lease
    from proxy.server.record import Exchange

WAITING, PREPARING, PREFILL, ANSWERING = "waiting", "preparing", "prefill", "answering"


def row(request: web.Request, came: float, now: float) -> Mapping[str, Any] | None:
    """One request; None for what computes nothing. ``came`` and ``now``: unix seconds."""
    exchange = request.get(EXCHANGE)
    if exchange is not None:
        return _cached(exchange, now)
    lease = request.get(LEASE)
    if lease is None or request.path.startswith(OWN):
        return None
    known = {"conversation": None, "title": None, "client": None, "state": ANSWERING}
    return {**_head(request.get(REQUEST_ID, ""), request.path, came, lease, now), **known}


def _head(
    request_id: str, path: str, came: float, lease: Lease | None, now: float
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "path": path,
        "client": None,
        "conversation": None,
        "title": None,
        "slot": lease.slot if lease else None,
        "reason": str(lease.reason if lease else Reason.PENDING),
        "state": WAITING,
        "prompt": None,
        "cached": None,
        "processed": None,
        "at": came,
        "queued": lease.queued if lease else max(0.0, now - came),
        "generated": None,
    }


def _cached(exchange: Exchange, now: float) -> Mapping[str, Any]:
    lease, turn, seen = exchange.granted, exchange.turn, exchange.events
    head = _head(exchange.request_id, exchange.request.path, exchange.started, lease, now)
    prompt = seen.prompt_n if seen.prompt_n is not None else _expected(lease)
    return {
        **head,
        "client": (turn.client or None) if turn else None,
        "conversation": turn.row.id if turn and turn.row else None,
        "title": exchange.title or None,
        "state": _state(exchange),
        "prompt": prompt,
        "cached": seen.cache_n,
        "processed": prompt if seen.prefilled else seen.processed,
        "generated": seen.generated if seen.prefilled else None,
    }


def _state(exchange: Exchange) -> str:
    if exchange.granted is None:
        return WAITING
    if exchange.lease is None:
        return PREPARING
    return ANSWERING if exchange.events.prefilled else PREFILL


def _expected(lease: Lease | None) -> int | None:
    """The prompt's length as placement knew it, where it was weighed."""
    return lease.option.n_tokens or None if lease else None
