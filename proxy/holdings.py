"""What is on disk for the backend's current fingerprint, what may still come, and what has to go.

`transfer.Transfer` is this and a state's two journeys. Nothing here touches a slot.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from proxy.core.costs import Costs
from proxy.core.prefix import PrefixIndex
from proxy.core.retention import Refusal, overflow, refused_from, superseded, unroomy
from proxy.store.snapshots import StoreError
from proxy.telemetry.metrics import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.records import Prompt, Snapshot
    from proxy.core.retention import Limits
    from proxy.core.slots import Content
    from proxy.store.snapshots import SnapshotStore
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.transfer")

DAY = 86_400.0
INEFFECTIVE_LIMIT = 3  # DESIGN.md rule 6
EVICTED = 512  # how many of the last evictions are remembered
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Budget:
    """What writing may cost: ``keep_free`` bytes stay free, ``daily`` bytes are written at most."""

    keep_free: int
    daily: int


class Holdings:
    """Owns the index of what is on disk for the backend's current fingerprint."""

    def __init__(
        self,
        store: SnapshotStore,
        metrics: Metrics,
        clock: Callable[[], float],
        limits: Limits,
        budget: Budget,
    ) -> None:
        """``clock`` gives unix seconds."""
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self.limits = limits
        self.budget = budget
        self._barred: set[str] = set()  # refused by this instance of the backend
        self._evicted: deque[str] = deque(maxlen=EVICTED)  # conversations
        # Forgotten conversations: an answer that still runs may bring one back.
        self._forgotten: set[str] = set()
        self._written_day = 0.0
        self._written = 0
        self.fingerprint = ""
        self.index = PrefixIndex()
        self.costs = Costs()
        self.ineffective = 0
        self.refused = None
        # Snapshots went, or are of no use any more: by whose wish, None for nobody's.
        self.on_removed: Callable[[Cause | None], None] = lambda _: None

    @property
    def refused(self) -> Refusal | None:
        """Why the last save was not made, as long as that may still be so.

        Set it to None when that may not be so any more: the next save will tell.
        """
        return self._believed()[0]

    @refused.setter
    def refused(self, why: Refusal | None) -> None:
        self._tries = why, math.inf, self._terms()

    @property
    def refused_from(self) -> float:
        """Bytes from which on a save would be refused, as the last ones were; inf: none was."""
        return self._believed()[1]

    def _believed(self) -> tuple[Refusal | None, float]:
        why, least, terms = self._tries
        return (why, least) if terms == self._terms() else (None, math.inf)

    def _terms(self) -> tuple[Limits, Budget, float | None]:
        """What a refusal was made under: the limits, the budget, and the day it is for."""
        today = self._clock() - self._written_day < DAY
        return self.limits, self.budget, self._written_day if today else None

    def _tried(self, size: int, why: Refusal | None) -> None:
        """A save of what was reckoned to be ``size`` bytes went through, or was refused."""
        least = refused_from(self.refused_from, size, why)
        self._tries = why, least, self._terms()

    @property
    def retired(self) -> bool:
        """Restores of this fingerprint proved useless three times: none is tried any more."""
        return self.ineffective >= INEFFECTIVE_LIMIT

    # What is there

    def matches(self, prompt: Prompt) -> tuple[tuple[Snapshot, int], ...]:
        """Snapshots that cover the beginning of ``prompt``, deepest first, with their tokens."""
        if self.retired or prompt.tokens is None:
            return ()
        return tuple(self.index.ranked(prompt.seed, prompt.tokens, without=self._useless()))

    def barred(self, snapshot_id: str) -> bool:
        """Refused by this instance, or a restore of it once took the backend down."""
        return snapshot_id in self._barred or self._store.quarantined(snapshot_id)

    def _useless(self) -> frozenset[str]:
        """Ids of what is there and barred: it covers nothing."""
        return frozenset(one.id for one in self.index if self.barred(one.id))

    def on_disk(self, content: Content) -> Content:
        """The content, as much of it saved as a snapshot that can be restored holds now."""
        if not content.n_saved:
            return content
        tokens = content.tokens or array("i")
        held = self.index.ranked(content.prompt.seed, tokens, 1, without=self._useless())
        return replace(content, n_saved=min(content.n_saved, held[0][1] if held else 0))

    def evicted(self, conversation: str) -> bool:
        """Whether a snapshot of it was lately removed to make room."""
        return conversation in self._evicted

    def gauge(self) -> None:
        """Show the size of the store."""
        size, files = self._store.usage()
        self._metrics.store_bytes.set(size)
        self._metrics.store_files.set(files)
        self._metrics.store_limit_bytes.set(self.limits.max_bytes)

    # What may come

    async def _room(self, content: Content, keep: frozenset[str]) -> Refusal | None:
        """Make room for one more state; why it cannot be had. What is in ``keep`` stays."""
        if content.prompt.conversation in self._forgotten:
            return Refusal.FORGOTTEN
        size = self.costs.size(content.n_tokens)
        now = self._clock()
        if now - self._written_day >= DAY:
            self._written_day, self._written = now, 0
        if self._written + size > self.budget.daily:
            return Refusal.WRITE_BUDGET
        if refusal := unroomy(self.limits, self._store.all_snapshots(), size):
            return refusal
        try:
            free = await self._free()
        except OSError:
            return Refusal.NO_DIRECTORY
        gone = self.over(size, keep)
        freed = sum(one.size for one in self._store.all_snapshots() if one.id in gone)
        if free + freed - size < self.budget.keep_free:
            return Refusal.DISK_FULL  # before anything goes for a state that has no room
        if not await self._delete(gone, Cause.SPACE) and self._full(size):
            return Refusal.UNDELETED
        return None

    def _full(self, size: int) -> bool:
        n_bytes, n_files = self._store.usage()
        return n_bytes + size > self.limits.max_bytes or n_files >= self.limits.max_files

    async def _take_in(self, new: Snapshot, keep: frozenset[str]) -> Refusal | None:
        """A state was published: what it makes needless goes, and what has no room beside it.

        Its size was only guessed before. What could never be kept beside what is pinned goes
        itself, and alone: whatever else went, there would be no room.
        """
        others = [one for one in self._store.all_snapshots() if one.id != new.id]
        refusal = unroomy(self.limits, others, new.size)
        if refusal:
            await self._delete([new.id], Cause.SPACE)
            return refusal
        self.index.add(new)
        needless = [one for one in superseded(new, self.index) if one not in keep]
        await self._delete(needless, Cause.SUPERSEDED)
        await self._delete(self.over(keep=keep | {new.id}), Cause.SPACE)
        return None

    async def _free(self) -> int:
        """Bytes the file system has left. Raises ``OSError``."""
        free = await self._store.free_bytes()
        self._metrics.disk_free_bytes.set(free)
        return free

    # What has to go

    def over(self, incoming: int = 0, keep: frozenset[str] = NOTHING) -> list[str]:
        """Ids of what the limits do not allow, in all the store, once ``incoming`` bytes came.

        And of what was forgotten while the disk refused.
        """
        rows = self._store.all_snapshots()
        left = [row.id for row in rows if row.conversation in self._forgotten]
        others = [row for row in rows if row.fingerprint != self.fingerprint and row.id not in left]
        now, barred = self._clock(), self._useless()
        gone = overflow(self.index, others, self.limits, self.costs, now, incoming, keep, barred)
        return [*left, *gone]

    async def forget(self, conversation: str) -> int:
        """Delete a conversation's snapshots, of all fingerprints, and save none of it any more.

        Gives their number. One that the backend is reading goes too: what it reads is a link.
        Raises ``StoreError`` when the disk refuses; some may then be left, to be tried again.
        """
        if not conversation:
            return 0
        self._forgotten.add(conversation)
        ids = [s.id for s in self._store.all_snapshots() if s.conversation == conversation]
        for snapshot_id in ids:  # nothing of it is used, even if the disk refuses
            self.index.remove(snapshot_id)
        if ids:
            await self._store.delete(ids, Cause.FORGOTTEN)
            self.removed(ids, Cause.FORGOTTEN)
        return len(ids)

    def removed(self, ids: list[str], cause: Cause) -> None:
        """These were deleted by hand: slots are not saved in them any more (``on_removed``).

        What a save deletes for room is not told: saved again it would push out what is worth more.
        """
        for snapshot_id in ids:
            self.index.remove(snapshot_id)
        self.refused = None
        self._metrics.evicted(cause, len(ids))
        self.gauge()
        self.on_removed(cause)

    async def _delete(self, ids: list[str], cause: Cause) -> bool:
        """False when the disk refuses: then they are still there, count, and are tried again."""
        removed = [self.index.remove(snapshot_id) for snapshot_id in ids]
        if not ids:
            return True
        try:
            await self._store.delete(ids, cause)
        except (StoreError, OSError) as error:
            log.warning("snapshots.delete-failed", error=type(error).__name__)
            for row in self._store.snapshots(self.fingerprint):
                if row.id in ids and row.conversation not in self._forgotten:
                    self.index.add(row)
            return False
        if cause is Cause.SPACE:
            self._evicted.extend(snapshot.conversation for snapshot in removed if snapshot)
        self._metrics.evicted(cause, len(ids))
        return True
