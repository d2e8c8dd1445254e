"""Proves, once per backend process, what may be done to it (DESIGN.md, rule 2).

Whatever cannot be proved ends in ``forward``: the proxy then only relays. The order matters:
nothing is saved before pinning holds, nothing restored before its file was found whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import orjson

from proxy.backends import launch
from proxy.backends.base import Backend, Facts, SlotView, StateIO, Verdict
from proxy.core import fingerprint, slotfile
from proxy.core.records import Mode
from proxy.errors import BackendBrokenError, BackendRefusedError, SlotkeeperError

N_TOKENS = 64  # of the two dissimilar prompts
WINDOW = "sliding-window or hybrid"
HOPELESS = "no launch line lifts that; prompts are kept still all the same"
N_MORE = 8  # tokens that extend a restored one
N_KV = 16  # of the prompt whose KV bytes identify weights and rope
VOCABULARY_USED = 1000  # ids below this exist in every real vocabulary
UNRELATED = 4  # tokens two dissimilar prompts may seem to share (a leading BOS)
MAX_VARIANTS = 32  # servers that look alike and compute other KV
HEAD = 1 << 20  # bytes of the model file that are hashed
OTHER_FOLDER = "the backend's slot folder is another one than ours"


class ProbeFiles(Protocol):
    """Where the probe state of each fingerprint is kept. Blocking; called in a thread."""

    def load(self, fingerprint: str) -> bytes | None:
        """The state file stored for this fingerprint, None when there is none."""

    def store(self, fingerprint: str, data: bytes, manifest: Mapping[str, Any]) -> None:
        """Keep the state file of a new fingerprint and, in words, what it was made of."""


async def probe(
    backend: Backend,
    *,
    slot_dir: Path | None,
    slots: tuple[int, ...],
    facts: Facts,
    files: ProbeFiles,
) -> Verdict:
    """Find the mode by trying it. The caller guarantees that nothing else is in flight.

    ``slots`` are slots seen idle whose content may be lost, at least one; two prove more. They
    are empty afterwards. At most five prompts of at most 72 tokens are computed.

    Raises: ``BackendUnreachableError`` and its siblings when the backend fails underneath; that
        says nothing about its mode.
    """
    if slot_dir is None:
        return _forward(facts, slot_dir, "no slot folder is configured")
    if not await asyncio.to_thread(slot_dir.is_dir):
        return _forward(facts, slot_dir, "the slot folder does not exist here")
    run = _Run(backend, slot_dir, slots, facts, files)
    try:
        return await run.verdict()
    except _UnprovenError as unproven:
        return _forward(facts, slot_dir, str(unproven))
    finally:
        await run.clean_up()


class _UnprovenError(Exception):
    """A proof failed; the text is the ``why`` of the verdict."""


@dataclass(frozen=True, slots=True)
class _Completion:
    slot: int
    cache_n: int


class _Run:
    """One probing: ``main`` is the slot that is saved and restored."""

    def __init__(
        self,
        backend: Backend,
        slot_dir: Path,
        slots: tuple[int, ...],
        facts: Facts,
        files: ProbeFiles,
    ) -> None:
        self._backend = backend
        self._dir = slot_dir
        self._main = slots[0]
        self._other = slots[1] if len(slots) > 1 else None
        self._facts = facts
        self._files = files
        self._names: list[str] = []
        self._touched: set[int] = set()
        span = min(int(facts.identity.get("n_vocab") or VOCABULARY_USED), VOCABULARY_USED)
        self._a = [span // 4 + i for i in range(N_TOKENS)]
        self._b = [3 * span // 4 - i for i in range(N_TOKENS)]
        self._more = [span // 8 + i for i in range(N_MORE)]
        self._kv = [span // 2 + i for i in range(N_KV)]

    async def verdict(self) -> Verdict:
        """The proofs, in order."""
        await self._prove_pinning()
        await self._prove_no_ram_cache()
        layout = await self._prove_restore()
        kv = await self._kv_state()
        found = await self._fingerprint(layout, kv)
        unified = layout["n_stream"] == 1 and self._facts.total_slots > 1
        return Verdict(
            Mode.EXCLUSIVE,
            "pinning, saving and restoring were proved",
            "--no-kv-unified would keep slots from sharing one pool" if unified else "",
            found,
            layout,
        )

    async def clean_up(self) -> None:
        """Erase what was put into slots, delete the files; a dead backend is no obstacle."""
        for name in self._names:
            await asyncio.to_thread((self._dir / name).unlink, missing_ok=True)
        with suppress(SlotkeeperError):  # the probe's own outcome matters more
            for view in await self._backend.slots():
                # an erase of a slot somebody else keeps busy may hang for good (finding 10)
                if view.index in self._touched and not view.is_processing:
                    await self._backend.erase(view.index)

    async def _prove_pinning(self) -> None:
        before = await self._look()
        done = await self._complete(self._a, self._main)
        after = await self._look()
        moved = {
            view.index for view in after.values() if view.id_task != before[view.index].id_task
        }
        if done.slot != self._main or self._main not in moved:
            raise _UnprovenError("the backend does not honour id_slot")
        if moved != {self._main}:
            raise _UnprovenError("another client used the backend during the probe")

    async def _prove_no_ram_cache(self) -> None:
        # With similarity 0 a RAM cache that is on stays away from pinned slots, busy ones too
        # (finding 1; tried again on b11549): it passes here, rightly.
        await self._complete(self._b, self._main)
        again = await self._complete(self._a, self._main)
        if again.cache_n > UNRELATED:
            raise _UnprovenError("the backend's RAM cache is on: a pin could mix conversations")

    async def _kv_state(self) -> bytes:
        """The state of the fixed short prompt. ``main`` holds the extended one when this begins.

        With a second slot it also proves that using one leaves the other alone.
        """
        slot = self._main if self._other is None else self._other
        await self._complete(self._kv, slot, reuse=False)
        held = (await self._look())[self._main].n_tokens
        if slot != self._main and held != N_TOKENS + N_MORE:
            raise _UnprovenError("the backend clears idle slots when another slot is used")
        _, data = await self._save(slot)
        return data

    async def _prove_restore(self) -> dict[str, Any]:
        """Returns the layout. ``main`` holds the first prompt when this begins."""
        name, data = await self._save(self._main)
        state = self._parse(data)
        if state.tokens.tolist() != self._a:
            raise _UnprovenError("a saved state holds other tokens than were sent")
        if slotfile.leftover(state):
            raise _UnprovenError(
                f"{WINDOW} model: what its saved states are good for is not proved"
            )
        await self._backend.erase(self._main)
        try:
            restored = await self._backend.restore(self._main, name)
        except BackendRefusedError as refused:
            raise _UnprovenError(f"a saved state was not restored: {refused.message}") from refused
        done = await self._complete([*self._a, *self._more], self._main)
        if restored.n_tokens != N_TOKENS or done.cache_n != N_TOKENS:
            raise _UnprovenError("a restored state was not used")
        return slotfile.layout(state)

    async def _fingerprint(self, layout: dict[str, Any], kv: bytes) -> str:
        """Same facts but other KV (rope settings are invisible, finding 7): the next variant."""
        file = await asyncio.to_thread(file_identity, self._facts.model_path)
        identity = self._facts.identity
        for variant in range(MAX_VARIANTS):
            found = fingerprint.fingerprint(identity, file, layout, variant)
            stored = await asyncio.to_thread(self._files.load, found)
            if stored is None:
                words = fingerprint.manifest(identity, file, layout, variant)
                await asyncio.to_thread(self._files.store, found, kv, words)
                return found
            if await asyncio.to_thread(_same_kv, stored, kv):
                return found
        raise _UnprovenError("too many different servers look like this one")

    async def _look(self) -> dict[int, SlotView]:
        try:
            views = await self._backend.slots()
        except BackendRefusedError as refused:
            if refused.answer == HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            raise _UnprovenError("/slots is switched off") from refused
        known = {view.index: view for view in views}
        if not {self._main, self._other} - {None} <= known.keys():
            raise BackendBrokenError("a slot of the backend has gone")
        return known

    async def _complete(
        self, tokens: Sequence[int], slot: int, *, reuse: bool = True
    ) -> _Completion:
        """Prefill only: the slot then holds exactly ``tokens`` (llama-server.md 1.10)."""
        self._touched.add(slot)
        body = {"prompt": tokens, "n_predict": 0, "id_slot": slot, "cache_prompt": reuse}
        headers = [("Content-Type", "application/json")]
        data = orjson.dumps(body)
        async with self._backend.send("POST", "/completion", headers, data) as upstream:
            raw = await upstream.read()
        if upstream.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise BackendRefusedError("the backend is not ready", answer=upstream.status)
        if upstream.status != HTTPStatus.OK:
            raise _UnprovenError(f"/completion was answered with {upstream.status}")
        try:
            answer = orjson.loads(raw)
            return _Completion(int(answer["id_slot"]), int(answer["timings"]["cache_n"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BackendBrokenError("/completion gave an unknown answer") from error

    async def _save(self, slot: int) -> tuple[str, bytes]:
        """Save a slot; the file's name and content, proved whole and in our own folder."""
        name = f"probe-{secrets.token_hex(8)}.kv"
        self._names.append(name)
        try:
            saved = await self._backend.save(slot, name)
        except BackendRefusedError as refused:
            if refused.answer == HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            if refused.answer == HTTPStatus.NOT_IMPLEMENTED:
                raise _UnprovenError("the backend runs without --slot-save-path") from refused
            raise _UnprovenError(f"saving does not work: {refused.message}") from refused
        return name, await asyncio.to_thread(_read_whole, self._dir / name, saved)

    @staticmethod
    def _parse(data: bytes) -> slotfile.StateFile:
        try:
            return slotfile.parse(_reader(data), len(data))
        except slotfile.SlotFileError as error:
            raise _UnprovenError(f"saved states have an unknown format: {error}") from error


