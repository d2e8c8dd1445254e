"""The store's file primitives: the lock, atomic writes, the probe's files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.store import files
from proxy.store.files import Lock, ProbeFiles, StoreBusyError

HOLDER = """
import sys
from pathlib import Path
from proxy.store.files import Lock
lock = Lock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_vanishes_with_a_killed_process(tmp_path: Path) -> None:
    """Another process's lock refuses us while it lives, and no longer than that."""
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"held"
        lock = Lock(path)
        with pytest.raises(StoreBusyError):
            lock.take()
        holder.kill()
        holder.wait()
    lock.take()
    lock.release()
    lock.release()


def test_an_atomic_write_is_whole_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the old content stays and no part file does."""
    path = tmp_path / "file"
    files.write_atomic(path, b"old", shared=False)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            files.write_atomic(path, b"new", shared=False)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    files.write_atomic(path, b"new", shared=False)
    assert path.read_bytes() == b"new"


def test_probe_files_come_back(tmp_path: Path) -> None:
    """The probe's state as it was stored, the manifest as JSON for people; unknown: None."""
    probes = ProbeFiles(tmp_path)
    assert probes.load("abc") is None
    probes.store("abc", b"state", {"model": "M", "n_stream": 2})
    assert probes.load("abc") == b"state"
    manifest = (tmp_path / "abc" / "manifest.json").read_bytes()
    assert manifest == b'{\n  "model": "M",\n  "n_stream": 2\n}'
    with pytest.raises(ValueError, match="fingerprint"):
        probes.load("../abc")


@pytest.mark.skipif(os.name == "nt", reason="symlinks need a right there")
def test_a_probe_file_is_never_read_through_a_link(tmp_path: Path) -> None:
    """A symlink is no probe state; neither is one that appears between look and open."""
    (tmp_path / "abc").mkdir()
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "abc" / "probe.kv").symlink_to(tmp_path / "target")
    assert ProbeFiles(tmp_path).load("abc") is None
    with pytest.raises(OSError, match="symbolic links"):
        files.open_regular(tmp_path / "abc" / "probe.kv")


@pytest.mark.skipif(os.name == "nt", reason="permissions as POSIX has them")
def test_a_probe_file_that_cannot_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe runs again instead of failing."""
    probes = ProbeFiles(tmp_path)
    probes.store("abc", b"state", {})

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "open_regular", refuse)
    assert probes.load("abc") is None


@pytest.mark.skipif(os.name == "nt", reason="permissions as POSIX has them")
def test_modes_of_anothers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users: the mode of the backend's file is its owner's affair; one user: it is an error."""

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    files.seal(tmp_path, shared=True)
    with pytest.raises(PermissionError):
        files.seal(tmp_path, shared=False)
