"""The facts DESIGN.md rests on, tried again on the engine the tests run (llama-server.md)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from proxy.backends.llama_server import LlamaServer
from proxy.core import slotfile
from proxy.errors import BackendRefusedError, BackendUnreachableError
from tests.real.conftest import EngineFactory, complete, driver

pytestmark = pytest.mark.real

ONE = range(1000, 1064)
TWO = range(5000, 5064)
JSON = [("Content-Type", "application/json")]


def parse(path: Path) -> slotfile.StateFile:
    """A saved state's header."""
    data = path.read_bytes()
    return slotfile.parse(lambda offset, size: data[offset : offset + size], len(data))


async def tasks(backend: LlamaServer) -> list[int | None]:
    """The last task of each slot."""
    return [view.id_task for view in await backend.slots()]


async def test_a_pin_is_honoured(engine: EngineFactory, tiny_model: Path) -> None:
    """``id_slot`` names the slot that computes, and no other slot is touched."""
    async with driver(engine(tiny_model).url) as backend:
        assert (await complete(backend, ONE, 1))["id_slot"] == 1
        first, second = await tasks(backend)
        assert first is None
        await complete(backend, TWO, 0)
        assert (await tasks(backend))[1] == second


async def test_slot_ids_wrap_around(engine: EngineFactory, tiny_model: Path) -> None:
    """Slot 7 of 2 is slot 1 (1.7): this is why the driver checks the range itself."""
    async with driver(engine(tiny_model).url) as backend:
        await complete(backend, ONE, 7)
        first, second = await tasks(backend)
        assert first is None
        assert second is not None


async def test_prefill_only(engine: EngineFactory, tiny_model: Path) -> None:
    """``n_predict: 0`` computes the prompt; the slot then holds exactly that (1.10)."""
    async with driver(engine(tiny_model).url) as backend:
        answer = await complete(backend, ONE, 0)
        assert answer["tokens_cached"] == len(ONE)
        assert answer["timings"]["prompt_n"] == len(ONE)
        assert (await backend.slots())[0].n_tokens == len(ONE)


async def test_restored_state_is_used(engine: EngineFactory, tiny_model: Path) -> None:
    """After erase and restore, an extension computes only its own tokens; also in another slot."""
    async with driver(engine(tiny_model).url) as backend:
        await complete(backend, ONE, 0)
        await backend.save(0, "one.kv")
        for slot in (0, 1):
            await backend.erase(slot)
            await backend.restore(slot, "one.kv")
            timings = (await complete(backend, [*ONE, *TWO[:8]], slot))["timings"]
            assert (timings["cache_n"], timings["prompt_n"]) == (64, 8)


async def test_restored_state_can_be_rewound(engine: EngineFactory, tiny_model: Path) -> None:
    """With full attention any common prefix of a restored state is used (class A)."""
    async with driver(engine(tiny_model).url) as backend:
        await complete(backend, ONE, 0)
        await backend.save(0, "one.kv")
        await backend.erase(0)
        await backend.restore(0, "one.kv")
        timings = (await complete(backend, [*ONE[:40], *TWO], 0))["timings"]
        assert timings["cache_n"] == 40


async def test_full_attention_file(engine: EngineFactory, tiny_model: Path) -> None:
    """The size is what the server said, the tokens are in the header, nothing is left over."""
    handle = engine(tiny_model)
    async with driver(handle.url) as backend:
        await complete(backend, ONE, 1)
        saved = await backend.save(1, "one.kv")
    path = handle.slot_dir / "one.kv"
    assert path.stat().st_size == saved.n_bytes
    state = parse(path)
    assert state.tokens.tolist() == list(ONE)
    assert (state.n_stream, state.cells, slotfile.leftover(state)) == (2, 64, 0)


async def test_window_and_hybrid_files(
    engine: EngineFactory, swa_model: Path, hybrid_model: Path
) -> None:
    """Sliding-window and hybrid states go on behind the first KV section."""
    for model in (swa_model, hybrid_model):
        handle = engine(model)
        async with driver(handle.url) as backend:
            await complete(backend, ONE, 0)
            await backend.save(0, "one.kv")
        state = parse(handle.slot_dir / "one.kv")
        assert state.tokens.tolist() == list(ONE)
        assert slotfile.leftover(state) > 0


async def test_window_and_hybrid_states_bring_checkpoints(
    engine: EngineFactory, swa_model: Path, hybrid_model: Path
) -> None:
    """Since PR #26004 (not in b11434) the file also holds the slot's checkpoints: a restored
    extension computes its own tokens and at most the few behind the last checkpoint.
    """
    prompt = range(1000, 1600)
    for model in (swa_model, hybrid_model):
        handle = engine(model)
        async with driver(handle.url) as backend:
            await complete(backend, prompt, 0)
            await backend.save(0, "long.kv")
            await backend.erase(0)
            await backend.restore(0, "long.kv")
            timings = (await complete(backend, [*prompt, *TWO[:8]], 0))["timings"]
        assert b"SCKP" in (handle.slot_dir / "long.kv").read_bytes()
        assert timings["cache_n"] >= 595


