"""What to keep on disk: which states are worth writing, and which go first.

The value of a snapshot is the time it saves over the next best thing (another snapshot that
shares part of it), per byte, fading with the time since its last use (routing.md, part B: level
with or ahead of LRU on every public trace tried, and LFU loses: a snapshot is normally used
once, by the successor that supersedes it).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from proxy.core.costs import Costs
from proxy.core.prefix import PrefixIndex, common_tokens
from proxy.core.records import Snapshot

_MIN_TAIL = 32  # tokens; a shorter unsaved tail is computed again in no time


@dataclass(frozen=True, slots=True)
class Limits:
    """What the store may hold: bytes, files, and seconds since a snapshot's last use."""

    max_bytes: int
    max_files: int
    max_age: float
    policy: Literal["value", "lru"] = "value"


class Refusal(StrEnum):
    """Why a state was not saved: the word in the log and in the API."""

    FORGOTTEN = "forgotten"  # its owner had the conversation forgotten
    WRITE_BUDGET = "write-budget"
    TOO_LARGE = "too-large"
    PINS_FULL = "pins-full"
    NO_DIRECTORY = "no-directory"
    DISK_FULL = "disk-full"
    UNDELETED = "undeleted"  # what has to go first cannot be removed

    @property
    def advice(self) -> str:
        """What its owner can do about it, ``""`` where nothing is wrong."""
        return _ADVICE.get(self, "")

    def reach(self, size: int) -> float:
        """Bytes from which on other states are refused, too, where one of ``size`` bytes was."""
        if self is Refusal.FORGOTTEN:
            return math.inf  # that conversation alone
        # Elsewhere a smaller one may fit into what is left of the store, the disk or the day.
        return 0 if self in _WHATEVER_SIZE else size


_WHATEVER_SIZE = (Refusal.NO_DIRECTORY, Refusal.UNDELETED, Refusal.PINS_FULL)
_ADVICE = {
    Refusal.WRITE_BUDGET: "nothing more is saved today: raise cache.daily_write",
    Refusal.TOO_LARGE: "a state is larger than the whole store may be: raise cache.max_bytes",
    Refusal.PINS_FULL: (
        "pinned snapshots fill the store, so nothing new is saved: unpin some"
        " (slotkeeper cache pin --off ID) or raise cache.max_bytes or cache.max_files"
    ),
    Refusal.NO_DIRECTORY: "the store's folder cannot be looked at, so nothing is saved",
    Refusal.UNDELETED: "the disk does not let go of old states, so nothing new is saved",
    Refusal.DISK_FULL: "the disk is nearly full, so nothing is saved: make room there",
}


def refused_from(before: float, size: int, why: Refusal | None) -> float:
    """Bytes from which on saves are refused (inf: none is known to be), as a try of ``size`` shows.

    ``before``: as it was known before. ``why`` None: it went through, and so would smaller ones.
    """
    if why is not None:
        return min(before, why.reach(size))
    return math.inf if size >= before else before


def worth_saving(n_tokens: int, n_saved: int, costs: Costs) -> bool:
    """Whether computing the tail no snapshot holds would cost more than saving the whole state.

    ``n_tokens`` are in the slot, the first ``n_saved`` of them in a snapshot too.
    """
    if n_tokens - n_saved < _MIN_TAIL:
        return False
    return costs.prefill(n_saved, n_tokens) > costs.save(costs.size(n_tokens))


def superseded(new: Snapshot, others: Iterable[Snapshot]) -> list[str]:
    """Ids of the snapshots that ``new`` makes needless: its longer prompt holds theirs.

    What was generated after the prompt need not be held then: clients send it back in other
    tokens, or not at all. Another answer to the same prompt is a branch, and branches stay. So
    does what is pinned.
    """
    return [
        old.id
        for old in others
        if old.id != new.id
        and not old.pinned
        and (old.fingerprint, old.seed) == (new.fingerprint, new.seed)
        and common_tokens(new.tokens, old.tokens) >= _needed(old, new)
    ]


def fits(limits: Limits, incoming: int) -> bool:
    """Whether a file of ``incoming`` bytes could be kept if everything else went."""
    return incoming <= limits.max_bytes and limits.max_files > 0


def unroomy(limits: Limits, snapshots: Iterable[Snapshot], incoming: int) -> Refusal | None:
    """Why a file of ``incoming`` bytes could not be kept, whatever is deleted; None: it could."""
    if not fits(limits, incoming):
        return Refusal.TOO_LARGE
    pinned = [snapshot.size for snapshot in snapshots if snapshot.pinned]
    room = sum(pinned) + incoming <= limits.max_bytes and len(pinned) < limits.max_files
    return None if room else Refusal.PINS_FULL


def overflow(
    index: PrefixIndex,
    others: Iterable[Snapshot],
    limits: Limits,
    costs: Costs,
    now: float,
    incoming: int = 0,
    keep: frozenset[str] = frozenset(),
    barred: Collection[str] = (),
) -> list[str]:
    """Ids to delete so that the limits hold for the whole store: ``evict``, and before it others'.

    ``others``: snapshots of other fingerprints, which nobody can restore now. Of them the longest
    unused go first, and all that are too old; what stays (pinned, too) takes room from the index.
    """
    if not fits(limits, incoming):
        incoming = 0
    left = {other.id: other for other in sorted(others, key=lambda s: s.last_used)}
    n_bytes = sum(s.size for s in (*index, *left.values())) + incoming
    n_files = len(index) + len(left) + (incoming > 0)
    gone = []
    for other in [other for other in left.values() if not other.pinned]:
        full = n_bytes > limits.max_bytes or n_files > limits.max_files
        if not full and now - other.last_used <= limits.max_age:
            break
        gone.append(left.pop(other.id).id)
        n_bytes, n_files = n_bytes - other.size, n_files - 1
    room = limits.max_bytes - sum(other.size for other in left.values())
    files = limits.max_files - len(left)
    rest = replace(limits, max_bytes=max(0, room), max_files=max(0, files))
    return [*gone, *evict(index, rest, costs, now, incoming, keep, barred)]


