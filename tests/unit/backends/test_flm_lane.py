"""One at a time, in order, with a pause where one is due; answers outlive their readers."""

from __future__ import annotations

import asyncio

import pytest

from proxy.backends.flm_lane import Job, Lane
from proxy.errors import BackendUnreachableError


async def test_in_order() -> None:
    """The lane has one user; who came first is next, and who gave up is skipped."""
    lane = Lane()
    await lane.enter()
    order: list[int] = []

    async def wait(number: int) -> None:
        await lane.enter()
        order.append(number)
        lane.leave(0.0)

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert (order, lane.wanted) == ([], True)
    lane.leave(0.0)
    await asyncio.wait(tasks)
    assert (order, lane.wanted) == ([0, 2], False)


async def test_a_pause() -> None:
    """After trouble the next one starts no sooner than it was said, and may give up meanwhile."""
    lane, loop = Lane(), asyncio.get_running_loop()
    await lane.enter()
    begun = loop.time()
    lane.leave(0.02)
    quitter = asyncio.create_task(lane.enter())
    await asyncio.sleep(0)
    quitter.cancel()
    await lane.enter()
    assert loop.time() >= begun + 0.02


async def test_a_job_is_read_as_it_is_written() -> None:
    """Head, pieces and end come in order, whoever is ahead."""
    job = Job()
    reading = asyncio.create_task(job.read())
    await asyncio.sleep(0)
    job.begin(200, [("A", "b")])
    await job.begun()
    job.put(b"one")
    await asyncio.sleep(0)
    job.put(b"")
    job.put(b"two")
    job.end()
    assert (await reading, await job.read_some(), job.status) == (b"onetwo", b"", 200)


async def test_a_job_that_fails() -> None:
    """Before the head it is the head's error, after it the body's; only the first end counts."""
    job, late = Job(), Job()
    job.end(BackendUnreachableError("gone"))
    job.end()
    with pytest.raises(BackendUnreachableError):
        await job.begun()
    late.begin(200, [])
    late.put(b"x")
    late.end(BackendUnreachableError("gone"))
    await late.begun()
    assert await late.read_some() == b"x"
    with pytest.raises(BackendUnreachableError):
        await late.read_some()


async def test_a_cancelled_read_loses_nothing() -> None:
    """Who stops waiting finds the next piece all the same."""
    job = Job()
    job.begin(200, [])
    reading = asyncio.create_task(job.read_some())
    await asyncio.sleep(0)
    reading.cancel()
    job.put(b"x")
    assert await job.read_some() == b"x"
