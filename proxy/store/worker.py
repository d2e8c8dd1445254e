"""One thread for one store: all its disk work runs there, so no two operations meet.

SQLite connections belong to their thread, and nothing here blocks the event loop. An operation
once begun runs to its end: a caller that is cancelled stops waiting, not the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from proxy.store.files import StoreError

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """The thread, and the operations that are under way in it."""

    def __init__(self, name: str) -> None:
        """``name`` is the thread's; it starts with the first call."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._running: set[asyncio.Task[Any]] = set()

    async def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` in the thread. Raises ``StoreError`` for whatever ``OSError`` it raises."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))
        except StoreError:
            raise
        except OSError as error:
            # The file's name would say nothing to the user, and may say too much in a log.
            raise StoreError(error.errno, error.strerror) from error

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end, whatever happens to the caller."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Until no operation is under way."""
        while self._running:
            await asyncio.wait(self._running)

    def stop(self) -> None:
        """End the thread after its present work. Final."""
        self._thread.shutdown(wait=False)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have left
