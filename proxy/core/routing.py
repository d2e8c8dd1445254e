"""Mode ``routed``: how requests are placed before a server whose slots are processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy.core.costs import Costs
from proxy.core.hold import hold_seconds
from proxy.core.placement import Need
from proxy.core.queue import Lease
from proxy.core.records import Reuse
from proxy.core.slots import Content

MOST_SENT = 8 * 1024**2  # bytes; a larger request is not kept, and so never sent again


@dataclass(frozen=True, slots=True)
class Routing:
    """What a driver says of its slots.

    ``serial``: they share what computes, so one runs at a time. ``beside``: paths whose requests
    leave what a slot holds as it is (FastFlowLM's embeddings: fastflowlm.md 2).
    """

    reuse: Reuse = Reuse.EXTENSION
    serial: bool = True
    beside: frozenset[str] = frozenset()

    def admit(self, need: Need, first: int) -> Need:
        """``need`` as it is placed here.

        Nobody can look at its rendered prompt, and a client's ``id_slot`` means nothing. What runs
        beside goes to the ``first`` process that is there, so that one alone must offer it.
        """
        beside = need.path in self.beside
        wanted = first if beside else need.wanted if need.idle else None
        return replace(need, exact=True, wide=False, wanted=wanted, beside=beside)

    def kept(self, content: Content, lease: Lease, costs: Costs, now: float) -> Content | None:
        """What a slot holds after an answer, kept for its conversation for a while."""
        if self.reuse is Reuse.NONE:
            return None
        side = lease.prompt.side
        seconds = hold_seconds(content.n_tokens, costs, expects=lease.expects, side=side)
        again = lease.body is not None and len(lease.body) <= MOST_SENT and not side
        return replace(
            content,
            storable=False,
            reuse=self.reuse,
            held=now + seconds,
            sent=lease.body if again else None,
        )