def file_identity(model_path: str) -> dict[str, Any] | None:
    """Size, time and head of the model file, None when it cannot be read here. Blocking."""
    path = Path(model_path)
    if not path.is_absolute():  # relative to the backend's folder, which is not known
        return None
    try:
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(HEAD)).hexdigest()
        status = path.stat()
    except OSError:
        return None
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "head_sha256": head}


def _read_whole(path: Path, saved: StateIO) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _UnprovenError(OTHER_FOLDER) from None
    except OSError as error:
        raise _UnprovenError(f"saved states cannot be read here: {error.strerror}") from error
    if len(data) != saved.n_bytes:
        raise _UnprovenError("a saved state is shorter than the backend says: disk full?")
    return data


def _reader(data: bytes) -> slotfile.Reader:
    return lambda offset, size: data[offset : offset + size]


def _same_kv(one: bytes, two: bytes) -> bool:
    """Whether two states of the same prompt come from the same weights and positions."""
    try:
        states = [(data, slotfile.parse(_reader(data), len(data))) for data in (one, two)]
    except slotfile.SlotFileError:
        return False
    first, second = (slotfile.kv_bytes(_reader(data), state) for data, state in states)
    return fingerprint.same_kv(first, second)


def _forward(facts: Facts, slot_dir: Path | None, why: str) -> Verdict:
    advice = f"restart llama-server with: {launch.line(facts, slot_dir)}"
    if WINDOW in why:
        advice = HOPELESS
    return Verdict(Mode.FORWARD, why, advice)
