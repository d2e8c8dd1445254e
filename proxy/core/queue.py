"""Which waiting request starts now, and what a lease learns while it is held. Pure.

``next_up`` is asked again after every change. A request is bound only when what it wants is free
(late binding); what waited long is favoured; a request that takes every slot holds back those
behind it, or it would never have them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from proxy.core.hold import patience
from proxy.core.placement import AGEING, LARGE_SECONDS, SIDE_SECONDS, Need, Option, hot, options
from proxy.core.records import Reason, Reuse
from proxy.core.slots import Content, Slot, SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from proxy.core.costs import Costs
    from proxy.core.records import Prompt, Snapshot


SPARED_TOKENS = 32  # less is the template's own opening, which every prompt shares
# Seconds that outweigh any cost: for who has waited long enough, and who goes after all others.
FIRST, LAST = 1e9, 1e6


class Kind(StrEnum):
    """How much a request takes: one slot, every slot, or a counting permit where none is pinned."""

    NARROW = "narrow"
    WIDE = "wide"
    PERMIT = "permit"


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue. ``queued``: when it came, by the caller's clock."""

    need: Need
    kind: Kind
    queued: float


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Engine:
    """The backend as the queue sees it right now.

    ``total_slots`` 0: not known, permits are not limited. ``wide``: one request has every slot.
    ``large``: a large prefill is running. ``typical``: seconds an answer takes after its prefill.
    ``reuse``: EXTENSION makes slots scarce (`core.hold`). ``serial``: one slot runs at a time.
    ``refused_from``: bytes from which on a save would be refused, as far as is known.
    """

    slots: Sequence[Slot]
    total_slots: int
    permits: int
    wide: bool
    large: bool
    typical: float
    reuse: Reuse = Reuse.PREFIX
    serial: bool = False
    refused_from: float = math.inf

    @property
    def scarce(self) -> bool:
        """What is displaced is lost, and cannot be kept in part."""
        return self.reuse is Reuse.EXTENSION

    @property
    def all_free(self) -> bool:
        """Nothing runs in any slot."""
        return all(slot.state is SlotState.FREE for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Grant:
    """One decision: the option taken, and all that were weighed (for the decision log)."""

    option: Option
    weighed: tuple[Option, ...] = ()


def next_up(
    queue: Iterable[W],
    engine: Engine,
    costs: Costs,
    now: float,
    matches: Callable[[Prompt], tuple[tuple[Snapshot, int], ...]],
) -> tuple[W, Grant] | None:
    """The waiting request that starts now: least cost, less what it has waited; None: none can."""
    best: tuple[float, W, Grant] | None = None
    for waiting in queue:
        grant = startable(waiting, engine, costs, now, matches)
        if grant is not None:
            cost = rank(waiting, grant.option, engine, now)
            if best is None or cost < best[0]:
                best = (cost, waiting, grant)
        if waiting.kind is Kind.WIDE:
            break
    return (best[1], best[2]) if best else None


def rank(waiting: Waiting, option: Option, engine: Engine, now: float) -> float:
    """The least one starts: seconds, less what it has waited."""
    waited = now - waiting.queued
    side = waiting.need.prompt.side
    cost = option.cost - AGEING * waited + (SIDE_SECONDS if side else 0.0)
    if not engine.scarce:
        return cost
    if waiting.need.idle:
        return cost + 2 * LAST
    if waited > patience(option.prefill, option.loss, side=side):
        return cost - FIRST
    return cost + (LAST if side else 0.0)


def startable(
    waiting: Waiting,
    engine: Engine,
    costs: Costs,
    now: float,
    matches: Callable[[Prompt], tuple[tuple[Snapshot, int], ...]],
) -> Grant | None:
    """What this request can start with now, None when it has to, or had better, wait."""
    if waiting.kind is Kind.PERMIT:
        free = not engine.total_slots or engine.permits < engine.total_slots
        return unpinned(Reason.FORWARD) if free else None
    if engine.wide or engine.permits:
        return None
    if waiting.kind is Kind.WIDE:
        return unpinned(Reason.WIDE) if engine.all_free else None
    if engine.serial and not engine.all_free:
        return None
    return placed(there(waiting, engine, now), engine, costs, now, matches)


def there(waiting: Waiting, engine: Engine, now: float) -> Need:
    """What it needs by now. A process it waited for may be gone: then any will do."""
    need = waiting.need
    if engine.reuse is Reuse.PREFIX:  # its slots are of one process
        return need
    need = replace(need, waited=now - waiting.queued)
    here = [slot.index for slot in engine.slots]
    if need.wanted in (None, *here) or need.idle:
        return need
    return replace(need, wanted=here[0] if need.beside and here else None)


def placed(
    need: Need,
    engine: Engine,
    costs: Costs,
    now: float,
    matches: Callable[[Prompt], tuple[tuple[Snapshot, int], ...]],
) -> Grant | None:
    """The cheapest option, if it can start now."""
    if not need.exact and not hot(need, engine.slots, costs):
        return None  # its rendered prompt is being looked at
    if need.cache and need.prompt.tokens is not None:
        need = replace(need, matches=matches(need.prompt))
    weighed = weigh(need, engine, costs, now)
    if not weighed or not weighed[0].ready:
        return None
    best = weighed[0]
    if best.prefill > LARGE_SECONDS and engine.large:
        return None  # one large prefill at a time: it slows every other slot
    if need.path:
        best = replace(best, reason=Reason.FORWARD)
    elif need.wanted is not None and best.snapshot is None and not engine.scarce:
        best = replace(best, reason=Reason.PINNED)
    return Grant(best, tuple(weighed))


def weigh(need: Need, engine: Engine, costs: Costs, now: float) -> list[Option]:
    """Every way to serve ``need``, cheapest first, the backend being as it is."""
    return options(need, engine.slots, costs, now, engine.typical, engine.refused_from)


def unpinned(reason: Reason) -> Grant:
    """The backend chooses the slot."""
    return Grant(Option(slot=-1, reason=reason, hit=0, n_tokens=0))


def any_start(queue: Iterable[W], engine: Engine, now: float) -> tuple[W, Grant] | None:
    """Who starts when weighing failed: the first in line, in any free slot."""
    free = [slot.index for slot in engine.slots if slot.state is SlotState.FREE]
    busy = engine.serial and not engine.all_free
    if engine.wide or engine.permits or busy or not free:
        return None
    for waiting in queue:
        if waiting.kind is Kind.WIDE and len(free) < len(engine.slots):
            return None
        if waiting.kind is Kind.WIDE:
            return waiting, unpinned(Reason.WIDE)
        wanted = there(waiting, engine, now).wanted
        slot = free[0] if wanted is None else wanted
        if waiting.kind is Kind.NARROW and slot in free:
            return waiting, Grant(Option(slot=slot, reason=Reason.BYPASS, hit=0, n_tokens=0))
    return None


@dataclass(slots=True, eq=False)
class Lease:
    """A slot (or a permit) held for one request, and what is learned while it is held.

    ``queued`` and ``started`` by the caller's clock, in seconds. ``cache_n`` and ``prompt_n`` are
    the engine's own counts; ``n_tokens`` is what the slot holds at the end, None: not known.
    """

    option: Option
    kind: Kind
    prompt: Prompt
    reason: Reason
    queued: float
    started: float
    weighed: tuple[Option, ...] = field(default=(), repr=False)
    cache_n: int | None = None
    prompt_n: int | None = None
    n_tokens: int | None = None
    storable: bool = True
    tasks: dict[int, int | None] = field(default_factory=dict)  # wide: last task per slot before
    pinned: bool = True  # False: the backend is not proved any more, so it chooses
    tainted: bool = False  # its KV is no function of the tokens (DESIGN.md rule 8)
    sent: bool = False  # the backend may have begun with it
    ended: bool = False  # the answer ran to its end
    beside: bool = False  # what the slot holds stays there
    expects: bool = False  # a tool was called: its result is on the way
    body: bytes | None = field(default=None, repr=False)  # as sent; it would bring the state back
    moved: int | None = None  # the slot whose process took over from that of the one it holds

    @property
    def place(self) -> int:
        """The slot it runs in."""
        return self.option.slot if self.moved is None else self.moved

    @property
    def slot(self) -> int | None:
        """The slot to name to the backend; None where the backend chooses."""
        return self.place if self.kind is Kind.NARROW and self.pinned else None

    def observed(self, cache_n: int, prompt_n: int) -> bool:
        """The engine says how much it really reuses; True the first time it does."""
        if self.cache_n is not None:
            return False
        self.cache_n, self.prompt_n = cache_n, prompt_n
        spared = cache_n >= SPARED_TOKENS or 2 * cache_n >= prompt_n
        if self.reason in (Reason.COLD, Reason.SLOT_HIT):
            self.reason = Reason.SLOT_HIT if spared else Reason.COLD
        elif self.reason is Reason.RESTORED and not spared:
            self.reason = Reason.COLD
        return True

    def finish(self, n_tokens: int, *, storable: bool = True) -> None:
        """The answer ran to its end with ``n_tokens`` in the slot."""
        self.n_tokens, self.ended = n_tokens, True
        self.storable = self.storable and storable

    def content(self, before: Content | None, n_tokens: int, now: float) -> Content | None:
        """What the slot holds after this lease, ``n_tokens`` in all; None: not known."""
        if not n_tokens:
            return None
        kept = self.cache_n or 0
        inherited = before is not None and before.tainted and kept > 1
        tainted = self.tainted or inherited
        tokens = self.prompt.tokens
        if tokens is None and before is not None and before.tokens is not None:
            tokens = before.tokens[:kept]
        return Content(
            prompt=self.prompt,
            n_tokens=n_tokens,
            n_prompt=min(self.prompt_n if self.prompt_n is not None else n_tokens, n_tokens),
            used=now,
            tokens=tokens[:n_tokens] if tokens is not None else None,
            n_saved=min(before.n_saved, kept) if before is not None else 0,
            storable=self.storable and not tainted,
            tainted=tainted,
        )

    def interrupted(self, before: Content | None, n_tokens: int, now: float) -> Content | None:
        """What the slot holds after an answer that did not run to its end.

        Without any progress of ours and with as many tokens as before, nothing ran: it was refused.
        """
        if self.prompt_n is None and not self.ended:
            return before if before is not None and before.n_tokens == n_tokens else None
        return self.content(before, n_tokens, now)
