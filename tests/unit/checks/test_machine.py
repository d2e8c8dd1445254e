"""What the doctor sees of this machine."""

from __future__ import annotations

import errno
import importlib
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy.checks import machine
from proxy.checks.finding import Level
from proxy.config import Backend, Cache, Config, Server
from proxy.engine import free_port
from proxy.store import files
from proxy.store.shelf import LOCK


def test_versions() -> None:
    """Ours, Python's and those of the libraries that matter."""
    found = machine.versions()
    assert found.level is Level.OK
    for name in ("slotkeeper", "Python", "aiohttp", "orjson", "tokenizers"):
        assert name in found.text


def test_settings() -> None:
    """Each warning of the configuration is a finding."""
    open_to_all = Config(server=Server(host="0.0.0.0"))
    assert [one.level for one in machine.settings(open_to_all)] == [Level.WARNING]


@pytest.mark.parametrize(
    ("limit", "level"),
    [(-1, Level.OK), (4096, Level.OK), (1024, Level.NOTE), (64, Level.WARNING)],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, level: Level) -> None:
    """Enough for every client that may wait, or how many that is."""
    fake = SimpleNamespace(RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda _: (limit, limit))
    monkeypatch.setitem(sys.modules, "resource", fake)
    found = machine.open_files(1024)
    assert found is not None
    assert found.level is level
    assert bool(found.todo) == (level is not Level.OK)


def test_open_files_where_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none."""

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert machine.open_files(1024) is None


def test_address() -> None:
    """Free, taken by another program, or none of this machine."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = machine.address("127.0.0.1", other.getsockname()[1])
        assert machine.taken("127.0.0.1", other.getsockname()[1])
    assert taken.level is Level.PROBLEM
    assert taken.todo.startswith("Another program has it")
    nowhere = machine.address("192.0.2.1", free_port())
    assert nowhere.level is Level.PROBLEM
    assert nowhere.todo.startswith("Give slotkeeper another --host")
    assert machine.address("127.0.0.1", free_port()).level is Level.OK
    assert not machine.taken("127.0.0.1", free_port())
    assert not machine.taken("192.0.2.1", free_port()), "that is another fault"


@pytest.mark.parametrize(
    ("url", "itself"),
    [
        ("http://localhost:9", True),
        ("http://127.0.0.1:9/", True),
        ("http://127.0.0.1:7", False),
        ("http://h.invalid:9", False),
    ],
)
def test_its_own_address_is_no_model_server(
    monkeypatch: pytest.MonkeyPatch, url: str, itself: bool
) -> None:
    """Whatever this machine is called there; nobody listens at it yet."""
    monkeypatch.setattr("proxy.client.Client.is_slotkeeper", lambda _: False)
    here = Config(server=Server(host="0.0.0.0", port=9), backend=Backend(url=url))
    found = machine.no_model_server(here)
    assert (found is not None) is itself


def test_who_has_the_store(tmp_path: Path) -> None:
    """A proxy that runs, and not what one that ended left behind."""
    assert not machine.driven(None)
    assert not machine.driven(tmp_path)
    lock = files.Lock(tmp_path / LOCK)
    lock.take()
    assert machine.driven(tmp_path)
    lock.release()
    assert not machine.driven(tmp_path)


def test_a_lock_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing; the folder's own check tells of it."""

    def refuse(_: files.Lock) -> None:
        raise PermissionError

    (tmp_path / LOCK).touch()
    monkeypatch.setattr(files.Lock, "take", refuse)
    assert not machine.driven(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="modes as POSIX has them")
