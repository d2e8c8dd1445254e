"""What the emulator puts on the wire, whom it lets in, and how it dies (sections 1 and 2)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from tests.emulators.fastflowlm import Clock, Emulator, Options, acceptance
from tests.emulators.fastflowlm.acceptance import CKPT, WIRE, Ask
from tests.emulators.fastflowlm.client import Wire, ask, parse, until
from tests.emulators.fastflowlm.transport import to_json

CHAT = "/v1/chat/completions"
SAY: dict[str, Any] = {
    "model": CKPT,
    "stream": True,
    "messages": [{"role": "user", "content": "Hello"}],
}
PLAIN = {**SAY, "stream": False}


async def queued(emu: Emulator, count: int) -> None:
    """Wait until so many requests are in the queue."""
    await until(lambda: emu.npu.waiting >= count)


async def leave(emu: Emulator, body: dict[str, Any]) -> None:
    """Start a stream and go after its first bytes."""
    wire = Wire(emu.url)
    await wire.open()
    hold = emu.hold("decode", after=1)
    await wire.send("POST", CHAT, to_json(body))
    await hold.reached.wait()
    await wire.close()
    await until(lambda: emu.records[-1].disconnected)
    hold.release.set()
    await emu.settled()


async def test_aborted_streams_cost_their_slots() -> None:
    """After ten aborted streams nobody is let in any more, until the process is restarted."""
    async with Emulator(Options(model=CKPT)) as emu:
        for _ in range(acceptance.SOCKETS):
            await leave(emu, SAY)
        assert all(record.leaked for record in emu.records)
        assert (await ask(emu.url, "/api/version")).status == 0
        await emu.restart()
        assert (await ask(emu.url, "/api/version")).status == 200


async def test_a_client_that_gives_up_while_prefilling() -> None:
    """The loop of #733: nothing is kept of an abandoned prefill, each retry pays all of it."""
    async with Emulator(Options(model=CKPT)) as emu:
        body = {**SAY, **Ask("s u1 a1 u2").body()}
        for _ in range(3):
            hold = emu.hold("prefill")
            wire = Wire(emu.url)
            await wire.open()
            await wire.send("POST", CHAT, to_json(body))
            await hold.reached.wait()
            await wire.close()
            await until(lambda: emu.records[-1].disconnected)
            hold.release.set()
            await emu.settled()
            assert (emu.records[-1].finish, emu.records[-1].kept) == ("cancel", 0)
        await ask(emu.url, CHAT, body)
        assert (emu.records[-1].kept, emu.records[-1].finish) == (0, "stop")
        assert emu.as_json()["counters"]["leaked"] == 3


async def test_without_the_leak_slots_come_back() -> None:
    """``--leak off``: aborts cost nothing."""
    async with Emulator(Options(model=CKPT, leak=False)) as emu:
        for _ in range(acceptance.SOCKETS):
            await leave(emu, SAY)
        assert emu.active == 0


async def test_cancelled_streams_keep_their_slots() -> None:
    """A cancel that the client stays for ends the stream regularly."""
    async with Emulator(Options(model=CKPT)) as emu:
        hold = emu.hold("decode", after=1)
        running = asyncio.create_task(ask(emu.url, CHAT, {**SAY, "request_id": "a"}))
        await hold.reached.wait()
        await ask(emu.url, "/api/cancel", {"request_id": "a"})
        hold.release.set()
        reply = await running
        assert (reply.finish, reply.chunks[-1], emu.active) == ("cancel", b"data: [DONE]\n\n", 0)
        gone = await ask(emu.url, "/api/cancel", {"request_id": "a"})
        assert (gone.status, gone.body) == WIRE["nothing to cancel"]


