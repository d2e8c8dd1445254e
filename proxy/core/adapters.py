"""LoRA sets that meet: KV computed with one set must never answer a request with another.

The engine's RAM cache matches tokens only, and a request that names no set takes over a slot's KV
whatever set that was computed with (llama-server.md 1.12, llama.cpp#30129).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.slots import Content


class Adapters:
    """Whether requests with several sets have come; most users never send any."""

    def __init__(self, present: Callable[[], bool]) -> None:
        """None has come. ``present``: whether the backend has adapters at all."""
        self._present = present
        self._first: bytes | None = None
        self._several = False

    def doubtful(self, named: bytes, held: Content | None) -> bool:
        """Whether a request that names this set may meet KV of another one.

        ``held``: what its slot holds, None where that is not known or the backend chooses.
        """
        if self._first is None:
            self._first = named
        self._several = self._several or named != self._first
        return self._several and self._present() and (held is None or held.prompt.adapters != named)
