"""What clients leave behind at FastFlowLM: who gets it, who waits for it, and when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from proxy.backends import fastflowlm, flm_orphans
from proxy.backends.fastflowlm import FastFlowLM
from proxy.backends.flm_lane import Job, Running
from proxy.backends.flm_memory import Prompt
from proxy.backends.flm_orphans import Orphans, Visit
from proxy.backends.flm_work import CHAT, Work
from proxy.backends.transport import OWNER, WHOLE
from proxy.core import hold
from proxy.errors import BackendBrokenError
from tests.emulators.fastflowlm import Answer, Emulator
from tests.unit.backends.test_flm_driver import CKPT, cancels, driven, post, turns, until

Body = dict[str, Any]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(fastflowlm, "CANCEL_SECONDS", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves has waited long."""
    monkeypatch.setattr(hold, "LONG_SECONDS", 0.0)


def asks(*texts: str, stream: bool = False) -> Body:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, "stream": stream}


async def leave(emu: Emulator, backend: FastFlowLM, body: Body, owner: str = "k") -> Any:
    """A client that goes during its prefill; the hold is still on."""
    at = emu.hold("prefill")
    asking = asyncio.create_task(post(backend, body, owner=owner))
    await at.reached.wait()
    await gone(asking)
    return at


async def gone(asking: asyncio.Task[Any]) -> None:
    """It has left."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def said(got: tuple[int, Any, dict[str, str]]) -> str:
    """The text of an answer."""
    assert got[0] == 200, got
    return str(got[1]["choices"][0]["message"]["content"]).strip()


@pytest.mark.usefixtures("patient")
async def test_it_is_finished_before_another_starts() -> None:
    """And waits, whole, for its own client: neither is computed twice, or cancelled."""
    async with driven() as (emu, backend):
        at = await leave(emu, backend, asks("a"))
        other = asyncio.create_task(post(backend, asks("b"), owner="k"))
        await turns(200)
        at.release.set()
        assert said(await other).endswith("b")
        assert said(await post(backend, asks("a"), owner="k")).endswith("a")
        assert [chat.finish for chat in emu.chats()] == ["stop", "stop"]
        assert cancels(emu) == 0
        assert not backend._orphans._left


async def test_who_left_soon_makes_way_once() -> None:
    """A person changed its mind; but who asks the same again is a machine, and is waited for."""
    async with driven() as (emu, backend):
        for attempt in range(2):
            at = await leave(emu, backend, asks("a"))
            other = asyncio.create_task(post(backend, asks(f"b{attempt}"), owner="k"))
            await until(lambda n=attempt: n or cancels(emu) == 1)  # type: ignore[misc]
            await turns(200)
            at.release.set()
            assert said(await other).endswith(f"b{attempt}")
        assert said(await post(backend, asks("a"), owner="k")).endswith("a")
        assert cancels(emu) == 1
        assert [chat.finish for chat in emu.chats()] == ["cancel", "stop", "stop", "stop"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("owner", ["k", "other"])
async def test_who_asks_something_else_instead(owner: str) -> None:
    """Does not come back: what it asked before is cancelled. Only its own client says so."""
    async with driven() as (emu, backend):
        at = await leave(emu, backend, asks("a", "yes", "wrong"))
        other = asyncio.create_task(post(backend, asks("a", "yes", "right"), owner=owner))
        await until(lambda: owner != "k" or cancels(emu) == 1)
        await turns(200)
        at.release.set()
        assert said(await other).endswith("right")
        assert cancels(emu) == (owner == "k")


def test_what_replaces() -> None:
    """The same conversation with another last message; not its next turn, nor another opening."""
    before = Prompt.of(asks("a", "yes", "b"))
    for texts, want in [
        (("a", "yes", "c"), True),
        (("a", "yes", "c", "no", "d"), True),
        (("a", "yes"), True),
        (("a", "yes", "b"), False),
        (("a", "yes", "b", "no", "d"), False),
        (("x", "yes", "c"), False),
        (("a",), False),
    ]:
        assert Prompt.of(asks(*texts)).replaces(before) is want
    assert not Prompt.of(asks("b")).replaces(Prompt.of(asks("a")))


@pytest.mark.usefixtures("patient")
async def test_the_proxys_own_work_makes_way() -> None:
    """However long it ran: nobody waits for it."""
    async with driven() as (emu, backend):
        at = emu.hold("prefill")
        send = backend.send("POST", CHAT, [], orjson.dumps(asks("idle")))
        own = asyncio.create_task(send.__aenter__())
        await at.reached.wait()
        await gone(own)
        other = asyncio.create_task(post(backend, asks("b"), owner="k"))
        await until(lambda: cancels(emu) == 1)
        at.release.set()
        assert said(await other).endswith("b")


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_same_twice_at_once(leaves: bool) -> None:
    """The second waits; it gets the first one's answer if that one's client has gone."""
    async with driven() as (emu, backend):
        at = emu.hold("prefill")
        first = asyncio.create_task(post(backend, asks("a"), owner="k"))
        await at.reached.wait()
        second = asyncio.create_task(post(backend, asks("a"), owner="k"))
        await until(lambda: backend._lane.wanted)
        if leaves:
            await gone(first)
        await turns(200)
        at.release.set()
        assert said(await second).endswith("a")
        if not leaves:
            assert said(await first).endswith("a")
        assert (len(emu.chats()), cancels(emu)) == (1 if leaves else 2, 0)
        assert not backend._asked


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("whole", [True, False])
async def test_one_who_saw_nothing_gets_all_of_it(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left in the middle of an answer that is put together elsewhere, it is told from the start.

    Who watched the stream itself has seen what it wanted to.
    """
    monkeypatch.setattr(flm_orphans, "GLANCE_SECONDS", 0.0)
    async with driven() as (emu, backend):
        emu.answers.append(Answer("one two three four five"))
        at = emu.hold("decode", after=4)
        headers = [(OWNER, "k"), *([(WHOLE, "1")] if whole else [])]
        body = orjson.dumps(asks("a", stream=True))

        async def read() -> bytes:
            async with backend.send("POST", CHAT, headers, body) as upstream:
                return await upstream.read()

        asking = asyncio.create_task(read())
        await at.reached.wait()
        await until(lambda: any(len(one.job._pieces) > 1 for one in backend._running.values()))
        await turns(20)
        await gone(asking)
        await until(lambda: whole or cancels(emu) == 1)
        at.release.set()
        await until(lambda: not backend._running)
        got = await read()
        deltas = [orjson.loads(e[6:])["choices"][0]["delta"] for e in got.split(b"\n\n")[:-2]]
        text = "".join(delta.get("content", "") for delta in deltas).strip()
        assert text == ("one two three four five" if whole else "Heard: a")
        assert (len(emu.chats()), cancels(emu)) == ((1, 0) if whole else (2, 1))


