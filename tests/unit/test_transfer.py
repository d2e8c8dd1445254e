"""A state's two journeys, on a real store, with a backend that writes real state files.

``proxy.transfer`` and ``proxy.holdings``.
"""

from __future__ import annotations

import errno
import math
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.base import StateIO
from proxy.core.records import Prompt, Snapshot
from proxy.core.retention import Limits, Refusal
from proxy.core.slots import Content
from proxy.errors import (
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)
from proxy.store.snapshots import SnapshotStore, StoreError
from proxy.telemetry.metrics import Cause, Metrics
from proxy.transfer import DAY, Budget, Transfer
from tests.state_files import state_bytes
from tests.unit.doubles import Clock
from tests.unit.factories import SEED, chat, content

FINGERPRINT = "f" * 32
GIB = 1024**3


@dataclass
class Engine:
    """Saves and restores real files; errors come as the test says, one per call."""

    staging: Path
    slots: dict[int, array[int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    save_error: SlotkeeperError | None = None
    restore_errors: list[SlotkeeperError] = field(default_factory=list)
    short: int = 0  # bytes the file lacks
    lie: int = 0  # tokens a restore says it has less

    async def save(self, slot: int, name: str) -> StateIO:
        """Writes the file, like llama-server in place and without a sync."""
        self.calls.append("save")
        tokens = self.slots.get(slot, array("i"))
        data = state_bytes(tokens)
        (self.staging / name).write_bytes(data[: len(data) - self.short])
        if self.save_error is not None:
            raise self.save_error
        return StateIO(len(tokens), len(data), 0.01)

    async def instance(self) -> str:
        """Who this is."""
        return "one"

    async def erase(self, slot: int) -> None:
        """Empty."""
        self.calls.append("erase")
        self.slots.pop(slot, None)

    async def restore(self, slot: int, name: str) -> StateIO:
        """Reads the file."""
        self.calls.append("restore")
        if self.restore_errors:
            raise self.restore_errors.pop(0)
        data = (self.staging / name).read_bytes()
        tokens = array("i")
        tokens.frombytes(data[24 : 24 + 4 * int.from_bytes(data[20:24], "little")])
        self.slots[slot] = tokens
        return StateIO(len(tokens) - self.lie, len(data), 0.01)


@dataclass
class Place:
    """A transfer and what it works with."""

    engine: Engine
    store: SnapshotStore
    transfer: Transfer
    metrics: Metrics
    clock: Clock

    async def save(
        self, tokens: range | list[int], slot: int = 0, talk: str = "", keep: tuple[str, ...] = ()
    ) -> Content:
        """A slot that holds these tokens of a conversation, saved."""
        self.engine.slots[slot] = array("i", tokens)
        prompt = replace(chat("q"), conversation=talk)
        held = content(prompt, len(tokens))
        return await self.transfer.save(slot, held, frozenset(keep))

    def files(self) -> list[str]:
        """Names in the staging folder."""
        return sorted(p.name for p in self.engine.staging.iterdir() if p.is_file())

    def count(self, series: str) -> bool:
        """Whether the exposition has this line."""
        return f"slotkeeper_{series}\n".encode() in self.metrics.render()[0]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """An empty store, adopted."""
    staging = tmp_path / "slots"
    staging.mkdir(mode=0o700)
    store = SnapshotStore(staging, staging / "slotkeeper")
    await store.open()
    engine, metrics, clock = Engine(staging), Metrics(), Clock(1e9)
    limits = Limits(max_bytes=GIB, max_files=10, max_age=1e6)
    budget = Budget(keep_free=0, daily=GIB)
    transfer = Transfer(engine, store, metrics, clock, limits, budget)  # type: ignore[arg-type]
    await transfer.adopt(FINGERPRINT)
    yield Place(engine, store, transfer, metrics, clock)
    await store.close()


def request(tokens: range | list[int]) -> Prompt:
    """A prompt that is tokenised."""
    return chat("q", tokens=tokens)


async def test_a_saved_slot_is_found_and_restored(place: Place) -> None:
    """Out and in again: the same tokens in another slot."""
    after = await place.save(range(300))
    assert (after.n_saved, after.n_tokens) == (300, 300)
    ((found, n),) = place.transfer.matches(request(range(310)))
    assert (n, found.seed) == (300, SEED)
    place.engine.calls.clear()
    assert await place.transfer.restore(1, found)
    assert place.engine.calls == ["erase", "restore"]
    assert list(place.engine.slots[1]) == list(range(300))
    assert place.files() == []
    newer = place.transfer.index.get(found.id)
    assert newer is not None
    assert newer.restores == 1


async def test_what_a_longer_state_covers_is_deleted_at_once(place: Place) -> None:
    """A conversation has one snapshot, a branch has its own."""
    await place.save(range(300))
    await place.save(range(400))
    await place.save([*range(200), *range(5000, 5100)])
    assert sorted(s.n_tokens for s in place.transfer.index) == [300, 400]
    assert place.count('evictions_total{cause="superseded"} 1.0')


async def test_a_short_file_is_never_published(place: Place) -> None:
    """The backend says 200 and the file lacks a byte: gone, counted, nothing in the index."""
    place.engine.short = 1
    before = content(chat("q"), 300)
    place.engine.slots[0] = array("i", range(300))
    assert await place.transfer.save(0, before) is before
    assert len(place.transfer.index) == 0
    assert place.files() == []
    assert place.count('saves_total{outcome="failed"} 1.0')


@pytest.mark.parametrize(
    "error", [BackendRefusedError("no", answer=500), BackendTimeoutError("slow")]
)
async def test_a_save_the_backend_refuses_costs_only_the_save(
    place: Place, error: SlotkeeperError
) -> None:
    """The left-over file is removed."""
    place.engine.save_error = error
    after = await place.save(range(300))
    assert after.n_saved == 0
    assert place.files() == []


async def test_a_backend_that_dies_while_saving_is_reported(place: Place) -> None:
    """Nothing is left over, the caller learns that the backend is gone."""
    place.engine.save_error = BackendUnreachableError("gone")
    with pytest.raises(BackendUnreachableError):
        await place.save(range(300))
    assert place.files() == []


@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        (Limits(max_bytes=10, max_files=10, max_age=1e6), Budget(0, GIB)),
        (Limits(max_bytes=GIB, max_files=10, max_age=1e6), Budget(0, 10)),
        (Limits(max_bytes=GIB, max_files=10, max_age=1e6), Budget(2**62, GIB)),
    ],
)
async def test_no_save_beyond_the_limits(place: Place, limits: Limits, budget: Budget) -> None:
    """Too large for the store, the day's writes used up, or the disk nearly full."""
    place.transfer.limits, place.transfer.budget = limits, budget
    after = await place.save(range(300))
    assert after.n_saved == 0
    assert place.engine.calls == []
    assert place.count('saves_total{outcome="refused"} 1.0')


