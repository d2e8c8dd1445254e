"""What the scheduler has done to slots, and how it waits for them to become idle."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Protocol

from proxy.core.costs import Costs
from proxy.core.records import Reason
from proxy.core.slots import SlotState, restored
from proxy.errors import BackendBrokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from proxy.backends.base import Backend, SlotView
    from proxy.core.queue import Lease
    from proxy.core.records import Prompt, Snapshot
    from proxy.core.slots import Content, SlotTable


POLL_FIRST, POLL_LAST = 0.02, 1.0  # seconds between looks at a slot that is to become idle


class Effects(Protocol):
    """What the scheduler can have done to slots (`transfer.Transfer`)."""

    costs: Costs

    @property
    def refused_from(self) -> float:
        """Bytes from which on a save would be refused, as far as is known; inf: none."""

    def matches(self, prompt: Prompt) -> tuple[tuple[Snapshot, int], ...]:
        """Snapshots that cover the beginning of a tokenised prompt."""

    def judge(self, expected: int, cache_n: int) -> bool:
        """Count a restore that did or did not show up."""

    async def save(
        self, slot: int, content: Content, keep: frozenset[str] = frozenset()
    ) -> Content:
        """Slot to disk; snapshots in ``keep`` do not make room for it."""

    async def restore(self, slot: int, snapshot: Snapshot) -> bool:
        """Disk to slot."""

    def on_disk(self, content: Content) -> Content:
        """The content, as much of it saved as a snapshot holds now."""


class Tasks:
    """Tasks that are kept until they are done; their errors were told where they happened."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """``on_end`` is called after each."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_end = on_end

    def __len__(self) -> int:
        """How many are running."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Start one."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()
        self._on_end()


async def until_idle(backend: Backend, slot: int) -> SlotView:
    """Poll ``/slots`` until the slot is idle: the engine notices a cancel within a batch."""
    pause = POLL_FIRST
    while True:
        views = await backend.slots()
        if slot >= len(views):
            msg = "the backend has fewer slots than before"
            raise BackendBrokenError(msg)
        if not views[slot].is_processing:
            return views[slot]
        await asyncio.sleep(pause)
        pause = min(POLL_LAST, pause * 1.5)


async def carry_out(
    effects: Effects,
    table: SlotTable,
    lease: Lease,
    clock: Callable[[], float],
    proved: Callable[[], bool],
) -> None:
    """What a lease's option wants done first. Raises what the backend raises.

    Nothing is restored any more when the backend is not ``proved`` after the save.
    """
    option = lease.option
    content = table[option.slot].content
    if option.save_first and content is not None:
        table.become(option.slot, SlotState.SAVING, clock())
        keep = frozenset({option.snapshot.id} if option.snapshot else ())  # restored next
        table.hold(option.slot, await effects.save(option.slot, content, keep))
    if option.snapshot is not None and proved():
        table.become(option.slot, SlotState.RESTORING, clock())
        table.hold(option.slot, None)
        ok = await effects.restore(option.slot, option.snapshot)
        found = restored(option.snapshot, lease.prompt, clock())  # it may be deleted by now
        table.hold(option.slot, effects.on_disk(found) if ok else None)
        lease.reason = lease.reason if ok else Reason.COLD


async def settle_wide(backend: Backend, table: SlotTable, lease: Lease) -> None:
    """After a request that may have used any slot: only those that ran nothing are still known."""
    for row in table:
        view = await until_idle(backend, row.index)
        if lease.tasks.get(row.index, -1) != view.id_task:
            table.hold(row.index, None)


class Nothing:
    """Effects where there is no slot directory: the mode is ``forward``, none is asked for."""

    refused_from = math.inf  # nothing is refused where nobody asks

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

    async def save(
        self, slot: int, content: Content, keep: frozenset[str] = frozenset()
    ) -> Content:
        """Nothing is saved."""
        del slot, keep
        return content

    def on_disk(self, content: Content) -> Content:
        """Nothing was saved."""
        return content

    async def restore(self, slot: int, snapshot: Snapshot) -> bool:
        """Nothing can be restored."""
        del slot, snapshot
        return False
