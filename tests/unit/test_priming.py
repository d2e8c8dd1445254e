"""Displaced conversations are had back while nobody waits, once, and give way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.core.placement import Need
from proxy.core.priming import IDLE_SECONDS
from proxy.core.queue import Lease
from proxy.core.records import Prompt
from proxy.core.routing import Routing
from proxy.errors import BackendUnreachableError
from proxy.priming import TRIES, Primer, again
from proxy.scheduler import Scheduler
from proxy.telemetry.metrics import Metrics
from tests.unit.doubles import Clock, FakeBackend, FakeEffects
from tests.unit.factories import chat, costs

BESIDE = "/v1/embeddings"
TIMINGS = {"cache_n": 0, "prompt_n": 5000, "prompt_ms": 50_000.0}


class Reply:
    """A whole answer."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        self.headers: list[tuple[str, str]] = []

    async def read(self) -> bytes:
        """The body."""
        return self.body


class Backend(FakeBackend):
    """Answers what the test says, when it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.willing = True
        self.sent: list[tuple[int | None, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.reply = Reply(200, orjson.dumps({"timings": TIMINGS}))
        self.error: Exception | None = None

    def primes(self, slot: int, body: bytes) -> bool:
        """As the test says."""
        del slot, body
        return self.willing

    @asynccontextmanager
    async def send(
        self, method: str, target: str, headers: Any, body: bytes, *, slot: int | None = None
    ) -> AsyncIterator[Reply]:
        """One request."""
        assert (method, target) == ("POST", "/v1/chat/completions")
        self.sent.append((slot, orjson.loads(body)))
        self.begun.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        yield self.reply


async def unresolved() -> Prompt:
    """Nobody looks."""
    raise AssertionError


class Bench:
    """One process, a scheduler and a primer."""

    def __init__(self, total: int = 1) -> None:
        self.clock = Clock()
        self.backend = Backend()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.backend,  # type: ignore[arg-type]
            FakeEffects(costs()),
            self.metrics,
            self.clock,
            max_queue=8,
            queue_timeout=60.0,
        )
        self.scheduler.route(total, Routing(serial=False, beside=frozenset({BESIDE})))
        self.primer = Primer(
            self.scheduler,
            self.backend,  # type: ignore[arg-type]
            self.metrics,
            self.clock,
        )

    async def turn(self, prompt: Prompt, n_tokens: int = 5000) -> Lease:
        """A whole answer; the next one comes some seconds later."""
        async with self.scheduler.lease(Need(prompt), unresolved) as lease:
            lease.sent = True
            lease.body = orjson.dumps({"messages": [prompt.size], "stream": True, "max_tokens": 99})
            self.scheduler.observed(lease, 0, n_tokens)
            lease.finish(n_tokens)
        self.clock.now += IDLE_SECONDS
        return lease

    async def displace(self) -> None:
        """A conversation of 50 s, then a short one in its place."""
        await self.turn(chat("s", "q"))
        await self.turn(chat("x"), 100)

    async def embed(self) -> None:
        """A request that leaves the slot as it is."""
        need = Need(chat(), exact=True, wide=True, path=BESIDE)
        async with self.scheduler.lease(need, unresolved) as lease:
            lease.sent = True
        await self.scheduler.quiet()
        self.clock.now += IDLE_SECONDS

    async def done(self) -> None:
        """Until the primer has nothing to do any more."""
        if self.primer._task is not None:
            await asyncio.wait({self.primer._task})
        await self.scheduler.quiet()
        self.clock.now += IDLE_SECONDS

    def counted(self, outcome: str) -> bool:
        """That outcome, once."""
        return f'primes_total{{outcome="{outcome}"}} 1.0'.encode() in self.metrics.render()[0]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """At the end nothing is left over."""
    made = Bench()
    yield made
    made.backend.gate.set()
    await made.primer.stop()
    await made.scheduler.quiet()
    assert made.scheduler.quiescent()


async def test_what_was_displaced_is_computed_again(bench: Bench) -> None:
    """Its last request for one token, in its process; afterwards its next turn is expected hot."""
    await bench.displace()
    bench.primer.look()
    await bench.done()
    ((slot, body),) = bench.backend.sent
    assert slot == 0
    assert body == {"messages": [2], "stream": False, "max_tokens": 1}
    assert bench.counted("done")
    lease = await bench.turn(chat("s", "q", "a", "r"))
    assert lease.option.hit == 5000


async def test_only_once(bench: Bench) -> None:
    """Displaced again before it went on, it is not computed once more."""
    await bench.displace()
    for _ in range(3):
        bench.primer.look()
        await bench.done()
        await bench.turn(chat("y"), 100)
    assert len(bench.backend.sent) == 1


async def test_not_where_it_is_of_no_use(bench: Bench) -> None:
    """The driver knows the model."""
    bench.backend.willing = False
    await bench.displace()
    bench.primer.look()
    assert not bench.backend.sent


async def test_not_before_a_pause(bench: Bench) -> None:
    """Clients send several side requests in a row."""
    await bench.displace()
    bench.clock.now -= 1
    bench.primer.look()
    assert not bench.backend.sent
    bench.clock.now += 1
    bench.primer.look()
    await bench.done()
    assert bench.backend.sent


async def test_not_while_something_runs(bench: Bench) -> None:
    """A lease is held."""
    await bench.displace()
    async with bench.scheduler.lease(Need(chat("z")), unresolved):
        bench.clock.now += 100
        bench.primer.look()
    assert not bench.backend.sent


async def test_not_what_came_back_by_itself(bench: Bench) -> None:
    """Its next turn was faster than the keeper."""
    await bench.displace()
    await bench.turn(chat("s", "q", "a", "r"))
    bench.primer.look()
    assert not bench.backend.sent


async def test_not_into_a_process_that_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where nothing is routed any more; it is had back when it can be."""
    await bench.displace()
    monkeypatch.setattr(FakeBackend, "absent", frozenset({0}))
    bench.primer.look()
    monkeypatch.setattr(FakeBackend, "absent", frozenset())
    bench.scheduler.forward(1)
    bench.primer.look()
    assert not bench.backend.sent
    bench.scheduler.route(1, Routing())
    bench.primer.look()
    await bench.done()
    assert bench.backend.sent


