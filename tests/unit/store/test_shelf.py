"""Whatever step of publish, stage, unstage or delete fails, what is left is whole or sweepable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.core.records import Snapshot
from proxy.store import files
from proxy.store.catalogue import Catalogue
from proxy.store.files import StageError, StoreError
from proxy.store.shelf import Report, Saved, Shelf
from tests.state_files import state_bytes
from tests.unit.store.conftest import FINGERPRINT, SEED, Place

TOKENS = range(12)
DATA = state_bytes(TOKENS)
STEPS = 60  # more than any operation here takes


class KilledError(BaseException):
    """The process is gone: no clean-up step works any more."""


class Fault:
    """Lets ``after`` steps on disk pass, then raises: once (the disk) or forever (a kill)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, killed: bool) -> None:
        """Every function that changes the disk goes through here, before it acts."""
        self.left = 10**9
        self.killed = killed
        self.fired = False
        for name in ("seal", "flush", "flush_dir", "move", "link", "remove", "make_dir"):
            self._wrap(monkeypatch, files, name)
        for name in ("put", "delete"):
            self._wrap(monkeypatch, Catalogue, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0 and (self.killed or not self.fired):
                self.fired = True
                raise KilledError if self.killed else OSError(28, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    def arm(self, after: int) -> None:
        """The step after this many fails."""
        self.left, self.fired = after, False

    def disarm(self) -> None:
        """All is well again."""
        self.left = 10**9


@pytest.fixture(params=["killed", "full"])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Both kinds of end."""
    return Fault(monkeypatch, killed=request.param == "killed")


def opened(place: Place) -> tuple[Shelf, Report]:
    """A start."""
    shelf = Shelf(place.staging, place.root, shared=False)
    return shelf, shelf.open()


def publish(place: Place, shelf: Shelf) -> Snapshot:
    """What the backend wrote becomes a snapshot."""
    name = files.fresh("sks-{}.kv")
    (place.staging / name).write_bytes(DATA)
    return shelf.publish(name, Saved(FINGERPRINT, SEED, 12, 12, len(DATA), 0.1), 1.0)


def every_step(fault: Fault, place: Place, act: Callable[[Shelf, Snapshot], None]) -> int:
    """Run ``act`` on a shelf with one snapshot, failing at each step in turn, then restart.

    After each: every row has its whole file, and nothing of ours is left over. Returns how many
    steps ``act`` has.
    """
    for step in range(STEPS):
        shelf, _ = opened(place)
        snapshot = publish(place, shelf)
        fault.arm(step)
        try:
            act(shelf, snapshot)
        except (KilledError, OSError, StageError):
            assert fault.fired
        else:
            if not fault.fired:
                fault.disarm()
                shelf.close()
                return step
        fault.disarm()
        if not fault.killed:
            check_whole(place, shelf)
        shelf.close()
        again, report = opened(place)
        assert_whole(place, report)
        again.delete(list(report.snapshots.values()))
        again.close()
    pytest.fail("more steps than expected")


def assert_whole(place: Place, report: Report) -> None:
    """Rows and files say the same, and each file is what the backend wrote."""
    paths = {place.path(snapshot) for snapshot in report.snapshots.values()}
    assert {place.staging / name for name in place.files()} == paths
    assert all(path.read_bytes() == DATA for path in paths)


def check_whole(place: Place, shelf: Shelf) -> None:
    """A failed operation left no half of a snapshot behind: rows have files of full length."""
    for key, row in shelf._rows.items("snapshot").items():
        path = place.root / row["fingerprint"] / f"{key}.kv"
        lent = shelf._lent.get(key)
        assert path.exists() or (lent and (place.staging / lent).exists())


def test_publish(fault: Fault, place: Place) -> None:
    """A save whose publishing fails at any step is gone at once, or after a kill swept."""

    def act(shelf: Shelf, _: Snapshot) -> None:
        before = len(place.files())
        try:
            publish(place, shelf)
        except OSError:
            assert len(place.files()) == before, "half published"
            raise

    assert every_step(fault, place, act) >= 6


def test_stage(fault: Fault, place: Place) -> None:
    """A snapshot survives whatever interrupts its loan, and no name is left in staging."""
    assert every_step(fault, place, lambda shelf, s: void(shelf.stage(s, 2.0))) >= 2


def test_unstage(fault: Fault, place: Place) -> None:
    """The same for the way back, heard or not."""

    def act(shelf: Shelf, snapshot: Snapshot) -> None:
        armed, fault.left = fault.left, 10**9
        name = shelf.stage(snapshot, 2.0)
        fault.arm(armed)
        shelf.unstage(snapshot, name, known=True)

    assert every_step(fault, place, act) >= 2


def test_lending(fault: Fault, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links are refused the one file there is survives every interruption."""
    monkeypatch.setattr(files, "link", lambda source, target: False)
    survivors: list[bool] = []

    def act(shelf: Shelf, snapshot: Snapshot) -> None:
        try:
            shelf.unstage(snapshot, shelf.stage(snapshot, 2.0), known=True)
        finally:
            names = place.files()
            survivors.append(any((place.staging / n).read_bytes() == DATA for n in names))

    assert every_step(fault, place, act) >= 3
    assert all(survivors)


def test_delete(fault: Fault, place: Place) -> None:
    """An interrupted delete leaves no row that points nowhere and, after a start, no file."""

    def act(shelf: Shelf, snapshot: Snapshot) -> None:
        shelf.delete([snapshot])
        if not fault.fired:
            assert place.files() == set()

    assert every_step(fault, place, act) >= 2


def void(_: object) -> None:
    """Use a value for nothing."""


def test_a_failed_start_leaves_the_lock_free(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails after taking the lock lets the next one try."""

    def fail(self: Catalogue) -> str:
        message = "the catalogue cannot be opened"
        raise StoreError(message)

    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "open", fail)
        with pytest.raises(StoreError):
            opened(place)
    shelf, report = opened(place)
    assert report == Report()
    shelf.close()


def test_a_touch_of_what_is_gone_writes_nothing(place: Place) -> None:
    """A row is rewritten only while there is one."""
    shelf, _ = opened(place)
    snapshot = publish(place, shelf)
    shelf.delete([snapshot])
    shelf.rewrite([snapshot])
    shelf.close()
    again, report = opened(place)
    assert report.snapshots == {}
    again.close()


def test_a_foreign_folder_is_no_fingerprint(place: Place, tmp_path: Path) -> None:
    """A symlinked folder in the store is not followed when sweeping."""
    shelf, _ = opened(place)
    shelf.close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{'a' * 32}.kv").write_bytes(DATA)
    (place.root / "linked").symlink_to(outside, target_is_directory=True)
    (place.root / "plain").write_bytes(b"a file")
    shelf, report = opened(place)
    assert report.swept == 0
    assert (outside / f"{'a' * 32}.kv").exists()
    shelf.close()
