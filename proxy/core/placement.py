"""Which slot a request gets, in seconds (DESIGN.md, Placement). Pure: no clock, no IO.

``place`` weighs every option for one request against the table as it stands: a slot as it is, a
snapshot restored into a free slot, a free slot cold, or waiting for a busy slot that holds more.
The scheduler performs what comes out, or asks again when something changed (late binding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.core.hold import hold_left, patience
from proxy.core.prefix import common, common_tokens, extends
from proxy.core.records import Reason, Reuse
from proxy.core.retention import worth_saving
from proxy.core.slots import Content, Slot, SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.core.costs import Costs
    from proxy.core.records import Prompt, Snapshot

ANSWER_AND_NEXT = 2  # messages by which a prompt must exceed the one before, to extend its state
LARGE_SECONDS = 2.0  # a prefill longer than this has the engine to itself
HOT_SECONDS = 0.5  # the most a look-up that was left out may cost
AGEING = 0.3  # eta: seconds of cost forgiven per second queued (routing.md: 0.1 to 0.5)
SIDE_REUSE = 0.1  # of that chance, for what a side request left behind
SIDE_SECONDS = 2.0  # how long a side request stands back behind one of a conversation
REUSE_FLOOR, REUSE_PEAK, REUSE_SCALE = 0.1, 0.4, 300.0  # P(reuse), routing.md simulation


@dataclass(frozen=True, slots=True)
class Need:
    """One request as placement sees it.

    ``exact``: its rendered prompt was looked at, or cannot be. ``wanted``: the client's id_slot.
    ``wide``: it cannot name one slot. ``matches``: snapshots and how many tokens each covers.
    ``beside``: it leaves what a slot holds as it is. ``path``: where the backend takes it, "" for
    the cached path. ``idle``: nobody waits for it. ``waited``: seconds in the queue.
    """

    prompt: Prompt
    exact: bool = False
    wanted: int | None = None
    wide: bool = False
    cache: bool = True
    matches: tuple[tuple[Snapshot, int], ...] = ()
    beside: bool = False
    path: str = ""
    idle: bool = False
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve the request, its cost in seconds split as the decision log shows it.

    ``hit`` tokens need no computing (expected), ``n_tokens`` is the prompt's length (maybe
    estimated), ``save_first``: unsaved work in the slot is worth a save before it is overwritten.
    """

    slot: int
    reason: Reason
    hit: int
    n_tokens: int
    snapshot: Snapshot | None = None
    save_first: bool = False
    wait: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    loss: float = 0.0

    @property
    def cost(self) -> float:
        """Seconds this option costs, what it destroys included."""
        return self.wait + self.prefill + self.transfer + self.loss

    @property
    def ready(self) -> bool:
        """It can start now."""
        return self.wait == 0.0

    def explain(self) -> dict[str, object]:
        """The row of the decision log."""
        return {
            "slot": self.slot,
            "reason": str(self.reason),
            "hit": self.hit,
            "prompt": self.n_tokens,
            "snapshot": self.snapshot.id if self.snapshot else None,
            "save_first": self.save_first,
            **{
                k: round(getattr(self, k), 4)
                for k in ("wait", "prefill", "transfer", "loss", "cost")
            },
        }


def hit(content: Content | None, prompt: Prompt) -> int:
    """How many tokens of ``prompt`` the content should spare; exact where both are tokenised."""
    if content is None or content.prompt.seed != prompt.seed:
        return 0
    if content.reuse is Reuse.EXTENSION:
        longer = len(prompt.chain) - len(content.prompt.chain) >= ANSWER_AND_NEXT
        return content.n_prompt if longer and extends(prompt, content.prompt) else 0
    if extends(prompt, content.prompt):
        return content.n_tokens
    known = 0
    if content.tokens is not None and prompt.tokens is not None:
        known = common_tokens(content.tokens, prompt.tokens)
    depth = common(prompt, content.prompt)
    if depth == 0 or content.prompt.size == 0:
        return known
    share = content.prompt.ends[depth - 1] / content.prompt.size
    return max(known, int(content.n_prompt * share))


def length(prompt: Prompt, contents: Iterable[Content | None], text: float) -> int:
    """The prompt's length in tokens: counted, else extrapolated from a slot it extends.

    ``text``: bytes per token.
    """
    if prompt.tokens is not None:
        return len(prompt.tokens)
    for content in contents:
        if content is not None and extends(prompt, content.prompt):
            grown = max(0, prompt.size - content.prompt.size)
            return content.n_prompt + math.ceil(grown / text)
    return max(1, math.ceil(prompt.size / text))


def reuse(age: float) -> float:
    """The chance that what a slot holds is wanted again, by seconds since its last use."""
    return REUSE_FLOOR + REUSE_PEAK * math.exp(-max(0.0, age) / REUSE_SCALE)


