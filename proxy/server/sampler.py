"""Feeds the minute-by-minute series, and keeps it in a small private file over restarts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from proxy.server import status
from proxy.store import files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proxy.curator import Curator
    from proxy.telemetry.history import Decision
    from proxy.telemetry.metrics import Metrics
    from proxy.telemetry.series import Series

log = structlog.get_logger("slotkeeper.history")

LOOK = 10.0  # seconds between two looks at the counters
WRITE = 12  # looks between two writes: a killed proxy forgets two minutes
MOST = 1024 * 1024  # bytes; a larger file is none of ours


class Sampler:
    """Beside the server, from ``open`` to ``close``."""

    def __init__(
        self,
        series: Series,
        metrics: Metrics,
        clock: Callable[[], float],
        curator: Curator | None = None,
    ) -> None:
        """``clock`` gives unix seconds."""
        self._series = series
        self._metrics = metrics
        self._clock = clock
        self._curator = curator
        self._path: Path | None = None

    def decided(self, decision: Decision, new: bool) -> None:  # noqa: FBT001 - History's signature
        """A request ended."""
        if new:
            self._series.answered(self._clock(), decision.first_token)

    async def open(self, path: Path | None) -> None:
        """Go on where ``path`` ends; None: keep it in memory alone."""
        self._path = path
        if path is None:
            return
        with suppress(OSError):
            data = await asyncio.to_thread(_read, path)
            self._series.load(data, self._clock())

    async def run(self) -> None:
        """Until cancelled."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK)
            looks += 1
            await self.look()
            if looks % WRITE == 0:
                await self.write()

    async def look(self) -> None:
        """Note the counters as they stand, and how much room the disk has."""
        if self._curator is not None:
            with suppress(OSError):
                await self._curator.look()
        self._series.note(self._clock(), status.counters(self._metrics))

    async def write(self) -> None:
        """Bring the file up to date, in a thread; a disk that refuses costs the file only."""
        if self._path is None:
            return
        try:
            await asyncio.to_thread(_write, self._path, self._series.dump())
        except OSError as error:
            log.warning("history.unwritten", error=type(error).__name__)

    async def close(self) -> None:
        """The last look, and the last write. After ``open`` only."""
        self._series.note(self._clock(), status.counters(self._metrics))
        await self.write()
        self._path = None


def _read(path: Path) -> bytes:
    for part in files.named(path.parent, files.PART_NAME):  # of a process killed in a write
        files.remove(part)
    if files.regular(path) is None:
        return b""
    with files.open_regular(path) as file:
        return file.read(MOST)


def _write(path: Path, data: bytes) -> None:
    files.write_atomic(path, data, shared=False)