async def test_the_write_budget_is_of_one_day(place: Place) -> None:
    """Tomorrow there is a new one, and a restart does not renew it."""
    size = len(state_bytes(range(300)))
    place.transfer.budget = Budget(0, size + 10)
    for n in range(5):
        place.transfer.costs.observe_size(300, size)
        await place.save([n * 1000 + i for i in range(300)])
    assert len(place.transfer.index) == 1
    await place.transfer.remember()
    again = Transfer(
        place.engine,  # type: ignore[arg-type]
        place.store,
        place.metrics,
        place.clock,
        place.transfer.limits,
        place.transfer.budget,
    )
    await again.adopt(FINGERPRINT)
    place.engine.slots[0] = array("i", range(7000, 7300))
    assert (await again.save(0, content(chat("q"), 300))).n_saved == 0
    place.clock.now += DAY
    assert (await again.save(0, content(chat("q"), 300))).n_saved == 300


async def test_the_least_useful_goes_when_there_are_too_many(place: Place) -> None:
    """Limits hold after every save, and never at the cost of the new one."""
    place.transfer.limits = Limits(max_bytes=GIB, max_files=3, max_age=1e6)
    for n in range(5):
        place.clock.now += 100
        await place.save([n * 1000 + i for i in range(300)])
        assert len(place.transfer.index) <= 3
    assert place.transfer.matches(request([4000 + i for i in range(300)]))
    assert place.store.usage()[1] == 3


