"""One answer from upstream to client: figures, errors, and who writes when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from proxy.core.placement import Option
from proxy.core.queue import Kind, Lease
from proxy.core.records import Prompt, Reason
from proxy.core.sse import encode
from proxy.dialects import DIALECTS
from proxy.errors import BackendBrokenError, BackendUnreachableError
from proxy.server.relay import Client, Relay, without

NATIVE, CHAT = "/completion", "/v1/chat/completions"
TIMINGS = {"cache_n": 10, "prompt_n": 5, "predicted_n": 3, "prompt_ms": 50.0}


@dataclass
class Upstream:
    """An answer in pieces; ends with ``error`` if there is one."""

    pieces: list[bytes]
    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    error: Exception | None = None

    async def read_some(self) -> bytes:
        """The next piece."""
        if not self.pieces and self.error is not None:
            raise self.error
        return self.pieces.pop(0) if self.pieces else b""

    async def read(self) -> bytes:
        """All of them."""
        return b"".join(self.pieces)


@dataclass
class Told:
    """What the scheduler was told."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def observed(self, lease: Lease, cache_n: int, prompt_n: int) -> None:
        """Recorded."""
        self.calls.append(("observed", cache_n, prompt_n))

    def prefilled(self, lease: Lease) -> None:
        """Recorded."""
        self.calls.append(("prefilled",))

    def measured(self, cached: int, computed: int, seconds: float, *, restored: bool) -> None:
        """Recorded."""
        source = "snapshot" if restored else "slot"
        self.calls.append(("measured", cached, computed, seconds, source))


class Bench:
    """A relay, its lease, what it told and what it kept."""

    def __init__(self, path: str, body: Mapping[str, Any], kept: list[bytes] | None = None) -> None:
        self.dialect = DIALECTS[path]
        self.call = self.dialect.parse(orjson.dumps({"messages": [], "prompt": "x", **body}))
        self.told = Told()
        option = Option(slot=0, reason=Reason.COLD, hit=0, n_tokens=15)
        prompt = Prompt(seed=b"", chain=(), ends=(), size=0)
        self.lease = Lease(option, Kind.NARROW, prompt, Reason.COLD, 0.0, 0.0)
        self.relay = Relay(self.told, self.lease, kept)  # type: ignore[arg-type]

    async def assemble(self, *events: bytes, error: Exception | None = None) -> tuple[int, Any]:
        """Put an answer together."""
        upstream = Upstream([encode(event) for event in events], error=error)
        events_filter = self.dialect.filter(self.call)
        assembler = self.dialect.assembler(self.call)
        status, body = await self.relay.assemble(upstream, events_filter, assembler)
        return status, orjson.loads(body)


def native(**more: Any) -> bytes:
    """An event of ``/completion``."""
    return orjson.dumps({"content": "", "stop": False, **more})


async def test_figures_of_an_answer() -> None:
    """The reuse is told at the first progress, the cost at the end, and the slot's new length."""
    bench = Bench(NATIVE, {})
    progress = {"total": 15, "cache": 10, "processed": 10}
    status, answer = await bench.assemble(
        native(prompt_progress=progress),
        native(prompt_progress={**progress, "processed": 15}),
        native(content="a"),
        native(stop=True, timings=TIMINGS),
    )
    assert (status, answer["content"]) == (200, "a")
    assert bench.told.calls[0] == ("observed", 10, 15)
    assert bench.told.calls.count(("prefilled",)) == 3
    assert bench.told.calls[-1] == ("measured", 10, 5, 0.05, "slot")
    assert (bench.lease.n_tokens, bench.lease.ended, bench.lease.storable) == (17, True, True)


async def test_tokens_of_a_snapshot() -> None:
    """What was reused after a restore came from disk, not from the slot."""
    bench = Bench(NATIVE, {})
    bench.lease.reason = Reason.RESTORED
    await bench.assemble(native(stop=True, timings=TIMINGS))
    assert bench.told.calls[-1] == ("measured", 10, 5, 0.05, "snapshot")


async def test_a_shifted_context_is_not_stored() -> None:
    """What the engine truncated is no function of its tokens (DESIGN.md rule 8)."""
    bench = Bench(NATIVE, {})
    await bench.assemble(native(stop=True, timings=TIMINGS, truncated=True))
    assert (bench.lease.ended, bench.lease.storable) == (True, False)


@pytest.mark.parametrize(
    ("timings", "ended"),
    [(None, False), ({}, False), ({"cache_n": 0, "prompt_n": 0}, False), (TIMINGS, True)],
)
async def test_without_figures_nothing_is_claimed(timings: Any, ended: bool) -> None:
    """An answer without timings says nothing of the slot: it has to be looked at."""
    bench = Bench(NATIVE, {})
    await bench.assemble(native(stop=True, timings=timings))
    assert bench.lease.ended is ended


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 400, "message": "too long"}, 400),
        ({"code": 503}, 503),
        ({"code": 200}, 500),
        ({"code": "x"}, 500),
        ({}, 500),
        ("words", 500),
        (None, 500),
    ],
)
async def test_error_events(error: Any, status: int) -> None:
    """An error event becomes an error answer with the status it names, or 500."""
    bench = Bench(CHAT, {})
    event = orjson.dumps({"error": error})
    assert await bench.assemble(event) == (status, {"error": error})
    assert not bench.lease.ended


