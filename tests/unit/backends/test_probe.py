"""The probe against a lying backend: what the real engine cannot be made to do."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.backends import probe as probing
from proxy.backends.base import Facts, Single, SlotView, StateIO, Verdict
from proxy.core.records import Mode
from proxy.errors import BackendBrokenError, BackendRefusedError, BackendUnreachableError

FACTS = Facts(
    kind="llama-server",
    instance="i",
    total_slots=2,
    n_ctx=512,
    model="m",
    model_path="m.gguf",
    identity={"n_vocab": 500},
)


def state(tokens: list[int], *, weight: float = 1.0, appendix: bytes = b"") -> bytes:
    """A state file of one layer with one 32-bit float per token and side."""
    words = struct.pack(f"<iIi{len(tokens)}ii", -1, 1, len(tokens), *tokens, 0)
    cells = b"".join(struct.pack("<iIi", i, 1, 0) for i in range(len(tokens)))
    rows = struct.pack("<iQ", 0, 4) + b"".join(struct.pack("<f", weight * t) for t in tokens)
    head = struct.pack("<III", 0x67677371, 4, len(words) // 4) + words
    kv = struct.pack("<II", 1, len(tokens)) + cells + struct.pack("<IIII", 0, 1, 0, 0)
    return head + kv + rows + rows + appendix


@dataclass
class Answer:
    """An ``Upstream`` whose body is there already."""

    status: int
    body: bytes
    headers: list[tuple[str, str]] = field(default_factory=list)

    async def read_some(self) -> bytes:
        """All of it, then nothing."""
        body, self.body = self.body, b""
        return body

    async def read(self) -> bytes:
        """All of it."""
        return await self.read_some()


class FakeBackend(Single):
    """Two slots of tokens that behave; each test bends one method or field."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is its slot directory."""
        self.folder = folder
        self.held: list[list[int]] = [[], []]
        self.tasks: list[int | None] = [None, None]
        self.clock = 0
        self.status = 200
        self.written: Callable[[list[int]], bytes] = state
        self.slot_of: Callable[[int], int] = lambda wanted: wanted
        self.after_completion: Callable[[], None] = lambda: None
        self.busy = False
        self.prompts: list[list[int]] = []

    @asynccontextmanager
    async def send(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes | None,
        *,
        slot: int | None = None,
    ) -> AsyncIterator[Answer]:
        """``/completion`` only."""
        assert slot is None
        assert isinstance(body, bytes)
        asked = orjson.loads(body)
        slot, prompt = self.slot_of(asked["id_slot"]), asked["prompt"]
        self.prompts.append(prompt)
        common = 0
        while asked["cache_prompt"] and self.held[slot][common : common + 1] == prompt[common:][:1]:
            common += 1
        self.held[slot] = prompt
        self.clock += 1
        self.tasks[slot] = self.clock
        self.after_completion()
        done = {"id_slot": slot, "timings": {"cache_n": common}}
        yield Answer(self.status, orjson.dumps(done))

    async def slots(self) -> tuple[SlotView, ...]:
        """Both."""
        return tuple(
            SlotView(i, 512, self.busy, self.tasks[i], len(self.held[i])) for i in range(2)
        )

    async def save(self, slot: int, name: str) -> StateIO:
        """Writes what ``written`` makes of the tokens."""
        data = self.written(self.held[slot])
        (self.folder / name).write_bytes(data)
        return StateIO(len(self.held[slot]), len(data), 0.1)

    async def restore(self, slot: int, name: str) -> StateIO:
        """Gives the first prompt back: the only one the probe restores."""
        data = (self.folder / name).read_bytes()
        self.held[slot] = self.prompts[0]
        return StateIO(len(self.prompts[0]), len(data), 0.1)

    async def erase(self, slot: int) -> None:
        """Empties the slot."""
        self.held[slot] = []

    async def facts(self) -> Facts:
        """Not used by the probe."""
        return FACTS

    async def instance(self) -> str:
        """Not used by the probe."""
        return FACTS.instance

    async def render(self, body: Mapping[str, Any]) -> str:
        """Not used by the probe."""
        raise NotImplementedError

    async def tokenize(self, text: str) -> list[int]:
        """Not used by the probe."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to close."""


