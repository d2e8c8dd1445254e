"""Looks at a llama-server by trying it: its slot folder, its mode, a state's way out and back."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson

from proxy import words
from proxy.backends.base import Backend, Facts, SlotView, Verdict
from proxy.backends.probe import HOPELESS, VOCABULARY_USED, WINDOW
from proxy.backends.probe import probe as prove
from proxy.checks.finding import Finding, Level
from proxy.core.records import Mode
from proxy.core.sse import Parser
from proxy.errors import BackendBrokenError, BackendRefusedError, SlotkeeperError
from proxy.store import files

TRIP_TOKENS = 560  # more than two batches of 256, seconds of work on a slow machine
MORE_TOKENS = 8
SAVE_SECONDS = 30.0  # a save of an idle slot that takes longer met a request (llama-server.md 0.10)
BATCH_SECONDS = 3.0  # other slots stand still for a batch (DESIGN.md, Placement)
BATCHES = (256, 512, 1024, 2048)
MEMORY = "memory"


class Unkept:
    """``ProbeFiles`` of somebody who only looks."""

    def load(self, fingerprint: str) -> bytes | None:
        """Nothing is known."""
        del fingerprint
        return None

    def store(self, fingerprint: str, data: bytes, manifest: Mapping[str, Any]) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class Trip:
    """A prompt that was computed, saved, restored and used. Seconds, tokens, bytes."""

    tokens: int
    computed: float = 0.0
    saved: float = 0.0
    size: int = 0
    restored: float = 0.0
    reused: int = 0
    batches: list[int] = field(default_factory=list)

    @property
    def batch(self) -> int:
        """Tokens computed at a time, as far as it showed."""
        return max(self.batches, default=0)


async def same_folder(backend: Backend, idle: Sequence[SlotView], folder: Path) -> Finding:
    """Have an idle slot saved, and look for the file here. The slot keeps what it holds."""
    slot = min(idle, key=lambda view: view.n_tokens or 0)
    name = f"probe-{secrets.token_hex(8)}.kv"
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            await backend.save(slot.index, name)
    except TimeoutError:
        return Finding("same folder", Level.WARNING, "a save did not end: is the server busy?")
    except BackendRefusedError as error:
        return _refused_save(error)
    if await asyncio.to_thread(files.remove, folder / name):
        return Finding("same folder", Level.OK, f"the server's --slot-save-path is {folder}")
    return Finding(
        "same folder",
        Level.PROBLEM,
        f"the server saves to another folder than {folder} (a small file, {name}, is left there)",
        "Give llama-server and slotkeeper the same --slot-save-path.",
    )


def _refused_save(error: BackendRefusedError) -> Finding:
    if error.answer == HTTPStatus.NOT_IMPLEMENTED:
        text, todo = "the server runs without --slot-save-path", "Start it with the line below."
    else:
        text, todo = f"the server cannot save: {error.message}", "Look into its log."
    return Finding("same folder", Level.PROBLEM, text, todo)


async def mode(
    backend: Backend, facts: Facts, idle: Sequence[SlotView], folder: Path
) -> tuple[Verdict, list[Finding]]:
    """What the proxy's own proof says. The one or two slots it uses are empty afterwards."""
    slots = tuple(view.index for view in sorted(idle, key=lambda view: view.id_task or -1))[:2]
    verdict = await prove(backend, slot_dir=folder, slots=slots, facts=facts, files=Unkept())
    return verdict, [said(verdict.mode, verdict.why), memory(verdict.mode, verdict.why)]


def said(reached: str, why: str) -> Finding:
    """The mode as a finding."""
    good = reached == Mode.EXCLUSIVE
    level = Level.OK if good else Level.PROBLEM
    todo = "" if good else "Nothing is saved or restored: see the line below."
    if WINDOW in why:
        level, todo = Level.WARNING, f"{HOPELESS.capitalize()}."
    return Finding("mode", level, f"{reached}: {why}", todo)


def memory(reached: str, why: str) -> Finding:
    """What a restored state is good for, as far as the mode and its reason tell."""
    if reached == Mode.EXCLUSIVE:
        text = "class A: whatever a prompt and a snapshot have in common is reused"
        return Finding(MEMORY, Level.OK, text)
    if WINDOW in why:
        text = "class B or C (sliding window or hybrid): its saved states are not used"
        return Finding(MEMORY, Level.WARNING, text)
    return Finding(MEMORY, Level.NOTE, f"class not known: nothing is restored in mode {reached}")


