"""The catalogue: small JSON rows by kind and key, in a ``diskcache.Cache`` that executes nothing.

diskcache unpickles what it finds in a row that says so, under its JSON disk too (CVE-2025-69872,
no fixed release), reads whatever file a row names, and deletes that file with the row. The Disk
here does none of the three: a row is an orjson text inline under a plain string key, or no row.
Methods block; the store calls them in its one worker thread (SQLite connections are per thread).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import diskcache
import orjson

from proxy.store.files import StoreError, seal

_RAW = 1  # diskcache.core.MODE_RAW: the value column is the value
_FULL = 2  # PRAGMA synchronous: an intent must be on disk before the restore it announces
_PATIENCE = 10.0  # seconds to wait for a lock nobody should hold
_DATABASE = "cache.db"
# Faults of the disk or of rights, not of the file: moving it aside would lose a good catalogue.
_ENVIRONMENT = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
_FOREIGN_ROWS = (
    "DELETE FROM Cache WHERE raw IS NOT 1 OR mode IS NOT 1 OR filename IS NOT NULL"
    " OR expire_time IS NOT NULL OR typeof(key) != 'text' OR typeof(value) != 'blob'"
)


class TamperedRowError(ValueError):
    """A row this program cannot have written."""


class InlineDisk(diskcache.Disk):
    """String keys and bytes values, inline; everything else is refused, in both directions."""

    def put(self, key: Any) -> tuple[str, bool]:
        """Convert a key for the database: only ``str``, as it is."""
        if type(key) is not str:
            message = "catalogue keys are strings"
            raise TypeError(message)
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        """Convert a key from the database: ``raw`` = 0 would be a pickle."""
        if type(key) is not str or not raw:
            message = "a key that is not a plain string"
            raise TamperedRowError(message)
        return key

    def store(
        self, value: Any, read: Any, key: Any = None
    ) -> tuple[int, int, None, sqlite3.Binary]:
        """Convert a value for the database: only ``bytes``, of any length inline."""
        if type(value) is not bytes or read:
            message = "catalogue values are bytes"
            raise TypeError(message)
        return 0, _RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> bytes:
        """Convert a value from the database: no other mode, no file."""
        if mode != _RAW or filename is not None or type(value) is not bytes or read:
            message = "a value that is not plain bytes"
            raise TamperedRowError(message)
        return value

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        """No value gets a file."""
        message = "catalogue values have no files"
        raise TypeError(message)

    def remove(self, file_path: Any) -> None:
        """Delete nothing: a file named by a row is not the catalogue's."""


