"""The store: publish, stage, unstage, restart; nothing doubtful is ever handed to the backend."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

from proxy.store import files, shelf
from proxy.store.snapshots import (
    PublishError,
    Saved,
    SnapshotStore,
    StageError,
    StoreBusyError,
    StoreError,
)
from tests.state_files import ROW, state_bytes
from tests.unit.store.conftest import FINGERPRINT, SEED, Place, Restart

posix = pytest.mark.skipif(os.name == "nt", reason="modes and symlinks as POSIX has them")


async def reopen(place: Place) -> tuple[SnapshotStore, shelf.Report]:
    """The next start, with its report."""
    store = place.store()
    return store, await store.open()


def flip(path: Path) -> None:
    """Change one bit of a V row: same size, same header."""
    data = bytearray(path.read_bytes())
    data[-ROW] ^= 1
    path.write_bytes(data)


# Publish


async def test_a_save_becomes_a_snapshot(place: Place, store: SnapshotStore) -> None:
    """The file moves under its fingerprint; the snapshot says what the file holds."""
    snapshot = await place.save(store, [5, 6, 7], now=1234.5)
    assert snapshot.tokens == array("i", [5, 6, 7])
    assert (snapshot.fingerprint, snapshot.seed, snapshot.n_prompt) == (FINGERPRINT, SEED, 2)
    assert (snapshot.created, snapshot.last_used, snapshot.save_seconds) == (1234.5, 1234.5, 0.25)
    assert place.path(snapshot).read_bytes() == state_bytes([5, 6, 7])
    assert place.files() == {f"slotkeeper/{FINGERPRINT}/{snapshot.id}.kv"}
    assert snapshot.conversation == "talk"
    assert store.snapshots(FINGERPRINT) == store.all_snapshots() == [snapshot]
    assert store.snapshots("other") == []
    assert store.usage() == (snapshot.size, 1)
    assert await store.free_bytes() > 0


async def test_snapshots_survive_a_restart(
    place: Place, store: SnapshotStore, restart: Restart
) -> None:
    """The next process finds equal snapshots, tokens included."""
    made = [await place.save(store, range(n, n + 30), now=n) for n in range(3)]
    again = await restart(store)
    assert sorted(again.snapshots(FINGERPRINT), key=lambda s: s.created) == made


@posix
@pytest.mark.parametrize(
    ("shared", "folder", "file"), [(False, 0o700, 0o600), (True, 0o2770, 0o660)]
)
async def test_others_can_read_nothing(place: Place, shared: bool, folder: int, file: int) -> None:
    """Folders and files have the modes of DESIGN.md although the backend writes under umask 022."""
    before = os.umask(0o022)
    try:
        store = place.store(shared=shared)
        report = await store.open()
        snapshot = await place.save(store)
        store.probe_files.store(FINGERPRINT, b"probe", {"a": 1})
    finally:
        os.umask(before)
    assert not report.exposed
    for path in (place.staging, place.root, place.root / FINGERPRINT):
        assert stat.S_IMODE(path.stat().st_mode) == folder
    for path in (
        place.path(snapshot),
        place.root / FINGERPRINT / "probe.kv",
        place.root / FINGERPRINT / "manifest.json",
    ):
        assert stat.S_IMODE(path.stat().st_mode) == file
    assert stat.S_IMODE((place.root / "lock").stat().st_mode) == 0o600
    await store.close()


@posix
async def test_a_staging_folder_of_the_users_keeps_its_mode(place: Place) -> None:
    """It was there before us: it is reported as open to others, not changed."""
    place.staging.mkdir()
    place.staging.chmod(0o755)
    store, report = await reopen(place)
    assert report.exposed
    assert stat.S_IMODE(place.staging.stat().st_mode) == 0o755
    await store.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_bytes": 1}, "bytes"),
        ({"n_tokens": 39}, "holds 40 tokens"),
        ({"n_prompt": 41}, "41 prompt tokens"),
        ({"fingerprint": "../up"}, "fingerprint"),
    ],
)
async def test_a_save_that_is_not_what_was_said_is_refused(
    place: Place, store: SnapshotStore, change: dict[str, Any], reason: str
) -> None:
    """Whatever differs from the backend's word: no file, no row, a reason."""
    data = state_bytes(range(40))
    said = replace(Saved(FINGERPRINT, SEED, 40, 40, len(data), 0.1), **change)
    name = store.staging_name()
    (place.staging / name).write_bytes(data)
    with pytest.raises(PublishError, match=reason):
        await store.publish(name, said, 1.0)
    await store.discard(name)
    assert place.files() == set()
    assert store.all_snapshots() == []


