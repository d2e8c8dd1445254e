"""The headline figures: what the proxy is, what it may do, what it has spared since its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.telemetry.metrics import Cause, Outcome, PathClass, Source
from proxy.telemetry.series import Totals, quantile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.keeper import Keeper
    from proxy.telemetry.history import History
    from proxy.telemetry.metrics import Metrics

HOUR = 3600.0
_COMPUTING = {PathClass.CHAT, PathClass.COMPLETION, PathClass.INFILL, PathClass.COMPUTE}
_TOTALS = (
    "requests_total", "prompt_tokens_total", "saved_seconds_total", "saves_total",
    "restores_total", "evictions_total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class About:
    """What stays while the proxy runs. ``url``: the backend's; ``started``: unix seconds.

    ``slot_dir``: where the backend saves states, as seen from here, absolute; ``""``: nowhere.
    """

    version: str
    url: str
    started: float
    hide_titles: bool = False
    slot_dir: str = ""


def totals(metrics: Metrics) -> Mapping[str, Any]:
    """Counters since the start; tokens by where they came from, seconds of prefill spared."""
    found = metrics.read(*_TOTALS)
    requests = (n for key, n in found.items() if key[0] == _TOTALS[0] and key[1] in _COMPUTING)
    return {
        "requests": int(sum(requests)),
        "prompt_tokens": {str(s): int(found["prompt_tokens_total", s]) for s in Source},
        "seconds_saved": round(found["saved_seconds_total",], 3),
        "saves": int(found["saves_total", Outcome.OK]),
        "restores": int(found["restores_total", Outcome.OK]),
        "evictions": int(found["evictions_total", Cause.SPACE]),
    }


def counters(metrics: Metrics) -> Totals:
    """What the series are made of."""
    names = ("prompt_tokens_total", "saved_seconds_total", "queue_length", "store_bytes")
    found = metrics.read(*names)
    return Totals(
        slot=found["prompt_tokens_total", Source.SLOT],
        snapshot=found["prompt_tokens_total", Source.SNAPSHOT],
        computed=found["prompt_tokens_total", Source.COMPUTED],
        seconds_saved=found["saved_seconds_total",],
        queue=found["queue_length",],
        disk=found["store_bytes",],
    )


def queue(metrics: Metrics) -> Mapping[str, int]:
    """Requests that wait, and that hold a lease."""
    found = metrics.read("queue_length", "leases_active")
    return {"waiting": int(found["queue_length",]), "running": int(found["leases_active",])}


def backend(keeper: Keeper, metrics: Metrics, about: About, total_slots: int) -> Mapping[str, Any]:
    """The model server, as far as it has introduced itself."""
    facts = keeper.facts
    return {
        "kind": facts.kind if facts else None,
        "url": about.url,
        "up": keeper.up,
        "model": (facts.model or None) if facts else None,
        "n_ctx": (facts.n_ctx or None) if facts else None,
        "total_slots": total_slots,
        "version": facts.identity.get("build_info") if facts else None,
        "restarts": int(metrics.read("backend_restarts_total")["backend_restarts_total",]),
    }


def first_token(history: History, now: float) -> Mapping[str, Any]:
    """Seconds until the first token, over the last hour's requests that stream."""
    ascending = history.first_tokens(now - HOUR)
    shares = {"p50": quantile(ascending, 0.5), "p95": quantile(ascending, 0.95)}
    return {**shares, "count": len(ascending)}
