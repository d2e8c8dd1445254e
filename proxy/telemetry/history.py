"""The decision log: why the last requests got what they got. Bounded, in memory only.

It quotes at most 60 characters of prompts, for whoever may see the proxy's own pages (DESIGN.md
rule 9). What goes to the structured log is ``Decision.for_log`` and nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from proxy.core.records import Reason
from proxy.telemetry import limits

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
    ``sentence``, ``before``, ``after``, ``advice``. ``title``: the conversation's, at most 60
    characters, ``""`` for one that is not remembered. ``seq``: its number since the start, which no
    other has: the request's id may be the client's own, who may give it twice.
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
    title: str = field(default="", repr=False)
    seq: int = 0

    @property
    def computed(self) -> int | None:
        """Prompt tokens that were not reused."""
        if self.prompt is None or self.reused is None:
            return None
        return max(0, self.prompt - self.reused)

    def as_json(self) -> dict[str, Any]:
        """Plain values, ready to be an answer."""
        return {**asdict(self), "computed": self.computed}

    def for_log(self) -> dict[str, Any]:
        """What the structured log may have: names and figures, never a quote of a prompt."""
        line = {name: getattr(self, name) for name in _LOGGED}
        # "prompt" would be taken for the text itself, and dropped (logs.SECRET_NAMES).
        line["prompt_tokens"] = self.prompt
        line["cold"] = str(self.cold["cause"]) if self.cold else ""
        return line


Listen = Callable[[Decision, bool], None]
"""Hears of a decision; True: it is new, False: there is more, or less, known of it."""


class History:
    """The newest ``limit`` decisions."""

    def __init__(self, limit: int = limits.REQUESTS) -> None:
        """``limit``: how many are kept; older ones are dropped."""
        self._decisions: deque[Decision] = deque(maxlen=limit)
        self._forgotten: deque[str] = deque(maxlen=limit)
        self._listeners: list[Listen] = []
        self._seq = 0

    def listen(self, listener: Listen) -> None:
        """Tell ``listener`` of every decision from now on."""
        self._listeners.append(listener)

    def add(self, decision: Decision) -> int:
        """Remember it, and forget the oldest if there are too many; its ``seq``."""
        self._seq += 1
        decision = replace(self._discreet(decision), seq=self._seq)
        self._decisions.append(decision)
        self._tell(decision, new=True)
        return self._seq

    def explain(self, seq: int, cold: Mapping[str, str]) -> None:
        """The cause of a cold answer was found after it had been remembered.

        By ``seq``: another conversation's request may have the same id, and must not quote this.
        """
        for place, decision in enumerate(self._decisions):
            if decision.seq == seq:
                self._change(place, replace(decision, cold=cold))

    def forget(self, conversation: str) -> None:
        """Its owner had it forgotten: nothing of it is quoted, nor of a request that still runs."""
        self._forgotten.append(conversation)
        for place, decision in enumerate(self._decisions):
            if decision.conversation == conversation and (decision.cold or decision.title):
                self._change(place, decision)

    def get(self, request_id: str) -> Decision | None:
        """The newest of that id; None when it is not, or no longer, here."""
        return next((d for d in reversed(self._decisions) if d.request_id == request_id), None)

    def shared(self) -> Mapping[str, int]:
        """Ids that several have, and how many."""
        counts = Counter(decision.request_id for decision in self._decisions)
        return {request_id: count for request_id, count in counts.items() if count > 1}

    def recent(self, n: int, after: str = "") -> list[Decision]:
        """At most ``n``, the newest first; only those newer than the request ``after``, if here.

        Of several of that id the oldest counts: some may be told twice then, but none is missed.
        """
        newer = deque(self._decisions)
        if any(decision.request_id == after for decision in newer):
            while newer.popleft().request_id != after:
                pass
        return list(islice(reversed(newer), max(0, n)))

    def first_tokens(self, since: float) -> list[float]:
        """Seconds until the first token of the requests that came after ``since``, ascending."""
        recent = (d.first_token for d in self._decisions if d.at >= since)
        return sorted(seconds for seconds in recent if seconds is not None)

    def _discreet(self, decision: Decision) -> Decision:
        """Without quotes, if its conversation is forgotten."""
        if not decision.conversation or decision.conversation not in self._forgotten:
            return decision
        cold = {"cause": decision.cold["cause"]} if decision.cold else None
        return replace(decision, cold=cold, title="")

    def _change(self, place: int, decision: Decision) -> None:
        decision = self._discreet(decision)
        self._decisions[place] = decision
        self._tell(decision, new=False)

    def _tell(self, decision: Decision, *, new: bool) -> None:
        for listener in self._listeners:
            listener(decision, new)
