"""The fake behaves as llama-server does where the proxy depends on it, and fails on demand.

The same facts about the real engine are in tests/real/test_engine_facts.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.backends.llama_server import LlamaServer
from proxy.backends.probe import probe
from proxy.core.records import Mode
from proxy.store.files import ProbeFiles
from tests.integration.fake_llama_server import FakeLlamaServer

Client = aiohttp.ClientSession
LONG = " ".join(f"word{i}" for i in range(200))
CHAT = "/v1/chat/completions"


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A chat request of one user message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


async def post(client: Client, fake: FakeLlamaServer, target: str, body: Any) -> Any:
    """The JSON answer to a request that must succeed."""
    async with client.post(fake.url + target, data=orjson.dumps(body)) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        return orjson.loads(raw)


async def get(client: Client, fake: FakeLlamaServer, target: str) -> Any:
    """A page's JSON."""
    async with client.get(fake.url + target) as answer:
        return orjson.loads(await answer.read())


async def events(client: Client, fake: FakeLlamaServer, body: Any, target: str = CHAT) -> list[Any]:
    """All events of a stream."""
    body = {**body, "stream": True, "return_progress": True}
    async with client.post(fake.url + target, data=orjson.dumps(body)) as answer:
        raw = await answer.read()
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    return [line if line == b"[DONE]" else orjson.loads(line) for line in lines]


@asynccontextmanager
async def driver(fake: FakeLlamaServer) -> AsyncIterator[LlamaServer]:
    """The real driver before the fake."""
    backend = LlamaServer(fake.url, key=fake.key, connect_timeout=2, silence_timeout=60)
    try:
        yield backend
    finally:
        await backend.close()


async def verdict(fake: FakeLlamaServer, slot_dir: Path, root: Path) -> Mode:
    """What the real probe makes of the fake."""
    async with driver(fake) as backend:
        facts = await backend.facts()
        found = await probe(
            backend, slot_dir=slot_dir, slots=(0, 1), facts=facts, files=ProbeFiles(root)
        )
        return found.mode


async def test_the_probe_finds_it_exclusive(
    fake: FakeLlamaServer, slot_dir: Path, tmp_path: Path
) -> None:
    """Pinning, saving, restoring and reuse are those of the recommended launch line."""
    assert await verdict(fake, slot_dir, tmp_path) is Mode.EXCLUSIVE
    assert not await asyncio.to_thread(lambda: list(slot_dir.iterdir()))