@pytest.mark.parametrize("events", [[], [b"{"], [native(content="a")], [b"[DONE]"], [b"null"]])
@pytest.mark.parametrize("path", [CHAT, NATIVE, "/v1/completions", "/infill"])
async def test_no_answer(path: str, events: list[bytes]) -> None:
    """Whatever is no whole answer is the backend's failure, and the slot is not believed."""
    bench = Bench(path, {})
    with pytest.raises(BackendBrokenError):
        await bench.assemble(*events)
    assert not bench.lease.ended


async def test_a_connection_that_breaks() -> None:
    """It is not taken for the end, even after a whole-looking answer."""
    bench = Bench(NATIVE, {})
    last = native(stop=True, timings=TIMINGS)
    with pytest.raises(BackendUnreachableError):
        await bench.assemble(last, error=BackendUnreachableError("broke"))
    assert not bench.lease.ended


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b'{"timings": 5}', b"{}"])
async def test_unstreamed_answers_pass_as_they_are(body: bytes) -> None:
    """An answer the backend did not stream is not changed, whatever it is."""
    bench = Bench(CHAT, {})
    assert await bench.relay.whole(Upstream([body])) == body
    assert not bench.lease.ended


async def test_figures_of_unstreamed_answers() -> None:
    """They are in its timings."""
    bench = Bench(CHAT, {})
    await bench.relay.whole(Upstream([orjson.dumps({"timings": TIMINGS})]))
    assert bench.told.calls == [("observed", 10, 15), ("measured", 10, 5, 0.05, "slot")]
    assert bench.lease.n_tokens == 17
    refused = Bench(CHAT, {})
    await refused.relay.whole(Upstream([orjson.dumps({"timings": TIMINGS})], status=400))
    assert refused.told.calls == []


async def test_what_the_backend_sent_is_kept_where_wanted() -> None:
    """Data of all events, or the one whole body; never what an earlier try left."""
    kept = [b"old"]
    bench = Bench(CHAT, {}, kept)
    with pytest.raises(BackendBrokenError):
        await bench.assemble(b'{"choices":[]}', b"[DONE]")
    assert kept == [b'{"choices":[]}', b"[DONE]"]
    bench = Bench(CHAT, {}, kept)
    assert kept == []
    await bench.relay.whole(Upstream([b"{}"]))
    assert kept == [b"{}"]
    await bench.relay.whole(Upstream([b"no"], status=400))
    assert kept == [b"{}"]


def test_without() -> None:
    """Names are compared without case, order and repetitions stay."""
    headers = [("A", "1"), ("Content-Length", "5"), ("a", "2")]
    assert without(headers, ("content-length",)) == [("A", "1"), ("a", "2")]


class Ping:
    """An event filter that only pings."""

    def ping(self) -> bytes:
        """The next one."""
        return encode(b"ping")


async def test_no_pings_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an event waits for its client to read, the silence is not the backend's."""
    order: list[str] = []
    pinged, released = asyncio.Event(), asyncio.Event()

    def release() -> None:
        order.append("released")
        released.set()

    def ping() -> None:
        order.append("ping")
        pinged.set()

    class Stuck(web.StreamResponse):
        async def write(self, data: bytes) -> None:  # type: ignore[override]
            await released.wait()
            await super().write(data)

    async def handler(request: web.Request) -> web.StreamResponse:
        client = Client(request, lambda: "")
        client.ping_in_silence(Ping(), 0.001, ping)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(0.02, release)
        await client.write(encode(b"event"))
        await pinged.wait()
        await client.quiet()
        return await client.write(b"")

    monkeypatch.setattr(web, "StreamResponse", Stuck)
    app = web.Application()
    app.router.add_get("/", handler)
    async with TestServer(app, host="127.0.0.1") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert encode(b"event") in await reader.read()
        writer.close()
        await writer.wait_closed()
    assert order[:2] == ["released", "ping"]


async def test_a_ping_that_fails_is_the_last() -> None:
    """What it raised is raised where pings end, and nothing is lost in the event loop."""
    counted: list[int] = []
    twice = asyncio.Event()

    class Broken(Ping):
        def ping(self) -> bytes:
            raise ValueError("broken")

    client = Client(make_mocked_request("GET", "/"), lambda: "")
    client.ping_in_silence(Broken(), 0.001, lambda: counted.append(1))  # type: ignore[arg-type]
    asyncio.get_running_loop().call_later(0.02, twice.set)
    await twice.wait()
    with pytest.raises(ValueError, match="broken"):
        await client.quiet()
    assert counted == [1]


async def test_headers_leave_once_and_writers_take_turns() -> None:
    """Pings and events written at the same time come whole, after one set of headers."""
    notes: list[str] = []
    counted: list[int] = []
    fourth = asyncio.Event()

    def ping() -> None:
        counted.append(1)
        if len(counted) == 4:
            fourth.set()

    async def handler(request: web.Request) -> web.StreamResponse:
        def note() -> str:
            notes.append("note")
            return "note"

        client = Client(request, note)
        assert not client.begun
        client.ping_in_silence(Ping(), 0.001, ping)  # type: ignore[arg-type]
        await fourth.wait()
        await client.quiet()  # three have gone; the fourth was about to
        assert client.first_after() is None
        client.answering()
        await asyncio.gather(*(client.write(encode(b"event" * 100)) for _ in range(50)))
        assert (client.first_after() or 0.0) > 0
        client.headers = [("X-Late", "1")]
        return await client.write(b"")

    app = web.Application()
    app.router.add_get("/", handler)
    async with TestServer(app, host="127.0.0.1") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert body == encode(b"ping") * 3 + encode(b"event" * 100) * 50
    assert notes == ["note"]
    assert len(counted) == 4
    assert b"X-Accel-Buffering: no" in head
    assert b"X-Late" not in head
