"""Which of several equal servers has seen a conversation before. Pure.

For servers that share prefixes by themselves and take many requests at once (vLLM and others):
going back to the same one is all that is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.core.conversation import head_length, segments
from proxy.core.prefix import segment_chain

MOST_MARKS = 20_000  # 16 bytes each


class Sticky:
    """Remembers, for a while, where the messages of conversations went."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self._places: dict[bytes, int] = {}  # the last put one at the end

    def find(self, marks: Sequence[bytes]) -> int | None:
        """Where the longest known beginning went; None: nowhere."""
        known = (self._places[mark] for mark in reversed(marks) if mark in self._places)
        return next(known, None)

    def put(self, marks: Sequence[bytes], place: int) -> None:
        """Remember it; the marks put longest ago are forgotten."""
        for mark in marks:
            self._places.pop(mark, None)
            self._places[mark] = place
        while len(self._places) > MOST_MARKS:
            del self._places[next(iter(self._places))]


def landmarks(messages: Any) -> tuple[bytes, ...]:
    """Digests of a conversation's beginnings, from its first message that is no system text.

    System text alone would draw all clients of one program to the same server.
    """
    if not isinstance(messages, list):
        return ()
    chain, _ = segment_chain(b"", segments(messages))
    return chain[head_length(messages) :]
