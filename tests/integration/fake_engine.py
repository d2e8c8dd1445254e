"""The part of the fake llama-server behind HTTP: tokens, slots, reuse, the RAM cache.

Behaviour follows llama-server.md sections 1.6 to 2. A token is a word with its leading space, a
newline or a ChatML marker, so what was generated is tokenised again to the same tokens.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

N_VOCAB = 49_152
_WORD = re.compile(r"<\|im_(?:start|end)\|>|\n| ?[^\s<]{1,12}|.", re.DOTALL)
_KEEP_HALF = 0.5  # a slot that keeps less of its content saves it to the RAM cache first
_USEFUL = 0.25  # a RAM cache entry must be covered by this much


def tokenize(text: str) -> list[int]:
    """Text to tokens: equal words are equal tokens."""
    return [_token(word) for word in _WORD.findall(text)]


def _token(word: str) -> int:
    return zlib.crc32(word.encode()) % N_VOCAB


def render(body: dict[str, Any]) -> str:
    """ChatML, tools first."""
    parts = [f"<|im_start|>tools\n{tool}<|im_end|>\n" for tool in body.get("tools", [])]
    for message in body.get("messages", []):
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        parts.append(f"<|im_start|>{message.get('role')}\n{content}<|im_end|>\n")
    if body.get("add_generation_prompt", True):
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


@dataclass
class FakeSlot:
    """One slot: what it holds and what it is doing. ``useless``: a restore that is no state."""

    index: int
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    id_task: int | None = None
    t_last: int = -1
    useless: bool = False


@dataclass
class FakeEngine:
    """Slots and the queue before them. A new one is a new process: empty, tasks from 0."""

    n_slots: int = 2
    n_ctx: int = 8192
    batch: int = 64
    ram_cache: bool = False
    clears_idle: bool = False  # unified pool with --cache-idle-slots: a launch empties the others
    similarity: float = 0.1

    def __post_init__(self) -> None:
        """Empty slots."""
        self.slots = [FakeSlot(i) for i in range(self.n_slots)]
        self.ram: list[list[int]] = []
        self.freed = asyncio.Condition()
        self._tasks = 0

    @asynccontextmanager
    async def idle(self, index: int) -> AsyncIterator[FakeSlot]:
        """The slot for an action: waits while it is busy, takes the id modulo (1.7)."""
        slot = self.slots[index % self.n_slots]
        async with self._owned(slot.index):
            self.next_task()
            yield slot

    @asynccontextmanager
    async def slot(self, pinned: int, prompt: Sequence[int]) -> AsyncIterator[FakeSlot]:
        """The slot for a prompt: the pinned one, else the most similar, else the oldest."""
        async with self._owned(pinned % self.n_slots if pinned >= 0 else None, prompt) as slot:
            slot.id_task = slot.t_last = self.next_task()
            if self.clears_idle:
                for other in self.slots:
                    if other is not slot and not other.busy:
                        self.ram.append(other.tokens)
                        other.tokens = []
            if self.ram_cache:
                self._swap(slot, prompt)
            yield slot

    def next_task(self) -> int:
        """Task ids are given to everything that is queued."""
        self._tasks += 1
        return self._tasks

    @asynccontextmanager
    async def _owned(
        self, index: int | None, prompt: Sequence[int] = ()
    ) -> AsyncIterator[FakeSlot]:
        async with self.freed:
            while True:
                idle = [s for s in self.slots if not s.busy and index in (None, s.index)]
                if idle:
                    break
                await self.freed.wait()
            slot = self._choose(idle, prompt)
            slot.busy = True
        try:
            yield slot
        finally:
            slot.busy = False
            await asyncio.shield(self._wake())

    async def _wake(self) -> None:
        async with self.freed:
            self.freed.notify_all()

    def _choose(self, idle: list[FakeSlot], prompt: Sequence[int]) -> FakeSlot:
        if not prompt or len(idle) == 1:
            return idle[0]
        best = max(idle, key=lambda s: common(s.tokens, prompt))
        if common(best.tokens, prompt) > self.similarity * len(prompt):
            return best
        return min(idle, key=lambda s: s.t_last)

    def _swap(self, slot: FakeSlot, prompt: Sequence[int]) -> None:
        """--cache-ram: put away what would be lost, take out what fits better (section 2)."""
        held = common(slot.tokens, prompt)
        if not slot.tokens or held >= _KEEP_HALF * len(slot.tokens):
            return
        self.ram.append(slot.tokens)
        best = max(self.ram, key=lambda tokens: common(tokens, prompt))
        if best and common(best, prompt) > max(held, _USEFUL * len(best)):
            self.ram.remove(best)
            slot.tokens = best

    def reuse(self, slot: FakeSlot, prompt: Sequence[int], *, cache: bool) -> int:
        """Tokens that need no computing; of a wholly cached prompt the last one does (1.10)."""
        if slot.useless or not cache:
            slot.useless = False
            return 0
        return max(0, min(common(slot.tokens, prompt), len(prompt) - 1))

    def answer(self, prompt: Sequence[int], n: int) -> list[str]:
        """The ``n`` words that follow this prompt, and no other."""
        seed = zlib.crc32(repr(list(prompt)).encode())
        return [f" w{(seed * (i + 1) + i) % 9973}" for i in range(n)]
