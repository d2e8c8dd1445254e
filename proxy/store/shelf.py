"""The state files and their rows, step by step: every method blocks, one thread calls them.

Order is the whole design (DESIGN.md rules 3 to 5): a row is written after its file is whole and
in place, an intent before the file is lent. Killed between any two steps, ``open`` finds a whole
snapshot or a sweepable orphan.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from proxy.core import slotfile
from proxy.core.records import Snapshot
from proxy.store import files
from proxy.store.catalogue import Catalogue
from proxy.store.files import PublishError, StageError, StoreError
from proxy.store.rows import from_row, to_row

SNAPSHOT = "snapshot"
INTENT = "intent"
CATALOGUE = "catalogue.d"  # the folder of the rows, in the store's
LOCK = "lock"  # the file a running proxy holds locked there


@dataclass(slots=True)
class Report:
    """What ``open`` found.

    ``unread``: ids of states that could not be read now; they stay for the next start.
    ``dropped``: rows without a good file. ``swept``: files of our own pattern without a row.
    ``aside``: name of a corrupt catalogue moved aside, or ``""``. ``exposed``: others may enter
    the staging folder (it was there before us, so its mode stays).
    """

    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    dropped: int = 0
    swept: int = 0
    aside: str = ""
    exposed: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backend says it saved, and what the caller knows of it (see ``Snapshot``)."""

    fingerprint: str
    seed: bytes
    n_prompt: int
    n_tokens: int
    n_bytes: int
    save_seconds: float
    conversation: str = ""