@pytest.mark.parametrize("end", ["refused", "broken", "whole"])
async def test_what_failed_is_not_claimed(end: str) -> None:
    """Whoever asks again after an error asks the server again."""
    loop = asyncio.get_running_loop()
    orphans = Orphans(loop.create_task, lambda _running: asyncio.sleep(0))
    work = Work(CHAT, [], b"{}", name="n", key=b"k", owner="o")
    running = Running(work, Job(), loop.time())
    assert orphans.keep(running, Visit(loop.time()), respite=1.0)
    if end == "broken":
        running.job.begin(200, [])
        running.job.end(BackendBrokenError("gone"))
    else:
        running.job.whole(503 if end == "refused" else 200, [], b"x")
    assert orphans.claim(work) is (running if end == "whole" else None)
    assert orphans.keep(running, Visit(loop.time()), respite=1.0) is (end == "whole")
    orphans.forget()


@pytest.mark.usefixtures("patient")
async def test_answers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some are kept, the newest, and none for ever; nothing of them is left at the end."""
    monkeypatch.setattr(flm_orphans, "MOST_KEPT", 2)
    async with driven() as (emu, backend):
        for name in "abcd":
            at = await leave(emu, backend, asks(name))
            at.release.set()
            await until(lambda: not backend._running)
        assert len(backend._orphans._left) == 3  # the last one was running when it came
        monkeypatch.setattr(hold, "KEPT_SECONDS", 0.0)
        at = await leave(emu, backend, asks("e"))
        at.release.set()
        await until(lambda: not backend._running)
        await turns(50)
        assert len(backend._orphans._left) == 2
        await backend.close()
        assert not backend._orphans._left
        assert not backend._tasks


@pytest.mark.usefixtures("patient")
async def test_what_was_broken_off_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which requests those were is remembered of the newest only."""
    monkeypatch.setattr(flm_orphans, "MOST_KNOWN", 1)
    monkeypatch.setattr(hold, "LONG_SECONDS", 60.0)
    async with driven() as (emu, backend):
        for count, name in enumerate("ab", 1):
            at = await leave(emu, backend, asks(name))
            other = asyncio.create_task(post(backend, asks("x"), owner="k"))
            await until(lambda n=count: cancels(emu) == n)  # type: ignore[misc]
            at.release.set()
            await other
        assert len(backend._orphans._broken) == 1


@pytest.mark.usefixtures("patient")
async def test_a_prefill_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed for nobody has a bound, and is no answer from then on."""
    monkeypatch.setattr(flm_orphans, "PREFILL_SECONDS", 0.01)
    async with driven() as (emu, backend):
        at = await leave(emu, backend, asks("a"))
        await until(lambda: cancels(emu) == 1)
        assert not backend._orphans._left
        at.release.set()
        assert said(await post(backend, asks("a"), owner="k")).endswith("a")


async def test_a_job_can_be_read_again() -> None:
    """The next reader gets all of it, and an end without a head is an error."""
    job, bare = Job(), Job()
    job.whole(200, [], b"x")
    assert await job.read() == b"x"
    assert await job.read() == b""
    job.rewind()
    await job.begun()
    assert await job.read() == b"x"
    bare.end()
    with pytest.raises(BackendBrokenError):
        await bare.begun()


@pytest.mark.parametrize("raw", [None, b"{", b"[]", b'{"request_id": 5}'])
async def test_questions_need_no_turn(raw: bytes | None) -> None:
    """They are asked beside an answer, whatever is wrong with them, and never as the client's."""
    async with driven() as (emu, backend):
        at = emu.hold("prefill")
        asking = asyncio.create_task(post(backend, asks("a")))
        await at.reached.wait()
        async with backend.send("POST", "/api/cancel", [("Cookie", "c")], raw) as upstream:
            assert b"request_id is required" in await upstream.read()
        async with backend.send("GET", "/api/version", [], raw) as upstream:
            assert upstream.status == 200
        async with backend.send("GET", "/api/ps", [], raw) as upstream:
            assert orjson.loads(await upstream.read())["models"][0]["name"] == CKPT
        backend._loaded = ""
        async with backend.send("GET", "/api/ps", [], raw) as upstream:
            assert orjson.loads(await upstream.read()) == {"models": []}
        at.release.set()
        assert said(await asking).endswith("a")
