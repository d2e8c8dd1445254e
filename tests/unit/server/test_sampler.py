"""The series' file: private, whole or not there, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.core.records import Reason
from proxy.server.sampler import Sampler
from proxy.telemetry.history import Decision
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.series import Series
from tests.unit.doubles import Clock


def names(folder: Path) -> list[str]:
    """What is in it."""
    return [entry.name for entry in folder.iterdir()]


class Run:
    """One life of the proxy."""

    def __init__(self, now: float) -> None:
        self.series = Series()
        self.metrics = Metrics()
        self.clock = Clock(now)
        self.sampler = Sampler(self.series, self.metrics, self.clock)

    def answered(self) -> None:
        """A request ended; its explanation comes later and is no second one."""
        decision = Decision("r", self.clock.now, "/", Reason.COLD, 200, 1.0, first_token=2.0)
        self.sampler.decided(decision, True)
        self.sampler.decided(decision, False)


async def test_the_past_is_there_again(tmp_path: Path) -> None:
    """What one life wrote at its end, the next one shows; nobody else can read it."""
    path = tmp_path / "history.json"
    one, two = Run(600.0), Run(900.0)
    await one.sampler.open(path)
    one.answered()
    one.metrics.prompt(reused=5, computed=7, restored=False, saved=1.0)
    await one.sampler.look()
    await one.sampler.close()
    if os.name != "nt":
        assert path.stat().st_mode & 0o777 == 0o600
    await two.sampler.open(path)
    (row,) = two.series.rows(0)
    assert row[:5] == [600, 1, 5, 0, 7]
    assert names(tmp_path) == ["history.json"]


async def test_nowhere_to_keep_it(tmp_path: Path) -> None:
    """Without a file nothing is written, also after the end."""
    run = Run(600.0)
    await run.sampler.open(None)
    run.answered()
    await run.sampler.write()
    await run.sampler.close()
    await run.sampler.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"{", b"\xff" * 100])
async def test_a_damaged_file_costs_the_past_only(tmp_path: Path, data: bytes) -> None:
    """It is overwritten by the next write; what a killed process left half-written is gone."""
    path = tmp_path / "history.json"
    path.write_bytes(data)
    part = tmp_path / f"part-{'0' * 32}"
    part.write_bytes(b"x")
    run = Run(600.0)
    await run.sampler.open(path)
    assert run.series.rows(0) == []
    assert not part.exists()
    run.answered()
    await run.sampler.close()
    again = Run(900.0)
    await again.sampler.open(path)
    assert len(again.series.rows(0)) == 1


@pytest.mark.skipif(os.name == "nt", reason="symlinks as POSIX has them")
async def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Neither read nor written through."""
    target = tmp_path / "target"
    run, path = Run(600.0), tmp_path / "history.json"
    run.answered()
    target.write_bytes(run.series.dump())
    path.symlink_to(target)
    other = Run(900.0)
    await other.sampler.open(path)
    assert other.series.rows(0) == []
    before = target.read_bytes()
    await other.sampler.close()
    assert target.read_bytes() == before
    assert not path.is_symlink()