class Shelf:
    """Everything on disk under ``root``, and our own names in ``staging``."""

    def __init__(self, staging: Path, root: Path, *, shared: bool) -> None:
        """See ``SnapshotStore``."""
        self._staging = staging
        self._root = root
        self._shared = shared
        self._lock = files.Lock(root / LOCK)
        self._rows = Catalogue(root / CATALOGUE)
        self._verified: dict[str, files.Signature] = {}
        self._intents: dict[str, str] = {}  # open ones: name in staging -> id
        self._staged: set[str] = set()  # names the backend may be reading now
        self._lent: dict[str, str] = {}  # renamed out for want of links: id -> name in staging

    def open(self) -> Report:
        """Take the lock, reconcile rows and files. Raises ``StoreBusyError``."""
        made = files.make_dir(self._staging, shared=self._shared)
        files.make_dir(self._root, shared=self._shared)
        self._lock.take()
        try:
            files.seal(self._root, shared=self._shared)
            exposed = not made and files.exposed(self._staging)
            report = Report(aside=self._rows.open(), exposed=exposed)
            self._recover()
            self._read_rows(report)
            self._read_intents(report)
            self._sweep(report)
        except BaseException:
            self.close()
            raise
        return report

    def close(self) -> None:
        """Close the catalogue and let the next proxy in."""
        self._rows.close()
        self._lock.release()

    # Reconciling

    def _recover(self) -> None:
        """A snapshot that was renamed out when the proxy died goes back to its place."""
        for name, intent in self._rows.items(INTENT).items():
            snapshot_id = str(intent.get("id"))
            row = from_row(snapshot_id, self._rows.get(SNAPSHOT, snapshot_id))
            if row is None or not files.LINK_NAME.fullmatch(name):
                self._rows.delete(INTENT, name)
                continue
            self._intents[name] = snapshot_id
            place = self._place(row["fingerprint"], snapshot_id)
            lent = files.regular(self._staging / name)
            if lent and lent.st_size == row["size"] and files.regular(place) is None:
                files.make_dir(place.parent, shared=self._shared)
                files.move(self._staging / name, place)

    def _read_rows(self, report: Report) -> None:
        for key, value in self._rows.items(SNAPSHOT).items():
            try:
                snapshot = self._load(key, value)
            except OSError:  # this time it could not be read: that is no reason to delete it
                report.unread.add(key)
                continue
            if snapshot is None:
                self._rows.delete(SNAPSHOT, key)
                report.dropped += 1
            else:
                report.snapshots[key] = snapshot

    def _load(self, key: str, value: Mapping[str, Any]) -> Snapshot | None:
        """The snapshot of a row, its tokens from its file; a file that is not it is deleted."""
        row = from_row(key, value)
        if row is None:
            return None
        path = self._place(row["fingerprint"], key)
        status = files.regular(path)
        if status is None:
            return None
        try:
            if status.st_size != row["size"]:
                raise slotfile.SlotFileError
            with files.open_regular(path) as file:
                tokens = slotfile.parse(_reader(file), status.st_size).tokens
            if not 0 <= row["n_prompt"] <= len(tokens):
                raise slotfile.SlotFileError
            return Snapshot(id=key, tokens=tokens, **row)
        except ValueError:
            with suppress(OSError):
                files.remove(path)
            return None

    def _read_intents(self, report: Report) -> None:
        """An open intent means: the last restore of that snapshot was never heard of again."""
        for name, snapshot_id in list(self._intents.items()):
            if snapshot_id in report.snapshots:
                report.quarantined.add(snapshot_id)
            else:
                self._close_intent(name)

    def _sweep(self, report: Report) -> None:
        """Delete files of our own pattern that no row speaks of; touch no other file."""
        orphans = [
            *files.named(self._staging, files.SAVE_NAME),
            *files.named(self._staging, files.LINK_NAME),
            *files.named(self._staging, files.PROBE_NAME),
        ]
        for folder in self._root.iterdir():
            if not files.FINGERPRINT.fullmatch(folder.name) or folder.is_symlink():
                continue
            if not folder.is_dir():
                continue
            orphans += files.named(folder, files.PART_NAME)
            for path in files.named(folder, files.STATE_NAME):
                snapshot = report.snapshots.get(path.stem)
                known = snapshot is not None and snapshot.fingerprint == folder.name
                if not known and path.stem not in report.unread:
                    orphans.append(path)
        for path in orphans:
            with suppress(OSError):
                report.swept += files.remove(path)

    # A save becomes a snapshot

    def publish(self, name: str, saved: Saved, now: float) -> Snapshot:
        """Verify, close, move, then write the row. Raises ``PublishError``, ``OSError``."""
        if not files.SAVE_NAME.fullmatch(name):
            message = "not a name this store gave out"
            raise PublishError(message)
        if not files.FINGERPRINT.fullmatch(saved.fingerprint):
            message = "not a fingerprint"
            raise PublishError(message)
        source = self._staging / name
        snapshot_id = files.fresh("{}")
        place = self._place(saved.fingerprint, snapshot_id)
        try:
            tokens, checksum = _verify_save(source, saved)
            snapshot = Snapshot(
                id=snapshot_id,
                fingerprint=saved.fingerprint,
                seed=saved.seed,
                tokens=tokens,
                n_prompt=saved.n_prompt,
                size=saved.n_bytes,
                checksum=checksum,
                created=now,
                last_used=now,
                save_seconds=saved.save_seconds,
                conversation=saved.conversation,
            )
            files.seal(source, shared=self._shared)
            files.flush(source)
            if files.make_dir(place.parent, shared=self._shared):
                files.flush_dir(self._root)
            files.move(source, place)
            files.flush_dir(place.parent)
            self._write(snapshot)
        except BaseException:
            for path in (source, place):
                with suppress(OSError):
                    files.remove(path)
            raise
        status = files.regular(place)
        if status is not None:
            self._verified[snapshot_id] = files.signature(status)
        return snapshot

    def discard(self, name: str) -> None:
        """Delete what a failed save may have left."""
        if files.SAVE_NAME.fullmatch(name):
            files.remove(self._staging / name)

    # A snapshot is lent to the backend

    def stage(self, snapshot: Snapshot, now: float) -> str:
        """Verify, write the intent, link. Raises ``StageError`` (then it is gone), ``OSError``."""
        if snapshot.id in self._lent:
            message = "the state is lent to another slot"
            raise StoreError(message)
        place = self._place(snapshot.fingerprint, snapshot.id)
        problem = self._verify_stored(place, snapshot)
        if problem:
            self.delete([snapshot])
            raise StageError(problem)
        name = files.fresh("skr-{}.kv")
        self._rows.put(INTENT, name, {"id": snapshot.id, "at": now})
        self._intents[name] = snapshot.id
        try:
            if not files.link(place, self._staging / name):
                files.move(place, self._staging / name)
                self._lent[snapshot.id] = name
        except BaseException:
            self._close_intent(name)
            raise
        self._staged.add(name)
        return name

    def check(self, snapshot: Snapshot) -> str:
        """What is wrong with a snapshot's file, read to its end; ``""``: nothing, or it is lent."""
        if snapshot.id in self._lent:
            return ""
        self._verified.pop(snapshot.id, None)
        return self._verify_stored(self._place(snapshot.fingerprint, snapshot.id), snapshot)

    def _verify_stored(self, place: Path, snapshot: Snapshot) -> str:
        """What is wrong with the stored file, or ``""``; hashed once per process and content."""
        status = files.regular(place)
        if status is None:
            return "the file is missing"
        if status.st_size != snapshot.size:
            return f"the file has {status.st_size} bytes, {snapshot.size} were stored"
        if self._verified.get(snapshot.id) == files.signature(status):
            return ""
        with files.open_regular(place) as file:
            if files.checksum(file) != snapshot.checksum:
                return "the file's content is not what was stored"
        self._verified[snapshot.id] = files.signature(status)
        return ""

    def unstage(self, snapshot: Snapshot, name: str, *, known: bool) -> None:
        """Take the link back; ``known``: the restore's outcome was heard, the intent is done."""
        lent = self._staging / name
        self._staged.discard(name)
        if self._lent.get(snapshot.id) == name:
            if self._rows.get(SNAPSHOT, snapshot.id) is not None:
                files.move(lent, self._place(snapshot.fingerprint, snapshot.id))
            del self._lent[snapshot.id]
        if files.LINK_NAME.fullmatch(name):
            files.remove(lent)
        if known:
            self._close_intents(snapshot.id)

    def _close_intents(self, snapshot_id: str) -> None:
        """One heard outcome says the file does no harm: earlier silences are settled with it."""
        for name in [n for n, i in self._intents.items() if i == snapshot_id]:
            if name not in self._staged:
                self._close_intent(name)

    def _close_intent(self, name: str) -> None:
        self._rows.delete(INTENT, name)
        self._intents.pop(name, None)

    # Rows

    def delete(self, snapshots: Iterable[Snapshot]) -> None:
        """Rows first, then files: what is left of a half-done delete is swept at the next start."""
        for snapshot in snapshots:
            self._rows.delete(SNAPSHOT, snapshot.id)
            self._close_intents(snapshot.id)
            self._verified.pop(snapshot.id, None)
            files.remove(self._place(snapshot.fingerprint, snapshot.id))

    def rewrite(self, snapshots: Iterable[Snapshot]) -> None:
        """Last-use times and counts; a snapshot that is gone stays gone."""
        for snapshot in snapshots:
            if self._rows.get(SNAPSHOT, snapshot.id) is not None:
                self._write(snapshot)

    def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """A row of the caller's own kind."""
        return self._rows.get(kind, key)

    def put(self, kind: str, key: str, value: Mapping[str, Any]) -> None:
        """Write a row of the caller's own kind."""
        if kind in (SNAPSHOT, INTENT):
            message = f"{kind} rows are the store's own"
            raise ValueError(message)
        self._rows.put(kind, key, value)

    def free_bytes(self) -> int:
        """What the file system of the store has left for this user."""
        return shutil.disk_usage(self._root).free

    def _write(self, snapshot: Snapshot) -> None:
        self._rows.put(SNAPSHOT, snapshot.id, to_row(snapshot))

    def _place(self, fingerprint: str, snapshot_id: str) -> Path:
        return self._root / fingerprint / f"{snapshot_id}.kv"


