"""The catalogue keeps JSON rows and executes nothing it finds in its file."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import diskcache
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.store.catalogue import Catalogue, InlineDisk, TamperedRowError, peek
from proxy.store.files import StoreError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The catalogue's folder, not made yet."""
    return tmp_path / "catalogue.d"


@pytest.fixture
def catalogue(folder: Path) -> Iterator[Catalogue]:
    """An open catalogue."""
    opened = Catalogue(folder)
    assert opened.open() == ""
    yield opened
    opened.close()


@pytest.fixture
def trap(tmp_path: Path) -> tuple[bytes, Path]:
    """A pickle that makes a folder when it is loaded (protocol 0: os.mkdir(path))."""
    target = tmp_path / "executed"
    return b"cos\nmkdir\n(V" + str(target).encode() + b"\ntR.", target


def tamper(folder: Path, statement: str, *values: object) -> None:
    """Change the database as somebody with a file editor would."""
    with closing(sqlite3.connect(folder / "cache.db")) as base:
        base.execute(statement, values)
        base.commit()


def reopened(folder: Path) -> Catalogue:
    """The next start."""
    catalogue = Catalogue(folder)
    assert catalogue.open() == ""
    return catalogue


def test_a_row_survives_a_restart(folder: Path, catalogue: Catalogue) -> None:
    """What was put is what is got, now and by the next process; kinds do not mix."""
    catalogue.put("snapshot", "a", {"n": 1, "text": "ü" * 100_000})
    catalogue.put("intent", "a", {"n": 2})
    catalogue.close()
    again = reopened(folder)
    assert again.get("snapshot", "a") == {"n": 1, "text": "ü" * 100_000}
    assert again.items("intent") == {"a": {"n": 2}}
    again.delete("intent", "a")
    again.delete("intent", "a")
    assert again.get("intent", "a") is None
    again.close()
    assert {path.name for path in folder.iterdir()} == {"cache.db"}, "a value became a file"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    key=st.text(st.characters(exclude_categories=["Cs"])),
    value=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False),
    ),
)
def test_any_row_comes_back(catalogue: Catalogue, key: str, value: dict[str, object]) -> None:
    """Whatever key and JSON object is put, the same object is got."""
    value = {k: v for k, v in value.items() if v not in (float("inf"), float("-inf"))}
    catalogue.put("any", key, value)
    assert catalogue.get("any", key) == value


def test_nothing_is_culled(folder: Path, catalogue: Catalogue) -> None:
    """Diskcache's own size limit and eviction are off, whatever an older file says."""
    catalogue.close()
    tamper(folder, "UPDATE Settings SET value = 1000 WHERE key = 'size_limit'")
    tamper(folder, "UPDATE Settings SET value = 'least-recently-stored' WHERE key LIKE 'evict%'")
    again = reopened(folder)
    for number in range(50):
        again.put("big", str(number), {"text": "x" * 10_000})
    assert len(again.items("big")) == 50
    again.close()


@pytest.mark.skipif(os.name == "nt", reason="modes mean nothing on Windows")
def test_nobody_else_can_read(folder: Path) -> None:
    """Folder 0700 and files 0600 under the usual umask, and again after somebody loosened them."""
    before = os.umask(0o022)
    try:
        catalogue = Catalogue(folder)
        catalogue.open()
        catalogue.put("a", "b", {})
        modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})
        catalogue.close()
        folder.chmod(0o755)
        (folder / "cache.db").chmod(0o644)
        catalogue.open()
        modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})
        catalogue.close()
    finally:
        os.umask(before)


def test_the_trap_works(folder: Path, trap: tuple[bytes, Path]) -> None:
    """The control: under diskcache's own JSON disk the very same row is executed."""
    payload, target = trap
    with diskcache.Cache(str(folder), disk=diskcache.JSONDisk) as cache:
        cache.set("snapshot:a", {})
        tamper(folder, "UPDATE Cache SET mode = 4, value = ?", payload)
        with pytest.raises(Exception):  # noqa: B017 - what comes after the deed is no matter
            cache.get("snapshot:a")
    assert target.is_dir()


