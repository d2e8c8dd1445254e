"""The ledger on disk: one row per conversation, written behind by a second.

A row lost, or one from the second before a kill, costs time only: the next request of that
conversation is a new one. So a row that cannot be read is dropped, never mourned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from proxy.store import files
from proxy.store.catalogue import Catalogue
from proxy.store.files import StoreBusyError, StoreError
from proxy.store.packing import from_row, to_row
from proxy.store.worker import Worker
from proxy.telemetry.metrics import Where

if TYPE_CHECKING:
    from proxy.core.ledger import Conversation
    from proxy.telemetry.metrics import Metrics

log = structlog.get_logger("slotkeeper.ledger")

CONVERSATION = "conversation"
WRITE_BEHIND = 1.0  # seconds of conversation a killed proxy may forget (DESIGN.md)
LONGEST_PAUSE = 60.0  # seconds between tries while the disk fails


class LedgerStore:
    """Conversations in a folder of their own. Every method may raise ``StoreError``."""

    def __init__(self, directory: Path) -> None:
        """Touches nothing; ``open`` does. No other user ever reads ``directory``."""
        self._directory = directory
        self._lock = files.Lock(directory / "lock")
        self._rows = Catalogue(directory / "catalogue.d")
        self._worker = Worker("slotkeeper-ledger")
        self._closed = False
        self.dropped = 0  # rows that were none of ours, or damaged
        self.aside = ""  # the name a corrupt catalogue was moved aside to

    async def open(self) -> list[Conversation]:
        """All that is kept, the last used first.

        Raises ``StoreBusyError`` when another proxy keeps its ledger there.
        """
        return await self._worker.whole(self._worker.call(self._open))

    async def write(self, changed: Sequence[Conversation], gone: Collection[str]) -> None:
        """Keep these as they are now; ``gone`` are ids to forget."""
        await self._worker.whole(self._worker.call(self._write, changed, gone))

    async def close(self) -> None:
        """Let running work end, unlock. Final; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._worker.settled()
        await self._worker.call(self._shut)
        self._worker.stop()

    def _open(self) -> list[Conversation]:
        files.make_dir(self._directory, shared=False)
        try:
            self._lock.take()
        except StoreBusyError as error:
            message = "another slotkeeper keeps its ledger there; name another normalise.ledger"
            raise StoreBusyError(message) from error
        try:
            self.aside = self._rows.open()
            return self._read()
        except BaseException:
            self._shut()
            raise

    def _read(self) -> list[Conversation]:
        pool: dict[bytes, bytes] = {}  # equal bytes are kept once: tools and system text are long
        found: list[Conversation] = []
        for key, row in self._rows.items(CONVERSATION).items():
            conversation = from_row(key, row, pool)
            if conversation is None:
                self._rows.delete(CONVERSATION, key)
                self.dropped += 1
            else:
                found.append(conversation)
        return sorted(found, key=lambda c: c.used, reverse=True)

    def _write(self, changed: Iterable[Conversation], gone: Iterable[str]) -> None:
        for conversation in changed:
            self._rows.put(CONVERSATION, conversation.id, to_row(conversation))
        gone = tuple(gone)
        for key in gone:
            self._rows.delete(CONVERSATION, key)
        if gone:
            self._rows.scrub()

    def _shut(self) -> None:
        self._rows.close()
        self._lock.release()


class LedgerWriter:
    """Writes behind: remembers what changed and brings it to disk at most once a second.

    A disk that fails is counted, logged and tried again, ever more seldom; requests never see it.
    """

    def __init__(
        self, store: LedgerStore, metrics: Metrics, *, interval: float = WRITE_BEHIND
    ) -> None:
        """``interval`` in seconds."""
        self._store = store
        self._metrics = metrics
        self._interval = interval
        self._changed: dict[str, Conversation] = {}
        self._gone: set[str] = set()
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[bool] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    def changed(self, conversation: Conversation) -> None:
        """It is as this from now on."""
        self._gone.discard(conversation.id)
        self._changed[conversation.id] = conversation
        self._arm()

    def gone(self, conversation: str) -> None:
        """That id is no more."""
        self._changed.pop(conversation, None)
        self._gone.add(conversation)
        self._arm()

    async def flush(self) -> bool:
        """Bring everything to disk now; False when that failed: it is tried again later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        async with self._turn:
            done = await self._write()
        self._arm()
        return done

    async def close(self) -> None:
        """Flush and write no more; the store stays open."""
        self._closed = True
        await self.flush()
        if self._task is not None:
            await self._task

    def _arm(self) -> None:
        """Have what is unwritten written soon, unless that is under way."""
        waiting = self._timer is not None or self._turn.locked()
        if waiting or self._closed or not (self._changed or self._gone):
            return
        pause = min(LONGEST_PAUSE, self._interval * 2**self._failures)
        self._timer = asyncio.get_running_loop().call_later(pause, self._start)

    def _start(self) -> None:
        self._timer = None
        self._task = asyncio.create_task(self.flush(), name="ledger-write")

    async def _write(self) -> bool:
        changed, gone = self._changed, self._gone
        if not changed and not gone:
            return True
        self._changed, self._gone = {}, set()
        try:
            await self._store.write(tuple(changed.values()), gone)
        except StoreError as error:
            self._put_back(changed, gone)
            self._failures += 1
            self._metrics.fault(Where.STORE)
            log.warning("ledger.unwritten", error=type(error).__name__, count=len(changed))
        except asyncio.CancelledError:
            self._put_back(changed, gone)
            raise
        except Exception as error:  # a fault of ours would be the same the next time
            self._metrics.fault(Where.STORE)
            log.exception("ledger.fault", error=type(error).__name__, count=len(changed))
        else:
            self._failures = 0
            return True
        return False

    def _put_back(self, changed: dict[str, Conversation], gone: set[str]) -> None:
        """What was not written counts as unwritten again, unless there is newer word of it."""
        newer = {*self._changed, *self._gone}
        self._changed |= {key: value for key, value in changed.items() if key not in newer}
        self._gone |= gone - newer