def _reader(file: BufferedReader) -> slotfile.Reader:
    def read(offset: int, n: int) -> bytes:
        file.seek(offset)
        return file.read(n)

    return read


def _verify_save(source: Path, saved: Saved) -> tuple[array[int], str]:
    """The file's tokens and checksum. Raises ``PublishError`` for whatever was not promised."""
    status = files.regular(source)
    if status is None:
        message = "the backend left no regular file"
        raise PublishError(message)
    if status.st_size != saved.n_bytes:
        message = f"the file has {status.st_size} bytes, the backend wrote {saved.n_bytes}"
        raise PublishError(message)
    with files.open_regular(source) as file:
        try:
            state = slotfile.parse(_reader(file), status.st_size)
        except slotfile.SlotFileError as error:
            message = f"not a state file: {error}"
            raise PublishError(message) from error
        n_tokens = len(state.tokens)
        if n_tokens != saved.n_tokens:
            message = f"the file holds {n_tokens} tokens, the backend saved {saved.n_tokens}"
            raise PublishError(message)
        if not n_tokens or not 0 <= saved.n_prompt <= n_tokens:
            message = f"{saved.n_prompt} prompt tokens of {n_tokens}"
            raise PublishError(message)
        if state.has_media:
            message = "the state holds media"
            raise PublishError(message)
        if slotfile.leftover(state):
            message = f"{slotfile.leftover(state)} bytes after the first KV section"
            raise PublishError(message)
        return state.tokens, files.checksum(file)