@pytest.mark.parametrize("running", [False, True], ids=["at start", "while running"])
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE Cache SET mode = 4, value = ?",
        "UPDATE Cache SET raw = 0, key = ?",
        "UPDATE Cache SET mode = 4, value = NULL, filename = 'side.val'",
        "UPDATE Cache SET mode = 2, value = NULL, filename = 'side.val'",
        "UPDATE Cache SET mode = 1, filename = '../victim'",
        "UPDATE Cache SET value = 'text'",
        "UPDATE Cache SET value = x'5b5d'",
        "UPDATE Cache SET value = x'ff'",
        "UPDATE Cache SET key = 7",
    ],
)
def test_a_tampered_row_is_dropped(
    folder: Path, catalogue: Catalogue, trap: tuple[bytes, Path], change: str, running: bool
) -> None:
    """No row makes the catalogue execute, read a side file or delete one: it is gone instead."""
    payload, target = trap
    victim = folder.parent / "victim"
    victim.write_text("precious")
    (folder / "side.val").write_bytes(payload)
    catalogue.put("snapshot", "a", {"n": 1})
    if not running:
        catalogue.close()
    tamper(folder, change, *([payload] if "?" in change else []))
    subject = catalogue if running else reopened(folder)
    assert subject.items("snapshot") == {}
    assert subject.get("snapshot", "a") is None
    subject.put("snapshot", "a", {"n": 2})
    assert subject.items("snapshot") == {"a": {"n": 2}}
    subject.close()
    assert not target.exists()
    assert victim.read_text() == "precious"
    assert (folder / "side.val").exists()


@pytest.mark.parametrize("key", [b"bytes", 1, ("a", "tuple"), None])
def test_only_plain_keys_go_in(tmp_path: Path, key: object) -> None:
    """A key that diskcache would pickle is refused before it is written."""
    with diskcache.Cache(str(tmp_path), disk=InlineDisk) as cache, pytest.raises(TypeError):
        cache.set(key, b"")


@pytest.mark.parametrize("value", ["text", 1, {"a": 1}, None, [b"x"]])
def test_only_bytes_go_in(tmp_path: Path, value: object) -> None:
    """A value that diskcache would pickle, or keep as a file, is refused."""
    with diskcache.Cache(str(tmp_path), disk=InlineDisk) as cache, pytest.raises(TypeError):
        cache.set("key", value)


def test_the_disk_has_no_files(tmp_path: Path) -> None:
    """Neither a file object is read, nor a name made, nor a named file opened or deleted."""
    disk = InlineDisk(str(tmp_path))
    named = tmp_path / "named"
    named.write_bytes(b"x")
    with pytest.raises(TypeError):
        disk.store(b"x", True)
    with pytest.raises(TypeError):
        disk.filename()
    with pytest.raises(TamperedRowError):
        disk.fetch(1, "named", b"x", False)
    with pytest.raises(TamperedRowError):
        disk.fetch(1, None, b"x", True)
    disk.remove("named")
    assert named.exists()


def test_a_value_must_be_json(catalogue: Catalogue) -> None:
    """An object orjson cannot write is the caller's fault, not a row; so is a kind with a colon."""
    with pytest.raises(TypeError):
        catalogue.put("a", "b", {"x": object()})
    with pytest.raises(ValueError, match="colon"):
        catalogue.put("a:b", "c", {})
    assert catalogue.items("a") == {}


