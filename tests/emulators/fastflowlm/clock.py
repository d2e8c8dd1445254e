"""Emulated time: it always counts, and passes for real only as much as ``scale`` says."""

from __future__ import annotations

import asyncio


class Clock:
    """Seconds as the NPU would have needed them."""

    def __init__(self, scale: float = 0.0) -> None:
        """``scale``: real seconds per emulated second; 0 for tests that do not wait."""
        self.scale = scale
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        """Let ``seconds`` of emulated time pass; others run meanwhile."""
        await asyncio.sleep(seconds * self.scale)
        self.now += seconds