async def test_a_changed_file_is_not_handed_to_the_backend(place: Place) -> None:
    """One flipped bit: removed, counted, the backend is not asked."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)
    path = next(place.engine.staging.glob("slotkeeper/*/" + found.id + ".kv"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    place.engine.calls.clear()
    assert not await place.transfer.restore(1, found)
    assert place.engine.calls == []
    assert len(place.transfer.index) == 0


async def test_a_refused_restore_is_tried_once_more(place: Place) -> None:
    """A full pool looks like a bad file."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)
    place.engine.restore_errors = [BackendRefusedError("no space", answer=400)]
    place.engine.calls.clear()
    assert await place.transfer.restore(1, found)
    assert place.engine.calls == ["erase", "restore"] * 2


@pytest.mark.parametrize("answers", [[400, 400], [500]])
async def test_what_this_instance_refuses_is_not_offered_again(
    place: Place, answers: list[int]
) -> None:
    """Not deleted either: the next instance may take it."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)
    place.engine.restore_errors = [BackendRefusedError("no", answer=code) for code in answers]
    assert not await place.transfer.restore(1, found)
    assert place.transfer.matches(request(range(310))) == ()
    assert len(place.transfer.index) == 1
    await place.transfer.adopt(FINGERPRINT)
    assert place.transfer.matches(request(range(310)))


async def test_a_restore_with_another_number_of_tokens_is_no_restore(place: Place) -> None:
    """The backend's own count must agree."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)
    place.engine.lie = 1
    assert not await place.transfer.restore(1, found)


async def test_a_file_that_took_the_backend_down_is_quarantined(
    place: Place, tmp_path: Path
) -> None:
    """Also after a restart of the proxy: no crash loops."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)
    place.engine.restore_errors = [BackendUnreachableError("gone")]
    with pytest.raises(BackendUnreachableError):
        await place.transfer.restore(1, found)
    assert place.transfer.barred(found.id)
    assert place.files() == []
    await place.store.close()
    again = SnapshotStore(tmp_path / "slots", tmp_path / "slots" / "slotkeeper")
    await again.open()
    assert again.quarantined(found.id)
    await again.close()
    place.store = again


async def test_nothing_is_restored_into_another_instance(place: Place) -> None:
    """It may be another model of the same shape; the state is not to blame."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)
    await place.transfer.adopt(FINGERPRINT, "another")
    place.engine.calls.clear()
    with pytest.raises(BackendUnreachableError, match="another one"):
        await place.transfer.restore(1, found)
    assert place.engine.calls == []
    assert not place.transfer.barred(found.id)