def evict(
    index: PrefixIndex,
    limits: Limits,
    costs: Costs,
    now: float,
    incoming: int = 0,
    keep: frozenset[str] = frozenset(),
    barred: Collection[str] = (),
) -> list[str]:
    """Ids to delete, in order, so that the limits hold once ``incoming`` bytes are written.

    What is too old goes first, then the least valuable. Ids in ``keep`` (being restored), and what
    is pinned, stay even if the limits then do not hold. For a file that can never fit nothing is
    cleared: ask ``fits`` before writing. ``now`` in unix seconds. The index is not changed. What is
    ``barred`` is never restored: it covers nothing of others.
    """
    if not fits(limits, incoming):
        incoming = 0
    plan = _Plan(index, limits, costs, now, barred)
    movable = (s for s in index if s.id not in keep and not s.pinned)
    free = sorted(movable, key=lambda s: (s.last_used, s.id))
    for snapshot in free:
        if now - snapshot.last_used > limits.max_age:
            plan.drop(snapshot)
    room = limits.max_bytes - incoming
    files = limits.max_files - (incoming > 0)
    if plan.n_bytes > room or plan.n_files > files:
        plan.rank(snapshot for snapshot in free if snapshot.id not in plan.gone)
        while plan.ranks and (plan.n_bytes > room or plan.n_files > files):
            plan.drop_least()
    return plan.order


@dataclass(frozen=True, slots=True)
class Worth:
    """Of a snapshot: the ``seconds`` of prefill a restore spares, and its ``value``.

    That is those seconds per byte and per second since its use; by it, least first, the policy
    ``value`` evicts.
    """

    seconds: float
    value: float


def values(
    index: PrefixIndex, costs: Costs, now: float, barred: Collection[str] = ()
) -> dict[str, Worth]:
    """What each snapshot is worth, by id. ``barred``: as in ``evict``."""
    plan = _Plan(index, Limits(0, 0, 0.0), costs, now, barred)
    return {snapshot.id: plan.worth(snapshot) for snapshot in index}


class _Plan:
    """The store as it would be after the evictions chosen so far."""

    def __init__(
        self,
        index: PrefixIndex,
        limits: Limits,
        costs: Costs,
        now: float,
        barred: Collection[str],
    ) -> None:
        self._index = index
        self._by_value = limits.policy == "value"
        self._costs = costs
        self._now = now
        self._covered: dict[str, int] = {}
        self._candidates: dict[str, Snapshot] = {}
        self.ranks: dict[str, tuple[float, float, str]] = {}
        self.order: list[str] = []
        self.gone: set[str] = set()
        self._useless = set(barred)  # and what is gone
        self.n_files = len(index)
        self.n_bytes = sum(snapshot.size for snapshot in index)

    def drop(self, snapshot: Snapshot) -> None:
        self.order.append(snapshot.id)
        self.gone.add(snapshot.id)
        self._useless.add(snapshot.id)
        self.n_files -= 1
        self.n_bytes -= snapshot.size

    def rank(self, snapshots: Iterable[Snapshot]) -> None:
        """Note the value of each: least first, then the longest unused."""
        for snapshot in snapshots:
            value = self.worth(snapshot).value if self._by_value else 0.0
            self._candidates[snapshot.id] = snapshot
            self.ranks[snapshot.id] = (value, snapshot.last_used, snapshot.id)

    def drop_least(self) -> None:
        """Drop the least valuable; what relied on it for part of its tokens gains value."""
        *_, victim_id = min(self.ranks.values())
        del self.ranks[victim_id]
        victim = self._candidates.pop(victim_id)
        self.drop(victim)
        if self._by_value:
            self.rank([s for s in self._candidates.values() if self._relied(s, victim)])

    def worth(self, snapshot: Snapshot) -> Worth:
        known = self._covered.get(snapshot.id)  # the more are gone, the less is covered
        covered = self._index.covered(snapshot, self._useless, known)
        self._covered[snapshot.id] = covered
        saved = self._costs.prefill(covered, snapshot.n_tokens)
        benefit = max(0.0, saved - self._costs.restore(snapshot.size))
        age = max(1.0, self._now - snapshot.last_used)
        return Worth(benefit, benefit / (max(1, snapshot.size) * age))

    def _relied(self, snapshot: Snapshot, victim: Snapshot) -> bool:
        """Whether the victim held as much of ``snapshot`` as anybody did."""
        held = self._covered[snapshot.id]
        return (
            0 < held <= victim.n_tokens
            and (snapshot.fingerprint, snapshot.seed) == (victim.fingerprint, victim.seed)
            and snapshot.tokens[held - 1] == victim.tokens[held - 1]  # cheap, settles most
            and snapshot.tokens[:held] == victim.tokens[:held]
        )


def _needed(old: Snapshot, new: Snapshot) -> int:
    """Leading tokens of ``old`` that a successor must hold: all, if it is only another answer."""
    if new.n_prompt <= old.n_prompt:
        return old.n_tokens
    return min(old.n_prompt, old.n_tokens) or old.n_tokens
