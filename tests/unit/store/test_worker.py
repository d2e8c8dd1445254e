"""One thread for one store (`proxy.store.worker`)."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator

import pytest

from proxy.store.files import StoreBusyError, StoreError
from proxy.store.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One that is stopped at the end."""
    made = Worker("test-worker")
    yield made
    made.stop()


async def test_all_work_runs_in_one_thread_of_its_own(worker: Worker) -> None:
    """SQLite connections belong to their thread."""
    names = {await worker.call(lambda: threading.current_thread().name) for _ in range(3)}
    assert names == {"test-worker_0"}


async def test_errors_of_the_disk_have_one_type_and_name_no_file(worker: Worker) -> None:
    """A file's name may say too much in a log; other errors stay what they are."""

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(StoreError) as caught:
        await worker.call(fail, OSError(errno.EIO, "broken", "/home/me/secret"))
    assert "secret" not in str(caught.value)
    with pytest.raises(StoreBusyError):
        await worker.call(fail, StoreBusyError("taken"))
    with pytest.raises(ValueError, match="else"):
        await worker.call(fail, ValueError("something else"))


async def test_a_caller_that_leaves_does_not_break_the_work(worker: Worker) -> None:
    """What has begun ends, and is waited for."""
    begun, go, done = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        begun.set()
        await go.wait()
        done.append(1)

    caller = asyncio.create_task(worker.whole(work()))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    await worker.settled()
    assert done == [1]
    await worker.settled()


async def test_an_error_after_the_caller_left_is_no_warning(worker: Worker) -> None:
    """Nobody is there to see it; it must not come up as a task's unseen exception."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go.wait()
        raise StoreError

    caller = asyncio.create_task(worker.whole(work()))
    await begun.wait()
    caller.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await worker.settled()
