"""Backends that die, load, come back as others, or must be proved while clients wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.records import Mode
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, Proxy, until


async def saved(proxy: Proxy, *names: str) -> None:
    """Conversations that were held, and are on disk now."""
    for name in names:
        assert (await proxy.chat(f"{name} {LONG}")).status == 200
    await proxy.look()


def probes(fake: FakeLlamaServer) -> int:
    """How often the probe computed something."""
    return len([one for one in fake.seen("/completion") if one.target == "/completion"])


async def test_another_instance(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """After a restart nothing is believed, the state is restored from disk, and that is counted."""
    await saved(proxy, "one", "two")
    await fake.restart()
    await proxy.look(Mode.EXCLUSIVE)
    assert proxy.metric("backend_restarts_total") == 1
    await until(proxy.app.scheduler.quiescent)
    restored = len(fake.seen("restore"))
    answer = await proxy.chat(f"one {LONG}")
    assert answer.json["timings"]["prompt_n"] == 1
    assert restored >= 3, "both slots were warmed again, after the probe's own restore"


async def test_another_instance_is_met_by_a_request_first(
    serve: Serve, fake: FakeLlamaServer
) -> None:
    """A restart nobody noticed yet costs time, not the answer; afterwards beliefs are right."""
    proxy = await serve(prewarm=False)
    await saved(proxy, "one")
    assert proxy.tokens().count(None) == 1
    await fake.restart()
    answer = await proxy.chat(f"one {LONG}")
    assert answer.status == 200
    assert (answer.reason, answer.json["timings"]["cache_n"]) == ("cold", 0)
    await proxy.look(Mode.EXCLUSIVE)
    assert proxy.tokens() == [None, None]
    assert (await proxy.chat(f"one {LONG}")).reason == "restored"


async def test_gone_and_back(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """While the backend is away: 502, not ready, no beliefs; when it is back: ready, restored."""
    await saved(proxy, "one")
    await fake.die()
    answer = await proxy.chat("hello")
    assert (answer.status, answer.json["error"]["type"]) == (502, "backend_unreachable")
    await proxy.look(Mode.FORWARD)
    ready = await proxy.ask("/_slotkeeper/readyz", method="GET")
    assert (ready.status, ready.json["ready"]) == (503, False)
    assert proxy.metric("backend_up") == 0
    await fake.start()
    await proxy.look(Mode.EXCLUSIVE)
    assert (await proxy.page("readyz"))["ready"] is True
    assert (await proxy.chat(f"one {LONG}")).json["timings"]["prompt_n"] == 1


async def test_loading(serve: Serve, fake: FakeLlamaServer) -> None:
    """A backend that is still loading: its 503 is passed on; then it is proved."""
    fake.loading = True
    proxy = await serve()
    assert (await proxy.ask("/_slotkeeper/readyz", method="GET")).status == 503
    answer = await proxy.chat("hello")
    assert (answer.status, answer.json["error"]["message"]) == (503, "Loading model")
    await proxy.look(Mode.FORWARD)
    fake.loading = False
    await proxy.look(Mode.EXCLUSIVE)
    assert (await proxy.page("readyz")) == {
        "ready": True,
        "mode": "exclusive",
        "why": "pinning, saving and restoring were proved",
        "advice": "",
        "restores": "in use",
    }
    assert (await proxy.chat("hello")).status == 200


async def test_the_probe_waits_for_requests(
    serve: Serve, fake: FakeLlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that works for somebody is not probed; as soon as nothing runs, it is."""
    monkeypatch.setattr("proxy.keeper.PATIENCE_SECONDS", 0.05)
    fake.loading = True
    proxy = await serve()
    fake.loading = False
    stall = fake.fail("stall", on=CHAT)
    task = asyncio.create_task(proxy.chat("hello"))
    await stall.hit.wait()
    await proxy.look(Mode.FORWARD)
    assert probes(fake) == 0
    stall.release.set()
    await task
    await proxy.look(Mode.EXCLUSIVE)
    assert probes(fake) > 0


async def test_requests_wait_for_the_probe(serve: Serve, fake: FakeLlamaServer) -> None:
    """What comes during the probe is sent after it, and served as the verdict allows."""
    fake.loading = True
    proxy = await serve()
    fake.loading = False
    stall = fake.fail("stall", on="/completion")
    looking = asyncio.create_task(proxy.look(Mode.EXCLUSIVE))
    await stall.hit.wait()
    tasks = [asyncio.create_task(proxy.chat(word)) for word in ("one", "two", "three")]
    wide = asyncio.create_task(proxy.ask("/v1/embeddings", {"input": "x"}))
    await until(lambda: proxy.queued() == 4)
    assert not fake.seen(CHAT)
    stall.release.set()
    await looking
    answers = await asyncio.gather(*tasks)
    assert all("slot=" in answer.said for answer in answers)
    assert (await wide).reason == "wide"