async def test_failed_restore_empties_the_slot(engine: EngineFactory, tiny_model: Path) -> None:
    """Even a missing file costs the slot its content (finding 9)."""
    async with driver(engine(tiny_model).url) as backend:
        await complete(backend, ONE, 0)
        with pytest.raises(BackendRefusedError):
            await backend.restore(0, "missing.kv")
        assert (await backend.slots())[0].n_tokens == 0


async def test_other_weights_are_accepted(
    engine: EngineFactory, tiny_model: Path, other_tiny_model: Path
) -> None:
    """Restore checks shapes only (finding 7): this is why there are fingerprints."""
    handle = engine(tiny_model)
    async with driver(handle.url) as backend:
        await complete(backend, ONE, 0)
        await backend.save(0, "one.kv")
        await asyncio.to_thread(handle.restart, other_tiny_model)
        assert (await backend.restore(0, "one.kv")).n_tokens == 64


async def test_one_missing_byte_aborts_the_server(engine: EngineFactory, tiny_model: Path) -> None:
    """A file one byte short ends the whole process (finding 3): this is why sizes are checked."""
    handle = engine(tiny_model, slots=1)
    async with driver(handle.url) as backend:
        await complete(backend, ONE, 0)
        saved = await backend.save(0, "one.kv")
        path = handle.slot_dir / "one.kv"
        path.write_bytes(path.read_bytes()[: saved.n_bytes - 1])
        with pytest.raises(BackendUnreachableError):
            await backend.restore(0, "one.kv")
    assert handle.wait_dead() != 0


async def test_default_flags_have_a_ram_cache(engine: EngineFactory, tiny_model: Path) -> None:
    """With default flags a prompt comes back after another one took its slot (finding 2)."""
    reused = []
    for flags in ({"defaults": True}, {}):
        async with driver(engine(tiny_model, **flags).url) as backend:
            await complete(backend, ONE, 0)
            await complete(backend, TWO, 0)
            reused.append((await complete(backend, ONE, 0))["timings"]["cache_n"])
    assert reused == [63, 0]


async def test_media_marker_names_the_process(engine: EngineFactory, tiny_model: Path) -> None:
    """Stable while the process lives, another one after a restart."""
    handle = engine(tiny_model)
    async with driver(handle.url) as backend:
        before = await backend.instance()
        assert before == await backend.instance() != ""
        await asyncio.to_thread(handle.restart)
        assert await backend.instance() not in {before, ""}


async def test_progress_comes_before_compute(engine: EngineFactory, tiny_model: Path) -> None:
    """The first event of a stream tells the real reuse, before anything is computed (1.10)."""
    body = {"prompt": [*ONE, *TWO], "n_predict": 1, "id_slot": 0}
    body |= {"stream": True, "return_progress": True}
    async with driver(engine(tiny_model).url) as backend:
        await complete(backend, ONE, 0)
        async with backend.send("POST", "/completion", JSON, orjson.dumps(body)) as answer:
            event = (await answer.read_some()).partition(b"\n\n")[0]
    progress = orjson.loads(event.removeprefix(b"data: "))["prompt_progress"]
    assert (progress["total"], progress["cache"], progress["processed"]) == (128, 64, 64)


async def test_leaving_during_prefill_frees_the_slot(
    engine: EngineFactory, big_context_model: Path
) -> None:
    """With stream and progress, closing the connection stops the prefill early, and the part
    that was computed stays in the slot (finding 11).
    """
    prompt = [1000 + i % 997 for i in range(20_000)]
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0}
    body |= {"stream": True, "return_progress": True}
    async with driver(engine(big_context_model, context=24_000).url) as backend:
        async with backend.send("POST", "/completion", JSON, orjson.dumps(body)) as answer:
            assert b"prompt_progress" in await answer.read_some()
        while (slot := (await backend.slots())[0]).is_processing:
            pass
        assert slot.n_tokens is not None
        assert slot.n_tokens < len(prompt) // 2
        again = (await complete(backend, prompt[: slot.n_tokens + 1], 0))["timings"]
        assert again["cache_n"] == slot.n_tokens


async def test_the_last_duplicate_key_wins(engine: EngineFactory, tiny_model: Path) -> None:
    """A field appended to a JSON object overrides the client's own: splicing is enough."""
    raw = b'{"prompt":[1000,1001],"n_predict":7,"id_slot":0,"n_predict":2,"id_slot":1}'
    async with (
        driver(engine(tiny_model).url) as backend,
        backend.send("POST", "/completion", JSON, raw) as answer,
    ):
        done = orjson.loads(await answer.read())
    assert (done["tokens_predicted"], done["id_slot"]) == (2, 1)