@pytest.mark.parametrize("change", [{"ram_cache": True}, {"clears_idle": True}])
async def test_the_probe_finds_default_flags(
    fake: FakeLlamaServer, slot_dir: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """A RAM cache, or idle slots that are cleared, show: only forwarding is safe."""
    await fake.restart(**change)
    assert await verdict(fake, slot_dir, tmp_path) is Mode.FORWARD


async def test_the_probe_finds_a_window(
    fake: FakeLlamaServer, slot_dir: Path, tmp_path: Path
) -> None:
    """Bytes after the first KV section mean that a state is no prefix."""
    fake.window = True
    assert await verdict(fake, slot_dir, tmp_path) is Mode.FORWARD


async def test_reuse_is_the_common_prefix(fake: FakeLlamaServer, client: Client) -> None:
    """A continued conversation computes only what is new; what was generated is reused, too."""
    first = await post(client, fake, CHAT, chat(LONG, id_slot=1))
    said = first["choices"][0]["message"]["content"]
    n_prompt = first["timings"]["prompt_n"]
    body = chat(LONG, id_slot=1)
    body["messages"] += [{"role": "assistant", "content": said}, {"role": "user", "content": "so"}]
    second = await post(client, fake, CHAT, body)
    assert first["timings"]["cache_n"] == 0
    assert second["timings"]["cache_n"] == n_prompt + 3, "the last of 4 tokens is never decoded"
    assert await get(client, fake, "/slots") == [
        {"id": 0, "n_ctx": 8192, "speculative": False, "is_processing": False},
        {
            "id": 1,
            "n_ctx": 8192,
            "speculative": False,
            "is_processing": False,
            "id_task": 2,
            "n_prompt_tokens": second["usage"]["total_tokens"] - 1,
        },
    ]


async def test_a_stream_says_what_the_whole_says(fake: FakeLlamaServer, client: Client) -> None:
    """Progress before computing and to the end, then the words, usage, timings and [DONE]."""
    whole = await post(client, fake, CHAT, chat(LONG, id_slot=0))
    await fake.restart()
    got = await events(client, fake, chat(LONG, id_slot=0, stream_options={"include_usage": True}))
    progress = [e["prompt_progress"] for e in got[:-1] if "prompt_progress" in e]
    assert [p["processed"] for p in progress][:2] == [0, 64]
    assert progress[-1]["processed"] == progress[-1]["total"] == whole["usage"]["prompt_tokens"]
    text = "".join(
        choice["delta"].get("content") or "" for e in got[:-1] for choice in e["choices"]
    )
    assert text == whole["choices"][0]["message"]["content"]
    assert got[-2]["usage"] == whole["usage"]
    assert got[-2]["timings"] == whole["timings"]
    assert got[-1] == b"[DONE]"


@pytest.mark.parametrize("target", ["/completion", "/v1/completions"])
async def test_prompts_of_all_kinds(fake: FakeLlamaServer, client: Client, target: str) -> None:
    """Text, tokens and lists of both are answered; the text of a stream is that of the whole."""
    body = {"prompt": LONG, "n_predict": 3}
    whole = await post(client, fake, target, body)
    got = [e for e in await events(client, fake, body, target) if e != b"[DONE]"]
    if target == "/completion":
        assert "".join(e["content"] for e in got[:-1]) == whole["content"]
        both = await post(client, fake, target, {"prompt": ["a b", [1, 2, 3]], "n_predict": 1})
        assert [one["tokens_evaluated"] for one in both] == [2, 3]
    else:
        assert "".join(e["choices"][0]["text"] for e in got) == whole["choices"][0]["text"]
        both = await post(client, fake, target, {"prompt": ["a b", [1, 2, 3]], "n_predict": 1})
        assert [choice["index"] for choice in both["choices"]] == [0, 1]


async def test_a_pinned_busy_slot_waits(fake: FakeLlamaServer, client: Client) -> None:
    """Requests and actions for a busy slot come after it; the other slot goes on."""
    fake.go.clear()
    first = asyncio.create_task(post(client, fake, CHAT, chat("one", id_slot=0)))
    await fake.until(lambda: fake.engine.slots[0].busy)
    second = asyncio.create_task(post(client, fake, CHAT, chat("two", id_slot=0)))
    third = asyncio.create_task(post(client, fake, CHAT, chat("three", id_slot=1)))
    await fake.until(lambda: len([s for s in fake.requests if s.slot is not None]) == 2)
    erase = asyncio.create_task(post(client, fake, "/slots/0?action=erase", {}))
    await fake.until(lambda: len(fake.seen("erase")) == 1)
    assert [one.slot for one in fake.seen(CHAT)] == [0, None, 1]
    assert not erase.done()
    fake.go.set()
    await asyncio.gather(first, second, third, erase)


async def test_a_client_that_leaves_is_noticed(fake: FakeLlamaServer, client: Client) -> None:
    """Its slot is free at once and holds what was computed so far."""
    stall = fake.fail("stall", at="progress", on=CHAT)
    task = asyncio.create_task(events(client, fake, chat(LONG, id_slot=0)))
    await stall.hit.wait()
    task.cancel()
    await fake.until(lambda: fake.seen(CHAT)[0].done)
    assert fake.seen(CHAT)[0].cancelled
    assert not fake.engine.slots[0].busy
    computed = len(fake.engine.slots[0].tokens)
    assert computed < 200
    again = await post(client, fake, CHAT, chat(LONG, id_slot=0))
    assert again["timings"]["cache_n"] == computed


async def test_wide_requests_empty_idle_slots(fake: FakeLlamaServer, client: Client) -> None:
    """N > 1 takes other slots and leaves them empty, visibly in id_task; embeddings wipe one."""
    await post(client, fake, CHAT, chat(LONG, id_slot=1))
    wide = await post(client, fake, CHAT, chat("x", id_slot=0, n=2))
    assert len(wide["choices"]) == 2
    _, other = await get(client, fake, "/slots")
    assert (other["id_task"], other["n_prompt_tokens"]) == (3, 0)
    await post(client, fake, "/v1/embeddings", {"input": "x"})


@pytest.mark.parametrize("at", ["headers", "progress", "stream"])
@pytest.mark.parametrize("kind", ["reset", "cut", "die"])
async def test_broken_connections(
    fake: FakeLlamaServer, client: Client, kind: Any, at: Any
) -> None:
    """A reset, a cut chunk and a dead server reach the client as a broken connection."""
    fake.fail(kind, at=at, on=CHAT)
    with pytest.raises(aiohttp.ClientError):
        await events(client, fake, chat(LONG))
    if kind == "die":
        await fake.until(lambda: fake._runner is None)
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(client, fake, "/health")
        before = fake.marker
        await fake.restart()
        assert fake.marker != before
    assert (await get(client, fake, "/props"))["media_marker"] == fake.marker
    assert fake.engine.slots[0].busy is False


async def test_errors_and_nonsense(fake: FakeLlamaServer, client: Client) -> None:
    """HTTP errors, 503 while loading, answers that are no JSON, keys, unknown pages."""
    fake.fail("error", on=CHAT, status=500)
    fake.fail("bad-json", on="/props")
    for target, status in ((CHAT, 500), (CHAT, 200), ("/nope", 404), (CHAT + "x", 404)):
        async with client.post(fake.url + target, data=orjson.dumps(chat("x"))) as answer:
            assert answer.status == status
    with pytest.raises(orjson.JSONDecodeError):
        await get(client, fake, "/props")
    fake.loading = True
    async with client.get(fake.url + "/slots") as answer:
        assert answer.status == 503
    fake.loading, fake.key = False, "secret"
    async with client.get(fake.url + "/slots") as answer:
        assert answer.status == 401
    async with client.get(fake.url + "/slots", headers={"X-Api-Key": "secret"}) as answer:
        assert answer.status == 200


async def test_lies(fake: FakeLlamaServer, client: Client, slot_dir: Path) -> None:
    """A restore may claim success and be worth nothing; a save may write less than it says."""
    await post(client, fake, CHAT, chat(LONG, id_slot=0))
    saved = await post(client, fake, "/slots/0?action=save", {"filename": "a.kv"})
    assert (slot_dir / "a.kv").stat().st_size == saved["n_written"]
    fake.fail("lie", on="restore")
    restored = await post(client, fake, "/slots/1?action=restore", {"filename": "a.kv"})
    assert restored["n_restored"] == saved["n_saved"]
    assert (await post(client, fake, CHAT, chat(LONG, id_slot=1)))["timings"]["cache_n"] == 0
    fake.fail("lie", on="save")
    saved = await post(client, fake, "/slots/0?action=save", {"filename": "b.kv"})
    assert (slot_dir / "b.kv").stat().st_size == saved["n_written"] - 1
    body = orjson.dumps({"filename": "b.kv"})
    async with client.post(fake.url + "/slots/0?action=restore", data=body) as answer:
        assert answer.status == 400
    assert fake.engine.slots[0].tokens == []


async def test_without_a_slot_folder(client: Client) -> None:
    """Started without --slot-save-path, slot actions are not supported."""
    async with (
        FakeLlamaServer(None) as fake,
        client.post(fake.url + "/slots/0?action=erase") as answer,
    ):
        assert answer.status == 501


async def test_what_was_sent_is_kept(fake: FakeLlamaServer, client: Client) -> None:
    """Tests can see the very bytes and headers that arrived; answers follow a script."""
    fake.script = lambda body: [" yes"]
    raw = b'{"messages":[{"role":"user","content":"x"}], "big":123456789012345678901234567890}'
    async with client.post(fake.url + CHAT, data=raw, headers={"X-Mine": "1"}) as answer:
        assert orjson.loads(await answer.read())["choices"][0]["message"]["content"] == " yes"
    (seen,) = fake.seen(CHAT)
    assert seen.body == raw
    assert ("X-Mine", "1") in seen.headers
    assert (seen.done, seen.cancelled) == (True, False)
