"""A KV state's two journeys between a slot and the disk. Used by the scheduler and the keeper.

Out: evict what must go, save under a fresh name, verify and publish, drop what is superseded.
In: verify, write the intent, link, erase, restore, unlink, close the intent.
Both are called only while the caller owns the slot (state saving or restoring).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from proxy.core.costs import Costs
from proxy.core.prefix import PrefixIndex
from proxy.errors import (
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)
from proxy.holdings import DAY, NOTHING, Budget, Holdings
from proxy.store.snapshots import Saved, StageError, StoreError
from proxy.telemetry.metrics import Cause, Outcome, Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.backends.base import Backend
    from proxy.core.records import Snapshot
    from proxy.core.retention import Limits
    from proxy.core.slots import Content
    from proxy.store.snapshots import SnapshotStore
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.transfer")

__all__ = ["DAY", "Budget", "Transfer"]

SLACK_TOKENS = 8  # a restore is judged by what the engine reports, give or take the last token(s)
REFUSED = 400


class Transfer(Holdings):
    """Moves states, and owns the index of those on disk for the current fingerprint."""

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
        super().__init__(store, metrics, clock, limits, budget)
        self._backend = backend
        self.instance = ""

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
            if snapshot.conversation not in self._forgotten:  # the disk refused to let it go
                self.index.add(snapshot)
        self.refused = None  # its states have another size
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

    # Out: slot -> disk

    async def save(self, slot: int, content: Content, keep: frozenset[str] = NOTHING) -> Content:
        """Put the slot's state on disk; the content with what is saved now, or unchanged.

        Snapshots in ``keep`` make no room for it: they are needed next.
        Raises only ``BackendUnreachableError``: all else is counted, logged and costs time only.
        """
        try:
            return self.on_disk(await self._save(slot, content, keep))
        except SlotkeeperError:
            raise
        except Exception as error:  # rule 10: no fault of the cache fails a request
            self._metrics.fault(Where.SAVE)
            log.exception("save.fault", slot=slot, error=type(error).__name__)
            return content

    async def _save(self, slot: int, content: Content, keep: frozenset[str]) -> Content:
        size = self.costs.size(content.n_tokens)
        if why := await self._room(content, keep):
            self._tried(size, why)
            self._metrics.saved(Outcome.REFUSED)
            log.info("save.refused", slot=slot, why=str(why))
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
        refusal = await self._take_in(snapshot, keep)
        learned = self.costs.size(content.n_tokens)  # what the likes of it are reckoned from now on
        self._tried(learned if refusal else max(size, learned), refusal)
        self.gauge()
        if self.refused:
            log.info("save.refused", slot=slot, why=str(self.refused))
            return content
        return replace(
            content,
            n_tokens=snapshot.n_tokens,
            n_saved=snapshot.n_tokens,
            tokens=snapshot.tokens,
            n_prompt=min(content.n_prompt, snapshot.n_tokens),
        )

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
                self.on_removed(None)
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
            self.on_removed(None)  # another slot may count as saved in it
            self._metrics.restored(Outcome.REFUSED)
            return False
        seconds = max(0.0, self._clock() - started)
        self.costs.observe_restore(snapshot.size, seconds)
        self._metrics.restored(Outcome.OK, seconds=seconds, size=snapshot.size)
        await self._touch(snapshot)
        await self._delete(self.over(), Cause.SPACE)  # it was kept while another was saved
        self.gauge()
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
