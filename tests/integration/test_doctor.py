"""The doctor before the fake llama-server: every server it may meet, and what it says of it.

About ``proxy.doctor`` and ``proxy.checks.engine``.
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from proxy import doctor
from proxy.backends.base import SlotView
from proxy.backends.probe import OTHER_FOLDER, WINDOW
from proxy.checks import engine
from proxy.checks.finding import Finding, Level
from proxy.engine import free_port
from proxy.errors import BackendRefusedError
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import posts, settings

READY = {"ready": True, "mode": "exclusive", "why": "it was proved"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small trial of the disk."""
    monkeypatch.setattr("proxy.checks.machine.TRIAL", 2**20)


async def examine(
    fake: FakeLlamaServer, slot_dir: Path | None, ready: Any = None, **changes: Any
) -> doctor.Report:
    """A report with everything tried, unless ``probe=False``."""
    probe, at = changes.pop("probe", True), changes.pop("at", "")
    config = settings(fake.url, slot_dir, **changes)
    return await doctor.examine(config, ready, probe=probe, at=at)


def of(report: doctor.Report, subject: str) -> Finding:
    """The one finding about this."""
    (found,) = [one for one in report.findings if one.subject == subject]
    return found


def left_in(folder: Path) -> list[str]:
    """Names of the files there."""
    return [path.name for path in folder.iterdir()]