@pytest.mark.parametrize(
    "ruin",
    [
        lambda data: b"no database" * 1000,
        lambda data: data[:4096] + os.urandom(len(data) - 4096),
        lambda data: data[: len(data) // 2 + 100],
    ],
    ids=["foreign", "scrambled", "cut"],
)
def test_a_corrupt_database_is_moved_aside(folder: Path, ruin: object) -> None:
    """The proxy starts with an empty catalogue, says so, and keeps every corrupt one."""
    for expected in ("cache.db.corrupt-0", "cache.db.corrupt-1"):
        catalogue = Catalogue(folder)
        assert catalogue.open() == ""
        for number in range(40):
            catalogue.put("snapshot", str(number), {"text": "x" * 500})
        catalogue.close()
        database = folder / "cache.db"
        database.write_bytes(ruin(database.read_bytes()))  # type: ignore[operator]  # a lambda
        assert catalogue.open() == expected
        assert catalogue.items("snapshot") == {}
        catalogue.put("snapshot", "new", {})
        catalogue.close()
        assert (folder / expected).exists()


def test_a_database_of_another_shape_is_moved_aside(folder: Path) -> None:
    """Tables diskcache cannot live with are a corrupt catalogue, too."""
    folder.mkdir()
    tamper(folder, "CREATE TABLE Cache (other)")
    catalogue = Catalogue(folder)
    assert catalogue.open() == "cache.db.corrupt-0"
    catalogue.close()


def test_a_locked_database_is_not_moved_aside(
    folder: Path, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock somebody holds, or a full disk, is no damage: an error, and the file stays."""
    catalogue.put("a", "b", {"n": 1})
    catalogue.close()
    monkeypatch.setattr("proxy.store.catalogue._PATIENCE", 0.01)
    with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError):
            Catalogue(folder).open()
        other.execute("ROLLBACK")
    again = reopened(folder)
    assert again.get("a", "b") == {"n": 1}
    again.close()


def test_damage_while_running_is_a_store_error(folder: Path, catalogue: Catalogue) -> None:
    """A catalogue that breaks under us fails as the store's own error, nothing else."""
    catalogue.put("a", "b", {"n": 1})
    tamper(folder, "DROP TABLE Cache")
    for call in (
        lambda: catalogue.get("a", "b"),
        lambda: catalogue.put("a", "b", {}),
        lambda: catalogue.delete("a", "b"),
        lambda: catalogue.items("a"),
    ):
        with pytest.raises(StoreError):
            call()


def test_what_was_deleted_cannot_be_read(folder: Path, catalogue: Catalogue) -> None:
    """After a scrub no file of the catalogue holds a byte of it, with the catalogue open."""
    catalogue.put("conversation", "a", {"data": "CANARY" * 2000})
    catalogue.put("conversation", "b", {"data": "other"})
    catalogue.delete("conversation", "a")
    catalogue.scrub()
    assert all(b"CANARY" not in path.read_bytes() for path in folder.iterdir())
    assert catalogue.get("conversation", "b") == {"data": "other"}


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    """A row can be read without opening; nothing is made, not even where there is nothing."""
    assert peek(tmp_path / "c", "verdict", "one") is None
    assert list(tmp_path.iterdir()) == []
    rows = Catalogue(tmp_path / "c")
    rows.open()
    rows.put("verdict", "one", {"mode": "exclusive"})
    rows.close()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()}
    assert peek(tmp_path / "c", "verdict", "one") == {"mode": "exclusive"}
    assert peek(tmp_path / "c", "verdict", "two") is None
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()} == before
    (tmp_path / "c" / "cache.db").write_bytes(b"no database" * 999)
    assert peek(tmp_path / "c", "verdict", "one") is None


@pytest.mark.parametrize("value", [b"[1]", b"{"])
def test_a_look_at_what_is_no_row(tmp_path: Path, value: bytes) -> None:
    """It is none."""
    rows = Catalogue(tmp_path)
    rows.open()
    rows.close()
    with closing(sqlite3.connect(tmp_path / "cache.db")) as base:
        base.execute(
            "INSERT INTO Cache (key, raw, mode, value) VALUES ('k:one', 1, 1, ?)", (value,)
        )
        base.commit()
    assert peek(tmp_path, "k", "one") is None
