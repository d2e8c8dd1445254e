"""A verdict is reached once per backend process, and only a good one is remembered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy import proof
from proxy.backends.base import Facts, Verdict
from proxy.core.records import Mode
from proxy.proof import KIND, Proof
from proxy.store.snapshots import SnapshotStore
from tests.unit.doubles import FakeBackend

PROVED = Verdict(Mode.EXCLUSIVE, "proved", "advice", "f" * 32, {"n_stream": 2})
FACTS = Facts("llama_server", "one", 2, 4096, "m", "", {})


class Probed:
    """Stands for ``probe``: what it was asked, what it says."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.slots: list[tuple[int, ...]] = []

    async def __call__(self, _backend: Any, *, slots: tuple[int, ...], **_: Any) -> Verdict:
        """As set."""
        self.slots.append(slots)
        return self.verdict


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SnapshotStore]:
    """An open one."""
    made = SnapshotStore(tmp_path, tmp_path / "slotkeeper")
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Probed:
    """A probe that proves everything."""
    made = Probed(PROVED)
    monkeypatch.setattr(proof, "probe", made)
    return made


def build(store: SnapshotStore, tmp_path: Path, **backend: Any) -> Proof:
    """A proof over two idle slots."""
    fake = FakeBackend()
    fake.occupy(0, 0, **backend)
    return Proof(fake, store, tmp_path)  # type: ignore[arg-type]


async def test_once_per_instance(store: SnapshotStore, tmp_path: Path, probed: Probed) -> None:
    """The same process is not probed again, by the next proxy neither; another one is."""
    assert await build(store, tmp_path)(FACTS) == PROVED
    assert await build(store, tmp_path)(FACTS) == PROVED
    assert len(probed.slots) == 1
    await build(store, tmp_path)(replace(FACTS, instance="two"))
    assert len(probed.slots) == 2


async def test_what_cannot_be_told_apart(
    store: SnapshotStore, tmp_path: Path, probed: Probed
) -> None:
    """Without an identity of the process every start proves anew."""
    for _ in range(2):
        assert await build(store, tmp_path)(replace(FACTS, instance="")) == PROVED
    assert len(probed.slots) == 2


async def test_a_refusal_is_not_kept(store: SnapshotStore, tmp_path: Path, probed: Probed) -> None:
    """It may come from this proxy's own settings: the next start looks again."""
    probed.verdict = Verdict(Mode.FORWARD, "another folder")
    assert await build(store, tmp_path)(FACTS) == probed.verdict
    probed.verdict = PROVED
    assert await build(store, tmp_path)(FACTS) == PROVED


async def test_only_idle_slots(store: SnapshotStore, tmp_path: Path, probed: Probed) -> None:
    """Busy slots are left alone; if all are, nothing can be known."""
    assert await build(store, tmp_path, busy=frozenset({0, 1}))(FACTS) is None
    assert await build(store, tmp_path, busy=frozenset({0}))(FACTS) == PROVED
    assert probed.slots == [(1,)]


async def test_the_least_recently_used_slots(
    store: SnapshotStore, tmp_path: Path, probed: Probed
) -> None:
    """The probe empties the slots it uses: those whose last task is longest ago, or never was."""
    fake = FakeBackend()
    fake.occupy(5, 5, 5, 5)
    tasks = [9, 4, None, 7]
    fake.views = [replace(view, id_task=task) for view, task in zip(fake.views, tasks, strict=True)]
    await Proof(fake, store, tmp_path)(FACTS)  # type: ignore[arg-type]
    assert probed.slots == [(2, 1)]


@pytest.mark.parametrize("row", [{}, {"mode": "odd", "why": "", "advice": "", "fingerprint": ""}])
async def test_a_row_that_is_none_of_ours(
    store: SnapshotStore, tmp_path: Path, probed: Probed, row: dict[str, Any]
) -> None:
    """What cannot be read is proved again."""
    await store.put(KIND, "one", row)
    assert await build(store, tmp_path)(FACTS) == PROVED
    assert len(probed.slots) == 1
