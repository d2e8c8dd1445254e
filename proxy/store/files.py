"""What the store does to files: names of its own pattern, modes, links, checksums, the lock.

Every function blocks and raises ``OSError``. Nothing here knows a snapshot.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import orjson

SAVE_NAME = re.compile(r"sks-[0-9a-f]{32}\.kv")  # a save of the backend
LINK_NAME = re.compile(r"skr-[0-9a-f]{32}\.kv")  # a snapshot lent to the backend for a restore
PROBE_NAME = re.compile(r"probe-[0-9a-f]{16}\.kv")  # the probe's, of a killed proxy
ID = re.compile(r"[0-9a-f]{32}")
STATE_NAME = re.compile(r"[0-9a-f]{32}\.kv")  # a published snapshot: its id
PART_NAME = re.compile(r"part-[0-9a-f]{32}")  # an unfinished atomic write
FINGERPRINT = re.compile(r"[A-Za-z0-9_-]{1,128}")  # a folder's name: no dot, so no way out

PROBE = "probe.kv"
MANIFEST = "manifest.json"

Signature = tuple[int, int, int, int]
"""Device, inode, size, mtime in ns: equal means the file verified before is still the same."""


class StoreError(OSError):
    """The disk, or the catalogue on it, refused. The text names no file and no content."""


class StoreBusyError(StoreError):
    """Another proxy uses this store."""


class PublishError(ValueError):
    """What the backend saved is not what it said: the file is gone, the text says why."""


class StageError(ValueError):
    """The stored file is not what was stored: the snapshot is gone, the text says why."""


def fresh(form: str) -> str:
    """A name that was never used: ``form`` with 32 random hex digits in its ``{}``."""
    return form.format(secrets.token_hex(16))


def make_dir(path: Path, *, shared: bool) -> bool:
    """Make a private folder (2770 when two users share it); False when it was there."""
    if path.is_dir():
        return False
    path.mkdir(parents=True, mode=0o700)
    seal(path, shared=shared)
    return True


def seal(path: Path, *, shared: bool) -> None:
    """Take every right to ``path`` from others, whatever the umask gave them.

    In a shared folder a file may belong to the backend's user; only its owner may do this, and
    the folder around it (2770) already keeps others out.
    """
    alone, together = (0o700, 0o2770) if path.is_dir() else (0o600, 0o660)
    try:
        path.chmod(together if shared else alone)
    except PermissionError:
        if not shared:
            raise


def shared(path: Path) -> bool:
    """Whoever writes there, it is the group's (2770): the backend runs as another user."""
    mode = path.stat().st_mode if sys.platform != "win32" and path.is_dir() else 0
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def exposed(path: Path) -> bool:
    """Others than owner and group may enter (never said on Windows, where modes mean nothing)."""
    return sys.platform != "win32" and bool(path.stat().st_mode & 0o007)


def regular(path: Path) -> os.stat_result | None:
    """The status of a regular file; None for anything else: no file, a symlink, a pipe."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def open_regular(path: Path) -> BufferedReader:
    """Open for reading, never through a symlink. Raises ``OSError`` for one."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags), "rb")


def signature(status: os.stat_result) -> Signature:
    """What cannot stay the same when a file is exchanged or written to."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def checksum(file: BufferedReader) -> str:
    """Hex sha256 from the beginning to the end of the file; frees the GIL while hashing."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Make a file's content survive a power cut."""
    # Windows flushes only what may be written; elsewhere the right to read is enough.
    mode = os.O_RDWR if sys.platform == "win32" else os.O_RDONLY
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_dir(path: Path) -> None:
    """Make a folder's entries survive a power cut, where the system knows how (not Windows)."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """Rename within one file system, replacing nothing (names are fresh)."""
    source.rename(target)


def link(source: Path, target: Path) -> bool:
    """Hard link; False where this is refused (file system, kernel's rule on others' files)."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        return False
    return True


def remove(path: Path) -> bool:
    """Delete a file or a symlink itself; False when there was none."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def write_atomic(path: Path, data: bytes, *, shared: bool) -> None:
    """Write whole or not at all: a part file beside it, flushed, closed to others, renamed."""
    part = path.with_name(fresh("part-{}"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        seal(part, shared=shared)
        part.replace(path)
    except BaseException:
        remove(part)
        raise
    flush_dir(path.parent)


def named(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """Files and symlinks right in ``folder`` whose whole name has this pattern of ours."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                yield folder / entry.name


class Lock:
    """Keeps a second proxy out of a store; it vanishes with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        """``path`` is made when missing and stays."""
        self._path = path
        self._file: BinaryIO | None = None

    def take(self) -> None:
        """Raise ``StoreBusyError`` when another process (or another store here) holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            _lock(file)
        except OSError as error:
            file.close()
            message = "another slotkeeper is using this store"
            raise StoreBusyError(message) from error
        self._file = file

    def release(self) -> None:
        """Let the next one in."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock(file: BinaryIO) -> None:
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415 - exists on Windows only

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl  # noqa: PLC0415 - exists elsewhere only

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


class ProbeFiles:
    """The probe's saved states, one per fingerprint: ``probe.kv`` and, in words, ``manifest.json``.

    Methods block; they touch no other file of the store and may run in any thread.
    """

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        """``root`` is the store's folder."""
        self._root = root
        self._shared = shared

    def load(self, fingerprint: str) -> bytes | None:
        """The probe state kept for this fingerprint, None when there is none that can be read."""
        path = self._folder(fingerprint) / PROBE
        try:
            if regular(path) is None:
                return None
            with open_regular(path) as file:
                return file.read()
        except OSError:
            return None

    def store(self, fingerprint: str, data: bytes, manifest: Mapping[str, Any]) -> None:
        """Keep a probe state; ``manifest`` says in words what the fingerprint was made of."""
        folder = self._folder(fingerprint)
        make_dir(folder, shared=self._shared)
        words = orjson.dumps(dict(manifest), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        write_atomic(folder / MANIFEST, words, shared=self._shared)
        write_atomic(folder / PROBE, data, shared=self._shared)

    def _folder(self, fingerprint: str) -> Path:
        if not FINGERPRINT.fullmatch(fingerprint):
            message = "not a fingerprint"
            raise ValueError(message)
        return self._root / fingerprint
