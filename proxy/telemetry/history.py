"""The decision log: why the last requests got what they got. Bounded, in memory only.

It quotes at most 60 characters of prompts, for whoever may see the proxy's own pages (DESIGN.md
rule 9). What goes to the structured log is ``Decision.for_log`` and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from proxy.core.records import Reason

_LOGGED = (
    "request_id", "path", "reason", "status", "total", "queued", "slot", "reused", "first_token",
    "conversation", "client", "side", "rules",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """One finished request.

    ``at``: unix seconds when it came in. ``reused`` and ``prompt`` are the engine's own figures in
    tokens, ``queued``, ``first_token`` and ``total`` seconds since it came in; None where nobody
    can know. ``costs``: one row per option placement weighed. ``note``: a sentence, if one helps.
    ``conversation``: its id. ``client``: the recognised client program, ``side``: the kind of side
    request, ``""`` for none. ``rules``: names of those that changed something (``name (shadow)``:
    would have). ``cold``: why it reused less than its conversation's last prompt: ``cause``,
    ``sentence``, ``before``, ``after``, ``advice``.
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
    conversation: str = ""
    client: str = ""
    side: str = ""
    rules: Sequence[str] = ()
    cold: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, ready to be an answer."""
        return asdict(self)

    def for_log(self) -> dict[str, Any]:
        """What the structured log may have: names and figures, never a quote of a prompt."""
        line = {name: getattr(self, name) for name in _LOGGED}
        # "prompt" would be taken for the text itself, and dropped (logs.SECRET_NAMES).
        line["prompt_tokens"] = self.prompt
        line["cold"] = str(self.cold["cause"]) if self.cold else ""
        return line


class History:
    """The newest ``limit`` decisions."""

    def __init__(self, limit: int = 512) -> None:
        """``limit``: how many are kept; older ones are dropped."""
        self._decisions: deque[Decision] = deque(maxlen=limit)

    def add(self, decision: Decision) -> None:
        """Remember it, and forget the oldest if there are too many."""
        self._decisions.append(decision)

    def explain(self, request_id: str, cold: Mapping[str, str]) -> None:
        """The cause of a cold answer was found after it had been remembered."""
        for place, decision in enumerate(self._decisions):
            if decision.request_id == request_id:
                self._decisions[place] = replace(decision, cold=cold)

    def forget(self, conversation: str) -> None:
        """Its owner had it forgotten: nothing of it is quoted any more."""
        for place, decision in enumerate(self._decisions):
            if decision.cold and decision.conversation == conversation:
                cold = {"cause": decision.cold["cause"]}
                self._decisions[place] = replace(decision, cold=cold)

    def recent(self, n: int) -> list[Decision]:
        """At most ``n``, the newest first."""
        newest_first = list(reversed(self._decisions))
        return newest_first[: max(0, n)]