class Files:
    """``ProbeFiles`` in memory."""

    def __init__(self) -> None:
        """Empty."""
        self.kept: dict[str, bytes] = {}

    def load(self, fingerprint: str) -> bytes | None:
        """See ``ProbeFiles``."""
        return self.kept.get(fingerprint)

    def store(self, fingerprint: str, data: bytes, manifest: Mapping[str, Any]) -> None:
        """See ``ProbeFiles``."""
        assert manifest["fingerprint"] == fingerprint
        self.kept[fingerprint] = data


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    """A well-behaved backend with its slot folder."""
    return FakeBackend(tmp_path)


async def run(
    backend: FakeBackend, *, slots: tuple[int, ...] = (0, 1), files: Files | None = None
) -> Verdict:
    """Probe it."""
    return await probing.probe(
        backend, slot_dir=backend.folder, slots=slots, facts=FACTS, files=files or Files()
    )


@pytest.mark.parametrize("slots", [(0, 1), (1, 0), (0,), (1,)])
async def test_cheap_and_clean(backend: FakeBackend, slots: tuple[int, ...]) -> None:
    """At most five prompts of at most 72 tokens; slots empty and no file left afterwards."""
    verdict = await run(backend, slots=slots)
    assert verdict.mode is Mode.EXCLUSIVE
    assert len(backend.prompts) <= 5
    assert max(map(len, backend.prompts)) <= 72
    assert {token for prompt in backend.prompts for token in prompt} <= set(range(500))
    assert backend.held == [[], []]
    assert list(backend.folder.iterdir()) == []


async def test_pins_that_are_ignored(backend: FakeBackend) -> None:
    """A backend that computes elsewhere is only forwarded to."""
    backend.slot_of = lambda wanted: 1 - wanted
    verdict = await run(backend)
    assert (verdict.mode, verdict.why) == (
        Mode.FORWARD,
        "the backend does not honour id_slot",
    )


async def test_somebody_else_is_at_work(backend: FakeBackend) -> None:
    """A task that is not the probe's own ends the probing."""

    def intrude() -> None:
        backend.tasks[1] = 999

    backend.after_completion = intrude
    verdict = await run(backend)
    assert verdict.mode is Mode.FORWARD
    assert "another client" in verdict.why


async def test_busy_slots_are_not_erased(backend: FakeBackend) -> None:
    """Cleaning up leaves a slot alone that somebody else keeps busy (an erase would hang)."""

    def intrude() -> None:
        backend.busy = True
        backend.tasks[1] = 999

    backend.after_completion = intrude
    await run(backend)
    assert backend.held[0] != []


async def test_idle_slots_that_get_cleared(backend: FakeBackend) -> None:
    """Slots emptied by work in another slot mean forward."""

    def clear() -> None:
        if backend.tasks[1] is not None:
            backend.held[0] = []

    backend.after_completion = clear
    assert "clears idle slots" in (await run(backend)).why


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (lambda tokens: b"GGUF" + bytes(100), "unknown format"),
        (lambda tokens: state(tokens)[:-1], "unknown format"),
        (lambda tokens: state([*tokens, 7]), "other tokens"),
        (lambda tokens: state(tokens, appendix=b"more"), "sliding-window"),
    ],
    ids=["magic", "cut", "tokens", "appendix"],
)
async def test_states_that_are_not_understood(
    backend: FakeBackend, written: Callable[[list[int]], bytes], why: str
) -> None:
    """A saved state that is not read to its last byte is never restored."""
    backend.written = written

    async def never(slot: int, name: str) -> StateIO:
        raise AssertionError

    backend.restore = never  # type: ignore[method-assign]  # bent for this test
    verdict = await run(backend)
    assert verdict.mode is Mode.FORWARD
    assert why in verdict.why
    assert list(backend.folder.iterdir()) == []


async def test_a_file_shorter_than_said(backend: FakeBackend) -> None:
    """A size that differs from what the backend says is a full disk, not a state."""
    save = backend.save

    async def lie(slot: int, name: str) -> StateIO:
        told = await save(slot, name)
        return StateIO(told.n_tokens, told.n_bytes + 1, told.seconds)

    backend.save = lie  # type: ignore[method-assign]  # bent for this test
    assert "shorter" in (await run(backend)).why


