"""Connections against raw sockets: one is opened ahead, kept ones age, all end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from proxy.backends import connections
from proxy.backends.transport import Transport
from proxy.engine import free_port
from proxy.errors import BackendAbsentError, BackendTimeoutError
from tests.unit.backends.raw import RawServer, http, raw_server, read_request


class Counted:
    """Answers each request on its connection, notes which connection it was, and who left."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.served: list[int] = []
        self.left: list[int] = []
        self.known = 0
        self.gone = asyncio.Event()
        self.hang_up = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; ``hang_up`` ends those that wait for a request."""
        self.known += 1
        number = self.known
        self.came.set()
        asked = asyncio.create_task(read_request(reader))
        hung_up = asyncio.create_task(self.hang_up.wait())
        try:
            await asyncio.wait({asked, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await asked
                self.served.append(number)
                writer.write(http(b"ok"))
                await writer.drain()
                await reader.read()
        except asyncio.IncompleteReadError:
            self.left.append(number)
        finally:
            asked.cancel()
            hung_up.cancel()
            self.gone.set()

    async def until(self, count: int) -> None:
        """So many connections have come."""
        while self.known < count:
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), 10)


@asynccontextmanager
async def ahead() -> AsyncIterator[tuple[Counted, RawServer, Transport]]:
    """A server, and a transport that opens a connection ahead."""
    counted = Counted()
    async with raw_server(counted.handle) as server:
        transport = Transport(server.url, connect_timeout=2, silence_timeout=20, ahead=True)
        try:
            yield counted, server, transport
        finally:
            await transport.close()


async def once(transport: Transport) -> None:
    """A forwarded request."""
    async with transport.send("POST", "/", [], b"{}") as got:
        assert await got.read() == b"ok"


async def rested(transport: Transport) -> None:
    """One was opened ahead, and rests."""
    opening = transport._connections._opening
    assert opening is not None
    await asyncio.wait_for(opening, 10)
    assert transport._connections._idle


async def test_the_next_request_finds_a_connection() -> None:
    """After a request one is opened ahead, and the next request goes over it."""
    async with ahead() as (counted, server, transport):
        await once(transport)
        await rested(transport)
        assert (server.connections, counted.served) == (2, [1])
        await once(transport)
        assert counted.served == [1, 2]


async def test_one_that_the_backend_closed_is_left_alone() -> None:
    """A connection that ended while it rested is no request's failure: another one is made."""
    async with ahead() as (counted, _, transport):
        await once(transport)
        await rested(transport)
        await counted.until(2)
        counted.gone.clear()
        counted.hang_up.set()
        await asyncio.wait_for(counted.gone.wait(), 10)
        counted.hang_up.clear()
        for _ in range(10):
            await asyncio.sleep(0)  # the loop hears of the end
        await once(transport)
        assert 2 not in counted.served


async def test_one_that_rests_too_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Well before the server would do it, so that no request meets a dying connection."""
    monkeypatch.setattr(connections, "KEEPALIVE_SECONDS", 0.0)
    async with ahead() as (counted, _, transport):
        await once(transport)
        while 2 not in counted.left:
            counted.gone.clear()
            await asyncio.wait_for(counted.gone.wait(), 10)
        assert counted.served == [1]


async def test_a_closed_transport_opens_nothing_ahead() -> None:
    """What was being opened is given up, and a request that still runs leaves nothing open."""
    async with ahead() as (_, server, transport):
        await once(transport)
        await transport.close()  # while one is being opened
        before = server.connections
        await once(transport)
        for _ in range(10):
            await asyncio.sleep(0)
        assert server.connections <= before + 1


async def test_a_backend_that_is_gone_is_told_to_who_asks() -> None:
    """That no connection could be opened ahead is nobody's failure; the next request's is."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(raw_server(Counted().handle))
        transport = Transport(server.url, connect_timeout=2, silence_timeout=20, ahead=True)
        async with transport.send("POST", "/", [], b"{}") as got:
            assert await got.read() == b"ok"
            await stack.aclose()
    with pytest.raises(BackendAbsentError):
        await once(transport)
    await transport.close()


