"""The driver of servers nothing is known of: what is taken out, and what is told on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.backends.openai_compatible import OpenAICompatible, stripped, timed
from proxy.core.sse import encode
from proxy.errors import BackendBrokenError, BackendRefusedError, BackendUnreachableError
from tests.listening import Handler
from tests.unit.backends.raw import by_path, http, raw_server, saying

CHAT = "/v1/chat/completions"
EVENTS = "Content-Type: text/event-stream\r\n"
USAGE = {
    "prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7},
}  # fmt: skip
TIMINGS = {"cache_n": 7, "prompt_n": 3, "predicted_n": 2}


@asynccontextmanager
async def driver(handler: Handler, key: str | None = None) -> AsyncIterator[OpenAICompatible]:
    """The driver in front of a raw server."""
    async with raw_server(handler) as server:
        backend = OpenAICompatible(server.url, key=key, connect_timeout=2, silence_timeout=20)
        try:
            yield backend
        finally:
            await backend.close()


async def answered(raw: bytes) -> tuple[int, bytes]:
    """What a chat's reader gets when the server says ``raw``."""
    async with driver(saying(raw)) as backend, backend.send("POST", CHAT, [], b"{}") as upstream:
        return upstream.status, await upstream.read()


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b'{"a": 1,"b":"id_slot"}', b'{"a": 1,"b":"id_slot"}'),
        (b'{"a": 1,"cache_prompt":true,"id_slot":-1,"return_progress":true}', b'{"a":1}'),
        (b'{"a": 1.0, "cache_prompt" : true}', b'{"a":1.0}'),
        (b'{"cache_prompt": false}', b'{"cache_prompt": false}'),
        (b'{"verbose":true,"n_cache_reuse":0}', b"{}"),
        (b'"cache_prompt"', b'"cache_prompt"'),
        (b'{"cache_prompt"', b'{"cache_prompt"'),
        (b'{"x":"\\"cache_prompt\\""}', b'{"x":"\\"cache_prompt\\""}'),
    ],
)
def test_what_the_proxy_adds_is_taken_out(body: bytes, want: bytes) -> None:
    """Only with the values the proxy gives; what a client asked for itself goes on."""
    assert stripped(body) == want


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ({"usage": USAGE}, TIMINGS),
        ({"usage": {**USAGE, "prompt_tokens": 5}}, None),
        ({"usage": {**USAGE, "completion_tokens": None}}, None),
        ({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": None}}}, None),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 7}}}, None),
        ({"usage": None, "x": {"cached_tokens": 1}}, None),
        ({"usage": {"prompt_tokens": 10, "completion_tokens": 2}}, None),
        ({"usage": USAGE, "timings": {"cache_n": 1}}, {"cache_n": 1}),
        ([{"cached_tokens": 1}], None),
    ],
)
def test_reuse_is_told_on(answer: Any, want: Any) -> None:
    """Where the server says what it reused, and nowhere else."""
    data = orjson.dumps(answer)
    got = orjson.loads(timed(data))
    assert (got.get("timings") if isinstance(got, dict) else None) == want
    if want != TIMINGS:
        assert timed(data) is data


def test_no_json_is_left_alone() -> None:
    """Whatever it is."""
    assert timed(b'{"cached_tokens"') == b'{"cached_tokens"'


@pytest.mark.parametrize("rest", [b"", b"data: {"])
async def test_a_stream_keeps_its_bytes(rest: bytes) -> None:
    """Comments, unknown events, an unfinished one at the end: all bytes but the told event's."""
    last = encode(orjson.dumps({"usage": USAGE}))
    raw = b": ping\n\ndata: {}\n\n" + last + rest
    got = (await answered(http(raw, headers=EVENTS)))[1]
    told = encode(orjson.dumps({"usage": USAGE, "timings": TIMINGS}))
    assert got == b": ping\n\ndata: {}\n\n" + told + rest


async def test_an_event_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless event is the backend's fault, and not kept for ever."""
    monkeypatch.setattr("proxy.backends.openai_compatible.Parser", _Small)
    with pytest.raises(BackendBrokenError):
        await answered(http(b"data: x", headers=EVENTS))


class _Small:
    """A parser whose limit is met at once."""

    def feed(self, chunk: bytes) -> Any:
        """Refuse."""
        raise ValueError("an event is larger than 0 bytes")


async def test_a_whole_answer() -> None:
    """An answer that is not streamed is told on, too; an error is passed as it is."""
    body = orjson.dumps({"usage": USAGE})
    assert orjson.loads((await answered(http(body)))[1])["timings"] == TIMINGS
    assert await answered(http(body, "400 Bad Request")) == (400, body)


async def test_the_key() -> None:
    """The configured key replaces the client's; without one the client's goes through."""
    for key, want in (("k", b"Bearer k"), (None, b"Bearer c")):
        seen: list[bytes] = []
        async with driver(saying(http(b"{}"), seen), key) as backend:
            given = [("Authorization", "Bearer c")]
            async with backend.send("GET", "/v1/models?x=1", given, None) as upstream:
                assert await upstream.read() == b"{}"
        assert want in seen[0]
        assert seen[0].startswith(b"GET /v1/models?x=1 ")


@pytest.mark.parametrize(
    ("answer", "model"),
    [({"data": [{"id": "m"}]}, "m"), ({"data": []}, ""), (http(b"<html>"), ""), ([], ""),
     ({"data": [{"id": 7}]}, "")],
)  # fmt: skip
async def test_facts(answer: Any, model: str) -> None:
    """Only what it tells is known: no slots, no context, no process."""
    async with driver(by_path({"/v1/models": answer})) as backend:
        facts = await backend.facts()
        assert (facts.kind, facts.model, facts.total_slots) == ("openai-compatible", model, 0)
        assert (facts.instance, await backend.instance()) == ("", "")


async def test_a_key_is_demanded() -> None:
    """That is told apart from a server that has no list of models."""
    async with driver(by_path({"/v1/models": http(b"", "401 Unauthorized")})) as backend:
        with pytest.raises(BackendRefusedError) as caught:
            await backend.instance()
        assert caught.value.answer == 401
    async with driver(by_path({})) as backend:
        assert await backend.instance() == ""
    backend = OpenAICompatible("http://127.0.0.1:1", key=None, connect_timeout=2, silence_timeout=2)
    with pytest.raises(BackendUnreachableError):
        await backend.facts()
    await backend.close()
