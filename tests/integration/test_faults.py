"""What goes wrong behind the cache costs time, is counted, and never costs an answer."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import aiohttp
import pytest

from proxy.core.records import Mode
from proxy.dialects import DIALECTS
from proxy.store.snapshots import StoreError
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, Answer, Proxy, chat

SAVED = ("one", "two", "three")


async def talk(proxy: Proxy, name: str) -> Answer:
    """The conversation ``name``: always the same prompt, long enough to be worth saving."""
    answer = await proxy.chat(f"{name} {LONG}")
    assert answer.status == 200
    return answer


@pytest.fixture
async def full(proxy: Proxy) -> Proxy:
    """Three conversations on two slots, all of them on disk; the first one is only there."""
    for name in SAVED:
        await talk(proxy, name)
        await proxy.look()
    assert len((await proxy.page("api/snapshots"))["snapshots"]) == 3
    return proxy


async def test_a_restore_is_used(full: Proxy) -> None:
    """The conversation that lost its slot comes back from disk, and the header says so."""
    answer = await talk(full, "one")
    timings = answer.json["timings"]
    assert answer.reason == "restored"
    assert timings["prompt_n"] == 1
    assert f"reused={timings['cache_n']}; prompt={timings['cache_n'] + 1}" in answer.said


async def test_useless_restores_are_retired(full: Proxy, fake: FakeLlamaServer) -> None:
    """Three restores that say they worked and spared nothing: none is tried any more, visibly."""
    fake.fail("lie", on="restore", times=99)
    for n, name in enumerate(SAVED, 1):
        assert full.metric("ineffective_restores_total") == n - 1
        assert (await full.page("readyz"))["restores"] == "in use"
        answer = await talk(full, name)
        assert answer.reason == "cold"
        assert answer.json["timings"]["cache_n"] == 0
        await full.look()
    assert (await full.page("readyz"))["restores"] == "retired"
    assert full.metric("ineffective_restores_total") == 3
    restores = len(fake.seen("restore"))
    for name in (*SAVED, *SAVED):
        await talk(full, name)
    assert len(fake.seen("restore")) == restores


async def test_one_useless_restore_is_forgiven(full: Proxy, fake: FakeLlamaServer) -> None:
    """A restore that shows up again ends the count."""
    fake.fail("lie", on="restore", times=2)
    for name in (*SAVED, *SAVED):
        await talk(full, name)
    assert full.metric("ineffective_restores_total") == 2
    assert full.app.transfer is not None
    assert full.app.transfer.ineffective == 0
    assert (await full.page("readyz"))["restores"] == "in use"


@pytest.mark.parametrize("kind", ["error", "bad-json", "lie"])
async def test_a_save_that_fails(proxy: Proxy, fake: FakeLlamaServer, kind: Any) -> None:
    """Nothing is published, nothing is left over, the slot still serves."""
    await talk(proxy, "one")
    fake.fail(kind, on="save")
    await proxy.look(Mode.EXCLUSIVE)
    assert proxy.metric('saves_total{outcome="failed"}') == 1
    assert (await proxy.page("api/snapshots"))["snapshots"] == []
    assert fake.slot_dir is not None
    assert [path.name for path in fake.slot_dir.iterdir()] == ["slotkeeper"]
    assert (await talk(proxy, "one")).reason == "slot-hit"


async def test_a_save_before_a_displacement_that_fails(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The request that needed the slot is answered all the same."""
    fake.fail("error", on="save", times=9)
    for name in SAVED:
        await talk(proxy, name)
    assert proxy.metric('saves_total{outcome="failed"}') == 1
    assert (await talk(proxy, "three")).json["timings"]["prompt_n"] == 1


@pytest.mark.parametrize(("keep_free", "slot"), [(0, 0), (2**62, 1)])
async def test_what_cannot_be_saved_keeps_its_slot(serve: Serve, keep_free: int, slot: int) -> None:
    """On a full disk the few tokens shared with a conversation are no reason to displace it.

    The dry run reckons as the decision does.
    """
    proxy = await serve(keep_free=keep_free)
    for text in (f"Of use: {LONG} {LONG} {LONG}", f"Given up {LONG}"):
        await proxy.chat(text)
    await proxy.look(Mode.EXCLUSIVE)
    request = chat(f"Of use: {LONG[:300]} or not {LONG}")
    page, asked = "/_slotkeeper/api/explain", {"path": CHAT, "request": request}
    told = (await proxy.ask(page, asked, headers={"Content-Type": "application/json"})).json
    answer = await proxy.ask(CHAT, request)
    assert f"slot={slot};" in answer.said
    weighed = (await proxy.page("api/requests"))["requests"][0]["costs"]
    assert [row["slot"] for row in told["options"]] == [row["slot"] for row in weighed]
    for foreseen, row in zip(told["options"], weighed, strict=True):
        assert foreseen["loss"] == pytest.approx(row["loss"], abs=0.05)
    lost = next(row["loss"] for row in weighed if row["slot"] == 0)
    assert (lost > 0.1) is bool(keep_free), "the time to compute it all, or to restore it"


