"""The llama-server driver against raw sockets: shapes, keys, refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.backends.llama_server import LlamaServer
from proxy.errors import BackendBrokenError, BackendRefusedError
from tests.listening import Handler
from tests.unit.backends.raw import by_path, http, raw_server, saying

MARKER = "<__media_NeclExHObt5h4X72hKOjewtXVmFgIDjq__>"
PROPS: dict[str, Any] = {
    "default_generation_settings": {"params": {}, "n_ctx": 4096},
    "total_slots": 2,
    "model_alias": "alias",
    "model_ftype": "Q4_1",
    "model_path": "/models/m.gguf",
    "modalities": {"vision": False},
    "media_marker": MARKER,
    "chat_template": "{{ messages }}",
    "build_info": "b1",
}
META = {"n_vocab": 10, "n_ctx": 4096, "n_ctx_train": 8192, "n_embd": 4, "n_params": 9, "size": 7}
MODELS: dict[str, Any] = {"data": [{"id": "m", "created": 123, "meta": META}]}
LORA = [{"id": 0, "path": "/l.gguf", "scale": 1, "task_name": ""}]
INTRODUCTION: dict[str, object] = {"/props": PROPS, "/v1/models": MODELS, "/lora-adapters": LORA}
SAVED = {"id_slot": 1, "n_saved": 5, "n_written": 99, "timings": {"save_ms": 1500.0}}

Ask = Callable[[LlamaServer], Awaitable[object]]


@asynccontextmanager
async def driver(handler: Handler, key: str | None = None) -> AsyncIterator[LlamaServer]:
    """The driver in front of a raw server."""
    async with raw_server(handler) as server:
        backend = LlamaServer(server.url, key=key, connect_timeout=2, silence_timeout=20)
        try:
            yield backend
        finally:
            await backend.close()


async def test_facts() -> None:
    """What identifies process and model is found; what differs between two starts stays out."""
    async with driver(by_path(INTRODUCTION)) as backend:
        facts = await backend.facts()
        assert await backend.instance() == facts.instance == MARKER
    assert (facts.kind, facts.total_slots, facts.n_ctx) == ("llama-server", 2, 4096)
    assert (facts.model, facts.model_path) == ("m", "/models/m.gguf")
    assert facts.port > 0
    assert facts.identity["lora"] == [{"path": "/l.gguf", "scale": 1.0}]
    assert facts.identity["n_params"] == 9
    assert facts.template == "{{ messages }}"
    kept = orjson.dumps(facts.identity)
    for absent in (b"alias", b"created", b"messages", b'"n_ctx"', b"__media"):
        assert absent not in kept


@pytest.mark.parametrize("template", [None, 7])
async def test_facts_without_a_template(template: object) -> None:
    """A server that shows no template is still known."""
    props = {**PROPS, "chat_template": template}
    async with driver(by_path({**INTRODUCTION, "/props": props})) as backend:
        assert (await backend.facts()).template == ""


async def test_identity_knows_the_adapters() -> None:
    """Another LoRA scale is another identity."""
    other = {**INTRODUCTION, "/lora-adapters": [{**LORA[0], "scale": 0.5}]}
    async with driver(by_path(INTRODUCTION)) as one, driver(by_path(other)) as two:
        assert (await one.facts()).identity != (await two.facts()).identity


@pytest.mark.parametrize("marker", ["<__media__>", "", None, 7, MARKER + "x"])
async def test_a_pinned_marker_identifies_nothing(marker: object) -> None:
    """Only a marker that looks random tells one process from the next."""
    async with driver(by_path({"/props": {**PROPS, "media_marker": marker}})) as backend:
        assert await backend.instance() == ""


async def test_slots_in_order() -> None:
    """Slots come sorted by index; tasks and tokens are None until there were any."""
    rows = [
        {"id": 1, "n_ctx": 8, "is_processing": True, "id_task": 0, "n_prompt_tokens": 0},
        {"id": 0, "n_ctx": 8, "is_processing": False},
    ]
    async with driver(by_path({"/slots": rows})) as backend:
        first, second = await backend.slots()
    assert (first.index, first.id_task, first.n_tokens) == (0, None, None)
    assert (second.index, second.id_task, second.n_tokens) == (1, 0, 0)
    assert second.is_processing


async def test_save_in_seconds() -> None:
    """Tokens, bytes and seconds of a save come from the backend's answer."""
    answers = {**INTRODUCTION, "/slots/1?action=save": SAVED}
    seen: list[bytes] = []
    async with driver(by_path(answers, seen)) as backend:
        saved = await backend.save(1, "a-B_9.kv")
    assert (saved.n_tokens, saved.n_bytes, saved.seconds) == (5, 99, 1.5)
    assert seen[-1].endswith(b'{"filename":"a-B_9.kv"}')


@pytest.mark.parametrize("slot", [-1, 2, 7])
async def test_slots_out_of_range(slot: int) -> None:
    """Ids the server would wrap around to another slot never leave the driver."""
    seen: list[bytes] = []
    async with driver(by_path(INTRODUCTION, seen)) as backend:
        for act in (backend.erase(slot), backend.save(slot, "a.kv"), backend.restore(slot, "a.kv")):
            with pytest.raises(ValueError, match="not one of 2"):
                await act
    assert not any(b"action=" in request for request in seen)


