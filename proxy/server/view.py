"""What the proxy's own pages show, read from the live objects.

The only prompt text is a title of 60 characters and the quotes of the decision log, for those the
gate lets in (DESIGN.md rule 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from proxy.errors import SlotkeeperError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.core.ledger import Conversation
    from proxy.keeper import Keeper
    from proxy.scheduler import Scheduler
    from proxy.telemetry.history import History
    from proxy.telemetry.metrics import Metrics
    from proxy.transfer import Transfer


_LEFT = "The disk refuses: some of this conversation may still be on it."


class Talks(Protocol):
    """The conversations there are (``server.normaliser.Normaliser``)."""

    def conversations(self) -> Sequence[Conversation]:
        """The last used first."""

    def forget(self, conversation: str) -> bool:
        """Drop one; False when it is not known."""


class Written(Protocol):
    """Where they are kept (``store.ledger.LedgerWriter``)."""

    async def flush(self) -> bool:
        """Bring what changed to disk; False when the disk refuses."""


class View:
    """An ``AdminView``."""

    def __init__(
        self,
        scheduler: Scheduler,
        keeper: Keeper,
        transfer: Transfer | None,
        history: History,
        metrics: Metrics,
        talks: Talks | None = None,
        ledger: Written | None = None,
    ) -> None:
        """``transfer`` None: nothing is ever saved; likewise ``talks`` and ``ledger``."""
        self._scheduler = scheduler
        self._keeper = keeper
        self._transfer = transfer
        self._history = history
        self._metrics = metrics
        self._talks = talks
        self._ledger = ledger

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
                "conversation": snapshot.conversation,
            }
            for snapshot in found
        ]

    def conversations(self) -> Sequence[Mapping[str, Any]]:
        """One row per conversation, the last used first; ``bytes``: of its messages and tools."""
        return [
            {
                "id": row.id,
                "client": row.client,
                "messages": len(row.lines),
                "used": row.used,
                "prompt_n": row.prompt_n,
                "title": row.title,
                "bytes": row.size,
            }
            for row in (self._talks.conversations() if self._talks else ())
        ]

    async def forget(self, conversation: str) -> int | None:
        """Remove a conversation and its snapshots, for good; how many those were.

        None: neither is known. Raises ``SlotkeeperError`` when the disk refuses: a second try may
        remove the rest.
        """
        known = self._talks is not None and self._talks.forget(conversation)
        self._scheduler.table.unsave(conversation)
        self._history.forget(conversation)
        try:
            snapshots = await self._transfer.forget(conversation) if self._transfer else 0
            written = await self._ledger.flush() if self._ledger else True
        except OSError as error:
            raise SlotkeeperError(_LEFT, hint="Try again.") from error
        if not written:
            raise SlotkeeperError(_LEFT, hint="It is tried again by itself.")
        return snapshots if known or snapshots else None

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