async def test_a_restore_that_is_refused(full: Proxy, fake: FakeLlamaServer) -> None:
    """A 400 is tried once more; then this instance is not asked again, and the file is kept."""
    fake.fail("error", on="restore", status=400, times=2)
    assert (await talk(full, "one")).reason == "cold"
    assert len(fake.seen("restore")) == 3  # the probe's own
    assert full.metric('restores_total{outcome="refused"}') == 1
    rows = (await full.page("api/snapshots"))["snapshots"]
    assert [row["barred"] for row in rows].count(True) == 1


async def test_a_damaged_file(full: Proxy, fake: FakeLlamaServer) -> None:
    """A state with one byte too few never reaches the backend; the prompt is computed."""
    assert full.app.transfer is not None
    assert fake.slot_dir is not None
    for path in (fake.slot_dir / "slotkeeper").glob("*/*.kv"):
        data = await asyncio.to_thread(path.read_bytes)
        await asyncio.to_thread(path.write_bytes, data[:-1])
    before = len(fake.seen("restore"))
    assert (await talk(full, "one")).reason == "cold"
    assert len(fake.seen("restore")) == before
    assert full.metric('restores_total{outcome="failed"}') == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
async def test_a_fault_in_the_prefix_chain(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A request whose chain cannot be made is answered, the fault is counted."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("index out of order")

    monkeypatch.setattr(type(DIALECTS[path]), "prompt", broken)
    answer = await proxy.ask(path, {**chat("x"), "prompt": "x"})
    assert answer.status == 200
    assert proxy.metric('faults_total{where="prompt"}') == 1


async def test_a_fault_in_the_look_at_the_prompt(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """A backend that does not tell tokens serves the request nevertheless."""
    fake.fail("error", on="/tokenize")
    assert (await proxy.chat("x")).status == 200
    assert proxy.metric('faults_total{where="prompt"}') == 1


@pytest.mark.parametrize("where", ["matches", "index"])
async def test_a_fault_in_the_index(
    full: Proxy, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """When weighing fails, the request goes to any free slot, and so does the next one."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("index out of order")

    assert full.app.transfer is not None
    target = full.app.transfer if where == "matches" else full.app.transfer.index
    monkeypatch.setattr(target, "matches" if where == "matches" else "ranked", broken)
    for _ in range(2):
        answers = await asyncio.gather(*(talk(full, name) for name in ("a", "b", "c")))
        assert {answer.status for answer in answers} == {200}
    assert answers[0].reason in {"bypass", "slot-hit", "cold"}
    assert full.metric('faults_total{where="placement"}') >= 3
    monkeypatch.undo()


@pytest.mark.parametrize("error", [StoreError(errno.EIO, "input/output"), RuntimeError("a bug")])
@pytest.mark.parametrize("method", ["stage", "unstage", "touch"])
async def test_a_fault_in_the_store_on_the_way_in(
    full: Proxy, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    """A request that wanted a snapshot is answered without it."""

    async def broken(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(full.app.store, method, broken)
    answer = await talk(full, "one")
    assert answer.json["choices"]
    monkeypatch.undo()
    assert (await talk(full, "two")).status == 200
    await full.look(Mode.EXCLUSIVE)


@pytest.mark.parametrize("error", [StoreError(errno.EIO, "input/output"), RuntimeError("a bug")])
@pytest.mark.parametrize("method", ["publish", "delete", "free_bytes"])
async def test_a_fault_in_the_store_on_the_way_out(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    """A request that displaces unsaved work is answered even if that cannot be saved."""

    async def broken(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(proxy.app.store, method, broken)
    for name in (*SAVED, *SAVED):
        assert (await talk(proxy, name)).status == 200
    await proxy.look(Mode.EXCLUSIVE)
    monkeypatch.undo()
    assert (await talk(proxy, "one")).status == 200


async def test_silence(serve: Serve, fake: FakeLlamaServer) -> None:
    """A backend that accepts a request and says nothing is a 504 after the configured time."""
    proxy = await serve(silence_timeout=0.05)
    stall = fake.fail("stall", on=CHAT)
    answer = await proxy.chat("hello")
    assert (answer.status, answer.json["error"]["source"]) == (504, "backend")
    await fake.until(lambda: fake.seen(CHAT)[0].cancelled)
    assert stall.hit.is_set()
    assert (await proxy.chat("hello")).status == 200


async def test_a_fault_in_the_background(
    proxy: Proxy, fake: FakeLlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug met while the backend is judged is logged; the next look judges it."""

    async def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(proxy.app.keeper, "_prober", broken)
    await fake.restart()
    await proxy.look(Mode.FORWARD)
    assert (await proxy.chat("served all the same")).status == 200
    monkeypatch.undo()
    await proxy.look(Mode.EXCLUSIVE)


async def test_a_fault_at_the_end(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes nothing any more does not keep the proxy from ending."""

    async def full(*_: Any, **__: Any) -> Any:
        raise StoreError(errno.ENOSPC, "no space left on device")

    await talk(proxy, "one")
    for method in ("publish", "put", "discard"):
        monkeypatch.setattr(proxy.app.store, method, full)
    await proxy.stop()
    with pytest.raises(aiohttp.ClientConnectionError):
        await proxy.chat("anybody there")
