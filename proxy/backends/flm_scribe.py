"""Finds out how a model writes tool arguments, before it matters, and remembers it (3.3, 5.13).

An answer tells how many tokens it took. With the model's tokenizer that says with which blanks its
calls were written, though the server tells them without. The order of the keys takes no other
number of tokens: that, and everything where there is no tokenizer, is learned by hits and misses,
and kept for the next start, so that a model costs a miss once.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import structlog

from proxy.backends.flm_memory import Memory, Prompt, text_of
from proxy.backends.flm_spelling import Spelling, Spellings, schema_orders, written
from proxy.backends.flm_window import Window

log = structlog.get_logger("slotkeeper.fastflowlm")

_END = 1  # the token that ends an answer is counted, too (1.5)


class Scribe:
    """What is known of how models write; one for all processes that serve the same."""

    def __init__(self, where: Callable[[], Path | None] = lambda: None) -> None:
        """``where``: the file that this process alone keeps it in; None: nowhere, for now."""
        self.spellings = Spellings()
        self.faults = 0  # answers of which nothing was learned
        self._where = where
        self._lock = asyncio.Lock()  # of the file
        self._kept: bytes | None = None  # what is in the file; None: not looked yet
        self._last = ""  # the model that it names as heard last
        self._failing = False  # said so already

    async def open(self) -> None:
        """Go on from what the last run knew, once. Whatever is wrong with it, it begins anew."""
        async with self._lock:
            path = self._where()
            if path is None or self._kept is not None:
                return
            kept = b""
            try:
                kept = await asyncio.to_thread(path.read_bytes)
                self.spellings.recall(kept)
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                log.warning("fastflowlm.unlearned", error=type(error).__name__)
                kept = b""
            self._kept, self._last = kept, self.spellings.last

    async def heard(
        self,
        memory: Memory,
        window: Window,
        prompt: Prompt,
        message: Mapping[str, Any],
        timings: Mapping[str, Any],
    ) -> None:
        """``message`` is the answer to ``prompt``; the one before is in ``memory``.

        ``timings`` in llama-server's words, as ``flm_answer`` tells them. A fault here costs only
        what would have been learned.
        """
        try:
            await self._learn(memory, window, prompt, message, timings)
        except Exception as error:  # noqa: BLE001 - a tokenizer.json may be anything
            self.faults += 1
            log.warning("fastflowlm.unheard", error=type(error).__name__, times=self.faults)

    async def _learn(
        self,
        memory: Memory,
        window: Window,
        prompt: Prompt,
        message: Mapping[str, Any],
        timings: Mapping[str, Any],
    ) -> None:
        self.spellings.judge(self.spellings.last, memory.repeated, hit=bool(timings["cache_n"]))
        if calls := message["tool_calls"]:
            orders = schema_orders(orjson.loads(prompt.tools) if prompt.tools else None)
            texts = written(calls, orders)
            possible = await _counted(window, message, texts, timings["predicted_n"])
            if possible:
                self.spellings.counted(calls, possible)

    async def keep(self, *, final: bool = False) -> None:
        """Write down what is known by now, if it is new.

        Only at the end (``final``) if no more is new than which model was heard last: models may
        take turns with each request.
        """
        async with self._lock:
            path = self._where()
            last = self.spellings.last
            if path is None or self._kept is None or not last:
                return
            try:
                habits = self.spellings.habits()
                if self._kept == (habits if final else self.spellings.habits(self._last)):
                    return
                await asyncio.to_thread(_write, path, habits)
            except Exception as error:  # noqa: BLE001 - no answer may fail for it
                if not self._failing:
                    log.warning("fastflowlm.unkept", error=type(error).__name__)
                self._failing = True
            else:
                self._kept, self._last, self._failing = habits, last, False


async def _counted(
    window: Window,
    message: Mapping[str, Any],
    texts: Mapping[Spelling, list[str]],
    tokens: int,
) -> frozenset[Spelling]:
    """The spellings that come nearest to so many ``tokens``; none where it is not known.

    Where a text meets a call, tokens may be joined or not: one more or less for each is no sign
    that it is written in a way not known here.
    """
    each = [text_of(message["content"]), *(text for calls in texts.values() for text in calls)]
    counts = await window.counts(each) if texts else []
    if not counts:
        return frozenset()
    size = len(message["tool_calls"])
    off = {
        one: abs(counts[0] + sum(counts[at : at + size]) + _END - tokens)
        for one, at in zip(texts, range(1, len(counts), size), strict=True)
    }
    least = min(off.values())
    return frozenset(one for one in off if off[one] == least <= size)


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, and for its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # mode 0600
    fresh = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
