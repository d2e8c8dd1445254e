"""What the scheduler can have done to slots: the protocol, and its null form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from proxy.core.costs import Costs

if TYPE_CHECKING:
    from proxy.core.records import Prompt, Snapshot
    from proxy.core.slots import Content


class Effects(Protocol):
    """What the scheduler can have done to slots (`transfer.Transfer`)."""

    costs: Costs

    def matches(self, prompt: Prompt) -> tuple[tuple[Snapshot, int], ...]:
        """Snapshots that cover the beginning of a tokenised prompt."""

    def judge(self, expected: int, cache_n: int) -> bool:
        """Count a restore that did or did not show up."""

    async def save(self, slot: int, content: Content) -> Content:
        """Slot to disk."""

    async def restore(self, slot: int, snapshot: Snapshot) -> bool:
        """Disk to slot."""


class Nothing:
    """Effects where there is no slot directory: the mode is ``forward``, none is asked for."""

    def __init__(self) -> None:
        """Costs are still learned, for the decision log."""
        self.costs = Costs()

    def matches(self, prompt: Prompt) -> tuple[tuple[Snapshot, int], ...]:
        """No snapshots."""
        del prompt
        return ()

    def judge(self, expected: int, cache_n: int) -> bool:
        """Nothing was restored, so nothing can have been in vain."""
        return cache_n >= expected

    async def save(self, slot: int, content: Content) -> Content:
        """Nothing is saved."""
        del slot
        return content

    async def restore(self, slot: int, snapshot: Snapshot) -> bool:
        """Nothing can be restored."""
        del slot, snapshot
        return False
