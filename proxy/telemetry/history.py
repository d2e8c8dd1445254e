"""The decision log: why the last requests got what they got. Bounded, in memory only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxy.core.records import Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """One finished request. Holds no prompt text.

    ``at``: unix seconds when it came in. ``reused`` and ``prompt`` are the engine's own figures in
    tokens, ``queued``, ``first_token`` and ``total`` seconds since it came in; None where nobody
    can know. ``costs``: one row per option placement weighed. ``note``: a sentence, if one helps.
    """

    request_id: str
    at: float
    path: str
    reason: Reason
    status: int
    total: float
    queued: float = 0.0
    slot: int | None = None
    reused: int | None = None
    prompt: int | None = None
    first_token: float | None = None
    costs: Sequence[Mapping[str, Any]] = ()
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values, ready to be an answer."""
        return asdict(self)


class History:
    """The newest ``limit`` decisions."""

    def __init__(self, limit: int = 512) -> None:
        """``limit``: how many are kept; older ones are dropped."""
        self._decisions: deque[Decision] = deque(maxlen=limit)

    def add(self, decision: Decision) -> None:
        """Remember it, and forget the oldest if there are too many."""
        self._decisions.append(decision)

    def recent(self, n: int) -> list[Decision]:
        """At most ``n``, the newest first."""
        newest_first = list(reversed(self._decisions))
        return newest_first[: max(0, n)]
