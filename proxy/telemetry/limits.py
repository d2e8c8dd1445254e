"""How much of what happened is kept in memory: what the pages, the commands and the docs go by."""

from __future__ import annotations

REQUESTS = 512  # rows of the decision log
LOG_LINES = 1000