@pytest.mark.parametrize(
    ("data", "n_tokens", "reason"),
    [
        (b"", 0, "not a state file"),
        (b"junk" * 100, 4, "not a state file"),
        (state_bytes(range(8))[:-1], 8, "not a state file"),
        (state_bytes([]), 0, "0 prompt tokens of 0"),
        (state_bytes([1, -1, 2]), 3, "media"),
        (state_bytes(range(8), window=True), 8, "after the first KV section"),
        (state_bytes(range(8)) + b"x", 8, "1 bytes after"),
    ],
)
async def test_a_file_that_may_not_be_restored_is_refused(
    place: Place, store: SnapshotStore, data: bytes, n_tokens: int, reason: str
) -> None:
    """Cut, foreign, empty, with media, or of a model whose states are no prefix: not kept."""
    name = store.staging_name()
    (place.staging / name).write_bytes(data)
    with pytest.raises(PublishError, match=reason):
        await store.publish(name, Saved(FINGERPRINT, SEED, 0, n_tokens, len(data), 0.1), 1.0)
    assert place.files() == set()


async def publish_bare(store: SnapshotStore, name: str) -> None:
    """Publish ``name`` as a state of eight tokens."""
    await store.publish(name, Saved(FINGERPRINT, SEED, 8, 8, len(state_bytes(range(8))), 0.1), 1.0)


@posix
async def test_a_symlink_in_staging_is_refused(
    place: Place, store: SnapshotStore, tmp_path: Path
) -> None:
    """A link to a good state is no save: it goes, what it points to stays."""
    elsewhere = tmp_path / "elsewhere.kv"
    elsewhere.write_bytes(state_bytes(range(8)))
    name = store.staging_name()
    (place.staging / name).symlink_to(elsewhere)
    with pytest.raises(PublishError, match="no regular file"):
        await publish_bare(store, name)
    assert elsewhere.read_bytes() == state_bytes(range(8))
    assert not (place.staging / name).is_symlink()


@pytest.mark.parametrize("name", ["other.kv", "../sks-" + "0" * 32 + ".kv", "slotkeeper/lock"])
async def test_only_names_the_store_gave_out_are_published(
    place: Place, store: SnapshotStore, tmp_path: Path, name: str
) -> None:
    """A name that is not of our pattern is neither read nor deleted."""
    path = place.staging / name
    if not path.exists():
        path.write_bytes(state_bytes(range(8)))
    with pytest.raises(PublishError, match="not a name"):
        await publish_bare(store, name)
    await store.discard(name)
    assert path.exists()


async def test_staging_names_are_fresh(store: SnapshotStore) -> None:
    """No name comes twice; all satisfy llama-server's rules (llama-server.md 3.4)."""
    names = {store.staging_name() for _ in range(100)}
    assert len(names) == 100
    assert all(files.SAVE_NAME.fullmatch(name) for name in names)


async def test_discard_of_nothing_is_fine(store: SnapshotStore) -> None:
    """A save that never wrote needs no care."""
    await store.discard(store.staging_name())


# Stage and unstage


async def test_a_staged_snapshot_is_the_stored_file(place: Place, store: SnapshotStore) -> None:
    """The backend finds the verified bytes under a fresh name, and no copy was made."""
    snapshot = await place.save(store)
    name = await store.stage(snapshot, 5.0)
    assert files.LINK_NAME.fullmatch(name)
    assert (place.staging / name).samefile(place.path(snapshot))
    await store.unstage(snapshot, name, ok=True)
    assert place.files() == {f"slotkeeper/{FINGERPRINT}/{snapshot.id}.kv"}
    assert not store.quarantined(snapshot.id)