async def test_another_conversation_breaks_it_off(bench: Bench) -> None:
    """And is served; what was half computed is not believed in."""
    await bench.displace()
    bench.backend.gate.clear()
    bench.primer.look()
    bench.primer.look()  # a second one does not begin
    await bench.backend.begun.wait()
    await bench.turn(chat("y"), 100)
    assert bench.counted("broken-off")
    held = bench.scheduler.table[0].content
    assert held is not None
    assert held.prompt.chain == chat("y").chain


async def test_after_an_embedding_it_begins_anew(bench: Bench) -> None:
    """It waits for nobody, but what it broke off is not lost by it."""
    await bench.displace()
    bench.backend.gate.clear()
    bench.primer.look()
    await bench.backend.begun.wait()
    await bench.embed()
    assert bench.counted("broken-off")
    bench.backend.gate.set()
    bench.primer.look()
    await bench.done()
    assert bench.counted("done")
    assert (await bench.turn(chat("s", "q", "a", "r"))).option.hit == 5000


async def test_embeddings_without_end(bench: Bench) -> None:
    """Who asks every few seconds would have it computed for ever."""
    await bench.displace()
    bench.backend.gate.clear()
    for _ in range(TRIES + 2):
        bench.backend.begun.clear()
        bench.primer.look()
        if bench.primer._task is not None:
            await bench.backend.begun.wait()
        await bench.embed()
    assert len(bench.backend.sent) == TRIES


async def test_after_two_embeddings_at_once_too(bench: Bench) -> None:
    """The second one finds it broken off already, and is no further try."""
    await bench.displace()
    bench.backend.gate.clear()
    bench.primer.look()
    await bench.backend.begun.wait()
    await asyncio.gather(*(bench.embed() for _ in range(TRIES + 1)))
    bench.backend.gate.set()
    bench.primer.look()
    await bench.done()
    assert bench.counted("done")


async def test_its_own_next_turn_waits_for_it(bench: Bench) -> None:
    """And is hot then."""
    await bench.displace()
    bench.backend.gate.clear()
    bench.primer.look()
    await bench.backend.begun.wait()
    turn = asyncio.create_task(bench.turn(chat("s", "q", "a", "r")))
    await asyncio.sleep(0)
    assert bench.primer._task is not None
    bench.backend.gate.set()
    assert (await turn).option.hit == 5000
    assert len(bench.backend.sent) == 1


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b"no JSON"),
        Reply(200, b"[]"),
        Reply(200, b'{"timings": null}'),
        Reply(500, orjson.dumps({"timings": TIMINGS})),
    ],
)
async def test_an_answer_that_is_none(bench: Bench, reply: Reply) -> None:
    """It failed, and that is all."""
    bench.backend.reply = reply
    await bench.displace()
    bench.primer.look()
    await bench.done()
    assert bench.counted("failed")
    assert bench.scheduler.table[0].content is None


async def test_a_backend_that_breaks(bench: Bench) -> None:
    """Likewise."""
    bench.backend.error = BackendUnreachableError("gone")
    await bench.displace()
    bench.primer.look()
    await bench.done()
    assert bench.counted("failed")


async def test_stopping_breaks_it_off(bench: Bench) -> None:
    """And forgets the rest."""
    await bench.displace()
    bench.backend.gate.clear()
    bench.primer.look()
    await bench.backend.begun.wait()
    await bench.primer.stop()
    assert bench.counted("broken-off")
    bench.backend.gate.set()
    await bench.scheduler.quiet()
    bench.clock.now += 100
    bench.primer.look()
    assert len(bench.backend.sent) == 1


def test_one_token_by_whatever_name() -> None:
    """Both limits are known to the server."""
    body = {"messages": [], "max_completion_tokens": 5, "think": True}
    assert orjson.loads(again(orjson.dumps(body))) == {
        "messages": [], "think": True, "stream": False, "max_tokens": 1,
    }  # fmt: skip
