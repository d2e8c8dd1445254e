"""Recording stand-ins for what does IO, and a clock that only moves when told."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.backends.base import Facts, Single, SlotView, StateIO
from proxy.core.costs import Costs
from proxy.core.records import Prompt, Snapshot
from proxy.core.slots import Content
from proxy.errors import BackendUnreachableError


@dataclass
class Clock:
    """Unix seconds."""

    now: float = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@dataclass
class FakeBackend(Single):
    """A backend whose slots are set by the test."""

    views: list[SlotView] = field(default_factory=list)
    name: str = "one"
    down: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def occupy(
        self, *n_tokens: int, busy: frozenset[int] = frozenset(), ran: frozenset[int] = frozenset()
    ) -> None:
        """Slots with these token counts; ``ran``: those with a newer task than before."""
        self.views = [
            SlotView(i, 4096, i in busy, i + 100 * (i in ran), n) for i, n in enumerate(n_tokens)
        ]

    def _answer(self) -> None:
        self.asked.set()
        if self.down:
            raise BackendUnreachableError("no connection")

    async def instance(self) -> str:
        """Who this is."""
        self._answer()
        return self.name

    async def facts(self) -> Facts:
        """What it says of itself."""
        self._answer()
        return Facts("llama_server", self.name, len(self.views), 4096, "m", "", {})

    async def slots(self) -> tuple[SlotView, ...]:
        """As set."""
        self._answer()
        return tuple(self.views)

    async def erase(self, slot: int) -> None:
        """Records the call."""
        self._answer()
        self.calls.append(("erase", slot))

    async def save(self, slot: int, name: str) -> StateIO:
        """Records the call."""
        self._answer()
        self.calls.append(("save", slot, name))
        return StateIO(self.views[slot].n_tokens or 0, 1000, 0.01)


@dataclass
class FakeEffects:
    """Effects that are recorded; a test may hold them up or make them fail."""

    costs: Costs
    found: tuple[tuple[Snapshot, int], ...] = ()
    done: list[tuple[Any, ...]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    restores: bool = True
    error: Exception | None = None
    kept: list[frozenset[str]] = field(default_factory=list)  # of each save
    refused_from: float = math.inf

    async def _step(self, *what: Any) -> None:
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        self.done.append(what)
        if self.error is not None:
            raise self.error

    def matches(self, prompt: Prompt) -> tuple[tuple[Snapshot, int], ...]:
        """What the test put on disk."""
        return self.found if prompt.tokens is not None else ()

    def judge(self, expected: int, cache_n: int) -> bool:
        """Recorded."""
        self.done.append(("judge", expected, cache_n))
        return cache_n >= expected

    async def save(
        self, slot: int, content: Content, keep: frozenset[str] = frozenset()
    ) -> Content:
        """Everything is saved."""
        self.kept.append(keep)
        await self._step("save", slot)
        return replace(content, n_saved=content.n_tokens)

    def on_disk(self, content: Content) -> Content:
        """All that was saved."""
        return content

    async def restore(self, slot: int, snapshot: Snapshot) -> bool:
        """As the test says."""
        await self._step("restore", slot, snapshot.id)
        return self.restores
