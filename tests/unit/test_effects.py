"""Waiting for a slot to become idle, and what happens where nothing can be saved."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from proxy.backends.base import SlotView
from proxy.effects import Nothing, until_idle
from proxy.errors import BackendBrokenError
from tests.unit.factories import chat, content, snapshot


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


async def test_without_a_directory_nothing_is_saved_or_restored() -> None:
    """The null form does nothing, and says so."""
    nothing, held = Nothing(), content(chat("q"), 9)
    assert await nothing.save(0, held) is held
    assert not await nothing.restore(0, snapshot(range(9)))
    assert nothing.matches(chat("q", tokens=range(9))) == ()
    assert nothing.judge(5, 5)