def test_slot_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private is good, open to others a warning; a folder that is none, or not ours, a problem."""
    folder = tmp_path / "slots"
    assert machine.slot_folder(folder).level is Level.PROBLEM
    folder.mkdir(mode=0o700)
    assert machine.slot_folder(folder).level is Level.OK
    folder.chmod(0o755)
    exposed = machine.slot_folder(folder)
    assert (exposed.level, exposed.todo) == (Level.WARNING, f"chmod 700 {folder}")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert machine.slot_folder(folder).level is Level.PROBLEM


def config(folder: Path, **cache: object) -> Config:
    """Snapshots in ``folder``."""
    return Config(backend=Backend(slot_save_path=str(folder)), cache=Cache.model_validate(cache))


def test_store(tmp_path: Path) -> None:
    """What is kept is counted, and whatever else lies there is not."""
    prints = tmp_path / "slotkeeper" / "f"
    prints.mkdir(parents=True)
    (prints / ("ab" * 16 + ".kv")).write_bytes(bytes(machine.MIB))
    (prints / "probe.kv").write_bytes(bytes(machine.MIB))
    (prints / ("cd" * 16 + ".kv")).symlink_to(prints / "removed while one looks")
    store, disk = machine.store(config(tmp_path, keep_free=0))
    assert "1 snapshot, 1.0 MiB of " in store.text
    assert disk.level is Level.OK


def test_a_store_without_room(tmp_path: Path) -> None:
    """Nothing would be saved: a problem, before the first snapshot too."""
    *_, disk = machine.store(config(tmp_path, keep_free=2**60))
    assert disk.level is Level.PROBLEM
    assert "cache.keep_free" in disk.text


def test_a_store_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file system makes every save a copy."""
    slots, elsewhere = tmp_path / "slots", tmp_path / "store"
    slots.mkdir()
    elsewhere.mkdir()
    real = Path.stat

    def stat(path: Path, **more: bool) -> object:
        status = real(path, **more)
        if path != elsewhere:
            return status
        return SimpleNamespace(st_dev=status.st_dev + 1, st_mode=status.st_mode)

    monkeypatch.setattr(Path, "stat", stat)
    store, _ = machine.store(config(slots, store=str(elsewhere), keep_free=0))
    assert (store.level, store.todo) == (Level.WARNING, "Leave cache.store empty.")


def test_a_store_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may not be entered is a finding, not the end of the report."""

    def refuse(_path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("proxy.store.files.regular", refuse)
    monkeypatch.setattr("proxy.store.files.remove", refuse)
    prints = tmp_path / "slotkeeper" / "f"
    prints.mkdir(parents=True)
    (prints / ("ab" * 16 + ".kv")).touch()
    (store,) = machine.store(config(tmp_path))
    assert store.level is Level.PROBLEM
    assert store.text.endswith("slotkeeper cannot be looked at: Permission denied")
    monkeypatch.setattr(machine, "TRIAL", machine.MIB)
    assert machine.disk_speed(tmp_path).subject == "disk speed"


def test_no_store(tmp_path: Path) -> None:
    """Without snapshots there is nothing to say."""
    assert machine.store(config(tmp_path, enabled=False)) == []


def test_disk_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind; a slow disk is a warning, a broken one a problem."""
    monkeypatch.setattr(machine, "TRIAL", machine.MIB)
    monkeypatch.setattr(machine, "SLOW_DISK", 0.0)
    assert machine.disk_speed(tmp_path).level is Level.OK
    monkeypatch.setattr(machine, "SLOW_DISK", 1e18)
    assert machine.disk_speed(tmp_path).level is Level.WARNING

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    broken = machine.disk_speed(tmp_path)
    assert (broken.level, broken.text) == (
        Level.PROBLEM,
        "writing failed: No space left on device",
    )
    assert list(tmp_path.iterdir()) == []


def test_tokenizer(tmp_path: Path) -> None:
    """One that can be read is counted, another file is a problem, none is nothing."""
    good, bad = tmp_path / "tokenizer.json", tmp_path / "other.json"
    good.write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    bad.write_text("{}")
    found = machine.tokenizer(str(good))
    assert found is not None
    assert found.text.endswith("1 tokens")
    refused = machine.tokenizer(str(bad))
    assert refused is not None
    assert refused.level is Level.PROBLEM
    assert machine.tokenizer("") is None
