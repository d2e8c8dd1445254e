"""A store on a fresh folder, and a backend's save into its staging folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.core.records import Snapshot
from proxy.store.snapshots import Saved, SnapshotStore
from tests.state_files import state_bytes

FINGERPRINT = "f" * 16
SEED = b"\x00seed\xff"


@dataclass
class Place:
    """Where a store lives, and the verbs tests use on it."""

    staging: Path
    root: Path

    def store(self, *, shared: bool = False) -> SnapshotStore:
        """Another store on the same folders, not open."""
        return SnapshotStore(self.staging, self.root, shared=shared)

    async def save(
        self, store: SnapshotStore, tokens: Sequence[int] = range(40), *, now: float = 1000.0
    ) -> Snapshot:
        """What the backend and ``Transfer`` do: write a state, publish it."""
        name = store.staging_name()
        data = state_bytes(tokens)
        (self.staging / name).write_bytes(data)
        saved = Saved(FINGERPRINT, SEED, len(tokens) - 1, len(tokens), len(data), 0.25, "talk")
        return await store.publish(name, saved, now)

    def path(self, snapshot: Snapshot) -> Path:
        """The stored file."""
        return self.root / snapshot.fingerprint / f"{snapshot.id}.kv"

    def files(self) -> set[str]:
        """All state files, staged or stored, relative to the staging folder."""
        return {str(p.relative_to(self.staging)) for p in self.staging.rglob("*.kv")}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """The default layout: the store inside the slot save path; nothing is made yet."""
    return Place(tmp_path / "slots", tmp_path / "slots" / "slotkeeper")


@pytest.fixture
async def store(place: Place) -> AsyncIterator[SnapshotStore]:
    """An open store."""
    opened = place.store()
    await opened.open()
    yield opened
    await opened.close()


Restart = Callable[[SnapshotStore], Awaitable[SnapshotStore]]


@pytest.fixture
async def restart(place: Place) -> AsyncIterator[Restart]:
    """Close a store, open the next one; that one is closed at the end."""
    opened: list[SnapshotStore] = []

    async def _restart(old: SnapshotStore) -> SnapshotStore:
        await old.close()
        new = place.store()
        await new.open()
        opened.append(new)
        return new

    yield _restart
    for store in opened:
        await store.close()
