"""The probe on the real engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.base import Verdict
from proxy.backends.probe import probe
from proxy.core.records import Mode
from proxy.errors import BackendUnreachableError
from tests.real.conftest import EngineFactory, EngineHandle, driver

pytestmark = pytest.mark.real


class MemoryFiles:
    """``ProbeFiles`` without a disk."""

    def __init__(self) -> None:
        """Empty."""
        self.kept: dict[str, bytes] = {}
        self.manifests: dict[str, Mapping[str, Any]] = {}

    def load(self, fingerprint: str) -> bytes | None:
        """See ``ProbeFiles``."""
        return self.kept.get(fingerprint)

    def store(self, fingerprint: str, data: bytes, manifest: Mapping[str, Any]) -> None:
        """See ``ProbeFiles``."""
        self.kept[fingerprint] = data
        self.manifests[fingerprint] = manifest


async def verdict_of(
    handle: EngineHandle,
    *,
    slots: tuple[int, ...] = (0, 1),
    slot_dir: Path | None = None,
    files: MemoryFiles | None = None,
) -> Verdict:
    """One probing over connections of its own."""
    async with driver(handle.url) as backend:
        return await probe(
            backend,
            slot_dir=slot_dir or handle.slot_dir,
            slots=slots,
            facts=await backend.facts(),
            files=files or MemoryFiles(),
        )


@pytest.mark.parametrize("slots", [(0, 1), (1,)])
async def test_recommended_flags_are_exclusive(
    engine: EngineFactory, tiny_model: Path, slots: tuple[int, ...]
) -> None:
    """The recommended launch line is proved exclusive and leaves empty slots and no file."""
    handle = engine(tiny_model)
    files = MemoryFiles()
    verdict = await verdict_of(handle, slots=slots, files=files)
    assert (verdict.mode, verdict.advice) == (Mode.EXCLUSIVE, "")
    assert verdict.layout is not None
    assert verdict.layout["full_attention"] is True
    assert list(files.kept) == [verdict.fingerprint]
    assert list(handle.slot_dir.iterdir()) == []
    async with driver(handle.url) as backend:
        assert {view.n_tokens for view in await backend.slots()} <= {0, None}


async def test_one_slot_and_a_shared_pool(engine: EngineFactory, tiny_model: Path) -> None:
    """A single slot is exclusive; a pool shared by several is too, with advice; their states fit
    each other (both have one stream), so they share a fingerprint.
    """
    single = await verdict_of(engine(tiny_model, slots=1), slots=(0,))
    shared = await verdict_of(engine(tiny_model, unified=True))
    assert single.mode is shared.mode is Mode.EXCLUSIVE
    assert single.advice == ""
    assert "--no-kv-unified" in shared.advice
    assert single.fingerprint == shared.fingerprint


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"defaults": True}, "RAM cache is on"),
        ({"ram_cache": 512, "similarity": 0.1}, "RAM cache is on"),
        ({"ram_cache": 512, "unified": True}, "clears idle slots"),
    ],
    ids=["defaults", "ram-cache", "idle-clearing"],
)
async def test_ram_cache_means_forward(
    engine: EngineFactory, tiny_model: Path, flags: dict[str, Any], why: str
) -> None:
    """A RAM cache that touches slots behind the proxy's back means forward, with the remedy."""
    handle = engine(tiny_model, **flags)
    verdict = await verdict_of(handle)
    assert verdict.mode is Mode.FORWARD
    assert why in verdict.why
    assert "--cache-ram 0" in verdict.advice
    assert str(handle.slot_dir) in verdict.advice
    assert verdict.fingerprint == ""


async def test_no_slot_folder_means_forward(
    engine: EngineFactory, tiny_model: Path, tmp_path: Path
) -> None:
    """Without a folder, with a missing one, or with actions switched off: forward."""
    handle = engine(tiny_model, slot_save_path=None)
    assert "--slot-save-path" in (await verdict_of(handle, slot_dir=tmp_path)).why
    assert "not exist" in (await verdict_of(handle, slot_dir=tmp_path / "missing")).why


async def test_another_folder_means_forward(
    engine: EngineFactory, tiny_model: Path, tmp_path: Path
) -> None:
    """A slot folder that is not the backend's own is noticed: the saved file is not there."""
    verdict = await verdict_of(engine(tiny_model), slot_dir=tmp_path)
    assert verdict.mode is Mode.FORWARD
    assert "another one" in verdict.why


async def test_window_and_recurrence_mean_forward(
    engine: EngineFactory, swa_model: Path, hybrid_model: Path
) -> None:
    """Models whose restored states would be worthless are told by the bytes left in the file."""
    for model in (swa_model, hybrid_model):
        verdict = await verdict_of(engine(model))
        assert verdict.mode is Mode.FORWARD
        assert "sliding-window or hybrid" in verdict.why
        assert "llama-server" not in verdict.advice, "no launch line helps"


async def test_fingerprint_survives_a_restart_and_other_flags(
    engine: EngineFactory, tiny_model: Path
) -> None:
    """Context and batch size change no KV: same fingerprint after a restart with others."""
    handle = engine(tiny_model)
    files = MemoryFiles()
    before = await verdict_of(handle, files=files)
    handle.restart(context=1024, batch=64, threads=1)
    after = await verdict_of(handle, files=files)
    assert before.fingerprint == after.fingerprint
    assert len(files.kept) == 1


async def test_same_facts_other_weights_get_another_fingerprint(
    engine: EngineFactory, tiny_model: Path, other_tiny_model: Path
) -> None:
    """When all facts are equal and the KV is not, the next variant is taken (finding 7)."""
    verdict = await verdict_of(engine(tiny_model))
    files = MemoryFiles()
    strange = MemoryFiles()
    await verdict_of(engine(other_tiny_model), files=strange)
    files.kept[verdict.fingerprint] = next(iter(strange.kept.values()))
    handle = engine(tiny_model)
    moved = await verdict_of(handle, files=files)
    assert moved.mode is Mode.EXCLUSIVE
    assert moved.fingerprint != verdict.fingerprint
    assert (await verdict_of(handle, files=files)).fingerprint == moved.fingerprint
    assert len(files.kept) == 2


async def test_a_backend_that_dies_underneath(engine: EngineFactory, tiny_model: Path) -> None:
    """A backend that dies in mid-probe is an error, not a verdict, and leaves no file."""
    handle = engine(tiny_model)

    class Deadly(MemoryFiles):
        """Kills the backend when the probe asks for a stored state, its last step."""

        def load(self, fingerprint: str) -> bytes | None:
            """Kill, then answer as usual."""
            handle.kill()
            return super().load(fingerprint)

    async with driver(handle.url) as backend:
        facts = await backend.facts()
    handle.kill()
    async with driver(handle.url) as backend:
        with pytest.raises(BackendUnreachableError):
            await probe(
                backend, slot_dir=handle.slot_dir, slots=(0,), facts=facts, files=MemoryFiles()
            )
    handle.restart()
    assert (await verdict_of(handle, files=Deadly())).mode is Mode.EXCLUSIVE
    assert list(handle.slot_dir.iterdir()) == []