@pytest.mark.parametrize("refused", ["save", "restore"])
async def test_refused_actions(backend: FakeBackend, refused: str) -> None:
    """A save or restore that is refused means forward, in the backend's own words."""

    async def refuse(slot: int, name: str) -> StateIO:
        raise BackendRefusedError("no room", answer=400)

    setattr(backend, refused, refuse)
    verdict = await run(backend)
    assert verdict.mode is Mode.FORWARD
    assert "no room" in verdict.why


async def test_a_restore_without_effect(backend: FakeBackend) -> None:
    """A restore that claims success and restores nothing means forward."""

    async def pretend(slot: int, name: str) -> StateIO:
        return StateIO(64, 1, 0.1)

    backend.restore = pretend  # type: ignore[method-assign]  # bent for this test
    assert "was not used" in (await run(backend)).why


@pytest.mark.parametrize("answer", [501, 404])
async def test_slots_page_is_off(backend: FakeBackend, answer: int) -> None:
    """Without ``/slots`` nothing can be proved."""

    async def refuse() -> tuple[SlotView, ...]:
        raise BackendRefusedError("off", answer=answer)

    backend.slots = refuse  # type: ignore[method-assign]  # bent for this test
    verdict = await run(backend)
    assert (verdict.mode, verdict.why) == (Mode.FORWARD, "/slots is switched off")


async def test_not_ready_is_no_verdict(backend: FakeBackend) -> None:
    """A backend that loads its model is asked again later, not judged."""
    backend.status = 503
    with pytest.raises(BackendRefusedError):
        await run(backend)


async def test_completions_are_off(backend: FakeBackend) -> None:
    """An embedding server cannot be driven."""
    backend.status = 501
    assert "501" in (await run(backend)).why


async def test_death_is_no_verdict(backend: FakeBackend) -> None:
    """A connection that breaks is raised as it is, whatever cleaning up runs into."""

    async def die() -> tuple[SlotView, ...]:
        raise BackendUnreachableError("gone")

    backend.slots = die  # type: ignore[method-assign]  # bent for this test
    with pytest.raises(BackendUnreachableError):
        await run(backend)


async def test_slots_that_went_away(backend: FakeBackend) -> None:
    """Slots the backend no longer lists are a broken backend, not a KeyError."""
    with pytest.raises(BackendBrokenError):
        await run(backend, slots=(0, 5))


async def test_variants(backend: FakeBackend) -> None:
    """Servers that differ only in KV get fingerprints of their own, each found again."""
    files = Files()
    found = []
    for weight in (1.0, 2.0, 1.0, 3.0, 2.0):
        backend.written = lambda tokens, weight=weight: state(tokens, weight=weight)  # type: ignore[misc]
        found.append((await run(backend, files=files)).fingerprint)
    assert found[0] == found[2]
    assert found[1] == found[4]
    assert len(set(found)) == len(files.kept) == 3


async def test_a_damaged_stored_state_is_another_variant(backend: FakeBackend) -> None:
    """A stored probe state that cannot be read proves nothing: its states are not used."""
    files = Files()
    first = (await run(backend, files=files)).fingerprint
    files.kept[first] = b"damaged"
    assert (await run(backend, files=files)).fingerprint != first


async def test_variants_end(backend: FakeBackend) -> None:
    """A server that is never the same twice is not given fingerprints without end."""

    class Strange(Files):
        """Always another server's state."""

        def load(self, fingerprint: str) -> bytes | None:
            """Unlike any."""
            return state([1] * 16, weight=9)

    verdict = await run(backend, files=Strange())
    assert verdict.mode is Mode.FORWARD


def test_file_identity(tmp_path: Path) -> None:
    """Content, size and time of the model file count; a relative or missing path tells nothing."""
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF" * 10)
    one = probing.file_identity(str(model))
    assert one is not None
    assert one["size"] == 40
    model.write_bytes(b"GGUX" * 10)
    assert probing.file_identity(str(model)) != one
    assert probing.file_identity("m.gguf") is None
    assert probing.file_identity(str(tmp_path / "missing")) is None


async def test_the_advice_can_be_pasted(backend: FakeBackend) -> None:
    """Figures, no placeholder a shell would read as its own."""
    backend.status = 500
    verdict = await run(backend)
    command = verdict.advice.removeprefix("restart llama-server with: ")
    assert command.startswith("llama-server -m m.gguf -np 2 --no-kv-unified -c 1024 ")
    assert not set("<>$&;|") & set(command)