async def test_a_store_that_fails_for_once_loses_no_snapshot(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in the index for the next time."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)

    async def broken(*_: object) -> str:
        raise StoreError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(place.store, "stage", broken)
        assert not await place.transfer.restore(1, found)
    assert await place.transfer.restore(1, found)


async def test_the_gauges_are_right_from_the_start(place: Place) -> None:
    """What an earlier run left on disk shows before this one saves anything."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)
    assert await place.transfer.restore(1, found)
    assert place.count(f"restore_bytes_total {float(found.size)}")
    place.metrics.store_files.set(0)
    place.transfer.fingerprint = ""
    await place.transfer.adopt(FINGERPRINT)
    assert place.count("store_files 1.0")
    assert place.count("store_limit_bytes 1.073741824e+09")
    assert not place.count("disk_free_bytes 0.0")


async def test_three_restores_in_vain_retire_restoring(place: Place) -> None:
    """Counted against the engine's own figure; a good one starts the count anew."""
    await place.save(range(300))
    judge = place.transfer.judge
    assert judge(300, 299)
    assert not judge(300, 0)
    assert not judge(300, 10)
    assert judge(300, 300)
    assert not place.transfer.retired
    assert place.count("restores_retired 0.0")
    assert [judge(300, 0) for _ in range(3)] == [False] * 3
    assert place.transfer.retired
    assert place.count("restores_retired 1.0")
    assert place.transfer.matches(request(range(310))) == ()
    await place.transfer.remember()
    place.transfer.fingerprint = ""
    await place.transfer.adopt(FINGERPRINT)
    assert place.transfer.retired


async def test_another_fingerprint_has_snapshots_of_its_own(place: Place) -> None:
    """Wrong-model guard: nothing crosses."""
    await place.save(range(300))
    await place.transfer.adopt("e" * 32)
    assert place.transfer.matches(request(range(310))) == ()
    await place.transfer.adopt(FINGERPRINT)
    assert place.transfer.matches(request(range(310)))


async def test_a_forgotten_conversation_has_no_snapshots(place: Place) -> None:
    """Of any fingerprint; others keep theirs. What an answer that runs on brings is not saved."""
    await place.save(range(300), talk="a")
    await place.save(range(5000, 5300), talk="b")
    await place.save(range(7000, 7300))
    await place.transfer.adopt("e" * 32)
    await place.save(range(300), talk="a")
    assert await place.transfer.forget("a") == 2
    assert {s.conversation for s in place.store.all_snapshots()} == {"b", ""}
    assert place.transfer.matches(request(range(310))) == ()
    assert place.count('evictions_total{cause="forgotten"} 2.0')
    assert place.count("store_files 2.0")
    assert len(list(place.store._shelf._root.glob("*/*.kv"))) == 2
    assert (await place.save(range(300), talk="a")).n_saved == 0
    assert place.engine.calls.count("save") == 4
    assert await place.transfer.forget("a") == await place.transfer.forget("") == 0
    assert len(place.store.all_snapshots()) == 2


async def test_a_conversation_forgotten_while_it_is_saved_is_not_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was just written goes again."""
    publish = place.store.publish

    async def forgotten(*what: Any) -> Snapshot:
        snapshot = await publish(*what)
        assert await place.transfer.forget("a") == 1
        return snapshot

    monkeypatch.setattr(place.store, "publish", forgotten)
    assert (await place.save(range(300), talk="a")).n_saved == 0
    assert len(place.transfer.index) == 0
    assert place.store.all_snapshots() == []


async def test_a_snapshot_that_is_being_read_can_be_forgotten(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend reads on through its link; afterwards nothing of it is left."""
    await place.save(range(300), talk="a")
    (found,) = list(place.transfer.index)
    restore = place.engine.restore

    async def forgotten(slot: int, name: str) -> StateIO:
        assert await place.transfer.forget("a") == 1
        return await restore(slot, name)

    monkeypatch.setattr(place.engine, "restore", forgotten)
    assert await place.transfer.restore(1, found)
    assert list(place.engine.slots[1]) == list(range(300))
    assert place.files() == []
    assert place.store.all_snapshots() == []
    assert len(place.transfer.index) == 0


@contextmanager
def undeletable(place: Place) -> Iterator[None]:
    """Meanwhile the disk deletes nothing."""

    def broken(_: object) -> None:
        raise StoreError(errno.EIO, "input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.store._shelf, "delete", broken)
        yield


async def test_a_disk_that_forgets_nothing_says_so(place: Place) -> None:
    """Its owner must know; a second try can succeed. Meanwhile the snapshot is not used."""
    await place.save(range(300), talk="a")

    with undeletable(place), pytest.raises(StoreError):
        await place.transfer.forget("a")
    assert place.transfer.matches(request(range(310))) == ()
    assert await place.transfer.forget("a") == 1


async def test_limits_count_other_models_too_and_theirs_go_first(place: Place) -> None:
    """A model nobody serves any more must not fill the disk."""
    place.transfer.limits = Limits(max_bytes=GIB, max_files=2, max_age=1000)
    await place.save(range(300))
    await place.save(range(5000, 5300))
    await place.transfer.adopt("e" * 32)
    place.clock.now += 10
    await place.save(range(300))
    assert place.store.usage()[1] == 2
    place.clock.now += 2000
    await place.save(range(7000, 7300))
    assert {s.fingerprint for s in place.store.all_snapshots()} == {"e" * 32}


async def test_pins_that_fill_the_store_are_named(place: Place) -> None:
    """Pinned snapshots leave no room, by bytes or by number: that is said, and nothing deleted."""
    size = len(state_bytes(range(300)))
    await place.save(range(300))
    (first,) = list(place.transfer.index)
    await place.store.pin(first.id, pinned=True)
    for limits in (Limits(2 * size - 1, 10, 1e6), Limits(GIB, 1, 1e6)):
        place.transfer.limits = limits
        assert (await place.save(range(5000, 5300))).n_saved == 0
        assert place.transfer.refused is Refusal.PINS_FULL
        assert "unpin" in place.transfer.refused.advice
        assert place.store.usage()[1] == 1
    place.transfer.limits = Limits(size - 1, 10, 1e6)
    await place.save(range(5000, 5300))
    assert place.transfer.refused is Refusal.TOO_LARGE
    place.transfer.limits = Limits(2 * size, 2, 1e6)
    assert (await place.save(range(5000, 5300))).n_saved == 300
    assert place.transfer.refused is None


async def test_what_others_have_pinned_takes_room(place: Place) -> None:
    """The limit is the whole store's: ours give way to what may not go."""
    await place.save(range(300))
    (first,) = list(place.transfer.index)
    await place.store.pin(first.id, pinned=True)
    await place.transfer.adopt("e" * 32)
    size = len(state_bytes(range(300)))
    place.transfer.limits = Limits(2 * size, 10, 1e6)
    place.transfer.costs.observe_size(300, size)
    for n in (1, 2, 3):
        place.clock.now += 10
        assert (await place.save([n * 1000 + i for i in range(300)])).n_saved == 300
        assert place.store.usage()[0] <= 2 * size


async def test_removed_by_hand_it_is_not_saved_any_more(place: Place) -> None:
    """What another snapshot still holds counts; slots are told."""
    told: list[Cause | None] = []
    place.transfer.on_removed = told.append
    long = await place.save(range(300), talk="a")
    await place.save([*range(200), *range(5000, 5100)], talk="b")
    assert place.transfer.on_disk(long) == long
    (first,) = [s for s in place.transfer.index if s.conversation == "a"]
    assert await place.transfer.forget("a") == 1
    assert told == [Cause.FORGOTTEN]
    assert place.transfer.on_disk(long).n_saved == 200
    assert place.transfer.on_disk(replace(long, tokens=None)).n_saved == 0
    assert place.transfer.index.get(first.id) is None


async def test_removed_while_it_is_saved(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save ends with what the disk holds then."""
    delete = place.store.delete

    async def removing(ids: list[str], cause: str) -> None:
        monkeypatch.undo()
        await delete(ids, cause)
        (found,) = place.store.all_snapshots()
        await delete([found.id], Cause.REMOVED)
        place.transfer.removed([found.id], Cause.REMOVED)

    await place.save(range(200))
    monkeypatch.setattr(place.store, "delete", removing)  # what is superseded
    assert (await place.save(range(300))).n_saved == 0


async def test_a_damaged_snapshot_saves_no_slot(place: Place) -> None:
    """Found out at a restore into another slot; nobody wished it."""
    told: list[Cause | None] = []
    place.transfer.on_removed = told.append
    held = await place.save(range(300))
    (found,) = list(place.transfer.index)
    next(place.engine.staging.glob("slotkeeper/*/*.kv")).write_bytes(b"")
    assert not await place.transfer.restore(1, found)
    assert told == [None]
    assert place.transfer.on_disk(held).n_saved == 0


async def test_a_barred_snapshot_saves_no_slot_and_covers_nothing(place: Place) -> None:
    """What this instance refused is told, and hides no snapshot that can be restored."""
    told: list[Cause | None] = []
    place.transfer.on_removed = told.append
    for n in range(5):  # more than are looked at, all of one beginning
        place.clock.now += 1
        held = await place.save([*range(300), *range(n * 1000, n * 1000 + 50)])
    *refused, good = sorted(place.transfer.index, key=lambda row: -row.last_used)
    for one in refused:
        place.engine.restore_errors = [BackendRefusedError("no", answer=500)]
        assert not await place.transfer.restore(1, one)
    assert told == [None] * 4
    assert place.transfer.on_disk(held).n_saved == 300 == held.n_saved - 50
    found = place.transfer.matches(request(range(310)))
    assert [(row.id, n) for row, n in found] == [(good.id, 300)]


async def test_a_state_larger_than_it_was_thought_goes_alone(place: Place) -> None:
    """Its size is known once it is written: what it has no room beside stays, and it does not."""
    size = len(state_bytes(range(300)))
    for n in (1, 2, 3):
        await place.save([n * 10_000 + i for i in range(300)], talk=str(n))
    place.transfer.limits = Limits(4 * size, 10, 1e6)
    place.transfer.costs.observe_size(20_000, 1)  # it is thought to be smaller than it will be
    before = place.store.usage()
    assert (await place.save(range(4000), talk="big")).n_saved == 0
    assert place.transfer.refused is Refusal.TOO_LARGE
    assert place.transfer.refused_from == place.transfer.costs.size(4000)
    assert place.engine.calls.count("save") == 4
    assert place.store.usage() == before
    assert len(place.transfer.index) == 3
    assert [place.transfer.evicted(talk) for talk in ("1", "2", "3")] == [False] * 3


async def test_what_is_restored_next_makes_no_room(place: Place) -> None:
    """Saved first it pushes out another, or nothing; once that is restored the limits hold."""
    size = len(state_bytes(range(300)))
    place.transfer.costs.observe_size(300, size)
    await place.save(range(300))
    (next_one,) = list(place.transfer.index)
    place.clock.now += 1000
    place.transfer.limits = Limits(GIB, 1, 1e6)
    assert (await place.save(range(5000, 5300), keep=(next_one.id,))).n_saved == 300
    assert place.transfer.index.get(next_one.id) is not None
    assert await place.transfer.restore(1, next_one)
    assert place.store.usage()[1] == 1
    place.transfer.limits = Limits(GIB, 9, 1e6)
    (left,) = list(place.transfer.index)
    await place.save([*left.tokens, *range(9000, 9100)], keep=(left.id,))
    assert place.transfer.index.get(left.id) is not None, "superseded, and yet needed"


async def test_what_the_disk_does_not_let_go_counts_and_goes_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is saved meanwhile, and what should have gone is used."""
    size = len(state_bytes(range(300)))
    place.transfer.costs.observe_size(300, size)
    await place.save(range(300), talk="a")
    place.transfer.limits = Limits(GIB, 1, 1e6)

    def broken(_: object) -> None:
        raise OSError(errno.EACCES, "permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(place.store._shelf, "delete", broken)
        assert (await place.save(range(5000, 5300))).n_saved == 0
    assert place.transfer.refused is Refusal.UNDELETED
    assert "let go" in place.transfer.refused.advice
    assert place.transfer.matches(request(range(310)))
    assert not place.transfer.evicted("a")
    assert place.count('evictions_total{cause="space"} 0.0')
    assert (await place.save(range(5000, 5300))).n_saved == 300
    assert place.store.usage()[1] == 1


async def test_what_was_forgotten_while_the_disk_refused_goes_later(place: Place) -> None:
    """With the next save, whatever the room; it is never used again."""
    await place.save(range(300), talk="a")

    with undeletable(place):
        with pytest.raises(StoreError):
            await place.transfer.forget("a")
        assert (await place.save(range(5000, 5300))).n_saved == 300, "there is room"
    assert place.store.usage()[1] == 2
    await place.transfer.adopt("e" * 32)
    await place.transfer.adopt(FINGERPRINT)
    assert place.transfer.matches(request(range(310))) == ()
    await place.save(range(7000, 7300))
    assert {row.conversation for row in place.store.all_snapshots()} == {""}


async def test_a_refusal_ends_with_its_cause(place: Place) -> None:
    """Another day, another fingerprint, other limits: the next save will tell."""
    transfer, limits = place.transfer, place.transfer.limits
    transfer.budget = Budget(0, 10)
    await place.save(range(300))
    assert transfer.refused is Refusal.WRITE_BUDGET
    place.clock.now += DAY
    assert transfer.refused is None
    await place.save(range(300))
    assert transfer.refused is Refusal.WRITE_BUDGET
    transfer.budget = Budget(0, GIB)
    assert transfer.refused is None
    transfer.limits = Limits(10, 10, 1e6)
    for change in ("limits", "fingerprint"):
        await place.save(range(300))
        assert transfer.refused is Refusal.TOO_LARGE
        if change == "limits":
            transfer.limits = limits
        else:
            await transfer.adopt("e" * 32)
        assert transfer.refused is None
        transfer.limits = Limits(10, 10, 1e6)


async def test_a_refusal_is_about_what_is_as_large(place: Place) -> None:
    """And only until as much is saved, the terms change, or somebody made room."""
    transfer, limits = place.transfer, place.transfer.limits
    size = len(state_bytes(range(300)))
    transfer.costs.observe_size(300, size)
    assert transfer.refused_from == math.inf
    transfer.limits = narrow = replace(limits, max_bytes=2 * size)
    large = [*range(900)]
    assert (await place.save(large)).n_saved == 0
    assert transfer.refused_from == transfer.costs.size(900)
    assert (await place.save(range(5000, 5300))).n_saved == 300
    assert transfer.refused is None
    assert transfer.refused_from == transfer.costs.size(900), "that one was a small one"
    for change in ("limits", "removed", "asked", "saved"):
        transfer.limits = narrow
        await place.save(large)
        assert transfer.refused_from == transfer.costs.size(900)
        if change == "removed":
            transfer.removed([], Cause.REMOVED)
        elif change == "asked":
            transfer.refused = None
        else:
            transfer.limits = limits
        assert transfer.refused_from == math.inf


async def test_what_passes_again_is_no_longer_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full, and no setting changed: the next save that is tried tells."""
    full = True

    async def free_bytes() -> int:
        return 0 if full else GIB

    monkeypatch.setattr(place.store, "free_bytes", free_bytes)
    await place.save(range(300))
    assert place.transfer.refused is Refusal.DISK_FULL
    assert place.transfer.refused_from == place.transfer.costs.size(300)
    full = False
    assert (await place.save(range(400))).n_saved == 400
    assert place.transfer.refused_from == math.inf


async def test_nothing_goes_for_a_state_the_disk_has_no_room_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own limit would be kept by deleting, but the disk would be full all the same."""
    size = len(state_bytes(range(300)))
    place.transfer.costs.observe_size(300, size)
    assert (await place.save(range(300))).n_saved == 300
    place.transfer.limits = replace(place.transfer.limits, max_bytes=size + size // 2)
    place.transfer.budget = replace(place.transfer.budget, keep_free=GIB)
    room = GIB - 1

    async def free_bytes() -> int:
        return room

    monkeypatch.setattr(place.store, "free_bytes", free_bytes)
    assert (await place.save(range(5000, 5300))).n_saved == 0
    assert place.transfer.refused is Refusal.DISK_FULL
    assert len(place.store.all_snapshots()) == 1
    room = GIB + size // 2  # what goes makes room for what comes
    assert (await place.save(range(5000, 5300))).n_saved == 300
    assert len(place.store.all_snapshots()) == 1


async def test_a_forgotten_conversation_is_no_reason_to_save_no_other(place: Place) -> None:
    """Its refusal is its own."""
    await place.transfer.forget("a")
    await place.save(range(300), talk="a")
    assert place.transfer.refused is Refusal.FORGOTTEN
    assert place.transfer.refused_from == math.inf


async def test_another_api_key_finds_nothing(place: Place) -> None:
    """The seed is part of the look-up."""
    await place.save(range(300))
    assert place.transfer.matches(replace(request(range(310)), seed=b"other")) == ()
    assert place.transfer.matches(chat("q")) == ()


async def test_a_store_whose_disk_fails_costs_only_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save, delete, touch and clean-up errors are logged; requests never see them."""
    await place.save(range(300))
    (found,) = list(place.transfer.index)

    async def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    for name in ("touch", "unstage", "delete", "discard"):
        monkeypatch.setattr(place.store, name, broken)
    assert await place.transfer.restore(1, found)
    after = await place.save(range(400))
    assert after.n_saved == 400
    place.engine.save_error = BackendRefusedError("no", answer=500)
    assert (await place.save(range(500))).n_saved == 0
    monkeypatch.setattr(place.store, "free_bytes", broken)
    assert (await place.save(range(500))).n_saved == 0


def test_snapshots_do_not_show_their_tokens() -> None:
    """A log line with a snapshot in it holds no prompt."""
    state = Snapshot("i", "f", b"s", array("i", [4711]), 1, 1, "0", 0.0, 0.0, 0.0)
    assert "4711" not in repr(state)