async def test_dies_during_the_probe(serve: Serve, fake: FakeLlamaServer) -> None:
    """Nothing is proved by that; the next look begins anew."""
    fake.loading = True
    proxy = await serve()
    fake.loading = False
    fake.fail("die", on="save")
    await proxy.look(Mode.FORWARD)
    await fake.until(lambda: fake._runner is None)
    await fake.restart()
    await proxy.look(Mode.EXCLUSIVE)


async def test_dies_during_a_restore(serve: Serve, fake: FakeLlamaServer) -> None:
    """The file is quarantined, also for the next proxy: neither warmed nor offered again."""
    proxy = await serve()
    await saved(proxy, "one")
    await saved(proxy, "two")
    await saved(proxy, "three")
    fake.fail("die", on="restore")
    answer = await proxy.chat(f"one {LONG}")
    assert (answer.status, answer.json["error"]["source"]) == (502, "backend")
    await fake.until(lambda: fake._runner is None)
    await proxy.look(Mode.FORWARD)
    await proxy.kill()
    await fake.restart()
    fake.requests.clear()
    second = await serve()
    rows = (await second.page("api/snapshots"))["snapshots"]
    assert [row["barred"] for row in rows].count(True) == 1
    assert len([n for n in second.tokens() if n]) == 2, "the other two are warm"
    assert len(fake.seen("restore")) == 3, "the probe's, and theirs"
    for name, computed in (("two", 1), ("three", 1), ("one", 300)):
        timings = (await second.chat(f"{name} {LONG}")).json["timings"]
        assert timings["prompt_n"] >= computed
        assert (timings["prompt_n"] == 1) == (computed == 1)
    assert len(fake.seen("restore")) == 3


@pytest.mark.parametrize("both", [False, True])
async def test_a_clean_restart(serve: Serve, fake: FakeLlamaServer, both: bool) -> None:
    """What was drained is not computed again, after a restart of the proxy alone or of both.

    Slots of a backend that lives on hold somebody's KV: they are not overwritten beforehand.
    """
    proxy = await serve(idle_seconds=3600)
    for name in ("one", "two"):
        await proxy.chat(f"{name} {LONG}")
    await proxy.stop()
    if both:
        await fake.restart()
    fake.requests.clear()
    second = await serve()
    assert (probes(fake) == 0) == (not both), "a verdict on a living instance is remembered"
    for name in ("one", "two"):
        answer = await second.chat(f"{name} {LONG}")
        reason = "slot-hit" if both else "restored"
        assert (answer.reason, answer.json["timings"]["prompt_n"]) == (reason, 1)


async def test_draining_refuses_newcomers(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """While it drains, running answers end, new ones are told to come again, pages answer."""
    stall = fake.fail("stall", on=CHAT, at="stream")
    running = asyncio.create_task(proxy.chat("hello", stream=True))
    await stall.hit.wait()
    draining = asyncio.create_task(proxy.app.keeper.drain(30.0))
    await until(lambda: proxy.app.scheduler.draining)
    late = await proxy.chat("late")
    assert (late.status, late.headers["retry-after"]) == (503, "5")
    assert (await proxy.ask("/_slotkeeper/readyz", method="GET")).status == 503
    assert (await proxy.page("healthz"))["alive"] is True
    stall.release.set()
    assert (await running).events[-1] == b"[DONE]"
    await draining


async def test_another_model_on_the_same_port(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Other facts, other fingerprint: nothing saved for the first is offered to the second."""
    await saved(proxy, "one")
    first = (await proxy.page("api/snapshots"))["snapshots"]
    fake.lora = [{"id": 0, "path": "/a.gguf", "scale": 1.0}]
    await fake.restart()
    await proxy.look(Mode.EXCLUSIVE)
    assert len(first) == 1
    assert (await proxy.page("api/snapshots"))["snapshots"] == []
    answer = await proxy.chat(f"one {LONG}")
    assert (answer.reason, answer.json["timings"]["cache_n"]) == ("cold", 0)


@pytest.mark.parametrize("change", [{"ram_cache": True}, {"n_slots": 3}])
async def test_other_flags_after_a_restart(
    proxy: Proxy, fake: FakeLlamaServer, change: dict[str, Any]
) -> None:
    """A verdict belongs to the instance it was reached for."""
    await saved(proxy, "one")
    await fake.restart(**change)
    await proxy.look(Mode.FORWARD if "ram_cache" in change else Mode.EXCLUSIVE)
    slots = (await proxy.page("api/slots"))["slots"]
    assert len(slots) == change.get("n_slots", len(slots))
    assert (await proxy.chat(f"one {LONG}")).status == 200
