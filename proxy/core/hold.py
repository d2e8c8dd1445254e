"""Where slots are scarce: for whom one is kept a moment, and who waits how long. Pure.

A server that reuses only what is extended exactly, and saves nothing, loses a conversation the
moment another one runs in its slot. So the next step of a tool loop is worth a short wait of all
others (fastflowlm.md 5.16), and a client's side request waits for the conversation (5.17). All
times are seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.prefix import extends

if TYPE_CHECKING:
    from proxy.core.costs import Costs
    from proxy.core.records import Prompt
    from proxy.core.slots import Content

TOOL_SECONDS = 5.0  # after a tool call its result comes by itself
TURN_SECONDS = 1.0  # after any other answer: clients that go on without a user
RETURN_SECONDS = 2.0  # after a client gave up, for the same request again
LONG_SECONDS = 10.0  # who waited so long was sent away by a time-out, and asks again
KEPT_SECONDS = 600.0  # what such a client left is kept for it so long
WORTH = 0.5  # the share of a conversation's prefill that waiting for it may cost
SIDE_PATIENCE = 25.0  # a side request waits no longer for the conversations
LEAST_PATIENCE, MOST_PATIENCE = 30.0, 300.0  # nor does any other for cheaper ones


def hold_seconds(n_tokens: int, costs: Costs, *, expects: bool, side: bool) -> float:
    """How long a slot is kept after an answer of ``n_tokens``; ``expects``: it called a tool."""
    if side:
        return 0.0
    longest = TOOL_SECONDS if expects else TURN_SECONDS
    return min(longest, WORTH * costs.prefill(0, n_tokens))


def hold_left(content: Content | None, prompt: Prompt, now: float) -> float:
    """How long a free slot is still kept from ``prompt``; never from its own conversation."""
    if content is None or now >= content.held or same(content.prompt, prompt):
        return 0.0
    return content.held - now


def same(held: Prompt, prompt: Prompt) -> bool:
    """Whether ``prompt`` is the conversation's own: its next turn, a retry, another try."""
    if prompt.side != held.side:
        return False
    named = bool(held.conversation) and held.conversation == prompt.conversation
    return named or extends(prompt, held)


def patience(prefill: float, loss: float, *, side: bool) -> float:
    """How long a request that has to wait behind cheaper ones does so.

    Where a change of conversations costs much, they change seldom: about as long as the change
    takes (what is displaced will be computed again).
    """
    if side:
        return SIDE_PATIENCE
    return min(MOST_PATIENCE, max(LEAST_PATIENCE, prefill + 2 * loss))
