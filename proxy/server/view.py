"""What the proxy's own pages show, read from the live objects; no prompt text anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.keeper import Keeper
    from proxy.scheduler import Scheduler
    from proxy.telemetry.history import History
    from proxy.telemetry.metrics import Metrics
    from proxy.transfer import Transfer


class View:
    """An ``AdminView``."""

    def __init__(
        self,
        scheduler: Scheduler,
        keeper: Keeper,
        transfer: Transfer | None,
        history: History,
        metrics: Metrics,
    ) -> None:
        """``transfer`` None: nothing is ever saved."""
        self._scheduler = scheduler
        self._keeper = keeper
        self._transfer = transfer
        self._history = history
        self._metrics = metrics

    def slots(self) -> Sequence[Mapping[str, Any]]:
        """One row per slot; ``used`` is unix seconds."""
        return [
            {
                "slot": row.index,
                "state": str(row.state),
                "content": "known" if row.content else "unknown",
                "tokens": row.content.n_tokens if row.content else None,
                "prompt": row.content.n_prompt if row.content else None,
                "saved": row.content.n_saved if row.content else None,
                "storable": row.content.storable if row.content else None,
                "used": row.content.used if row.content else None,
            }
            for row in self._scheduler.table
        ]

    def snapshots(self) -> Sequence[Mapping[str, Any]]:
        """One row per snapshot of the current fingerprint, the last used first."""
        if self._transfer is None:
            return []
        found = sorted(self._transfer.index, key=lambda s: s.last_used, reverse=True)
        return [
            {
                "id": snapshot.id,
                "fingerprint": snapshot.fingerprint,
                "tokens": snapshot.n_tokens,
                "prompt": snapshot.n_prompt,
                "bytes": snapshot.size,
                "created": snapshot.created,
                "last_used": snapshot.last_used,
                "restores": snapshot.restores,
                "barred": self._transfer.barred(snapshot.id),
            }
            for snapshot in found
        ]

    def requests(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The decision log, newest first."""
        return [decision.as_json() for decision in self._history.recent(limit)]

    def metrics(self) -> tuple[bytes, str]:
        """The Prometheus exposition."""
        return self._metrics.render()

    def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """Ready: the backend answers and the proxy is not shutting down."""
        verdict = self._keeper.verdict
        draining = self._scheduler.draining
        details = {
            "mode": str(self._scheduler.mode),
            "why": "slotkeeper is shutting down" if draining else verdict.why,
            "advice": verdict.advice,
            "restores": "retired" if self._transfer and self._transfer.retired else "in use",
        }
        return self._keeper.up and not draining, details
