"""Which server it is, by its answers."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.backends.choose import UNDRIVEN, Chosen, build
from proxy.backends.fastflowlm import FastFlowLM
from proxy.backends.llama_server import LlamaServer
from proxy.backends.openai_compatible import OpenAICompatible
from proxy.backends.pool import Pool
from proxy.errors import BackendBrokenError, BackendRefusedError, BackendUnreachableError
from tests.unit.backends.raw import by_path, http, raw_server
from tests.unit.backends.test_llama_server import INTRODUCTION

NPU = {"npu_available": True, "active_requests": 0, "message": "NPU is available"}
TIMES: dict[str, Any] = {"connect_timeout": 2, "silence_timeout": 20}


@pytest.mark.parametrize(
    ("answers", "want"),
    [
        (INTRODUCTION, LlamaServer),
        ({**INTRODUCTION, "/api/npu/status": NPU}, LlamaServer),
        ({"/api/npu/status": NPU}, FastFlowLM),
        ({"/props": {"x": 1}, "/api/npu/status": NPU}, FastFlowLM),
        ({}, OpenAICompatible),
        ({"/props": http(b"<html>"), "/api/npu/status": http(b"<html>")}, OpenAICompatible),
        ({"/props": [1], "/api/npu/status": []}, OpenAICompatible),
    ],
)
async def test_recognised(answers: dict[str, object], want: type) -> None:
    """By what only that server answers; asked once."""
    seen: list[bytes] = []
    async with raw_server(by_path(answers, seen)) as server:
        chosen = build("auto", server.url, key="k", **TIMES)
        assert isinstance(chosen, Chosen)
        assert isinstance(await chosen.driver(), want)
        asked = len(seen)
        assert all(b"Bearer k" in request for request in seen)
        assert await chosen.driver() is await chosen.driver()
        assert len(seen) == asked
        await chosen.close()


@pytest.mark.parametrize("status", ["401 Unauthorized", "503 Service Unavailable"])
async def test_not_yet(status: str) -> None:
    """A server that loads, or wants a key, is taken for a llama-server and asked again."""
    answers: dict[str, object] = {"/props": http(b"{}", status)}
    async with raw_server(by_path(answers)) as server:
        chosen = build("auto", server.url, key=None, **TIMES)
        with pytest.raises(BackendRefusedError) as caught:
            await chosen.instance()
        assert str(caught.value.answer) == status[:3]
        answers.clear()
        answers["/api/npu/status"] = NPU
        assert await chosen.instance() == ""
        with pytest.raises(BackendRefusedError, match="FastFlowLM cannot"):
            await chosen.slots()
        await chosen.close()


async def test_not_there() -> None:
    """It says so, and asks again at the next contact."""
    async with raw_server(by_path({})) as server:
        pass
    chosen = build("auto", server.url, key=None, **TIMES)
    for _ in range(2):
        with pytest.raises(BackendUnreachableError):
            async with chosen.send("GET", "/x", [], None):
                pass
    await chosen.close()


async def test_everything_is_passed_on() -> None:
    """Each call reaches the driver, before and after it was found."""
    saved = {"id_slot": 0, "n_saved": 5, "n_written": 9, "timings": {"save_ms": 1.0}}
    restored = {"id_slot": 0, "n_restored": 5, "n_read": 9, "timings": {"restore_ms": 1.0}}
    answers = {
        **INTRODUCTION,
        "/x": {"found": True},
        "/slots": [{"id": 0, "n_ctx": 8, "is_processing": False}],
        "/slots/0?action=save": saved,
        "/slots/0?action=restore": restored,
        "/slots/0?action=erase": {},
        "/apply-template": {"prompt": "p"},
        "/tokenize": {"tokens": [1]},
    }
    async with raw_server(by_path(answers)) as server:
        chosen = build("auto", server.url, key=None, **TIMES)
        for _ in range(2):
            async with chosen.send("GET", "/x", [], None) as upstream:
                assert await upstream.read() == b'{"found":true}'
        assert len(await chosen.slots()) == 1
        assert (await chosen.facts()).kind == "llama-server"
        assert await chosen.instance()
        assert (await chosen.save(0, "a.kv")).n_tokens == 5
        assert (await chosen.restore(0, "a.kv")).n_tokens == 5
        await chosen.erase(0)
        assert await chosen.render({}) == "p"
        assert await chosen.tokenize("x") == [1]
        await chosen.close()


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("llama_server", LlamaServer), ("fastflowlm", FastFlowLM),
        ("openai_compatible", OpenAICompatible),
    ],
)  # fmt: skip
async def test_named(kind: str, want: type) -> None:
    """What the user names is not asked for."""
    named = build(kind, "http://127.0.0.1:1", key=None, **TIMES)
    assert isinstance(named, want)
    await named.close()


async def test_undriven_kinds_are_real() -> None:
    """The reasons are filed under the names that drivers give themselves."""
    async with raw_server(
        by_path({"/v1/models": {"data": []}, "/api/version": {"version": "1"}})
    ) as s:
        for name in ("fastflowlm", "openai_compatible"):
            backend = build(name, s.url, key=None, **TIMES)
            assert (await backend.facts()).kind in UNDRIVEN
            await backend.close()


async def test_several() -> None:
    """Of a kind that is named, or of the kind of the first that answers."""
    async with raw_server(by_path({})) as gone:
        pass
    for kind in ("fastflowlm", "openai_compatible"):
        named = build(kind, gone.url, "http://127.0.0.1:1", key=None, **TIMES)
        assert isinstance(named, Pool)
        await named.close()
    async with raw_server(by_path({"/api/npu/status": NPU})) as there:
        chosen = build("auto", gone.url, there.url, key=None, **TIMES)
        assert isinstance(chosen, Chosen)
        assert (chosen.absent, chosen.primes(0, b"{}")) == (frozenset(), False)
        assert isinstance(await chosen.driver(), Pool)
        await chosen.instance()
        assert chosen.absent == {0}
        assert not chosen.primes(1, b"{}")
        await chosen.close()


async def test_several_llama_servers() -> None:
    """Are refused with what to do; while it cannot be told, too."""
    answers: dict[str, object] = dict(INTRODUCTION)
    async with raw_server(by_path(answers)) as one:
        chosen = build("auto", one.url, "http://127.0.0.1:1", key=None, **TIMES)
        with pytest.raises(BackendBrokenError, match="this one is a llama-server"):
            await chosen.instance()
        await chosen.close()
    answers["/props"] = http(b"{}", "503 Service Unavailable")
    async with raw_server(by_path(answers)) as one:
        chosen = build("auto", one.url, "http://127.0.0.1:1", key=None, **TIMES)
        with pytest.raises(BackendBrokenError, match="cannot be told"):
            await chosen.instance()
        await chosen.close()