async def test_all_is_well(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """The right flags: the mode, the class, a journey that paid; no file and no token is left."""
    report = await examine(fake, slot_dir)
    assert report.good
    assert of(report, "mode").text.startswith("exclusive: ")
    assert of(report, "memory").text.startswith("class A")
    assert of(report, "round trip").text.endswith("560 reused")
    assert of(report, "batch").text.startswith("64 tokens at a time")
    assert of(report, "same folder").level is Level.OK
    assert left_in(slot_dir) == []
    assert all(slot.tokens == [] for slot in fake.engine.slots)


async def test_without_probe_nothing_is_computed(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """One save, and nothing a slot holds is lost."""
    fake.engine.slots[0].tokens = [1, 2, 3]
    report = await examine(fake, slot_dir, probe=False)
    assert report.good
    assert of(report, "mode").text.startswith("not tried")
    assert of(report, "memory").text == "class not known; `slotkeeper doctor --probe` finds out"
    assert [one.target.partition("?")[2] for one in posts(fake)] == ["action=save"]
    assert fake.engine.slots[0].tokens == [1, 2, 3]
    assert left_in(slot_dir) == []


async def test_without_probe_the_record_knows(
    fake: FakeLlamaServer, slot_dir: Path, serve: Serve
) -> None:
    """What a proxy that is gone proved of this very server holds; not of a restarted one."""
    await (await serve()).stop()
    before = sorted(path.name for path in (slot_dir / "slotkeeper" / "catalogue.d").iterdir())
    report = await examine(fake, slot_dir, probe=False)
    assert of(report, "mode").text.startswith("exclusive: ")
    assert "found out earlier" in of(report, "mode").text
    assert of(report, "memory").text.startswith("class A")
    assert before == sorted(
        path.name for path in (slot_dir / "slotkeeper" / "catalogue.d").iterdir()
    ), "it only looks"
    await fake.restart()
    report = await examine(fake, slot_dir, probe=False)
    assert of(report, "mode").text.startswith("not tried")
    assert of(report, "memory").level is Level.NOTE


async def test_the_ram_cache_is_on(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """Default flags: forward, and the launch line has what lifts it."""
    await fake.restart(ram_cache=True)
    report = await examine(fake, slot_dir)
    assert not report.good
    assert "RAM cache is on" in of(report, "mode").text
    words = shlex.split(report.launch)
    assert words[words.index("--cache-ram") + 1] == "0"
    assert words[words.index("--slot-save-path") + 1] == str(slot_dir)


async def test_another_folder(fake: FakeLlamaServer, slot_dir: Path, tmp_path: Path) -> None:
    """It is said that a file was left there; nothing further is tried."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    report = await examine(fake, other)
    same = of(report, "same folder")
    assert same.level is Level.PROBLEM
    (left,) = left_in(slot_dir)
    assert left in same.text
    assert of(report, "mode").level is Level.PROBLEM
    assert len(posts(fake)) == 1


async def test_a_folder_of_another_user(
    fake: FakeLlamaServer, slot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may not enter it is told so, and nothing is saved into it."""
    monkeypatch.setattr("proxy.checks.machine.os.access", lambda *_: False)
    report = await examine(fake, slot_dir)
    assert [one.subject for one in report.findings if one.level is Level.PROBLEM] == ["slot folder"]
    assert of(report, "mode").text == "not tried"
    assert posts(fake) == []


async def test_no_save_path(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """The server says so, and the line names the folder."""
    fake.slot_dir = None
    report = await examine(fake, slot_dir)
    assert of(report, "same folder").text == "the server runs without --slot-save-path"
    assert not report.good


async def test_nobody_there(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """The address is named; the line has the port that was asked."""
    await fake.die()
    report = await examine(fake, slot_dir)
    backend = of(report, "backend")
    assert backend.level is Level.PROBLEM
    assert fake.url in backend.text
    assert report.launch.endswith(f"--port {fake.port}")


@pytest.mark.parametrize(
    ("attribute", "value", "todo"),
    [("loading", True, "try again"), ("key", "hunter2", "backend.key")],
)
async def test_it_refuses(
    fake: FakeLlamaServer, slot_dir: Path, attribute: str, value: object, todo: str
) -> None:
    """Still loading, or a key is missing: what to do about it."""
    setattr(fake, attribute, value)
    report = await examine(fake, slot_dir)
    assert todo in of(report, "backend").todo


async def test_the_key_is_used(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """With ``backend.key`` a server that demands one is examined like any other."""
    fake.key = "hunter2"
    config = settings(fake.url, slot_dir)
    backend = config.backend.model_copy(update={"key": SecretStr("hunter2")})
    config = config.model_copy(update={"backend": backend})
    report = await doctor.examine(config, None, probe=False)
    assert report.good
    assert "hunter2" not in str(report)


async def test_a_sliding_window(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """Its states are not used, and the class says so; nothing is advised that would not help."""
    fake.window = True
    report = await examine(fake, slot_dir)
    assert of(report, "memory").text.startswith("class B or C")
    mode = of(report, "mode")
    assert (mode.level, mode.todo[:14]) == (Level.WARNING, "No launch line")


async def test_all_slots_are_busy(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """Nothing is touched."""
    for slot in fake.engine.slots:
        slot.busy = True
    report = await examine(fake, slot_dir)
    assert (of(report, "slots").level, of(report, "mode").text) == (Level.WARNING, "not tried")
    assert posts(fake) == []


async def test_no_folder_is_named(fake: FakeLlamaServer) -> None:
    """Mode forward, with DIR in the line."""
    report = await examine(fake, None)
    assert "no slot folder" in of(report, "mode").text
    assert "--slot-save-path DIR" in report.launch


@pytest.mark.parametrize(
    ("ready", "good", "memory"),
    [
        (READY, True, "class A: "),
        (READY | {"mode": "forward", "why": "RAM cache"}, False, "class not known: "),
        (READY | {"mode": "forward", "why": f"a {WINDOW} model"}, True, "class B or C "),
        (READY | {"ready": False}, False, "class A: "),
    ],
)
async def test_a_proxy_is_running(
    fake: FakeLlamaServer, slot_dir: Path, ready: dict[str, Any], good: bool, memory: str
) -> None:
    """The slots are its own: nothing is asked of them, its verdict is told instead."""
    report = await examine(fake, slot_dir, ready)
    assert report.good is good
    assert of(report, "mode").text == f"{ready['mode']}: {ready['why']}"
    assert of(report, "memory").text.startswith(memory)
    assert "running proxy" in of(report, "round trip").text
    assert posts(fake) == []


async def test_a_running_proxy_with_another_folder(
    fake: FakeLlamaServer, slot_dir: Path, tmp_path: Path
) -> None:
    """Both are named, and it is a problem; the same folder spelled otherwise is none."""
    other, spelled = str(tmp_path / "other"), f"{slot_dir}/../{slot_dir.name}"
    ready = READY | {"backend": {"url": fake.url.replace("127.0.0.1", "localhost")}}
    report = await examine(fake, slot_dir, ready | {"store": {"slot_dir": other}})
    same = of(report, "same folder")
    assert same.level is Level.PROBLEM
    assert (other in same.text, str(slot_dir) in same.text) == (True, True)
    assert (await examine(fake, slot_dir, ready | {"store": {"slot_dir": spelled}})).good
    assert (await examine(fake, slot_dir, ready | {"store": None})).good


async def test_a_running_proxy_whose_server_has_another_folder(
    fake: FakeLlamaServer, slot_dir: Path
) -> None:
    """That proxy and doctor agree on a folder is not enough: the server's is another."""
    other = {"mode": "forward", "why": OTHER_FOLDER, "store": {"slot_dir": str(slot_dir)}}
    same = of(await examine(fake, slot_dir, READY | other), "same folder")
    assert same.level is Level.PROBLEM
    assert str(slot_dir) in same.text


async def test_a_proxy_runs_and_nobody_said_where(
    fake: FakeLlamaServer, slot_dir: Path, serve: Serve
) -> None:
    """Its slots are left alone: who has the store has them."""
    await serve()
    before = len(posts(fake))
    report = await examine(fake, slot_dir)
    assert "--url" in of(report, "proxy").todo
    assert of(report, "mode").text == "not tried"
    assert len(posts(fake)) == before


async def test_no_proxy_where_one_was_named(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """It is said, and the rest is looked at."""
    report = await examine(fake, slot_dir, at="http://127.0.0.1:1")
    assert of(report, "proxy").text == "no slotkeeper answers at http://127.0.0.1:1"
    assert of(report, "mode").text.startswith("exclusive: ")


async def test_a_slotkeeper_as_its_backend(
    fake: FakeLlamaServer, slot_dir: Path, serve: Serve
) -> None:
    """It is recognised, and nothing else is asked of it."""
    proxy = await serve()
    fake.requests.clear()
    report = await doctor.examine(settings(proxy.url, slot_dir), None, probe=True)
    found = of(report, "backend")
    assert found.level is Level.PROBLEM
    assert (found.text, "model server" in found.todo) == (f"{proxy.url} is a slotkeeper", True)
    assert not report.good
    assert posts(fake) == []


async def test_a_running_proxy_that_cannot_save(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """Why the last state was not saved, and what to do about it."""
    store = {"refused": "pins-full", "advice": "unpin some"}
    saving = of(await examine(fake, slot_dir, READY | {"store": store}), "saving")
    assert (saving.level, saving.todo) == (Level.WARNING, "unpin some")
    assert "pins-full" in saving.text


async def test_a_running_proxy_before_another_server(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """Its verdict says nothing of this one, which is tried; the command for its own is named."""
    ready = READY | {"mode": "forward", "backend": {"url": "http://127.0.0.1:1"}}
    report = await examine(fake, slot_dir, ready | {"store": {"slot_dir": "/elsewhere"}})
    assert report.good
    other = of(report, "proxy")
    assert other.level is Level.WARNING
    assert "--backend http://127.0.0.1:1 --slot-save-path /elsewhere`" in other.todo
    assert of(report, "mode").text.startswith("exclusive: ")


async def test_the_launch_line_can_be_run_anywhere(
    fake: FakeLlamaServer, slot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is absolute, however it was named."""
    monkeypatch.chdir(slot_dir.parent)
    report = await examine(fake, Path(slot_dir.name), probe=False)
    words = shlex.split(report.launch)
    assert words[words.index("--slot-save-path") + 1] == str(slot_dir)


async def test_it_dies_underneath(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """A server that goes away in the middle is a problem, not a crash."""
    fake.fail("die", on="/completion", at="progress")
    report = await examine(fake, slot_dir)
    assert "failed underneath" in of(report, "mode").text
    assert left_in(slot_dir) == []


async def test_another_kind_of_server(slot_dir: Path, fake: FakeLlamaServer) -> None:
    """What cannot be driven is no problem, and no llama-server line is given for it."""
    report = await examine(fake, slot_dir, kind="openai_compatible")
    assert of(report, "mode").level is Level.NOTE
    assert report.launch == ""


def trip(tokens: int = 560, *, batches: list[int], computed: float, reused: int) -> engine.Trip:
    """A journey that was made."""
    return engine.Trip(tokens, computed, 0.1, 2**20, 0.01, reused, batches)


@pytest.mark.parametrize(
    ("made", "levels", "shown"),
    [
        (trip(batches=[256, 256, 48], computed=2.0, reused=560), ["ok", "ok"], "256 tokens"),
        (trip(batches=[560], computed=2.0, reused=560), ["ok", "warning"], "at least 560"),
        (trip(batches=[560], computed=0.1, reused=559), ["ok", "ok"], "at least 560"),
        (trip(batches=[512, 48], computed=20.0, reused=0), ["problem", "warning"], "512 tokens"),
        (trip(batches=[256, 256, 48], computed=20.0, reused=560), ["ok", "ok"], "256 tokens"),
    ],
)
def test_what_a_journey_says(made: engine.Trip, levels: list[str], shown: str) -> None:
    """It must have paid; a batch that holds others up, and could be smaller, is a warning."""
    found = engine.travelled(made)
    assert [str(one.level) for one in found] == levels
    assert shown in found[1].text


def test_a_journey_without_progress() -> None:
    """A server that tells no progress tells no batch."""
    assert len(engine.travelled(trip(batches=[], computed=1.0, reused=560))) == 1


@pytest.mark.parametrize(
    ("computed", "batch"), [(0.0, 2048), (0.1, 2048), (1.0, 1024), (99.0, 256)]
)
def test_the_good_batch(computed: float, batch: int) -> None:
    """The largest that takes three seconds at most, and 256 at least."""
    assert engine.good_batch(trip(batches=[560], computed=computed, reused=560)) == batch


class Refusing:
    """A backend whose save fails, or never ends."""

    def __init__(self, error: BackendRefusedError | None) -> None:
        """None: it never ends."""
        self.error = error

    async def save(self, slot: int, name: str) -> None:
        """See ``Backend``."""
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "level"),
    [(BackendRefusedError("no", answer=500), Level.PROBLEM), (None, Level.WARNING)],
)
async def test_a_save_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    slot_dir: Path,
    error: BackendRefusedError | None,
    level: Level,
) -> None:
    """An error is told; a save that hangs is given up."""
    monkeypatch.setattr(engine, "SAVE_SECONDS", 0.01)
    idle: Any = [SlotView(0, 64, is_processing=False, id_task=None, n_tokens=None)]
    backend: Any = Refusing(error)
    found = await engine.same_folder(backend, idle, slot_dir)
    assert found.level is level


async def test_a_port_that_is_taken(fake: FakeLlamaServer, slot_dir: Path) -> None:
    """Another program where the proxy wants to listen is a problem."""
    report = await examine(fake, slot_dir, probe=False, port=fake.port)
    assert of(report, "address").level is Level.PROBLEM
    report = await examine(fake, slot_dir, probe=False, port=free_port())
    assert of(report, "address").level is Level.OK