async def test_a_backend_that_speaks_no_tls() -> None:
    """An address that says https is never spoken to in the clear."""
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(2**16))
        writer.write(http(b"no"))
        await writer.drain()

    async with raw_server(handle) as server:
        url = server.url.replace("http://", "https://")
        transport = Transport(url, connect_timeout=2, silence_timeout=2)
        with pytest.raises(BackendAbsentError):
            await once(transport)
        await transport.close()
    assert b"POST" not in seen[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nobody_took_it(host: str) -> None:
    """Where nobody listens, it is known that nothing was done."""
    transport = Transport(f"http://{host}:{free_port()}", connect_timeout=2, silence_timeout=2)
    with pytest.raises(BackendAbsentError) as caught:
        await once(transport)
    assert caught.value.hint
    await transport.close()


async def test_a_large_body_that_nobody_reads_is_dropped() -> None:
    """Leaving while the body is still being sent sends no more of it."""
    size, got = 2**25, 0
    asked, leave, left = (asyncio.Event() for _ in range(3))

    async def handle(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        nonlocal got
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await leave.wait()
        try:
            while piece := await reader.read(2**16):
                got += len(piece)
        finally:
            left.set()

    async with raw_server(handle) as server:
        transport = Transport(server.url, connect_timeout=2, silence_timeout=20)

        async def send() -> None:
            async with transport.send("POST", "/", [], bytes(size)):
                pass

        task = asyncio.create_task(send())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leave.set()
        await asyncio.wait_for(left.wait(), 10)
        assert got < size
        await transport.close()


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nX: y", "a\rX: y"])
async def test_a_header_is_one_line(value: str) -> None:
    """A header that would become two is refused before anything is sent."""
    transport = Transport("http://127.0.0.1:1", connect_timeout=2, silence_timeout=2)
    with pytest.raises(ValueError, match="line break"):
        transport.send("GET", "/", [("X-A", value)], None)
    await transport.close()


@pytest.mark.parametrize("ends", [True, False])
async def test_an_answer_before_the_body_has_gone(*, ends: bool) -> None:
    """A large body that is refused at its head: the answer is heard, whatever the server does."""
    asked = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(http(b"no", "413 Payload Too Large"))
        await writer.drain()
        if not ends:
            await asked.wait()

    async with raw_server(handle) as server:
        transport = Transport(server.url, connect_timeout=2, silence_timeout=20)
        async with transport.send("POST", "/", [], bytes(2**25), keep=True) as got:
            assert (got.status, await got.read()) == (413, b"no")
        asked.set()
        assert not transport._connections._idle, "half a body would be the next request's head"
        await transport.close()


async def test_a_name_is_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a name stands for is remembered a moment, and asked again later; an address never is."""
    counted, asked = Counted(), 0
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def getaddrinfo(*args: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        return await real(*args, **more)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    async with raw_server(counted.handle) as server:
        for host, seconds, expected in (
            ("127.0.0.1", 10, 0),
            ("localhost", 10, 1),
            ("localhost", 0, 3),
        ):
            asked = 0
            monkeypatch.setattr(connections, "NAME_SECONDS", seconds)
            url = server.url.replace("127.0.0.1", host)
            transport = Transport(url, connect_timeout=2, silence_timeout=20)
            for _ in range(3):
                await once(transport)
            assert asked == expected, (host, seconds)
            await transport.close()


async def test_closed_for_good() -> None:
    """Closed in the very step in which one was to be opened ahead; a late request keeps none."""
    async with ahead() as (_, server, transport):
        async with transport.send("POST", "/", [], b"{}", keep=True) as got:
            assert await got.read() == b"ok"
            await transport.close()
        assert not transport._connections._idle
        assert server.connections == 1


async def test_what_is_no_name() -> None:
    """A host that cannot be a name is nobody's crash."""
    transport = Transport("http://a..b", connect_timeout=2, silence_timeout=2)
    with pytest.raises(BackendAbsentError, match="no name"):
        await once(transport)
    await transport.close()


async def test_silence_after_a_promise_is_silence() -> None:
    """An informational answer is none: who says no more after it times out."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await reader.read()

    async with raw_server(handle) as server:
        transport = Transport(server.url, connect_timeout=2, silence_timeout=0.05)
        with pytest.raises(BackendTimeoutError):
            await once(transport)
        await transport.close()
