"""The slot table and what may be done to it: which mode holds, what is taken, what slots hold.

The scheduler decides who is next; this is what it decides about. Nothing here waits for requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.core import hold
from proxy.core.hold import same
from proxy.core.queue import Engine, Kind
from proxy.core.records import Mode, Reuse
from proxy.core.routing import Routing
from proxy.core.slots import Content, Slot, SlotState, SlotTable
from proxy.effects import settle_wide, until_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proxy.backends.base import Backend
    from proxy.core.placement import Need
    from proxy.core.queue import Grant, Lease
    from proxy.core.records import Prompt
    from proxy.effects import Effects

MOST_LEFT = 64


@dataclass(frozen=True, slots=True)
class Left:
    """What a client left, to come back for: where, and until when.

    ``firm``: it waited so long that its request is finished whatever else runs there.
    """

    slot: int
    until: float
    firm: bool


class Board:
    """Slots, counting permits where none may be pinned, and the mode that says which."""

    def __init__(
        self,
        backend: Backend,
        effects: Effects,
        clock: Callable[[], float],
        running: Iterable[Lease] = (),
    ) -> None:
        """Nothing is known: forward, without a limit. ``clock`` gives unix seconds.

        ``running``: the leases that are held, at any time.
        """
        self._backend = backend
        self._effects = effects
        self._clock = clock
        self._running = running
        self._n_ctx = 0
        self._routing = Routing()  # counts in mode routed
        self._left: dict[bytes, Left] = {}  # by what identifies a request, the oldest first
        self._permits = 0
        self._wide = False
        self._gone: set[int] = set()  # slots whose process went while a request had them
        self.table = SlotTable()
        self.mode = Mode.FORWARD
        self.total_slots = 0
        self.on_displaced: Callable[[int, Content], None] = lambda _slot, _content: None
        backend.on_moved(self._moved)

    # Mode

    def forward(self, total_slots: int) -> None:
        """From now on nothing is pinned; ``total_slots`` requests run at once (0: not limited)."""
        self.mode, self.total_slots = Mode.FORWARD, total_slots
        self.table.forget()

    def drive(self, total_slots: int, n_ctx: int) -> None:
        """The backend is proved, and idle: pins and snapshots from now on."""
        self.table, self._n_ctx = SlotTable(total_slots), n_ctx
        self.mode, self.total_slots = Mode.EXCLUSIVE, total_slots

    def route(self, total_slots: int, routing: Routing) -> None:
        """Its slots are processes, and idle: requests are placed from now on, nothing is saved."""
        self.table, self._routing = SlotTable(total_slots), routing
        self.mode, self.total_slots = Mode.ROUTED, total_slots

    @property
    def pins(self) -> bool:
        """Requests are given a slot."""
        return self.mode is not Mode.FORWARD

    @property
    def reuses(self) -> bool:
        """An answer can go on from what a slot holds, as far as is known."""
        return self.mode is not Mode.ROUTED or self._routing.reuse is not Reuse.NONE

    def admit(self, need: Need) -> tuple[Need, Kind]:
        """A request as the mode takes it, and how much it takes."""
        if self.mode is Mode.FORWARD:
            return need, Kind.PERMIT
        if self.mode is Mode.ROUTED:
            here = [row.index for row in self._here()]
            need = self._routing.admit(need, here[0])
            if need.wanted is None:
                left = self._left.get(_mark(need.prompt))
                if left is not None and left.slot in here and self._clock() < left.until:
                    need = replace(need, wanted=left.slot)
        return need, Kind.WIDE if need.wide else Kind.NARROW

    # What is taken

    def engine(self, *, large: bool, typical: float) -> Engine:
        """The backend as the queue sees it right now. Processes that are gone are left out."""
        routed = self.mode is Mode.ROUTED
        return Engine(
            slots=self._here(),
            total_slots=self.total_slots,
            permits=self._permits,
            wide=self._wide,
            large=large and not routed,
            typical=typical,
            reuse=self._routing.reuse if routed else Reuse.PREFIX,
            serial=routed and self._routing.serial,
            refused_from=self._effects.refused_from,
        )

    def _here(self) -> list[Slot]:
        """Slots whose process is there; all, if none is: who asks is told so at once."""
        absent = self._backend.absent
        return [row for row in self.table if row.index not in absent] or list(self.table)

    def take(self, kind: Kind, grant: Grant) -> None:
        """A request starts."""
        option = grant.option
        if kind is Kind.PERMIT:
            self._permits += 1
        elif kind is Kind.WIDE:
            self._wide = True
        else:
            self._starts(option.slot)
            expected = max(0, option.n_tokens - option.hit)
            self.table.begin(option.slot, SlotState.LEASED, self._clock(), expected)

    def _starts(self, slot: int) -> None:
        """A request is computed there, and what goes on there for nobody is not finished."""
        there = {m: left for m, left in self._left.items() if left.slot == slot}
        for mark in [mark for mark, left in there.items() if not left.firm]:
            del self._left[mark]
        self._gone.discard(slot)

    def release(self, kind: Kind, slot: int) -> None:
        """It is over."""
        if kind is Kind.PERMIT:
            self._permits -= 1
        elif kind is Kind.WIDE:
            self._wide = False
        else:
            self.table.end(slot, self._clock())

    def taken(self) -> bool:
        """A slot or a permit is."""
        leased = any(row.state is SlotState.LEASED for row in self.table)
        return bool(self._permits or self._wide or leased)

    def kept(self, now: float) -> float | None:
        """Seconds until the next slot is not kept for its conversation any more (`core.hold`).

        ``now``: the instant of the decision it follows; one that ends right after it counts.
        """
        ends = [row.content.held for row in self.table if row.content and row.content.held > now]
        return min(ends) - now if ends else None

    # What slots hold

    def forget(self, slots: frozenset[int]) -> None:
        """These processes went, and what they held with them; also what runs there is not held."""
        self._gone |= slots
        for row in self.table:
            if row.index in slots:
                self.table.hold(row.index, None)

    def _moved(self, slot: int | None, to: int) -> None:
        """A process was found dead, and another computes its request: what that held is lost.

        The lease stays one of its own slot: the other one's may be held, too, and is used in turn.
        """
        if self.mode is not Mode.ROUTED or slot is None:
            return
        self.forget(frozenset({slot}))
        for lease in self._running:
            if lease.slot == slot:
                lease.moved = to
                if not lease.beside:
                    self._starts(to)
                    self._lose(to, lease)

    def _lose(self, slot: int, lease: Lease) -> None:
        """Of a slot another lease holds it is told when that has ended, or this one."""
        row = self.table[slot]
        if row.state is SlotState.FREE and row.content is not None:
            if not same(row.content.prompt, lease.prompt):
                self.on_displaced(slot, row.content)
            self.table.hold(slot, None)

    def answered(self, lease: Lease, n_tokens: int) -> None:
        """An answer ran to its end with ``n_tokens`` in its slot."""
        self._left.pop(_mark(lease.prompt), None)
        before = self.table[lease.place].content
        self._hold(lease, lease.content(before, n_tokens, self._clock()))

    async def settle(self, lease: Lease) -> None:
        """A request was sent and did not end by itself: wait for the engine, see what is left."""
        if lease.kind is Kind.WIDE:
            await settle_wide(self._backend, self.table, lease)
        elif self.mode is Mode.ROUTED:
            self._hold(lease, None)
            self._leave(lease)
        else:
            view = await until_idle(self._backend, lease.option.slot)
            before = self.table[lease.option.slot].content
            self._hold(lease, lease.interrupted(before, view.n_tokens or 0, self._clock()))

    def _leave(self, lease: Lease) -> None:
        """A client went: it may come back for what goes on there without it."""
        mark, slot, now = _mark(lease.prompt), lease.place, self._clock()
        if not mark or lease.beside:
            return
        firm = lease.body is not None and now - lease.started >= hold.LONG_SECONDS
        self._left.pop(mark, None)
        self._left[mark] = Left(slot, now + hold.KEPT_SECONDS, firm)
        for old in list(self._left)[: max(0, len(self._left) - MOST_LEFT)]:
            del self._left[old]
        if firm:
            n_tokens = math.ceil(lease.prompt.size / self._effects.costs.text)
            content = Content(lease.prompt, n_tokens, n_tokens, used=now, storable=False)
            until = now + hold.RETURN_SECONDS
            self.table.hold(slot, replace(content, reuse=self._routing.reuse, held=until))

    def _hold(self, lease: Lease, content: Content | None) -> None:
        """Beliefs are kept only of a proved backend, and of a context that did not shift."""
        if self.mode is Mode.ROUTED:
            content = self._routed(lease, content)
        elif content is not None and content.n_tokens > self._n_ctx:
            content = None
        self.table.hold(lease.place, content if self.pins else None)

    def _routed(self, lease: Lease, content: Content | None) -> Content | None:
        """What a process holds now. What it held before, of another conversation, is lost."""
        before = self.table[lease.place].content
        if lease.beside:
            return before
        if before is not None and not same(before.prompt, lease.prompt):
            self.on_displaced(lease.place, before)
        if content is None or lease.place in self._gone:
            return None
        costs = self._effects.costs
        costs.observe_text(lease.prompt.size, lease.prompt_n or 0)
        return self._routing.kept(content, lease, costs, self._clock())


def _mark(prompt: Prompt) -> bytes:
    """What a client sends that gave up and asks again; b"" where that cannot be told."""
    return prompt.chain[-1] if prompt.chain else b""