class Catalogue:
    """Rows by kind ("snapshot", "intent", "verdict", ...) and key; values are JSON objects."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the catalogue's alone."""
        self._folder = folder
        self._cache: Any = None

    def open(self) -> str:
        """Open, or start anew; the name a corrupt database was moved aside to, else ``""``."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seal(self._folder, shared=False)
        try:
            self._connect()
        except (sqlite3.DatabaseError, TypeError, ValueError, LookupError, AttributeError) as error:
            # DatabaseError: not a database, torn pages. The others: settings diskcache cannot
            # live with. All of it can be learned again, so none of it may stop the proxy.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _ENVIRONMENT:
                message = f"the catalogue cannot be opened ({error})"
                raise StoreError(message) from error
            self._disconnect()
            aside = self._set_aside()
            with _as_store_error():
                self._connect()
            return aside
        return ""

    def close(self) -> None:
        """Close the connection; call it in the thread that opened."""
        self._disconnect()

    def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """The row; None when there is none or it is none of ours (then it is dropped)."""
        return self._read(_name(kind, key))

    def put(self, kind: str, key: str, value: Mapping[str, Any]) -> None:
        """Write a row; it survives a power cut once this returns."""
        data = orjson.dumps(dict(value))
        with _as_store_error():
            self._cache.set(_name(kind, key), data)

    def delete(self, kind: str, key: str) -> None:
        """Forget a row, if there is one."""
        with _as_store_error():
            self._cache.delete(_name(kind, key))

    def scrub(self) -> None:
        """Leave nothing readable of what was deleted: not in free pages, not in the journal."""
        with _as_store_error():
            self._cache._sql("PRAGMA wal_checkpoint(TRUNCATE)")  # noqa: SLF001 - diskcache's own way

    def items(self, kind: str) -> dict[str, dict[str, Any]]:
        """All rows of one kind by key; foreign rows are dropped on the way."""
        prefix = _name(kind, "")
        try:
            names = self._names(prefix)
        except TamperedRowError:
            with _as_store_error(), closing(sqlite3.connect(self._folder / _DATABASE)) as base:
                _purge(base)
            names = self._names(prefix)
        rows = {name.removeprefix(prefix): self._read(name) for name in names}
        return {key: row for key, row in rows.items() if row is not None}

    def _names(self, prefix: str) -> list[str]:
        with _as_store_error():
            return [name for name in self._cache.iterkeys() if name.startswith(prefix)]

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with _as_store_error():
                data = self._cache.get(name)
            if data is None:
                return None
            row = orjson.loads(data)
        except ValueError:
            row = None
        if isinstance(row, dict):
            return row
        with _as_store_error():
            self._cache.delete(name)
        return None

    def _connect(self) -> None:
        database = self._folder / _DATABASE
        database.touch(mode=0o600)
        for path in self._folder.glob(f"{_DATABASE}*"):
            seal(path, shared=False)
        with closing(sqlite3.connect(database, timeout=_PATIENCE)) as base:
            _check(base)
        self._cache = diskcache.Cache(
            str(self._folder),
            timeout=_PATIENCE,
            disk=InlineDisk,
            eviction_policy="none",
            cull_limit=0,
            size_limit=2**62,
            statistics=0,
            tag_index=0,
            sqlite_journal_mode="wal",
            sqlite_synchronous=_FULL,
            sqlite_secure_delete=1,  # what is deleted is overwritten
            sqlite_mmap_size=0,  # a mapped file cut short by somebody else kills the process
        )

    def _disconnect(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _set_aside(self) -> str:
        """Rename the database and its companions; the first free number."""
        number = 0
        while (self._folder / f"{_DATABASE}.corrupt-{number}").exists():
            number += 1
        for path in (self._folder / f"{_DATABASE}{end}" for end in ("-wal", "-shm")):
            path.unlink(missing_ok=True)
        aside = self._folder / f"{_DATABASE}.corrupt-{number}"
        (self._folder / _DATABASE).rename(aside)
        return aside.name


def peek(folder: Path, kind: str, key: str) -> dict[str, Any] | None:
    """One row as it was last closed, for somebody who only looks: nothing is made or changed.

    None when there is none, or no catalogue, or none that can be read.
    """
    uri = f"{(folder / _DATABASE).absolute().as_uri()}?mode=ro&immutable=1"
    wanted = "SELECT value FROM Cache WHERE key = ? AND raw = 1 AND mode = 1 AND filename IS NULL"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as base:
            found = base.execute(wanted, (_name(kind, key),)).fetchone()
        row = orjson.loads(found[0]) if found else None
    except (sqlite3.Error, orjson.JSONDecodeError):
        return None
    return row if isinstance(row, dict) else None


def _name(kind: str, key: str) -> str:
    if ":" in kind:
        message = "a kind holds no colon"
        raise ValueError(message)
    return f"{kind}:{key}"


def _check(base: sqlite3.Connection) -> None:
    """Raise ``sqlite3.DatabaseError`` for a damaged database; drop foreign rows of a good one."""
    verdict = base.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != ("ok",):
        message = "the catalogue is damaged"
        raise sqlite3.DatabaseError(message)
    if base.execute("SELECT 1 FROM sqlite_schema WHERE name = 'Cache'").fetchone():
        _purge(base)


def _purge(base: sqlite3.Connection) -> None:
    base.execute(_FOREIGN_ROWS)
    base.commit()


@contextmanager
def _as_store_error() -> Iterator[None]:
    """What SQLite and diskcache raise, as the one error callers know."""
    try:
        yield
    except (sqlite3.Error, diskcache.Timeout) as error:
        message = f"the catalogue cannot be used ({type(error).__name__})"
        raise StoreError(message) from error
