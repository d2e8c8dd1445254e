"""FastFlowLM's driver against raw sockets: what goes out, and what is made of nonsense.

How it gets on with the emulator: tests/integration/test_fastflowlm.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from proxy.backends import fastflowlm
from proxy.backends.fastflowlm import FastFlowLM
from proxy.backends.flm_work import CHAT
from proxy.errors import BackendBrokenError, BackendRefusedError, BadRequestError
from tests.unit.backends.raw import by_path, http, raw_server

EVENTS = "Content-Type: text/event-stream\r\n"
KNOWN: dict[str, object] = {
    "/api/version": {"version": "0.9.45"},
    "/v1/models": {"data": [{"id": "m:1b"}]},
    "/api/npu/status": {"npu_available": True},
    "/api/cancel": {"cancelled": False},
}
BODY = orjson.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True})


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.0)


@asynccontextmanager
async def driver(
    answers: dict[str, object], seen: list[bytes] | None = None
) -> AsyncIterator[FastFlowLM]:
    """The driver in front of a raw server."""
    async with raw_server(by_path({**KNOWN, **answers}, seen)) as server:
        backend = FastFlowLM(server.url, connect_timeout=2, silence_timeout=20)
        try:
            yield backend
        finally:
            await backend.close()


async def test_facts() -> None:
    """One slot; the model is not known before an answer told it."""
    async with driver({}) as backend:
        facts = await backend.facts()
        assert (facts.kind, facts.total_slots, facts.model) == ("fastflowlm", 1, "")
        assert (facts.instance, await backend.instance()) == ("", "")
        assert facts.identity == {"version": "0.9.45"}


@pytest.mark.parametrize(
    "answers",
    [{"/api/version": []}, {"/v1/models": {}}, {"/v1/models": {"data": [7]}},
     {"/api/version": http(b"<")}],
)  # fmt: skip
async def test_facts_of_something_else(answers: dict[str, object]) -> None:
    """Another server's answers are named broken."""
    async with driver(answers) as backend:
        with pytest.raises(BackendBrokenError):
            await backend.facts()


async def test_not_there() -> None:
    """A page that is missing is told with its status."""
    async with driver({"/api/npu/status": http(b"", "404 Not Found")}) as backend:
        with pytest.raises(BackendRefusedError) as caught:
            await backend.instance()
        assert caught.value.answer == 404


async def test_what_only_reads() -> None:
    """Exact path, own connection, none of the client's headers."""
    seen: list[bytes] = []
    async with driver({"/v1/models": {"data": []}}, seen) as backend:
        given = [("Cookie", "c" * 9000), ("Authorization", "Bearer k")]
        async with backend.send("GET", "/v1/models?x=1", given, None) as upstream:
            assert await upstream.read() == b'{"data":[]}'
    assert seen[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert b"Cookie" not in seen[0]
    assert b"Authorization" not in seen[0]
    assert b"connection: close" in seen[0].lower()


async def test_what_is_no_json() -> None:
    """A form goes out as it came, its type with it; a refusal keeps its status."""
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nw\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nRIFF\r\n--b--'
    seen: list[bytes] = []
    async with driver({"/v1/audio/transcriptions": {"text": "t"}}, seen) as backend:
        kind = [("Content-Type", "multipart/form-data; boundary=b"), ("X", "y")]
        async with backend.send("POST", "/v1/audio/transcriptions", kind, form) as upstream:
            assert (upstream.status, await upstream.read()) == (200, b'{"text":"t"}')
        assert seen[-1].endswith(b"RIFF\r\n--b--")
        assert b"boundary=b" in seen[-1]
        async with backend.send("POST", "/no/such", [], None) as upstream:
            assert upstream.status == 404


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},  # no stream
        http(b'data: {"choices":[]}\n\n', headers=EVENTS),  # no end
        http(b"data: {\n\n", headers=EVENTS),
    ],
)
async def test_nonsense(answer: object) -> None:
    """An answer to a chat that is none is the backend's fault, and the lane is free again."""
    async with driver({CHAT: answer}) as backend:
        for _ in range(2):
            with pytest.raises(BackendBrokenError):
                async with backend.send("POST", CHAT, [], BODY) as upstream:
                    await upstream.read()


async def test_an_answer_without_finish() -> None:
    """Whole answers are only made of whole streams."""
    async with driver({CHAT: http(b"data: [DONE]\n\n", headers=EVENTS)}) as backend:
        body = orjson.dumps({"messages": [{"role": "user", "content": "x"}]})
        with pytest.raises(BackendBrokenError):
            async with backend.send("POST", CHAT, [], body):
                pass


async def test_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug costs the answer, not the lane."""
    async with driver({CHAT: {"error": "x"}}) as backend:
        with monkeypatch.context() as patch:
            patch.setattr("proxy.backends.flm_answer.judged", None)
            with pytest.raises(BackendBrokenError):
                async with backend.send("POST", CHAT, [], BODY):
                    pass
        async with backend.send("POST", CHAT, [], BODY) as upstream:
            assert upstream.status == 500


async def test_refused_before_it_is_sent() -> None:
    """A chat it could not read takes no turn."""
    seen: list[bytes] = []
    async with driver({}, seen) as backend:
        with pytest.raises(BadRequestError):
            async with backend.send("POST", "/chat/completions", [], b'{"messages":[]}'):
                pass
    assert not any(request.startswith(b"POST") for request in seen)