@pytest.mark.parametrize(
    "name", ["", "a", "../a.kv", "a/b.kv", "a.kv.tmp", "a.KV", "ä.kv", "a.kv\n"]
)
async def test_names_out_of_bounds(name: str) -> None:
    """Only bare names of a strict alphabet are sent."""
    async with driver(by_path(INTRODUCTION)) as backend:
        with pytest.raises(ValueError, match="bare file name"):
            await backend.save(0, name)


async def test_render_and_tokenize() -> None:
    """Prompts are tokenised with the flags the server itself uses."""
    answers: dict[str, object] = {
        "/apply-template": {"prompt": "<hi>"},
        "/tokenize": {"tokens": [1, 2]},
    }
    seen: list[bytes] = []
    async with driver(by_path(answers, seen)) as backend:
        assert await backend.render({"messages": []}) == "<hi>"
        assert await backend.tokenize("hi") == [1, 2]
    sent = orjson.loads(seen[1].partition(b"\r\n\r\n")[2])
    assert sent == {"content": "hi", "add_special": True, "parse_special": True}


async def test_the_configured_key_replaces_the_clients() -> None:
    """With a backend key, the client's own credentials never reach the backend."""
    seen: list[bytes] = []
    headers = [("authorization", "Bearer client"), ("X-API-Key", "client"), ("X-Other", "1")]
    async with (
        driver(saying(http(b"{}"), seen), key="backend") as backend,
        backend.send("GET", "/x", headers, None) as got,
    ):
        await got.read()
    assert b"client" not in seen[0]
    assert b"Authorization: Bearer backend\r\n" in seen[0]
    assert b"X-Other: 1\r\n" in seen[0]


async def test_without_a_key_the_clients_goes_through() -> None:
    """No backend key configured: what the client sent is what the backend checks."""
    seen: list[bytes] = []
    async with (
        driver(saying(http(b"{}"), seen)) as backend,
        backend.send("GET", "/x", [("Authorization", "Bearer client")], None) as got,
    ):
        await got.read()
    assert b"Authorization: Bearer client\r\n" in seen[0]


async def test_loading_is_a_refusal_with_503() -> None:
    """A server that still loads its model refuses with its own status and words."""
    body = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
    async with driver(saying(http(body, "503 Service Unavailable"))) as backend:
        with pytest.raises(BackendRefusedError, match="Loading model") as caught:
            await backend.slots()
    assert caught.value.answer == 503


@pytest.mark.parametrize("body", [b"", b"no", b"[]", b'{"error":1}', b'{"error":{"message":2}}'])
async def test_refusals_of_any_shape(body: bytes) -> None:
    """An error body that is no envelope is still a refusal."""
    async with driver(saying(http(body, "500 Oops"))) as backend:
        with pytest.raises(BackendRefusedError) as caught:
            await backend.slots()
    assert caught.value.answer == 500


async def test_errors_about_prompts_are_not_quoted() -> None:
    """An error text that may quote the prompt stays out of the message."""
    body = b'{"error":{"message":"near SECRET"}}'
    async with driver(saying(http(body, "400 Bad Request"))) as backend:
        for ask in (backend.render({}), backend.tokenize("x")):
            with pytest.raises(BackendRefusedError) as caught:
                await ask
            assert "SECRET" not in str(caught.value)


ODD: list[tuple[str, dict[str, object], Ask]] = [
    ("no-json", {"/slots": http(b"<html>")}, lambda b: b.slots()),
    ("slots-object", {"/slots": {}}, lambda b: b.slots()),
    ("slot-number", {"/slots": [1]}, lambda b: b.slots()),
    ("slot-empty", {"/slots": [{}]}, lambda b: b.slots()),
    (
        "slot-id-bool",
        {"/slots": [{"id": True, "n_ctx": 1, "is_processing": False}]},
        lambda b: b.slots(),
    ),
    ("props-list", {"/props": [1]}, lambda b: b.instance()),
    ("no-models", {**INTRODUCTION, "/v1/models": {"data": []}}, lambda b: b.facts()),
    ("meta-text", {**INTRODUCTION, "/v1/models": {"data": [{"meta": "x"}]}}, lambda b: b.facts()),
    ("lora-row", {**INTRODUCTION, "/lora-adapters": [None]}, lambda b: b.facts()),
    ("lora-bare", {**INTRODUCTION, "/lora-adapters": [{}]}, lambda b: b.facts()),
    ("props-bare", {**INTRODUCTION, "/props": {"x": 1}}, lambda b: b.facts()),
    ("save-bare", {**INTRODUCTION, "/slots/0?action=save": {"x": 1}}, lambda b: b.save(0, "a.kv")),
    ("tokens-text", {"/tokenize": {"tokens": ["a"]}}, lambda b: b.tokenize("x")),
    ("tokens-none", {"/tokenize": {"x": 1}}, lambda b: b.tokenize("x")),
    ("prompt-none", {"/apply-template": {"x": 1}}, lambda b: b.render({})),
]


@pytest.mark.parametrize(("answers", "ask"), [row[1:] for row in ODD], ids=[row[0] for row in ODD])
async def test_odd_answers_are_broken(answers: dict[str, object], ask: Ask) -> None:
    """An answer of a shape nobody expects is a broken backend, never a crash of the proxy."""
    async with driver(by_path(answers)) as backend:
        with pytest.raises(BackendBrokenError):
            await ask(backend)