async def round_trip(backend: Backend, facts: Facts, slot: int, folder: Path) -> Trip:
    """Compute a prompt, save it, restore it, go on from it. The slot is empty afterwards.

    Raises what the backend raises.
    """
    span = min(int(facts.identity.get("n_vocab") or VOCABULARY_USED), VOCABULARY_USED)
    wanted = min(TRIP_TOKENS, facts.n_ctx // 2)
    prompt = [(span // 8 + 7 * place) % span for place in range(wanted)]
    trip = Trip(wanted)
    name = f"probe-{secrets.token_hex(8)}.kv"
    try:
        trip.computed, _ = await _compute(backend, slot, prompt, trip.batches)
        saved = await backend.save(slot, name)
        trip.saved, trip.size = saved.seconds, saved.n_bytes
        await backend.erase(slot)
        begun = time.perf_counter()
        await backend.restore(slot, name)
        trip.restored = time.perf_counter() - begun
        _, trip.reused = await _compute(backend, slot, [*prompt, *prompt[:MORE_TOKENS]], [])
    finally:
        await asyncio.to_thread(files.remove, folder / name)
        await backend.erase(slot)
    return trip


async def _compute(
    backend: Backend, slot: int, prompt: Sequence[int], batches: list[int]
) -> tuple[float, int]:
    """Seconds it took and tokens that were there; ``batches`` gets the steps it was done in."""
    body = {
        "prompt": prompt,
        "n_predict": 0,
        "id_slot": slot,
        "cache_prompt": True,
        "stream": True,
        "return_progress": True,
    }
    headers = [("Content-Type", "application/json")]
    parser, done, events = Parser(), 0, []
    async with backend.send("POST", "/completion", headers, orjson.dumps(body)) as upstream:
        if upstream.status != HTTPStatus.OK:
            raise BackendRefusedError(
                f"/completion was answered with {upstream.status}", answer=upstream.status
            )
        while chunk := await upstream.read_some():
            events += [event for event in parser.feed(chunk) if not event.comment_only]
    timings: Any = None
    for event in map(_json, events):
        timings = event.get("timings") or timings
        progress = event.get("prompt_progress")
        if isinstance(progress, dict) and isinstance(progress.get("processed"), int):
            step, done = progress["processed"] - done, progress["processed"]
            batches += [step] if step > 0 else []
    try:
        return float(timings["prompt_ms"]) / 1000, int(timings["cache_n"])
    except (TypeError, KeyError, ValueError) as error:
        raise BackendBrokenError("/completion gave an unknown answer") from error


def _json(event: Any) -> dict[str, Any]:
    try:
        found = orjson.loads(event.data)
    except orjson.JSONDecodeError:  # data: [DONE]
        return {}
    return found if isinstance(found, dict) else {}


def travelled(trip: Trip) -> list[Finding]:
    """A trip as findings: did it pay, and how long do others stand still."""
    text = (
        f"{trip.tokens} tokens computed in {words.seconds(trip.computed)}, saved in"
        f" {words.seconds(trip.saved)} ({words.size(trip.size)}), restored in"
        f" {words.seconds(trip.restored)}: {trip.reused} reused"
    )
    used = trip.reused >= trip.tokens - 1
    return [Finding("round trip", Level.OK if used else Level.PROBLEM, text), *_batch(trip)]


def _batch(trip: Trip) -> list[Finding]:
    if not trip.batch or not trip.computed:
        return []
    whole = trip.batch >= trip.tokens
    shown = f"at least {trip.tokens}" if whole else f"{trip.batch}"
    lasts = (BATCHES[-1] if whole else trip.batch) * trip.computed / trip.tokens
    most = words.seconds(lasts)
    text = f"{shown} tokens at a time; the other slots stand still meanwhile, up to {most}"
    if lasts > BATCH_SECONDS and trip.batch > good_batch(trip):
        return [Finding("batch", Level.WARNING, text, f"Start it with -b {good_batch(trip)}.")]
    return [Finding("batch", Level.OK, text)]


def good_batch(trip: Trip) -> int:
    """The largest batch for which nobody waits long."""
    speed = trip.tokens / trip.computed if trip.computed else float("inf")
    return max((size for size in BATCHES if size <= speed * BATCH_SECONDS), default=BATCHES[0])


async def idle_slots(backend: Backend) -> tuple[list[SlotView], Finding]:
    """Slots nobody uses at this moment."""
    try:
        views = await backend.slots()
    except BackendRefusedError as error:
        return [], Finding(
            "slots", Level.PROBLEM, f"/slots is not shown: {error.message}", "Leave out --no-slots."
        )
    idle = [view for view in views if not view.is_processing]
    text = f"{words.many(len(views), 'slot')}, {len(idle)} of them idle"
    if idle:
        return idle, Finding("slots", Level.OK, text)
    return idle, Finding("slots", Level.WARNING, text, "Try again when one is.")


async def introduced(backend: Backend, urls: str) -> tuple[Facts | None, Finding]:
    """Who the server says it is."""
    try:
        facts = await backend.facts()
    except BackendRefusedError as error:
        return None, _refused(error, urls)
    except SlotkeeperError as error:
        text = f"{urls}: {error.message}"
        return None, Finding("backend", Level.PROBLEM, text, _sentence(error.hint))
    build = facts.identity.get("build_info")
    model = facts.model if facts.model != facts.model_path else Path(facts.model).name
    text = f"{facts.kind}{f' {build}' if build else ''} at {urls}, model {model}"
    if facts.total_slots and facts.n_ctx:
        slots, context = words.many(facts.total_slots, "slot"), words.many(facts.n_ctx, "token")
        text += f", {slots} of {context}"
    return facts, Finding("backend", Level.OK, text)


def _refused(error: BackendRefusedError, urls: str) -> Finding:
    todo = ""
    if error.answer == HTTPStatus.SERVICE_UNAVAILABLE:
        todo = "It loads its model: try again in a moment."
    elif error.answer in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        todo = "It demands a key: set backend.key."
    return Finding("backend", Level.PROBLEM, f"{urls}: {error.message}", todo)


def _sentence(hint: str) -> str:
    return hint[:1].upper() + hint[1:]