async def test_one_snapshot_into_two_slots(place: Place, store: SnapshotStore) -> None:
    """Two restores of the same state at once get a name each."""
    snapshot = await place.save(store)
    names = [await store.stage(snapshot, 5.0) for _ in range(2)]
    assert len(set(names)) == 2
    for name in names:
        await store.unstage(snapshot, name, ok=True)
    assert len(place.files()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        flip,
        lambda path: path.unlink(),
    ],
    ids=["short", "long", "flipped", "missing"],
)
async def test_a_doubtful_file_is_never_staged(
    place: Place, store: SnapshotStore, restart: Restart, damage: Callable[[Path], None]
) -> None:
    """One byte less would abort llama-server: the snapshot is removed, the caller told why."""
    snapshot = await place.save(store)
    damage(place.path(snapshot))
    with pytest.raises(StageError):
        await store.stage(snapshot, 5.0)
    assert store.snapshots(FINGERPRINT) == []
    assert store.deleted["damaged"] == 1
    assert list(place.staging.glob("*.kv")) == []
    with pytest.raises(StageError, match="gone"):
        await store.stage(snapshot, 6.0)
    assert (await restart(store)).all_snapshots() == []


async def test_a_flip_while_the_proxy_was_down_is_found(
    place: Place, store: SnapshotStore, restart: Restart
) -> None:
    """A file of the right size is hashed once in each process before its first restore."""
    snapshot = await place.save(store)
    path = place.path(snapshot)
    flip(path)
    again = await restart(store)
    assert again.snapshots(FINGERPRINT) == [snapshot], "reconciling reads headers, not gigabytes"
    with pytest.raises(StageError, match="content"):
        await again.stage(snapshot, 5.0)


