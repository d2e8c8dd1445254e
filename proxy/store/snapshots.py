"""The store as the rest of the proxy sees it: async, with an index in memory.

All disk work runs in one thread of its own, so nothing here blocks the event loop and no two
operations meet. The index changes on the event loop only, after the disk did. An operation once
begun runs to its end: a caller that is cancelled stops waiting, not the work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

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

__all__ = [
    "ProbeFiles",
    "PublishError",
    "Report",
    "SnapshotStore",
    "StageError",
    "StoreBusyError",
    "StoreError",
]

P = ParamSpec("P")
T = TypeVar("T")

_WRITE_BEHIND = 5.0  # seconds of last-use times a killed proxy may forget


class SnapshotStore:
    """Snapshots on disk. Every method may raise ``StoreError`` (an ``OSError``) beside its own.

    ``staging`` is the backend's slot save path, ``root`` the store's folder on the same file
    system. ``shared``: the backend runs as another user of the same group (2770/0660).
    """

    def __init__(self, staging: Path, root: Path, *, shared: bool = False) -> None:
        """Touches nothing; ``open`` does."""
        self._shelf = Shelf(staging, root, shared=shared)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slotkeeper-store")
        self._running: set[asyncio.Task[Any]] = set()
        self._rows: dict[str, Snapshot] = {}
        self._quarantined: set[str] = set()
        self._unwritten: set[str] = set()
        self._written_at = 0.0
        self._closed = False
        self.deleted: Counter[str] = Counter()  # snapshots by cause, since start
        self.probe_files = ProbeFiles(root, shared=shared)

    async def open(self) -> Report:
        """Take the lock and reconcile. Raises ``StoreBusyError`` when another proxy has it."""
        report = await self._whole(self._in_thread(self._shelf.open))
        self._rows = report.snapshots
        self._quarantined = report.quarantined
        return report

    async def close(self) -> None:
        """Let running work end, write what is behind, unlock. Final; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)
        try:
            await self._flush()
        finally:
            await self._in_thread(self._shelf.close)
            self._thread.shutdown(wait=False)

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
        return await self._in_thread(self._shelf.free_bytes)

    # Out of a slot

    def staging_name(self) -> str:
        """A bare file name for one save; never given twice."""
        return files.fresh("sks-{}.kv")

    async def publish(
        self,
        name: str,
        *,
        fingerprint: str,
        seed: bytes,
        n_prompt: int,
        n_tokens: int,
        n_bytes: int,
        save_seconds: float,
        now: float,
    ) -> Snapshot:
        """Make the save ``name`` a snapshot. ``n_tokens``, ``n_bytes``: as the backend says.

        Raises ``PublishError`` when the file is not what was said; whatever is raised, the file
        is gone.
        """
        saved = Saved(fingerprint, seed, n_prompt, n_tokens, n_bytes, float(save_seconds))
        return await self._whole(self._publish(name, saved, float(now)))

    async def _publish(self, name: str, saved: Saved, now: float) -> Snapshot:
        snapshot = await self._in_thread(self._shelf.publish, name, saved, now)
        self._rows[snapshot.id] = snapshot
        return snapshot

    async def discard(self, name: str) -> None:
        """Delete what a failed save left in staging, if anything."""
        await self._whole(self._in_thread(self._shelf.discard, name))

    # Into a slot

    async def stage(self, snapshot: Snapshot, now: float) -> str:
        """Lend a verified snapshot to the backend; the bare name to restore from.

        The intent is on disk before the name exists. Raises ``StageError`` when the file is not
        what was stored: the snapshot is then deleted.
        """
        return await self._whole(self._stage(snapshot, float(now)))

    async def _stage(self, snapshot: Snapshot, now: float) -> str:
        current = self._rows.get(snapshot.id)
        if current is None:
            message = "the snapshot is gone"
            raise StageError(message)
        try:
            return await self._in_thread(self._shelf.stage, current, now)
        except StageError:
            self._forget(current.id, "damaged")
            raise

    async def unstage(self, snapshot: Snapshot, name: str, *, ok: bool | None) -> None:
        """Take the name back. ``ok``: what the backend answered; None: it vanished.

        After None the snapshot is quarantined, over restarts too, until a restore is answered.
        """
        await self._whole(self._unstage(snapshot, name, ok=ok))

    async def _unstage(self, snapshot: Snapshot, name: str, *, ok: bool | None) -> None:
        if snapshot.id in self._rows:
            if ok is None:
                self._quarantined.add(snapshot.id)
            else:
                self._quarantined.discard(snapshot.id)
        await self._in_thread(self._shelf.unstage, snapshot, name, known=ok is not None)

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
            await self._whole(self._flush())

    async def delete(self, ids: Iterable[str], cause: str) -> None:
        """Remove snapshots; unknown ids are none of them any more."""
        await self._whole(self._delete(list(ids), cause))

    async def _delete(self, ids: list[str], cause: str) -> None:
        gone = [self._rows[i] for i in ids if i in self._rows]
        for row in gone:
            self._forget(row.id, cause)
        await self._in_thread(self._shelf.delete, gone)

    async def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """A row of the caller's own ("verdict", "costs", ...)."""
        return await self._in_thread(self._shelf.get, kind, key)

    async def put(self, kind: str, key: str, value: Mapping[str, Any]) -> None:
        """Write a row of the caller's own; ``value`` holds plain JSON values."""
        await self._whole(self._in_thread(self._shelf.put, kind, key, value))

    def _forget(self, snapshot_id: str, cause: str) -> None:
        if self._rows.pop(snapshot_id, None) is not None:
            self.deleted[cause] += 1
        self._quarantined.discard(snapshot_id)
        self._unwritten.discard(snapshot_id)

    async def _flush(self) -> None:
        rows = [self._rows[i] for i in self._unwritten if i in self._rows]
        self._unwritten.clear()
        if rows:
            await self._in_thread(self._shelf.rewrite, rows)

    # Threads

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))
        except StoreError:
            raise
        except OSError as error:
            # The file's name would say nothing to the user, and may say too much in a log.
            raise StoreError(error.errno, error.strerror) from error

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have left