async def test_queue() -> None:
    """One works, ``--q-len`` wait in order, the next gets 503; who finishes sleeps 333 ms first."""
    async with Emulator(Options(model=CKPT, socket=20)) as emu:
        hold = emu.hold("prefill")
        tasks = [asyncio.create_task(ask(emu.url, CHAT, PLAIN))]
        await hold.reached.wait()
        for count in range(1, 11):
            tasks.append(asyncio.create_task(ask(emu.url, CHAT, PLAIN)))
            await queued(emu, count)
        full = await ask(emu.url, CHAT, PLAIN)
        assert (full.status, full.body) == WIRE["queue full"]
        hold.release.set()
        await asyncio.gather(*tasks)
        done = [record for record in emu.records if record.status == 200]
        assert [r.started for r in done] == sorted(r.started for r in done)
        first, last = done[0], done[-1]
        work = first.prefill_seconds + first.decode_seconds
        assert first.first_byte == pytest.approx(first.started + work + 0.333)
        assert last.first_byte == pytest.approx(last.started + last.prefill_seconds
                                                + last.decode_seconds)  # fmt: skip


async def test_leaving_while_queued_is_not_noticed() -> None:
    """The streaming handler resets the token: the answer is generated for nobody."""
    async with Emulator(Options(model=CKPT)) as emu:
        hold = emu.hold("prefill")
        running = asyncio.create_task(ask(emu.url, CHAT, SAY))
        await hold.reached.wait()
        wire = Wire(emu.url)
        await wire.open()
        await wire.send("POST", CHAT, to_json(SAY))
        await queued(emu, 1)
        await wire.close()
        await until(lambda: any(connection.left for connection in emu._connections))
        hold.release.set()
        await running
        await emu.settled()
        assert (emu.records[-1].disconnected, emu.records[-1].leaked) == (True, True)
        assert emu.records[-1].prefill_seconds > 0


async def test_requests_that_take_no_lock_race() -> None:
    """``/v1/completions`` runs beside a chat, in the same engine."""
    async with Emulator(Options(model=CKPT)) as emu:
        hold = emu.hold("prefill")
        running = asyncio.create_task(ask(emu.url, CHAT, SAY))
        await hold.reached.wait()
        await ask(emu.url, "/v1/completions", {"model": CKPT, "prompt": "Hello"})
        hold.release.set()
        await running
        assert [r.race for r in emu.records] == [False, True]


async def test_the_context_may_be_cleared_under_the_next_request() -> None:
    """Error paths give the lock back before they clear."""
    async with Emulator(Options(model=CKPT, ctx_len=512)) as emu:
        late = emu.hold("before-clear")
        long = {**SAY, "messages": [{"role": "user", "content": "word " * 600}]}
        assert (await ask(emu.url, CHAT, long)).status == 400
        await late.reached.wait()
        hold = emu.hold("decode", after=1)
        running = asyncio.create_task(ask(emu.url, CHAT, SAY))
        await hold.reached.wait()
        late.release.set()
        await until(lambda: emu.engine is not None and not emu.engine.history)
        hold.release.set()
        await running
        assert emu.records[0].race


async def test_a_number_as_request_id_locks_for_ever() -> None:
    """The thread that reads it dies with the lock; everyone else waits."""
    async with Emulator(Options(model=CKPT)) as emu:
        first = asyncio.create_task(ask(emu.url, CHAT, {**SAY, "request_id": 7}))
        await until(lambda: emu.npu.poisoned)
        second = asyncio.create_task(ask(emu.url, CHAT, SAY))
        await queued(emu, 1)
        assert not first.done()
        await emu.stop()
        assert [reply.status for reply in await asyncio.gather(first, second)] == [0, 0]


@pytest.mark.parametrize(
    ("method", "target", "body", "want"),
    [
        ("GET", "/health", None, "not found"),
        ("GET", "/v1/models?x=1", None, "not found"),
        ("POST", "/v1/chat/completions/", PLAIN, "not found"),
        ("POST", "/v1/messages", PLAIN, "not found"),
        ("POST", "/api/cancel", {}, "cancel without an id"),
        ("POST", "/api/pull", {"model": "x"}, "pull"),
    ],
)
async def test_plain_answers(method: str, target: str, body: Any, want: str) -> None:
    """Targets are compared as they stand; bodies are the ones of the page."""
    async with Emulator() as emu:
        reply = await ask(emu.url, target, body, method=method)
        assert (reply.status, reply.body) == WIRE[want]
        kind = "multipart/form-data" if body is None else "application/json"
        assert reply.headers["content-type"] == kind
        assert reply.headers["access-control-allow-origin"] == "*"
        assert not {"connection", "date", "server"} & set(reply.headers)


