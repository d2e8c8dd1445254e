"""The store as the rest of the proxy sees it: async, with an index in memory.

All disk work runs in a thread of its own (``store/worker.py``). The index changes on the event loop
only, after the disk did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.core.records import Snapshot
from proxy.store import files
from proxy.store.files import (
    ProbeFiles,
    PublishError,
    StageError,
    StoreBusyError,
    StoreError,
)
from proxy.store.shelf import Report, Saved, Shelf
from proxy.store.worker import Worker

__all__ = [
    "ProbeFiles",
    "PublishError",
    "Report",
    "Saved",
    "SnapshotStore",
    "StageError",
    "StoreBusyError",
    "StoreError",
]

_WRITE_BEHIND = 5.0  # seconds of last-use times a killed proxy may forget


class SnapshotStore:
    """Snapshots on disk. Every method may raise ``StoreError`` (an ``OSError``) beside its own.

    ``staging`` is the backend's slot save path, ``root`` the store's folder on the same file
    system. ``shared``: the backend runs as another user of the same group (2770/0660).
    """

    def __init__(self, staging: Path, root: Path, *, shared: bool = False) -> None:
        """Touches nothing; ``open`` does."""
        self._shelf = Shelf(staging, root, shared=shared)
        self._worker = Worker("slotkeeper-store")
        self._rows: dict[str, Snapshot] = {}
        self._quarantined: set[str] = set()
        self._unwritten: set[str] = set()
        self._written_at = 0.0
        self._closed = False
        self.deleted: Counter[str] = Counter()  # snapshots by cause, since start
        self.probe_files = ProbeFiles(root, shared=shared)

    async def open(self) -> Report:
        """Take the lock and reconcile. Raises ``StoreBusyError`` when another proxy has it."""
        report = await self._worker.whole(self._worker.call(self._shelf.open))
        self._rows = report.snapshots
        self._quarantined = report.quarantined
        return report

    async def close(self) -> None:
        """Let running work end, write what is behind, unlock. Final; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._worker.settled()
        try:
            await self._flush()
        finally:
            await self._worker.call(self._shelf.close)
            self._worker.stop()

    # What is there

    def snapshots(self, fingerprint: str) -> list[Snapshot]:
        """All of one fingerprint, the quarantined ones too."""
        return [row for row in self._rows.values() if row.fingerprint == fingerprint]

    def all_snapshots(self) -> list[Snapshot]:
        """Of every fingerprint."""
        return list(self._rows.values())

    def quarantined(self, snapshot_id: str) -> bool:
        """The backend vanished during a restore of it, and no later restore ended well."""
        return snapshot_id in self._quarantined

    def usage(self) -> tuple[int, int]:
        """Bytes and files of all snapshots."""
        return sum(row.size for row in self._rows.values()), len(self._rows)

    async def free_bytes(self) -> int:
        """What the file system has left."""
        return await self._worker.call(self._shelf.free_bytes)

    # Out of a slot

    def staging_name(self) -> str:
        """A bare file name for one save; never given twice."""
        return files.fresh("sks-{}.kv")

    async def publish(self, name: str, saved: Saved, now: float) -> Snapshot:
        """Make the save ``name`` a snapshot.

        Raises ``PublishError`` when the file is not what ``saved`` says; whatever is raised, the
        file is gone.
        """
        return await self._worker.whole(self._publish(name, saved, float(now)))

    async def _publish(self, name: str, saved: Saved, now: float) -> Snapshot:
        snapshot = await self._worker.call(self._shelf.publish, name, saved, now)
        self._rows[snapshot.id] = snapshot
        return snapshot

    async def discard(self, name: str) -> None:
        """Delete what a failed save left in staging, if anything."""
        await self._worker.whole(self._worker.call(self._shelf.discard, name))

    # Into a slot

    async def stage(self, snapshot: Snapshot, now: float) -> str:
        """Lend a verified snapshot to the backend; the bare name to restore from.

        The intent is on disk before the name exists. Raises ``StageError`` when the file is not
        what was stored: the snapshot is then deleted.
        """
        return await self._worker.whole(self._stage(snapshot, float(now)))

    async def _stage(self, snapshot: Snapshot, now: float) -> str:
        current = self._rows.get(snapshot.id)
        if current is None:
            message = "the snapshot is gone"
            raise StageError(message)
        try:
            return await self._worker.call(self._shelf.stage, current, now)
        except StageError:
            self._forget(current.id, "damaged")
            raise

    async def unstage(self, snapshot: Snapshot, name: str, *, ok: bool | None) -> None:
        """Take the name back. ``ok``: what the backend answered; None: it vanished.

        After None the snapshot is quarantined, over restarts too, until a restore is answered.
        """
        await self._worker.whole(self._unstage(snapshot, name, ok=ok))

    async def _unstage(self, snapshot: Snapshot, name: str, *, ok: bool | None) -> None:
        if snapshot.id in self._rows:
            if ok is None:
                self._quarantined.add(snapshot.id)
            else:
                self._quarantined.discard(snapshot.id)
        await self._worker.call(self._shelf.unstage, snapshot, name, known=ok is not None)

    # Rows

    async def touch(self, snapshot_id: str, now: float, restores_delta: int = 0) -> None:
        """Note a use; written behind by a few seconds."""
        row = self._rows.get(snapshot_id)
        if row is None:
            return
        self._rows[snapshot_id] = replace(
            row, last_used=float(now), restores=row.restores + restores_delta
        )
        self._unwritten.add(snapshot_id)
        if not 0 <= now - self._written_at < _WRITE_BEHIND:
            self._written_at = now
            await self._worker.whole(self._flush())

    async def pin(self, snapshot_id: str, *, pinned: bool) -> Snapshot | None:
        """Keep it whatever it is worth, or no longer; the row as it is now, None: it is gone."""
        return await self._worker.whole(self._pin(snapshot_id, pinned=pinned))

    async def _pin(self, snapshot_id: str, *, pinned: bool) -> Snapshot | None:
        row = self._rows.get(snapshot_id)
        if row is None:
            return None
        self._rows[snapshot_id] = replace(row, pinned=pinned)  # first: a flush may be under way
        self._unwritten.add(snapshot_id)
        try:
            await self._flush()
        except StoreError:
            if snapshot_id in self._rows:
                self._rows[snapshot_id] = replace(self._rows[snapshot_id], pinned=row.pinned)
            raise
        return self._rows.get(snapshot_id)

    async def check(self, snapshot_id: str) -> str:
        """Read a snapshot's file to its end: what is wrong with it, ``""`` for nothing."""
        row = self._rows.get(snapshot_id)
        return "" if row is None else await self._worker.call(self._shelf.check, row)

    async def delete(self, ids: Iterable[str], cause: str) -> None:
        """Remove snapshots, also such as the backend is reading now; unknown ids are gone already.

        Raises ``StoreError`` when the disk refuses: then all of them still count as there.
        """
        await self._worker.whole(self._delete(list(ids), cause))

    async def _delete(self, ids: list[str], cause: str) -> None:
        gone = [self._rows[i] for i in ids if i in self._rows]
        quarantined = self._quarantined.intersection(ids)
        for row in gone:  # first: a use or a loan of it must not begin meanwhile
            self._forget(row.id, cause)
        try:
            await self._worker.call(self._shelf.delete, gone)
        except StoreError:  # they may still be there, and can be deleted again
            self._rows.update((row.id, row) for row in gone)
            self._quarantined |= quarantined
            self.deleted[cause] -= len(gone)
            raise

    async def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """A row of the caller's own ("verdict", "costs", ...)."""
        return await self._worker.call(self._shelf.get, kind, key)

    async def put(self, kind: str, key: str, value: Mapping[str, Any]) -> None:
        """Write a row of the caller's own; ``value`` holds plain JSON values."""
        await self._worker.whole(self._worker.call(self._shelf.put, kind, key, value))

    def _forget(self, snapshot_id: str, cause: str) -> None:
        if self._rows.pop(snapshot_id, None) is not None:
            self.deleted[cause] += 1
        self._quarantined.discard(snapshot_id)
        self._unwritten.discard(snapshot_id)

    async def _flush(self) -> None:
        rows = [self._rows[i] for i in self._unwritten if i in self._rows]
        self._unwritten.clear()
        if rows:
            await self._worker.call(self._shelf.rewrite, rows)
