"""Layer 2: the engine's tokens, its one checkpoint, and how long its work takes.

A loaded model has a history of tokens. A request is kept only if all of it is the beginning of
the new prompt (fastflowlm.md 3.3); what counts as history depends on the model's memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.emulators.fastflowlm.clock import Clock
from tests.emulators.fastflowlm.errors import UndefinedBehaviour, kind_of, type_error
from tests.emulators.fastflowlm.models import Model
from tests.emulators.fastflowlm.normalise import Message
from tests.emulators.fastflowlm.records import Record
from tests.emulators.fastflowlm.templates import EOS, Setting, render, render_head
from tests.emulators.fastflowlm.tokens import encode

POISONED = 2**32 - 1  # total_tokens after restore() returned -1

NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "image-max-tokens",
)
WHOLE = ("top_k", "min_p", "image-max-tokens")  # read as int: 0.05 becomes 0
DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "reasoning_effort": "medium",
}
QWEN35 = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}


@dataclass(slots=True)
class Prompt:
    """What is inserted."""

    messages: list[Message]
    tools: Any = None
    restore: bool = False  # layer 1 allows it
    matched: int = 0
    append: bool = False  # era B: behind whatever is there


@dataclass(slots=True)
class Engine:
    """A loaded model."""

    model: Model
    clock: Clock
    limit: int  # tokens of context
    chunk: int  # tokens between two looks at the cancel token
    date: str = ""
    strict_restore: bool = False
    history: list[str] = field(default_factory=list)
    checkpoint: list[str] | None = None
    pinned: list[str] = field(default_factory=list)
    total: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    users: int = 0  # requests inside at this moment; two are a race

    def __post_init__(self) -> None:
        self.sampling = {**DEFAULTS, **(QWEN35 if self.model.family.name == "qwen3.5" else {})}
        self.sampling["think"] = bool(self.model.thinks)

    @property
    def setting(self) -> Setting:
        """What the template sees of the sticky state."""
        think = bool(self.sampling["think"]) and self.model.thinks is not None
        return Setting(think, str(self.sampling["reasoning_effort"]), self.date)

    def clear(self) -> None:
        """``clear_context()``: everything, the checkpoint included."""
        self.history, self.checkpoint, self.pinned, self.total = [], None, [], 0

    @contextmanager
    def used(self, record: Record) -> Iterator[None]:
        """Work in the engine; whoever finds another at work races with it."""
        if self.users:
            record.race = True
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def configure(self, body: dict[str, Any]) -> None:
        """Take the sampling fields a request has; the others stay as the last request left them.

        Raises:
            JsonError: null or another type than expected.
        """
        for name in NUMBERS:
            if name in body:
                value = body[name]
                if not isinstance(value, int | float):
                    raise type_error("number", value)
                self.sampling[name] = int(value) if name in WHOLE else float(value)
        for name, kind in (("think", "boolean"), ("reasoning_effort", "string")):
            if name in body:
                if kind_of(body[name]) != kind:
                    raise type_error(kind, body[name])
                self.sampling[name] = body[name]

    def _tokens(self, prompt: Prompt) -> list[str]:
        tokens = encode(render(self.model, prompt.messages, prompt.tools, self.setting))
        trim = self.model.trim(think=self.setting.think)
        return tokens[:-trim] if trim else tokens

    def _restore(self, prompt: Prompt) -> None:
        """CKPT and CKPT-END go back to the checkpoint; HIST has none and keeps its history."""
        memory = self.model.memory(think=self.setting.think)
        if not prompt.restore or memory == "HIST":
            return
        if self.checkpoint is not None:
            self.history, self.total = list(self.checkpoint), len(self.checkpoint)
        else:
            self.history = []
            self.total = POISONED if prompt.matched or self.strict_restore else 0

    def _keep(self, prompt: Prompt, tokens: list[str], record: Record) -> int:
        """How many leading tokens need no prefill; clears if not all of the history fits."""
        if prompt.append:
            record.layer2 = "hit" if self.history else "empty"
            record.kept = len(self.history)
            return 0
        if self.model.family.flash:
            head = encode(render_head(self.model, prompt.messages, prompt.tools, self.setting))
            self.history = head if head == self.pinned else []
            self.pinned, self.total = head, len(self.history)
        kept = len(self.history)
        if tokens[:kept] == self.history:
            record.layer2, record.kept = ("hit" if kept else "empty"), kept
            return kept
        pairs = zip(tokens, self.history, strict=False)
        record.diverged = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
        record.layer2 = "miss"
        self.clear()
        return 0

    async def insert(self, prompt: Prompt, record: Record, cancelled: Callable[[], bool]) -> bool:
        """Prefill; False for "too long" and for a cancel (``record.finish`` tells them apart).

        Raises:
            UndefinedBehaviour: nothing is left to prefill, empty logits would be sampled.
        """
        if not prompt.messages:
            return False  # "No messages or prompt provided"
        self._restore(prompt)
        tokens = self._tokens(prompt)
        if self.total == POISONED:
            record.note("No valid checkpoint to restore")
        new = tokens[self._keep(prompt, tokens, record) :]
        if self.total + len(new) >= self.limit:
            record.note("Max length reached, stopping prefilling...")
            return False
        if not new:
            raise UndefinedBehaviour("no token is left to prefill")
        if not await self._prefill(new, record, cancelled):
            record.finish = "cancel"
            return False
        self.history += new
        self.total += len(new)
        if self.model.memory(think=self.setting.think) == "CKPT":
            self.checkpoint = list(self.history)
        return True

    async def _prefill(self, new: list[str], record: Record, cancelled: Callable[[], bool]) -> bool:
        record.prefilled = len(new)
        speed = self.model.speed
        start = self.clock.now
        for done in range(0, len(new), self.chunk):
            await record.pause("prefill")
            if cancelled():
                return False
            size = min(self.chunk, len(new) - done)
            constant = 0.0 if done else speed.a
            await self.clock.sleep(constant + speed.prefill(self.total + done, size))
            record.prefill_seconds = self.clock.now - start
        return True

    async def generate(
        self, planned: list[str], limit: int, record: Record, cancelled: Callable[[], bool]
    ) -> AsyncIterator[str]:
        """The tokens of an answer one by one, end of turn included; ``record`` gets the reason.

        The first token comes from the prefill's logits and takes no time of its own.
        """
        end = EOS[self.model.family.template]
        start = self.clock.now
        for token in [*planned, end]:
            if self.total >= self.limit:
                record.finish = "stop"  # the reason is never set to length (section 1.5)
                record.context_full = True
                break
            if record.completion:
                await record.pause("decode")
                if cancelled():
                    record.finish = "cancel"
                    break
                await self.clock.sleep(self.model.speed.decode(self.total))
                record.decode_seconds = self.clock.now - start
            self.history.append(token)
            self.total += 1
            record.completion += 1
            record.finish = "stop"
            yield token
            if token != end and 0 < limit <= record.completion:
                record.finish = "length"
                break
        self._after(record)

    def _after(self, record: Record) -> None:
        if self.model.memory(think=self.setting.think) == "CKPT-END":
            self.checkpoint = self.history[:-1]
