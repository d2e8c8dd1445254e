"""Report 733: a client whose time-out is shorter than the prefill asks the same for ever.

Emulated time alone decides here: a client gives up at an instant of the emulator's clock, in the
middle of a prefill, and the emulator goes on only when everybody has noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from proxy.backends import fastflowlm
from tests.emulators.fastflowlm import Answer, Clock, Emulator, Options, Record
from tests.emulators.fastflowlm.client import ask
from tests.emulators.fastflowlm.engine import Engine
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT

PATIENCE = 60.0  # emulated seconds a client waits
ATTEMPTS = 6
WORDS = 32_000  # 90 s of prefill
MODEL = "qwen3.5:9b"
KEYS = {"a": {"Authorization": "Bearer key-a"}, "b": {"Authorization": "Bearer key-b"}}
Ask = Callable[[str], Coroutine[Any, Any, str]]


class Alarms(Clock):
    """Emulated time that stands still while something happens at one of its instants."""

    def __init__(self) -> None:
        super().__init__()
        self._due: list[tuple[float, Callable[[], Awaitable[None]]]] = []

    def after(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        """Do this in so many seconds, if time gets there."""
        self._due.append((self.now + seconds, act))

    async def sleep(self, seconds: float) -> None:
        """See ``Clock``."""
        end = self.now + seconds
        while self._due and (first := min(self._due, key=lambda due: due[0]))[0] <= end:
            self._due.remove(first)
            self.now = first[0]
            await first[1]()
        await super().sleep(end - self.now)


async def turns() -> None:
    """Let everybody notice that a connection was closed."""
    for _ in range(1000):
        await asyncio.sleep(0)


def numbered(record: Record, _engine: Engine) -> Answer:
    """An answer that says for which request it was generated."""
    return Answer(f"number {record.number}.")


def prompt() -> list[dict[str, Any]]:
    """A prompt of 90 s, in a conversation of more than two messages."""
    long = {"role": "user", "content": "word " * WORDS}
    last = {"role": "user", "content": "And now?"}
    return [long, {"role": "assistant", "content": "Yes."}, last]


async def impatient(
    clock: Alarms, request: Callable[[], Coroutine[Any, Any, str]]
) -> tuple[int, str]:
    """Ask, give up after 60 s, ask again at once; how often it asked, and what it got at last."""
    for attempt in range(1, ATTEMPTS + 1):
        asking = asyncio.create_task(request())

        async def give_up(asking: asyncio.Task[str] = asking) -> None:
            asking.cancel()
            await turns()

        clock.after(PATIENCE, give_up)
        try:
            return attempt, (await asking).strip()
        except asyncio.CancelledError:
            continue
    return ATTEMPTS, ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Alarms:
    """Emulated time; the driver's own pauses are short."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)
    return Alarms()


def emulated(clock: Alarms) -> Emulator:
    """A model that needs 90 s for the prompt."""
    emu = Emulator(Options(model=MODEL, ctx_len=65_536), clock=clock)
    emu.script = numbered
    return emu


async def through(serve: Serve, emu: Emulator, **settings: Any) -> Callable[[bool, str], Ask]:
    """Ways to ask through a proxy, by form and key."""
    proxy = await serve(url=emu.url, slot_dir=None, **settings)

    def way(stream: bool, key: str) -> Ask:
        async def send(text: str) -> str:
            body = {"messages": prompt() if not text else [{"role": "user", "content": text}]}
            got = await proxy.ask(CHAT, {**body, "stream": stream}, headers=KEYS[key])
            assert got.status == 200, got.raw
            if not stream:
                return str(got.json["choices"][0]["message"]["content"])
            deltas = [e["choices"][0]["delta"] for e in got.events[:-1] if e["choices"]]
            return "".join(delta.get("content", "") for delta in deltas)

        return send

    return way


@pytest.mark.parametrize("stream", [True, False])
async def test_direct_it_never_ends(clock: Alarms, stream: bool) -> None:
    """Without the proxy each attempt starts again from nothing, and nobody ever gets an answer."""
    async with emulated(clock) as emu:
        body = {"messages": prompt(), "stream": stream}

        async def request() -> str:
            got = await ask(emu.url, CHAT, body)
            return got.text if stream else str(got.json)

        attempts, answer = await impatient(clock, request)
        await emu.settled()
        print(f"direct, stream={stream}: {attempts} attempts, {emu.prefill_seconds:.0f} s of "
              f"prefill, {emu.counters['leaked']} connections lost, no answer")  # fmt: skip
        assert (attempts, answer) == (ATTEMPTS, "")
        assert {chat.finish for chat in emu.chats()} == {"cancel"}
        assert emu.prefill_seconds > ATTEMPTS * PATIENCE


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("keys", [(), ("key-a", "key-b")])
async def test_through_the_proxy_it_is_one_prefill(
    serve: Serve, clock: Alarms, keys: tuple[str, ...], stream: bool
) -> None:
    """One prefill of 90 s, given up after 60 s, and the second attempt gets the answer."""
    async with emulated(clock) as emu:
        way = await through(serve, emu, keys=keys)
        attempts, answer = await impatient(clock, lambda: way(stream, "a")(""))
        print(f"through, stream={stream}: {attempts} attempts, {emu.prefill_seconds:.0f} s of "
              f"prefill, answered after {clock.now:.0f} s")  # fmt: skip
        (only,) = emu.chats()
        assert (attempts, answer) == (2, f"number {only.number}.")
        assert PATIENCE < only.prefill_seconds < 2 * PATIENCE


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("keys", [(), ("key-a", "key-b")])
@pytest.mark.parametrize("late", [True, False])
async def test_another_key_gets_an_answer_of_its_own(
    serve: Serve, clock: Alarms, late: bool, keys: tuple[str, ...], stream: bool
) -> None:
    """Word for word the same request under another key is computed for that key.

    ``late``: the answer that its client left behind is finished by then.
    """
    async with emulated(clock) as emu:
        way = await through(serve, emu, keys=keys)
        left = asyncio.create_task(way(stream, "a")(""))
        gone = asyncio.Event()

        async def give_up() -> None:
            left.cancel()
            await turns()
            gone.set()
            if not late:
                await turns()  # the other one comes while it is still being computed

        clock.after(PATIENCE, give_up)
        await gone.wait()
        if late:
            await emu.settled()
        answer = await way(stream, "b")("")
        whole = [chat for chat in emu.chats() if chat.finish == "stop"]
        first, last = emu.chats()[0], whole[-1]
        assert last.number != first.number
        assert answer.strip() == f"number {last.number}."


async def test_a_retry_with_another_word_is_another_request(serve: Serve, clock: Alarms) -> None:
    """What was left behind is no answer to anything else."""
    async with emulated(clock) as emu:
        way = await through(serve, emu)
        attempts, answer = await impatient(clock, lambda: way(False, "a")(""))
        assert (attempts, answer) == (2, f"number {emu.chats()[0].number}.")
        other = await way(False, "a")("word")
        assert other.strip() == f"number {emu.chats()[-1].number}."
        assert len(emu.chats()) == 2