async def test_an_unchanged_file_is_hashed_once(
    place: Place, store: SnapshotStore, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore of a file this process verified costs no second read of it."""
    snapshot = await place.save(store)
    again = await restart(store)
    hashed: list[int] = []
    real = files.checksum

    def counted(file: BufferedReader) -> str:
        hashed.append(1)
        return real(file)

    monkeypatch.setattr(files, "checksum", counted)
    for _ in range(3):
        await again.unstage(snapshot, await again.stage(snapshot, 5.0), ok=True)
    assert len(hashed) == 1


async def test_where_links_are_refused_the_file_is_lent(
    place: Place, store: SnapshotStore, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renamed out and back; not lent twice; deleted meanwhile it does not come back."""
    monkeypatch.setattr(files, "link", lambda source, target: False)
    snapshot = await place.save(store)
    name = await store.stage(snapshot, 5.0)
    assert place.files() == {name}
    with pytest.raises(StoreError, match="lent"):
        await store.stage(snapshot, 5.0)
    await store.unstage(snapshot, name, ok=True)
    assert place.path(snapshot).read_bytes() == state_bytes(range(40))
    name = await store.stage(snapshot, 6.0)
    await store.delete([snapshot.id], "test")
    await store.unstage(snapshot, name, ok=True)
    assert place.files() == set()
    assert (await restart(store)).all_snapshots() == []


async def test_a_lent_file_comes_back_after_a_crash(
    place: Place, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy died with the file renamed out: it is put back, and quarantined."""
    monkeypatch.setattr(files, "link", lambda source, target: False)
    snapshot = await place.save(store)
    await store.stage(snapshot, 5.0)
    await store.close()
    again, report = await reopen(place)
    assert again.snapshots(FINGERPRINT) == [snapshot]
    assert again.quarantined(snapshot.id)
    assert (report.dropped, report.swept) == (0, 0)
    await again.close()


async def test_links_are_refused_by_some_systems(
    place: Place, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EPERM from the kernel means rename; a name that exists is an error, and closes the intent."""
    snapshot = await place.save(store)

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    def collide(source: Path, target: Path) -> None:
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", refuse)
    name = await store.stage(snapshot, 5.0)
    assert not place.path(snapshot).exists()
    await store.unstage(snapshot, name, ok=True)
    monkeypatch.setattr(os, "link", collide)
    with pytest.raises(StoreError) as caught:
        await store.stage(snapshot, 5.0)
    assert str(place.staging) not in str(caught.value)
    await store.close()
    again, _ = await reopen(place)
    assert not again.quarantined(snapshot.id)
    await again.close()


# Quarantine


async def test_a_vanished_backend_quarantines(
    place: Place, store: SnapshotStore, restart: Restart
) -> None:
    """From then on and over restarts, until a restore of it was answered."""
    good, bad = await place.save(store), await place.save(store, range(9))
    await store.unstage(good, await store.stage(good, 1.0), ok=False)
    await store.unstage(bad, await store.stage(bad, 1.0), ok=None)
    for _ in range(2):
        assert (store.quarantined(good.id), store.quarantined(bad.id)) == (False, True)
        assert len(store.snapshots(FINGERPRINT)) == 2
        store = await restart(store)
    await store.unstage(bad, await store.stage(bad, 2.0), ok=True)
    for _ in range(2):
        assert not store.quarantined(bad.id)
        store = await restart(store)


async def test_a_killed_proxy_quarantines(place: Place, store: SnapshotStore) -> None:
    """The intent is on disk before the name is: a proxy that dies in a restore leaves it open."""
    snapshot = await place.save(store)
    await store.stage(snapshot, 1.0)
    await store.close()
    again, report = await reopen(place)
    assert again.quarantined(snapshot.id)
    assert report.swept == 1, "the left-over link goes, the stored file stays"
    assert place.files() == {f"slotkeeper/{FINGERPRINT}/{snapshot.id}.kv"}
    await again.delete([snapshot.id], "test")
    assert not again.quarantined(snapshot.id)
    await again.close()
    last, _ = await reopen(place)
    assert last.all_snapshots() == []
    assert not last.quarantined(snapshot.id)
    await last.close()


async def test_one_answer_does_not_speak_for_a_running_restore(
    place: Place, store: SnapshotStore
) -> None:
    """Two restores of one state: the first one's success leaves the second one's intent open."""
    snapshot = await place.save(store)
    first, _ = await store.stage(snapshot, 1.0), await store.stage(snapshot, 1.0)
    await store.unstage(snapshot, first, ok=True)
    await store.close()
    again, _ = await reopen(place)
    assert again.quarantined(snapshot.id)
    await again.close()


# Rows


async def test_last_use_survives(place: Place, store: SnapshotStore, restart: Restart) -> None:
    """Touches in quick succession are written together, at the latest when closing."""
    snapshot = await place.save(store, now=100.0)
    await store.touch(snapshot.id, 200.0, restores_delta=1)
    await store.touch(snapshot.id, 201, restores_delta=1)
    await store.touch("unknown", 201.0)
    again = await restart(store)
    (row,) = again.snapshots(FINGERPRINT)
    assert (row.last_used, row.restores, row.created) == (201.0, 2, 100.0)


async def test_a_snapshot_that_cannot_be_deleted_counts_as_there(
    place: Place, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be deleted again, and one that took the backend down is not trusted meanwhile."""
    kept, harmful = [await place.save(store, range(n, n + 30)) for n in range(2)]
    await store.unstage(harmful, await store.stage(harmful, 1.0), ok=None)

    def broken(_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store._shelf, "delete", broken)
        with pytest.raises(StoreError):
            await store.delete([kept.id, harmful.id], "test")
    assert {s.id for s in store.all_snapshots()} == {kept.id, harmful.id}
    assert [store.quarantined(s.id) for s in (kept, harmful)] == [False, True]
    assert not store.deleted["test"]
    await store.delete([kept.id, harmful.id], "test")
    assert store.all_snapshots() == []
    assert store.deleted["test"] == 2
    assert place.files() == set()


async def test_a_deleted_snapshot_stays_deleted(
    place: Place, store: SnapshotStore, restart: Restart
) -> None:
    """Not even a touch that was still to be written brings a row back; causes are counted."""
    kept, gone = await place.save(store), await place.save(store, range(9))
    await store.touch(gone.id, 200.0)
    await store.touch(gone.id, 201.0)
    await store.delete([gone.id, "unknown"], "limits")
    assert store.deleted == {"limits": 1}
    assert store.usage() == (kept.size, 1)
    assert not place.path(gone).exists()
    assert (await restart(store)).all_snapshots() == [kept]


async def test_rows_of_others(store: SnapshotStore, restart: Restart) -> None:
    """Verdicts and costs are kept too; the store's own kinds cannot be written from outside."""
    await store.put("verdict", "x", {"mode": "exclusive"})
    again = await restart(store)
    assert await again.get("verdict", "x") == {"mode": "exclusive"}
    assert await again.get("verdict", "y") is None
    for kind in ("snapshot", "intent"):
        with pytest.raises(ValueError, match="own"):
            await again.put(kind, "x", {})


# Reconciling


async def test_reconciling(place: Place, store: SnapshotStore) -> None:
    """Rows without a good file go, our files without a row go, and no other file is touched."""
    kept = await place.save(store)
    missing = await place.save(store, range(9))
    short = await place.save(store, range(10))
    broken = await place.save(store, range(11))
    await store.close()
    place.path(missing).unlink()
    place.path(short).write_bytes(place.path(short).read_bytes()[:-1])
    place.path(broken).write_bytes(b"x" * broken.size)
    ours = [
        place.staging / f"sks-{'0' * 32}.kv",
        place.staging / f"skr-{'1' * 32}.kv",
        place.staging / f"probe-{'1' * 16}.kv",
        place.root / FINGERPRINT / f"{'2' * 32}.kv",
        place.root / FINGERPRINT / f"part-{'3' * 32}",
        place.root / FINGERPRINT / f"{'5' * 32}.kv",
    ]
    others = [
        place.staging / "mine.kv",
        place.staging / f"sks-{'0' * 31}.kv",
        place.staging / f"{'2' * 32}.kv",
        place.root / f"{'2' * 32}.kv",
        place.root / FINGERPRINT / "probe.kv",
        place.root / FINGERPRINT / "manifest.json",
        place.root / "some.folder" / f"{'2' * 32}.kv",
        place.root / FINGERPRINT / f"{'4' * 32}.kv" / "a folder",
    ]
    for path in ours + others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(state_bytes(range(3)))
    again, report = await reopen(place)
    assert again.all_snapshots() == [kept]
    assert (report.dropped, report.swept) == (3, len(ours))
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in others)
    await again.close()


async def test_either_half_may_be_lost(place: Place, store: SnapshotStore) -> None:
    """A catalogue gone or corrupt: the states are swept. Files gone: the rows are dropped."""
    await place.save(store)
    await store.close()
    database = place.root / "catalogue.d" / "cache.db"
    database.write_bytes(b"no database" * 1000)
    again, report = await reopen(place)
    assert report.aside == "cache.db.corrupt-0"
    assert (report.swept, again.usage()) == (1, (0, 0))
    snapshot = await place.save(again)
    await again.close()
    place.path(snapshot).unlink()
    place.path(snapshot).parent.rmdir()
    last, report = await reopen(place)
    assert (report.dropped, last.usage()) == (1, (0, 0))
    await last.close()


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "../../outside"},
        {"fingerprint": 7},
        {"seed": "no hex"},
        {"size": "1"},
        {"size": True},
        {"extra": 1},
        {"n_prompt": 41},
        {"n_prompt": -1},
    ],
)
async def test_a_row_nobody_here_wrote_is_dropped(
    place: Place, store: SnapshotStore, change: dict[str, object]
) -> None:
    """Types, paths and figures of a row are checked before they are used."""
    snapshot = await place.save(store)
    rows = store._shelf._rows
    row = await store._worker.call(rows.get, "snapshot", snapshot.id)
    assert row is not None
    await store._worker.call(rows.put, "snapshot", snapshot.id, row | change)
    await store._worker.call(rows.put, "snapshot", "../../escape", row)
    await store._worker.call(rows.put, "intent", f"skr-{'0' * 32}.kv", {"id": "../../escape"})
    await store._worker.call(rows.put, "intent", "../x", {"id": snapshot.id})
    await store._worker.call(rows.put, "intent", f"skr-{'1' * 32}.kv", {})
    (place.staging / f"skr-{'0' * 32}.kv").write_bytes(state_bytes(range(40)))
    await store.close()
    again, report = await reopen(place)
    assert again.all_snapshots() == []
    assert report.dropped == 2
    assert not report.quarantined
    assert not list(place.staging.parent.glob("*.kv"))
    await again.close()