async def test_limits_of_a_request() -> None:
    """Long headers end the connection without a word, a long body is answered with 413."""
    async with Emulator(Options(max_body=100)) as emu:
        long = "x" * acceptance.HEADER_BYTES
        assert (await ask(emu.url, f"/api/version{long}")).status == 0
        reply = await ask(emu.url, CHAT, b"x" * 101)
        assert reply.status == 413
        assert reply.json == {"error": "Request payload too large", "max_bytes": 100}
        reply = await ask(emu.url, CHAT, b"{")
        assert (reply.status, reply.json["error"][:18]) == (500, "Handler exception:")


async def test_options_keeps_the_connection() -> None:
    """Only after OPTIONS a second request is possible."""
    async with Emulator() as emu:
        wire = Wire(emu.url)
        await wire.open()
        await wire.send("OPTIONS", CHAT)
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert parse(head).status == 200
        await wire.send("GET", "/api/version")
        assert parse(await wire.rest()).json == {"version": "0.9.45"}
        await wire.close()
    async with Emulator(Options(cors=False)) as emu:
        assert (await ask(emu.url, CHAT, method="OPTIONS")).status == 404


async def test_an_exception_in_mid_stream_never_ends_it() -> None:
    """Nothing more is written, the lock is free, the slot is lost."""
    async with Emulator(Options(model=CKPT)) as emu:
        emu.fault("hang", after=3)
        running = asyncio.create_task(ask(emu.url, CHAT, SAY))
        await until(lambda: emu.records and emu.records[0].ended is not None)
        assert (await ask(emu.url, CHAT, SAY)).complete
        assert not running.done()
        await emu.stop()
        reply = await running
        assert (reply.complete, len(reply.events), emu.records[0].leaked) == (False, 3, True)


async def test_undefined_behaviour() -> None:
    """By choice the process dies, or says so with 500; a new one starts with nothing."""
    async with Emulator(Options(model=CKPT)) as emu:
        assert (await ask(emu.url, CHAT, {"model": CKPT})).status == 0
        assert emu.crashed
        await emu.restart()
        assert (await ask(emu.url, CHAT, SAY)).complete
    async with Emulator(Options(model=CKPT, ub="error")) as emu:
        assert (await ask(emu.url, CHAT, {"model": CKPT})).status == 500
        assert (await ask(emu.url, CHAT, SAY)).complete
        assert (await ask(emu.url, "/api/chat", SAY)).events[-1]["message"]["content"] == ""
    async with Emulator() as emu:
        assert (await ask(emu.url, "/api/ps")).status == 0


async def test_debug_routes() -> None:
    """Another process can script answers and faults, and read what happened."""
    async with Emulator(Options(model=CKPT)) as emu:
        await ask(emu.url, "/__emu/script", {"answers": ["one", {"text": ["tw", "o"]}]})
        assert (await ask(emu.url, CHAT, SAY)).text == "\n\none"
        assert (await ask(emu.url, CHAT, SAY)).text == "\n\ntwo"
        await ask(emu.url, "/__emu/fault", {"kind": "drop", "after": 2})
        assert not (await ask(emu.url, CHAT, SAY)).complete
        records = (await ask(emu.url, "/__emu/records")).json["records"]
        assert [r["layer1"] for r in records] == ["switch", "miss", "miss"]
        await ask(emu.url, "/__emu/reset", {})
        assert not emu.records


async def test_time_passes_as_much_as_it_is_scaled() -> None:
    """Without a scale it is only counted."""
    clock = Clock(0.0)
    await clock.sleep(90)
    assert clock.now == 90
    scaled = Clock(0.001)
    loop = asyncio.get_running_loop()
    start = loop.time()
    await scaled.sleep(10)
    assert loop.time() - start >= 0.009


async def test_as_a_program() -> None:
    """``python -m tests.emulators.fastflowlm`` serves, and ends with a crash's status."""
    command = ["-m", "tests.emulators.fastflowlm", CKPT, "--port", "0", "--time-scale", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    url = next(word for word in line.split() if word.startswith("http"))
    assert (await ask(url, CHAT, SAY)).complete
    assert (await ask(url, CHAT, {})).status == 0
    assert await process.wait() == 139
