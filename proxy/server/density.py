"""How many tokens a chat prompt's bytes become, learned from what the backend counted."""

from __future__ import annotations

from math import ceil

_FADE = 0.8  # what a prompt still weighs when the next one is known
_BYTES_PER_TOKEN = 3.0  # until one is known: rather too many tokens than too few


class Density:
    """Tokens per byte of ``Prompt.size``; recent and long prompts count most."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._bytes = 0.0
        self._tokens = 0.0

    def learn(self, size: int, tokens: int) -> None:
        """A prompt of ``size`` bytes had that many ``tokens``."""
        if size > 0 and tokens > 0:
            self._bytes = self._bytes * _FADE + size
            self._tokens = self._tokens * _FADE + tokens

    def tokens(self, size: int) -> int:
        """An estimate, rounded up."""
        return ceil(size * self._tokens / self._bytes if self._bytes else size / _BYTES_PER_TOKEN)
