"""Whether a displaced conversation is worth computing again while nobody waits. Pure.

FastFlowLM holds one conversation. What another one displaced can be had back by sending its last
request again (fastflowlm.md 5.18): in idle time that costs nobody anything, and its next turn is
hot. All times are seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.hold import same
from proxy.core.placement import displaced

if TYPE_CHECKING:
    from proxy.core.costs import Costs
    from proxy.core.records import Prompt
    from proxy.core.slots import Content

IDLE_SECONDS = 4.0  # without any request, before it begins
WORTH_SECONDS = 3.0  # a conversation that is computed in less is not worth it
LET_RUN_SECONDS = 3.0  # so near its end it is not broken off for another conversation


def worth(content: Content | None, costs: Costs, now: float) -> float:
    """What losing it would cost: its prefill, by how likely it is to go on."""
    return displaced(content, 0, costs, now)[2]


def to_keep(known: Content | None, gone: Content, costs: Costs, now: float) -> Content | None:
    """Which of two displaced conversations is remembered; ``gone`` was displaced just now."""
    if gone.sent is None or costs.prefill(0, gone.n_tokens) < WORTH_SECONDS:
        return known
    if known is None or same(known.prompt, gone.prompt):
        return gone
    return max(known, gone, key=lambda content: worth(content, costs, now))


def due(gone: Content, holds: Content | None, costs: Costs, now: float, active: float) -> bool:
    """Whether to begin: idle for a while, and it is worth more than what the slot ``holds``.

    ``active``: when a request last came or ended.
    """
    if now - active < IDLE_SECONDS:
        return False
    return worth(gone, costs, now) > worth(holds, costs, now)


def breaks_off(gone: Content, arriving: Prompt, costs: Costs, elapsed: float) -> bool:
    """Whether a request that comes meanwhile ends it; its own conversation waits for it."""
    if same(gone.prompt, arriving):
        return False
    return costs.prefill(0, gone.n_prompt) - elapsed > LET_RUN_SECONDS
