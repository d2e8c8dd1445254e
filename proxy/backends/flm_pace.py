"""How fast this server is, and whether an answer nobody wants is worth its end. Pure.

A cancelled answer can cost the next turn the whole prefix (fastflowlm.md 1.3, 3.3, 5.20).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.backends.flm_models import Memory
from proxy.core.costs import Costs

_FADE = 0.9  # what an answer leaves of the weight of those before
_GUESSED_ANSWER = 256.0  # tokens, until answers were seen
_GUESSED_SECONDS = 0.1  # per token
_GUESSED_TEXT = 0.25  # tokens per byte of a prompt


class Pace:
    """Learns from the timings of answers."""

    def __init__(self) -> None:
        """Guesses only."""
        self._costs = Costs()
        self._answers = self._tokens = self._seconds = 0.0
        self._per_byte = _GUESSED_TEXT

    def observe(self, timings: Mapping[str, Any], size: int) -> None:
        """An answer in llama-server's words (``flm_answer``; milliseconds), its request's bytes."""
        start = int(timings["cache_n"])
        end = start + int(timings["prompt_n"])
        self._costs.observe_prefill(start, end, float(timings["prompt_ms"]) / 1e3)
        self._per_byte = end / max(size, 1) if end else self._per_byte
        self._answers = self._answers * _FADE + 1
        self._tokens = self._tokens * _FADE + float(timings["predicted_n"])
        self._seconds = self._seconds * _FADE + float(timings["predicted_ms"]) / 1e3

    def prefill(self, size: int) -> float:
        """Seconds to compute a prompt of so many bytes from nothing."""
        return self._costs.prefill(0, int(size * self._per_byte))

    def remaining(self, limit: int) -> float:
        """Seconds an answer may still take. However long it is already, it is as long again."""
        length = self._tokens / self._answers if self._answers else _GUESSED_ANSWER
        each = self._seconds / self._tokens if self._tokens else _GUESSED_SECONDS
        return min(float(limit), length) * each

    def patience(self, memory: Memory, *, tools: bool, size: int, limit: int) -> float:
        """Seconds to let an answer run on that its client has left; 0: cancel it now.

        Only a model that goes on from the prompt, and only with tools, loses anything by a cancel:
        the checksums of tools are gone. One that goes on from the whole answer has lost already,
        for the client will not repeat what it did not get. ``size``: bytes of its
        request; ``limit``: tokens its answer may have. The longest wait is what the prefill costs.
        """
        if not tools or memory not in {Memory.PROMPT, Memory.UNKNOWN}:
            return 0.0
        again = self.prefill(size)
        return again if self.remaining(limit) <= again else 0.0
