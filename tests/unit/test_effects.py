"""Waiting for a slot to become idle, and what happens where nothing can be saved."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from proxy.backends.base import SlotView
from proxy.core.placement import Option
from proxy.core.queue import Kind, Lease
from proxy.core.records import Reason
from proxy.core.slots import SlotState, SlotTable
from proxy.effects import Nothing, carry_out, until_idle
from proxy.errors import BackendBrokenError
from tests.unit.doubles import Clock, FakeEffects
from tests.unit.factories import chat, content, costs, snapshot


@dataclass
class Backend:
    """Slot 0 is busy for a number of looks."""

    busy: int

    async def slots(self) -> tuple[SlotView, ...]:
        """One look."""
        self.busy -= 1
        return (SlotView(0, 4096, self.busy >= 0, 7, 123),)


async def test_the_wait_ends_with_the_slot_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look is the answer, and the pauses grow."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)
    view = await until_idle(Backend(busy=12), 0)  # type: ignore[arg-type]
    assert (view.is_processing, view.n_tokens) == (False, 123)
    assert pauses == sorted(pauses)
    assert len(pauses) == 12
    assert pauses[-1] == 1.0


async def test_a_slot_that_is_gone_is_no_endless_wait() -> None:
    """Another backend has come in its place."""
    with pytest.raises(BackendBrokenError, match="fewer slots"):
        await until_idle(Backend(busy=0), 1)  # type: ignore[arg-type]


async def test_what_is_restored_next_makes_no_room_for_what_is_saved_first() -> None:
    """The save is told of it; where nothing is restored there is nothing to keep."""
    effects, table = FakeEffects(costs()), SlotTable(1)
    for found in (snapshot(range(9), "next"), None):
        table.hold(0, content(chat("old"), 9))
        table.begin(0, SlotState.LEASED, 0.0)
        option = Option(0, Reason.RESTORED, 9, 9, save_first=True, snapshot=found)
        lease = Lease(option, Kind.NARROW, chat("q"), Reason.RESTORED, queued=0.0, started=0.0)
        await carry_out(effects, table, lease, Clock(), lambda: True)
        table.end(0, 0.0)
    assert effects.done == [("save", 0), ("restore", 0, "next"), ("save", 0)]
    assert effects.kept == [frozenset({"next"}), frozenset()]


async def test_without_a_directory_nothing_is_saved_or_restored() -> None:
    """The null form does nothing, and says so."""
    nothing, held = Nothing(), content(chat("q"), 9)
    assert await nothing.save(0, held) is held
    assert not await nothing.restore(0, snapshot(range(9)))
    assert nothing.matches(chat("q", tokens=range(9))) == ()
    assert nothing.judge(5, 5)