def remaining(slot: Slot, costs: Costs, typical: float, now: float) -> float:
    """Seconds until a busy slot is free: what is typical, or half as long again as it took."""
    elapsed = max(0.0, now - slot.since)
    if slot.state in (SlotState.SAVING, SlotState.RESTORING):
        size = costs.size(slot.content.n_tokens) if slot.content else 0
        expected = costs.save(size)
    else:
        expected = typical + costs.prefill(0, slot.n_expected)
    return max(expected - elapsed, 0.5 * elapsed, 0.01)


def displaced(
    content: Content | None, kept: int, costs: Costs, now: float, refused_from: float = math.inf
) -> tuple[bool, float, float]:
    """What overwriting beyond ``kept`` tokens costs: (save first?, its seconds, loss).

    From ``refused_from`` bytes on a save would be refused, which takes no time. It is tried all the
    same, or nobody would know when that is over; but nobody counts on it.
    """
    if content is None or content.n_tokens <= kept:
        return False, 0.0, 0.0
    recompute = costs.prefill(kept, content.n_tokens)
    size = costs.size(content.n_tokens)
    chance = reuse(now - content.used) * (SIDE_REUSE if content.prompt.side else 1.0)
    save_first = content.storable and worth_saving(
        content.n_tokens, max(content.n_saved, kept), costs
    )
    if save_first and size < refused_from:
        return True, costs.save(size), chance * min(recompute, costs.restore(size))
    if content.n_saved > kept:
        saved = costs.restore(size) + costs.prefill(content.n_saved, content.n_tokens)
        recompute = min(recompute, saved)
    return save_first, 0.0, chance * recompute


def as_it_is(
    slot: Slot, need: Need, n_tokens: int, costs: Costs, now: float, refused_from: float
) -> Option:
    """Use the slot's own content, whatever it covers (nothing: cold)."""
    if need.beside:
        return Option(slot=slot.index, reason=Reason.COLD, hit=0, n_tokens=n_tokens)
    covered = min(hit(slot.content, need.prompt), n_tokens) if need.cache else 0
    kept = slot.content.n_tokens if slot.content and covered >= slot.content.n_prompt else covered
    if slot.content is not None and slot.content.reuse is Reuse.EXTENSION:
        kept *= slot.content.prompt.side == need.prompt.side  # one that goes on beside it ends it
    save_first, saving, loss = displaced(slot.content, kept, costs, now, refused_from)
    prefill = costs.prefill(covered, max(n_tokens, covered))
    wait = hold_left(slot.content, need.prompt, now)
    if need.waited > patience(prefill, loss, side=need.prompt.side):
        wait = 0.0
    return Option(
        slot=slot.index,
        reason=Reason.SLOT_HIT if covered else Reason.COLD,
        hit=covered,
        n_tokens=n_tokens,
        save_first=save_first,
        wait=wait,
        prefill=prefill,
        transfer=saving,
        loss=loss,
    )


def from_snapshot(
    slot: Slot,
    snapshot: Snapshot,
    covered: int,
    n_tokens: int,
    costs: Costs,
    now: float,
    refused_from: float,
) -> Option:
    """Restore ``snapshot`` into a free slot first."""
    save_first, saving, loss = displaced(slot.content, 0, costs, now, refused_from)
    return Option(
        slot=slot.index,
        reason=Reason.RESTORED,
        hit=covered,
        n_tokens=n_tokens,
        snapshot=snapshot,
        save_first=save_first,
        prefill=costs.prefill(covered, max(n_tokens, covered)),
        transfer=saving + costs.restore(snapshot.size),
        loss=loss,
    )


def options(
    need: Need,
    slots: Sequence[Slot],
    costs: Costs,
    now: float,
    typical: float,
    refused_from: float = math.inf,
) -> list[Option]:
    """Every way to serve ``need``, cheapest first. Ties: the slot that holds least, then index.

    ``refused_from``: as in ``displaced``.
    """
    n_tokens = length(need.prompt, [slot.content for slot in slots], costs.text)
    found: list[Option] = []
    for slot in slots:
        if need.wanted not in (None, slot.index):
            continue
        option = as_it_is(slot, need, n_tokens, costs, now, refused_from)
        if slot.state is not SlotState.FREE:
            wait = remaining(slot, costs, typical, now)
            found.append(replace(option, wait=wait, loss=0.0, transfer=0.0, save_first=False))
            continue
        found.append(option)
        if need.cache:
            found.extend(
                from_snapshot(slot, snapshot, covered, n_tokens, costs, now, refused_from)
                for snapshot, covered in need.matches
                if covered > option.hit
            )
    held = {slot.index: slot.content.n_tokens if slot.content else 0 for slot in slots}
    return sorted(found, key=lambda o: (o.cost, held[o.slot], o.slot))


def hot(need: Need, slots: Iterable[Slot], costs: Costs) -> bool:
    """A free slot holds so much of this prompt that looking further could not pay."""
    for slot in slots:
        content = slot.content
        if (
            slot.state is SlotState.FREE
            and content is not None
            and need.wanted in (None, slot.index)
            and extends(need.prompt, content.prompt)
        ):
            n_tokens = length(need.prompt, [content], costs.text)
            if costs.prefill(content.n_tokens, max(n_tokens, content.n_tokens)) <= HOT_SECONDS:
                return True
    return False
