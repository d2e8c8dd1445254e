"""What its owner does to the store by hand: look, pin, remove, verify, prune.

Beside `Transfer`, which owns the index and moves states; nothing here touches a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from proxy.core.retention import values
from proxy.telemetry.metrics import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from proxy.core.records import Snapshot
    from proxy.core.retention import Limits, Worth
    from proxy.store.snapshots import SnapshotStore
    from proxy.telemetry.metrics import Metrics
    from proxy.transfer import Budget, Transfer

log = structlog.get_logger("slotkeeper.curator")

FRESH = 10.0  # seconds for which a value is shown again


@dataclass(frozen=True, slots=True)
class Place:
    """Where snapshots are kept, and how much of it may be used."""

    path: Path
    limits: Limits
    budget: Budget


class Curator:
    """Every method may raise ``StoreError``: the disk refused."""

    def __init__(
        self,
        store: SnapshotStore,
        transfer: Transfer,
        metrics: Metrics,
        clock: Callable[[], float],
        place: Place,
    ) -> None:
        """``clock`` gives unix seconds."""
        self._store = store
        self._transfer = transfer
        self._metrics = metrics
        self._clock = clock
        self._valued: dict[str, Worth] = {}
        self._valued_at = 0.0
        self.place = place

    def usage(self) -> Mapping[str, Any]:
        """Sizes in bytes, ``free`` as last looked at; ``refused``: why the last save was."""
        used, snapshots = self._store.usage()
        refused = self._transfer.refused
        free = self._metrics.read("disk_free_bytes")
        return {
            "path": str(self.place.path),
            "used": used,
            "limit": self.place.limits.max_bytes,
            "free": int(free["disk_free_bytes",]),
            "snapshots": snapshots,
            "keep_free": self.place.budget.keep_free,
            "refused": str(refused) if refused else None,
            "advice": refused.advice if refused else "",
        }

    async def look(self) -> None:
        """How much the disk has left now."""
        self._metrics.disk_free_bytes.set(await self._store.free_bytes())

    def snapshots(self) -> Sequence[tuple[Snapshot, Worth]]:
        """Those of the current fingerprint with what they are worth, the last used first."""
        found = sorted(self._transfer.index, key=lambda row: row.last_used, reverse=True)
        worth = self._values(frozenset(row.id for row in found))
        return [(row, worth[row.id]) for row in found]

    def _values(self, ids: frozenset[str]) -> Mapping[str, Worth]:
        """Of these; they fade slowly, and working them out compares all with all."""
        now = self._clock()
        if ids != self._valued.keys() or not 0 <= now - self._valued_at < FRESH:
            self._valued_at = now
            barred = [one for one in ids if self.barred(one)]
            self._valued = values(self._transfer.index, self._transfer.costs, now, barred)
        return self._valued

    def barred(self, snapshot_id: str) -> bool:
        """It is not restored: this instance refused it, or the last try took the backend down."""
        return self._transfer.barred(snapshot_id)

    async def pin(self, snapshot_id: str, *, pinned: bool) -> bool:
        """Keep it until it is unpinned or removed by hand; False when it is not there."""
        snapshot = await self._store.pin(snapshot_id, pinned=pinned)
        if snapshot is None:
            return False
        self._transfer.index.replace(snapshot)
        self._transfer.refused = None  # the next save will tell
        log.info("snapshot.pinned", snapshot=snapshot_id, pinned=pinned)
        return True

    async def remove(self, snapshot_id: str) -> bool:
        """Delete it; False when it is not there. One that the backend is reading goes too."""
        if all(snapshot.id != snapshot_id for snapshot in self._store.all_snapshots()):
            return False
        await self._delete([snapshot_id], Cause.REMOVED)
        return True

    async def verify(self) -> tuple[int, list[str]]:
        """Read every file to its end: how many, and the ids of those that are not what was stored.

        One at a time, so that saves and restores come in between. Nothing is deleted.
        """
        ids = [snapshot.id for snapshot in self._store.all_snapshots()]
        bad = [one for one in ids if await self._damaged(one)]
        if bad:
            log.warning("store.damaged", snapshots=bad)
        return len(ids), bad

    async def _damaged(self, snapshot_id: str) -> bool:
        try:
            return bool(await self._store.check(snapshot_id))
        except OSError:  # one that cannot be read; the others are still looked at
            return True

    async def prune(self) -> tuple[list[str], int]:
        """Remove what is never restored again, and what the limits do not allow; ids and bytes.

        The limits are those of every save, by the same rule, for the whole store.
        """
        rows = {snapshot.id: snapshot for snapshot in self._store.all_snapshots()}
        useless = [one for one in rows if self._store.quarantined(one) and not rows[one].pinned]
        await self._delete(useless, Cause.SPACE)
        over = self._transfer.over()
        await self._delete(over, Cause.SPACE)
        gone = [*useless, *over]
        return gone, sum(rows[one].size for one in gone if one in rows)

    async def _delete(self, ids: list[str], cause: Cause) -> None:
        if not ids:
            return
        await self._store.delete(ids, cause)
        self._transfer.removed(ids, cause)
        log.info("snapshots.removed", cause=str(cause), count=len(ids))
