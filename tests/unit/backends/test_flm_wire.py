"""Questions to FastFlowLM, streams that stop, heads (fastflowlm.md 1.1, 1.5)."""

from __future__ import annotations

import asyncio

import pytest

from proxy.backends import flm_wire
from proxy.backends.flm_wire import ask, next_of, only_kind, parsed, streams, without_kind
from proxy.backends.transport import Transport
from proxy.errors import BackendBrokenError, BackendRefusedError, BackendTimeoutError
from tests.unit.backends.raw import by_path, http, raw_server, read_request

KIND = ("Content-Type", "text/event-stream")


async def test_questions() -> None:
    """JSON comes back; anything else has its error."""
    seen: list[bytes] = []
    pages: dict[str, object] = {"/a": {"x": 1}, "/b": http(b"<"), "/c": http(b"{}", "500 Oh")}
    async with raw_server(by_path(pages, seen)) as server:
        transport = Transport(server.url, connect_timeout=2, silence_timeout=20)
        assert await ask(transport, "/a") == {"x": 1}
        assert await ask(transport, "/a", {"y": 2}) == {"x": 1}
        with pytest.raises(BackendBrokenError):
            await ask(transport, "/b")
        with pytest.raises(BackendRefusedError) as caught:
            await ask(transport, "/c")
        await transport.close()
    assert caught.value.answer == 500
    assert [request.split(b" ")[0] for request in seen[:2]] == [b"GET", b"POST"]
    assert seen[1].endswith(b'{"y":2}')


async def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that is not answered, and a stream that stops, end in time."""
    monkeypatch.setattr(flm_wire, "ANSWER_SECONDS", 0.01)

    async def stopping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if request.startswith(b"GET /stream"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nx")
        await asyncio.Event().wait()

    async with raw_server(stopping) as server:
        transport = Transport(server.url, connect_timeout=2, silence_timeout=20)
        with pytest.raises(BackendTimeoutError):
            await ask(transport, "/silent")
        async with transport.send("GET", "/stream", [], None) as upstream:
            assert streams(upstream)
            assert await next_of(upstream, 5.0) == b"x"
            with pytest.raises(BackendTimeoutError):
                await next_of(upstream, 0.01)
        await transport.close()


def test_heads() -> None:
    """Going in only the type stays, going out everything but what the body changes."""
    pairs = [KIND, ("Content-Length", "1"), ("X", "y")]
    assert only_kind(pairs) == [KIND]
    assert without_kind(pairs) == [("X", "y")]


def test_parsed() -> None:
    """What cannot be read is the server's fault."""

    def refuse(data: bytes) -> bytes:
        raise ValueError(data)

    assert parsed(bytes.upper, b"a") == b"A"
    with pytest.raises(BackendBrokenError):
        parsed(refuse, b"a")
