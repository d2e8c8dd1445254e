"""A KV state's two journeys between a slot and the disk. Used by the scheduler and the keeper.

Out: evict what must go, save under a fresh name, verify and publish, drop what is superseded.
In: verify, write the intent, link, erase, restore, unlink, close the intent.
Both are called only while the caller owns the slot (state saving or restoring).
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from proxy.core.costs import Costs
from proxy.core.prefix import PrefixIndex
from proxy.core.retention import Refusal, overflow, superseded, unroomy
from proxy.errors import (
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)
from proxy.store.snapshots import Saved, StageError, StoreError
from proxy.telemetry.metrics import Cause, Outcome, Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.backends.base import Backend
    from proxy.core.records import Prompt, Snapshot
    from proxy.core.retention import Limits
    from proxy.core.slots import Content
    from proxy.store.snapshots import SnapshotStore
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.transfer")

DAY = 86_400.0
INEFFECTIVE_LIMIT = 3  # DESIGN.md rule 6
SLACK_TOKENS = 8  # a restore is judged by what the engine reports, give or take the last token(s)
REFUSED = 400
EVICTED = 512  # how many of the last evictions are remembered


@dataclass(frozen=True, slots=True)
class Budget:
    """What writing may cost: ``keep_free`` bytes stay free, ``daily`` bytes are written at most."""

    keep_free: int
    daily: int


class Transfer:
    """Owns the index of what is on disk for the backend's current fingerprint."""

    def __init__(
        self,
        backend: Backend,
        store: SnapshotStore,
        metrics: Metrics,
        clock: Callable[[], float],
        limits: Limits,
        budget: Budget,
    ) -> None:
        """``clock`` gives unix seconds."""
        self._backend = backend
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
        self.fingerprint = self.instance = ""
        self.index = PrefixIndex()
        self.costs = Costs()
        self.ineffective = 0
        self.refused: Refusal | None = None  # why the last save was not made
        self.on_removed: Callable[[], None] = lambda: None  # see ``removed``

    @property
    def retired(self) -> bool:
        """Restores of this fingerprint proved useless three times: none is tried any more."""
        return self.ineffective >= INEFFECTIVE_LIMIT

    async def adopt(self, fingerprint: str, instance: str = "") -> None:
        """A backend instance was proved: from now on its fingerprint's snapshots are in play."""
        self._barred.clear()
        self.instance = instance
        if fingerprint == self.fingerprint:
            return
        await self.remember()
        self.fingerprint = fingerprint
        self.index = PrefixIndex()
        for snapshot in self._store.snapshots(fingerprint):
            self.index.add(snapshot)
        stored = await self._store.get("costs", fingerprint) or {}
        self.costs = Costs.from_json(stored)
        self.ineffective = int(stored.get("ineffective", 0))
        budget = await self._store.get("budget", "day") or {}
        self._written_day = float(budget.get("day", 0.0))
        self._written = int(budget.get("written", 0))
        self.gauge()
        self._metrics.restores_retired.set(self.retired)
        with suppress(OSError):
            await self._free()
        log.info("snapshots.adopted", fingerprint=fingerprint, count=len(self.index))

    async def remember(self) -> None:
        """Write what was learned (costs, ineffective restores, the day's writes)."""
        if not self.fingerprint:
            return
        learned = {**self.costs.to_json(), "ineffective": self.ineffective}
        await self._store.put("costs", self.fingerprint, learned)
        await self._store.put("budget", "day", {"day": self._written_day, "written": self._written})

    def matches(self, prompt: Prompt) -> tuple[tuple[Snapshot, int], ...]:
        """Snapshots that cover the beginning of ``prompt``, deepest first, with their tokens."""
        if self.retired or prompt.tokens is None:
            return ()
        ranked = self.index.ranked(prompt.seed, prompt.tokens)
        return tuple((s, n) for s, n in ranked if not self.barred(s.id))

    def barred(self, snapshot_id: str) -> bool:
        """Refused by this instance, or a restore of it once took the backend down."""
        return snapshot_id in self._barred or self._store.quarantined(snapshot_id)

    # Out: slot -> disk

    async def save(self, slot: int, content: Content) -> Content:
        """Put the slot's state on disk; the content with what is saved now, or unchanged.

        Raises only ``BackendUnreachableError``: all else is counted, logged and costs time only.
        """
        try:
            return self.on_disk(await self._save(slot, content))
        except SlotkeeperError:
            raise
        except Exception as error:  # rule 10: no fault of the cache fails a request
            self._metrics.fault(Where.SAVE)
            log.exception("save.fault", slot=slot, error=type(error).__name__)
            return content

    async def _save(self, slot: int, content: Content) -> Content:
        self.refused = await self._room(content)
        if self.refused:
            self._metrics.saved(Outcome.REFUSED)
            log.info("save.refused", slot=slot, why=str(self.refused))
            return content
        name = self._store.staging_name()
        try:
            snapshot = await self._publish(slot, name, content)
        except BackendUnreachableError:
            await self._discard(name)
            raise
        except (SlotkeeperError, StoreError, OSError, ValueError) as error:
            await self._discard(name)
            self._metrics.saved(Outcome.FAILED)
            log.warning("save.failed", slot=slot, error=type(error).__name__, why=str(error))
            return content
        if content.prompt.conversation in self._forgotten:  # while it was saved
            await self._delete([snapshot.id], Cause.FORGOTTEN)
            return content
        self.index.add(snapshot)
        await self._delete(superseded(snapshot, self.index), Cause.SUPERSEDED)
        await self._delete(self.over(keep=frozenset({snapshot.id})), Cause.SPACE)
        self.gauge()
        return replace(
            content,
            n_tokens=snapshot.n_tokens,
            n_saved=snapshot.n_tokens,
            tokens=snapshot.tokens,
            n_prompt=min(content.n_prompt, snapshot.n_tokens),
        )

    async def _room(self, content: Content) -> Refusal | None:
        """Make room for one more state; why it cannot be had."""
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
        await self._delete(self.over(size), Cause.SPACE)
        try:
            free = await self._free()
        except OSError:
            return Refusal.NO_DIRECTORY
        return Refusal.DISK_FULL if free - size < self.budget.keep_free else None

    def over(self, incoming: int = 0, keep: frozenset[str] = frozenset()) -> list[str]:
        """Ids of what the limits do not allow, in all the store, once ``incoming`` bytes came."""
        others = [s for s in self._store.all_snapshots() if s.fingerprint != self.fingerprint]
        return overflow(self.index, others, self.limits, self.costs, self._clock(), incoming, keep)

    async def _free(self) -> int:
        """Bytes the file system has left. Raises ``OSError``."""
        free = await self._store.free_bytes()
        self._metrics.disk_free_bytes.set(free)
        return free

    def on_disk(self, content: Content) -> Content:
        """The content, as much of it saved as a snapshot holds now."""
        if not content.n_saved:
            return content
        held = self.index.ranked(content.prompt.seed, content.tokens or array("i"), 1)
        return replace(content, n_saved=min(content.n_saved, held[0][1] if held else 0))

    async def _publish(self, slot: int, name: str, content: Content) -> Snapshot:
        started = self._clock()
        state = await self._backend.save(slot, name)
        seconds = max(0.0, self._clock() - started)
        saved = Saved(
            fingerprint=self.fingerprint,
            seed=content.prompt.seed,
            n_prompt=min(content.n_prompt, state.n_tokens),
            n_tokens=state.n_tokens,
            n_bytes=state.n_bytes,
            save_seconds=seconds,
            conversation=content.prompt.conversation,
        )
        snapshot = await self._store.publish(name, saved, self._clock())
        self.costs.observe_save(state.n_bytes, seconds)
        self.costs.observe_size(state.n_tokens, state.n_bytes)
        self._written += state.n_bytes
        self._metrics.saved(Outcome.OK, seconds=seconds, size=state.n_bytes)
        return snapshot

    async def _discard(self, name: str) -> None:
        try:
            await self._store.discard(name)
        except (StoreError, OSError) as error:
            log.warning("save.left-over", error=type(error).__name__)

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
        self.on_removed()

    async def _delete(self, ids: list[str], cause: Cause) -> None:
        removed = [self.index.remove(snapshot_id) for snapshot_id in ids]
        if not ids:
            return
        if cause is Cause.SPACE:
            self._evicted.extend(snapshot.conversation for snapshot in removed if snapshot)
        self._metrics.evicted(cause, len(ids))
        try:
            await self._store.delete(ids, cause)
        except (StoreError, OSError) as error:
            log.warning("snapshots.delete-failed", error=type(error).__name__)

    def evicted(self, conversation: str) -> bool:
        """Whether a snapshot of it was lately removed to make room."""
        return conversation in self._evicted

    def gauge(self) -> None:
        """Show the size of the store."""
        size, files = self._store.usage()
        self._metrics.store_bytes.set(size)
        self._metrics.store_files.set(files)
        self._metrics.store_limit_bytes.set(self.limits.max_bytes)

    # In: disk -> slot

    async def restore(self, slot: int, snapshot: Snapshot) -> bool:
        """Load a snapshot into a slot the caller owns; False when it could not be.

        After False the slot is empty (a failed restore clears it, llama-server.md 0.9). Raises
        ``BackendUnreachableError`` when the backend went away: the intent then stays open.
        """
        try:
            return await self._load(slot, snapshot)
        except SlotkeeperError:
            raise
        except Exception as error:  # rule 10
            self._metrics.fault(Where.RESTORE)
            log.exception("restore.fault", slot=slot, error=type(error).__name__)
            return False

    async def _load(self, slot: int, snapshot: Snapshot) -> bool:
        if self.instance and await self._backend.instance() != self.instance:
            raise BackendUnreachableError("the backend is another one than was proved")
        try:
            name = await self._store.stage(snapshot, self._clock())
        except (StageError, StoreError, OSError) as error:
            if isinstance(error, StageError):
                self.index.remove(snapshot.id)
                self.on_removed()
            self._metrics.restored(Outcome.FAILED)
            log.warning("restore.unverified", snapshot=snapshot.id, why=str(error))
            return False
        ok: bool | None = None
        started = self._clock()
        try:
            ok = await self._restore(slot, snapshot, name)
        except (BackendUnreachableError, BackendTimeoutError):
            self._metrics.restored(Outcome.FAILED)
            raise
        except asyncio.CancelledError:
            ok = False  # the proxy is stopping; that says nothing against the file
            raise
        except SlotkeeperError as error:
            ok = False
            log.warning("restore.failed", snapshot=snapshot.id, why=error.message)
        finally:
            await asyncio.shield(self._unstage(snapshot, name, ok=ok))
        if not ok:
            self._barred.add(snapshot.id)
            self._metrics.restored(Outcome.REFUSED)
            return False
        seconds = max(0.0, self._clock() - started)
        self.costs.observe_restore(snapshot.size, seconds)
        self._metrics.restored(Outcome.OK, seconds=seconds, size=snapshot.size)
        await self._touch(snapshot)
        return True

    async def _restore(self, slot: int, snapshot: Snapshot, name: str) -> bool:
        """Erase, restore; a 400 is retried once, since a full pool looks like a bad file."""
        for attempt in (1, 2):
            await self._backend.erase(slot)
            try:
                state = await self._backend.restore(slot, name)
            except BackendRefusedError as error:
                if error.answer != REFUSED or attempt == 2:  # noqa: PLR2004 - the second of two attempts
                    raise
                continue
            return state.n_tokens == snapshot.n_tokens
        return False

    async def _unstage(self, snapshot: Snapshot, name: str, *, ok: bool | None) -> None:
        try:
            await self._store.unstage(snapshot, name, ok=ok)
        except (StoreError, OSError) as error:
            log.warning("restore.left-over", snapshot=snapshot.id, error=type(error).__name__)

    async def _touch(self, snapshot: Snapshot) -> None:
        now = self._clock()
        known = self.index.get(snapshot.id) or snapshot  # it may have been pinned meanwhile
        newer = replace(known, last_used=now, restores=known.restores + 1)
        self.index.replace(newer)
        try:
            await self._store.touch(snapshot.id, now, restores_delta=1)
        except (StoreError, OSError) as error:
            log.warning("snapshots.touch-failed", error=type(error).__name__)

    def judge(self, expected: int, cache_n: int) -> bool:
        """Did a restore show up in the engine's own count? Counts those that did not (rule 6)."""
        if cache_n + SLACK_TOKENS >= expected:
            self.ineffective = 0
            return True
        self.ineffective += 1
        self._metrics.ineffective_restores.inc()
        log.warning(
            "restore.ineffective", expected=expected, reused=cache_n, count=self.ineffective
        )
        self._metrics.restores_retired.set(self.retired)
        if self.retired:
            log.error(
                "restores.retired",
                fingerprint=self.fingerprint,
                why="three restores in a row spared no prefill; its snapshots are not used",
            )
        return False
