"""What the engine says about its own work while it answers (llama-server.md 1.10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Observed:
    """Collects progress and timings of one answer. Tokens; the first word on reuse is the last.

    ``processed``: of the prompt so far, what was reused included. ``generated``: about, so far.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.cache_n: int | None = None
        self.prompt_n: int | None = None
        self.processed: int | None = None
        self.generated = 0
        self.prefilled = False
        self.timings: Mapping[str, Any] | None = None
        self.truncated = False

    def progress(self, progress: Mapping[str, Any]) -> None:
        """A ``prompt_progress`` object; the first is sent before anything is computed."""
        total, cached = progress.get("total"), progress.get("cache")
        if not isinstance(total, int) or not isinstance(cached, int):
            return
        if self.cache_n is None:
            self.cache_n, self.prompt_n = cached, total
        processed = progress.get("processed")
        if isinstance(processed, int):
            self.processed = processed
        if processed == total:
            self.prefilled = True

    def event(self, event: Mapping[str, Any]) -> None:
        """An event (or a whole answer) that may carry ``timings``."""
        if event.get("truncated") is True:
            self.truncated = True
        timings = event.get("timings")
        if not isinstance(timings, dict):
            return
        self.timings = timings
        cached, computed = timings.get("cache_n"), timings.get("prompt_n")
        if self.cache_n is None and isinstance(cached, int) and isinstance(computed, int):
            self.cache_n, self.prompt_n = cached, cached + computed