# The lock, errors, cancellation


async def test_a_second_proxy_is_refused(place: Place, store: SnapshotStore) -> None:
    """Two proxies on one store: the later one is told so, and the first one works on."""
    snapshot = await place.save(store)
    second = place.store()
    with pytest.raises(StoreBusyError):
        await second.open()
    await second.close()
    await store.unstage(snapshot, await store.stage(snapshot, 1.0), ok=True)
    await store.close()
    third, _ = await reopen(place)
    assert len(third.all_snapshots()) == 1
    await third.close()


async def test_an_os_error_names_no_file(place: Place) -> None:
    """A store that cannot be made says what the system said, without the path."""
    place.staging.write_text("a file where the folder should be")
    store = place.store()
    with pytest.raises(StoreError) as caught:
        await store.open()
    assert str(place.staging) not in str(caught.value)
    await store.close()


async def test_a_cancelled_caller_loses_nothing(
    place: Place, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client left while its state was published: the snapshot is there all the same."""
    entered, leave = threading.Event(), threading.Event()
    real = files.flush

    def slow(path: Path) -> None:
        entered.set()
        assert leave.wait(60)
        real(path)

    monkeypatch.setattr(files, "flush", slow)
    task = asyncio.create_task(place.save(store))
    await asyncio.to_thread(entered.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.all_snapshots() == []
    closing = asyncio.create_task(store.close())
    leave.set()
    await closing
    assert len(store.all_snapshots()) == 1
    monkeypatch.undo()
    again, report = await reopen(place)
    assert (len(again.all_snapshots()), report.swept) == (1, 0)
    await again.close()


async def test_a_state_that_cannot_be_read_now_stays_for_the_next_start(
    place: Place, store: SnapshotStore, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, a rights mistake: no reason to delete what is on disk."""
    kept = await place.save(store)

    def refused(*_: object) -> object:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr("proxy.store.files.open_regular", refused)
        second = await restart(store)
        assert second.all_snapshots() == []
        assert place.path(kept).exists()
    third = await restart(second)
    assert [s.id for s in third.all_snapshots()] == [kept.id]


# By hand


async def test_a_pin_survives_a_restart(
    store: SnapshotStore, place: Place, restart: Restart
) -> None:
    """It is on disk once it is told, and a use that is noted meanwhile does not take it away."""
    snapshot = await place.save(store)
    pinned, _ = await asyncio.gather(
        store.pin(snapshot.id, pinned=True), store.touch(snapshot.id, 2000.0, 1)
    )
    assert pinned is not None
    assert pinned.pinned
    (again,) = (await restart(store)).all_snapshots()
    assert (again.pinned, again.restores) == (True, 1)


async def test_what_is_gone_is_not_pinned(store: SnapshotStore) -> None:
    """Nothing is written for it."""
    assert await store.pin("0" * 32, pinned=True) is None
    assert await store.check("0" * 32) == ""


async def test_a_disk_that_refuses_pins_nothing(
    store: SnapshotStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is told, and the snapshot is what it was."""
    snapshot = await place.save(store)

    def refuse(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(store._shelf, "rewrite", refuse)
    with pytest.raises(StoreError):
        await store.pin(snapshot.id, pinned=True)
    assert store.all_snapshots() == [snapshot]


async def test_check_reads_every_byte(store: SnapshotStore, place: Place) -> None:
    """What was verified once is read again; damage is told and nothing deleted."""
    snapshot = await place.save(store)
    assert await store.check(snapshot.id) == ""
    status = place.path(snapshot).stat()
    flip(place.path(snapshot))
    os.utime(place.path(snapshot), ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "not what was stored" in await store.check(snapshot.id)
    place.path(snapshot).unlink()
    assert "missing" in await store.check(snapshot.id)
    assert store.all_snapshots() == [snapshot]


async def test_what_is_lent_is_not_checked(
    store: SnapshotStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links are refused, the backend is reading the file itself."""
    snapshot = await place.save(store)
    monkeypatch.setattr(files, "link", lambda *_: False)
    name = await store.stage(snapshot, 2000.0)
    assert await store.check(snapshot.id) == ""
    await store.unstage(snapshot, name, ok=True)
    assert await store.check(snapshot.id) == ""
