"""Does a prompt fit? An attempt that does not costs FastFlowLM its whole context (1.5, 5.7).

Refused is only what cannot fit: the bound counted here lies below what the server counts. Its own
answer is capped anyway, so ``max_tokens`` needs no clamp: it ends where the context is full, which
``flm_answer`` tells as ``length``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer

from proxy.backends.flm_memory import Memory, Prompt, text_of

log = structlog.get_logger("slotkeeper.fastflowlm")

CHECKS = 8
SLACK = 8  # tokens
# No tokeniser joins two words, so each run of letters is a token at least.
_WORD = re.compile(r"[^\W\d_]+")


class Window:
    """The context of the loaded model, and lower bounds of prompts, in tokens."""

    def __init__(self, tokenizer: Path | None) -> None:
        """``tokenizer``: a tokenizer.json of the served model; read when first needed."""
        self._path = tokenizer
        self._encoder: Tokenizer | None = None
        self._checks = 0  # prompts whose count was compared with the server's
        self._overhead = 0.0  # tokens a template adds per message, the least seen
        self.model = ""  # whose context it is
        self.capacity = 0  # 0: not told yet

    def learn(self, model: str, capacity: int) -> None:
        """What an answer told; another model starts anew."""
        if model != self.model:
            self.model, self._checks, self.capacity = model, 0, 0
        self.capacity = capacity or self.capacity

    async def least(self, new: Prompt, memory: Memory) -> int:
        """Tokens this prompt has at least; 0 where it certainly fits, or nothing is known.

        What extends the last prompt is counted from that one's true total on.
        """
        last, known = memory.last, 0
        fresh: Sequence[dict[str, Any]] = new.messages
        if last is not None and new.extends(last):
            # less a few tokens per message, which some templates show only at the end (3.3)
            known = max(0, memory.tokens - SLACK * len(last.messages))
            fresh = new.messages[len(last.messages) :]
        texts = [_text(message) for message in fresh]
        if not self.capacity or known + 4 * sum(map(len, texts)) < self.capacity:
            return 0  # a character is 4 bytes at most, and a byte one token
        trusted = self._checks > 0
        added = int(len(fresh) * self._overhead) if trusted else 0
        return known + added + await self._count(texts, words=not trusted)

    async def told(self, prompt: Prompt, total: int) -> None:
        """The true total of a prompt: what the template adds, or that the tokenizer is wrong.

        Only the first few prompts that take a good part of the context are counted for this.
        """
        enough = self._checks >= CHECKS or total * 4 < self.capacity
        if self._path is None or enough or prompt.tools or prompt.media:
            return
        counts = await self.counts([_text(message) for message in prompt.messages])
        if not counts:
            return
        counted = sum(counts)
        if counted > total:
            self._path, self._checks = None, 0
            log.warning(
                "tokenizer.mismatch", hint="backend.tokenizer is not this model's; words count"
            )
            return
        added = (total - counted) / len(prompt.messages)
        self._overhead = min(added, self._overhead) if self._checks else added
        self._checks += 1

    async def _count(self, texts: Sequence[str], *, words: bool = False) -> int:
        counts = [] if words else await self.counts(texts)
        if self._path is None or words:
            return sum(len(_WORD.findall(text)) for text in texts)
        return sum(counts)

    async def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text by the tokenizer; empty without one, or if it proved another's."""
        if self._path is None:
            return []
        try:
            if self._encoder is None:
                self._encoder = await asyncio.to_thread(Tokenizer.from_file, str(self._path))
            encoded = await self._encoder.async_encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        except Exception as error:  # noqa: BLE001 - rule 10; the library raises nothing narrower
            self._path, self._checks = None, 0
            log.warning("tokenizer.broken", error=type(error).__name__, hint="words count")
            return []
        return [len(one.ids) for one in encoded]


def _text(message: dict[str, Any]) -> str:
    """What a template shows of it at least: some trim, and cut off what an answer thought."""
    text = text_of(message["content"])
    return (text.rpartition("</think>")[2] if message["role"] == "assistant" else text).strip()
