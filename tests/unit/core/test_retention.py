"""What is saved, superseded and evicted."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.costs import Costs
from proxy.core.prefix import PrefixIndex
from proxy.core.records import Snapshot
from proxy.core.retention import (
    Limits,
    Refusal,
    Worth,
    evict,
    fits,
    overflow,
    refused_from,
    superseded,
    unroomy,
    values,
    worth_saving,
)

NOW = 1_000_000.0
WIDE = Limits(max_bytes=10**12, max_files=10**6, max_age=10**9)


def snap(
    name: str,
    tokens: Iterable[int],
    *,
    n_prompt: int | None = None,
    size: int = 1000,
    age: float = 100.0,
    seed: bytes = b"seed",
    fingerprint: str = "fp",
) -> Snapshot:
    """A snapshot last used ``age`` seconds ago."""
    held = array("i", tokens)
    prompt = len(held) if n_prompt is None else n_prompt
    return Snapshot(name, fingerprint, seed, held, prompt, size, "", 0.0, NOW - age, 0.0)


def index_of(*snapshots: Snapshot) -> PrefixIndex:
    """An index of these."""
    index = PrefixIndex()
    for snapshot in snapshots:
        index.add(snapshot)
    return index


def test_worth_saving_weighs_the_tail() -> None:
    """A tail that takes longer to compute than to save is saved; a short or fast one is not."""
    costs = Costs()  # 2 ms a token; a state of n tokens takes 10 ms + 0.2 ms * n to save
    costs.observe_save(10**12, 2000.01)
    assert worth_saving(1000, 0, costs)
    assert not worth_saving(1000, 969, costs)
    assert not worth_saving(1000, 900, costs)
    assert worth_saving(1000, 890, costs)
    assert worth_saving(33, 1, costs)
    assert not worth_saving(31, 0, costs)
    assert not worth_saving(100, 200, costs)


def test_a_first_save_is_tried() -> None:
    """No guess stands in the way of a save that a fast disk makes worth it: it corrects itself."""
    costs = Costs()
    costs.observe_prefill(0, 1000, 0.07)  # a small model: quick to compute, quick to save
    assert worth_saving(1000, 0, costs)
    costs.observe_size(1000, 10**8)
    costs.observe_save(10**8, 0.2)
    assert not worth_saving(1000, 0, costs)


def test_superseded_by_an_extension() -> None:
    """A state whose prompt the new one holds is needless; a branch, a stranger, itself are not."""
    new = snap("new", range(100))
    others = [
        snap("prefix", range(60)),
        snap("equal", range(100)),
        snap("regenerated", [*range(60), 900, 901], n_prompt=60),
        snap("regenerated-part", [*range(58), 900, 901, 902], n_prompt=60),
        snap("longer", range(120)),
        snap("longer-prompt-held", range(120), n_prompt=80),
        snap("odd-count", range(60), n_prompt=90),
        snap("unknown-prompt", [*range(60), 900], n_prompt=0),
        snap("unknown-prompt-held", range(60), n_prompt=0),
        snap("empty", []),
        snap("seed", range(60), seed=b"other"),
        snap("print", range(60), fingerprint="other"),
        replace(new),
    ]
    assert superseded(new, others) == [
        "prefix",
        "equal",
        "regenerated",
        "longer-prompt-held",
        "odd-count",
        "unknown-prompt-held",
        "empty",
    ]


def test_fits() -> None:
    """A file larger than everything allowed, or any file when none is allowed, does not fit."""
    limits = replace(WIDE, max_bytes=100)
    assert fits(limits, 100)
    assert not fits(limits, 101)
    assert not fits(replace(limits, max_files=0), 1)


def test_within_limits_nothing_goes() -> None:
    """Limits met exactly are met."""
    index = index_of(snap("a", range(100)), snap("b", range(200, 300)))
    exact = Limits(max_bytes=2000, max_files=2, max_age=100.0)
    assert evict(index, exact, Costs(), NOW) == []
    assert evict(PrefixIndex(), exact, Costs(), NOW, incoming=10) == []


def test_too_old_goes_first_and_whatever_the_room() -> None:
    """Age alone is reason enough, oldest first; what is kept stays."""
    index = index_of(
        snap("old", range(100), age=300),
        snap("older", range(200, 300), age=400),
        snap("pinned", range(400, 500), age=500),
        snap("new", range(600, 700), age=200),
    )
    limits = replace(WIDE, max_age=200.0)
    assert evict(index, limits, Costs(), NOW, keep=frozenset({"pinned"})) == ["older", "old"]
    assert len(index) == 4


def test_least_value_goes_first() -> None:
    """Value is time saved per byte, fading with age; the index stays as it is."""
    index = index_of(
        snap("long", range(10_000), size=10_000),
        snap("short", range(20_000, 20_100), size=10_000),
        snap("fat", range(30_000, 40_000), size=90_000),
        snap("stale", range(50_000, 60_000), size=10_000, age=90_000),
    )
    order = ["stale", "short", "fat", "long"]  # 0.02, 0.19, 2.2, 20 milliseconds per kB and 100 s
    for n in range(4):
        limits = replace(WIDE, max_files=n)
        assert evict(index, limits, Costs(), NOW)[:4] == order[: 4 - n]
    assert len(index) == 4


def test_bytes_are_freed_for_what_comes() -> None:
    """Only as much goes as the incoming file needs; it counts as a file too."""
    index = index_of(*(snap(str(i), range(i * 1000, i * 1000 + 500), age=10 - i) for i in range(5)))
    limits = replace(WIDE, max_bytes=6000)
    assert evict(index, limits, Costs(), NOW, incoming=1000) == []
    assert evict(index, limits, Costs(), NOW, incoming=1001) == ["0"]
    assert evict(index, limits, Costs(), NOW, incoming=3000) == ["0", "1"]
    limits = replace(WIDE, max_files=5)
    assert evict(index, limits, Costs(), NOW) == []
    assert evict(index, limits, Costs(), NOW, incoming=1) == ["0"]


def test_what_never_fits_clears_nothing() -> None:
    """A file larger than the store does not empty it; existing excess is still removed."""
    index = index_of(snap("a", range(100), age=5), snap("b", range(200, 300), age=1))
    limits = replace(WIDE, max_bytes=2000)
    assert evict(index, limits, Costs(), NOW, incoming=2001) == []
    assert evict(index, replace(limits, max_bytes=1500), Costs(), NOW, incoming=2001) == ["a"]


def test_kept_ids_stay_even_over_the_limit() -> None:
    """Nothing left to evict ends the search."""
    index = index_of(snap("a", range(100)), snap("b", range(200, 300)))
    limits = replace(WIDE, max_bytes=10)
    assert evict(index, limits, Costs(), NOW, keep=frozenset({"a"})) == ["b"]
    assert evict(index, limits, Costs(), NOW, keep=frozenset({"a", "b"})) == []


def test_a_shared_prefix_counts_once() -> None:
    """Of two states that hold nearly the same, the first to go makes the other precious."""
    index = index_of(
        snap("twin-1", range(3000), age=101),
        snap("twin-2", range(3001), age=100),
        snap("own", range(5000, 5500), age=100),
    )
    assert evict(index, replace(WIDE, max_files=2), Costs(), NOW) == ["twin-1"]
    # Had twin-2's value not been renewed it would go next: it adds one token to twin-1.
    assert evict(index, replace(WIDE, max_files=1), Costs(), NOW) == ["twin-1", "own"]


def test_value_is_renewed_only_for_those_who_relied_on_it() -> None:
    """A branch off the same trunk, or another seed or fingerprint, keeps its own reckoning."""
    trunk = list(range(2000))
    index = index_of(
        snap("dead", trunk, age=5000),
        snap("branch", [*trunk[:500], *range(9000, 9500)]),
        snap("leaf", [*trunk, *range(8000, 8600)]),
        snap("seed", trunk, seed=b"other"),
        snap("print", [*trunk[:1999], 7], fingerprint="other"),
    )
    first, *rest = evict(index, replace(WIDE, max_files=0), Costs(), NOW)
    assert first == "dead"
    # Then: branch adds 500 to leaf's trunk; leaf alone holds 2100 more; the others 2000, 1999.
    assert rest == ["branch", "print", "seed", "leaf"]


def test_what_is_barred_covers_nothing() -> None:
    """A state that is never restored makes no other needless, however much it holds of it."""
    index = index_of(
        snap("barred", range(3000), age=1),
        snap("good", range(2900), age=2),
        snap("own", range(5000, 5500), age=1),
    )
    two = replace(WIDE, max_files=2)
    assert evict(index, two, Costs(), NOW) == ["good"]
    assert evict(index, two, Costs(), NOW, barred=["barred"]) == ["barred"]
    assert overflow(index, [], two, Costs(), NOW, barred={"barred"}) == ["barred"]
    worth = [values(index, Costs(), NOW, barred)["good"].seconds for barred in ((), ("barred",))]
    assert worth[0] == 0.0 < worth[1]


def test_damaged_sizes_and_clocks_do_not_stop_it() -> None:
    """A size of nothing and a last use in the future are survived."""
    index = index_of(snap("zero", range(100), size=0), snap("future", range(200, 300), age=-500))
    assert set(evict(index, replace(WIDE, max_files=0), Costs(), NOW)) == {"zero", "future"}


def test_lru_goes_by_last_use_alone() -> None:
    """The longest unused goes first whatever it is worth."""
    index = index_of(
        snap("precious", range(9000), size=1, age=900),
        snap("worthless", range(9000, 9001), size=10**6, age=10),
        snap("middle", range(100, 9000), age=500),
    )
    limits = replace(WIDE, max_files=0, policy="lru")
    assert evict(index, limits, Costs(), NOW) == ["precious", "middle", "worthless"]


shapes = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90)), max_size=4),
        st.integers(0, 1000),
        st.integers(-10, 1000),
    ),
    max_size=8,
)


@given(
    shapes, st.integers(0, 4000), st.integers(0, 8), st.integers(0, 500), st.sets(st.integers(0, 7))
)
def test_limits_hold_afterwards(
    rows: list[tuple[list[tuple[int, int]], int, int]],
    max_bytes: int,
    max_files: int,
    incoming: int,
    pinned: set[int],
) -> None:
    """Each eviction is the least valuable at its moment, and none is needless."""
    snapshots = [
        snap(str(i), (value for value, n in shape for _ in range(n)), size=size, age=age)
        for i, (shape, size, age) in enumerate(rows)
    ]
    keep = frozenset(str(i) for i in pinned)
    limits = Limits(max_bytes, max_files, max_age=10**6)
    costs = Costs()
    index = index_of(*snapshots)
    gone = evict(index, limits, costs, NOW, incoming, keep)
    if not fits(limits, incoming):
        incoming = 0

    def over() -> bool:
        held = sum(snapshot.size for snapshot in index)
        return held + incoming > max_bytes or len(index) + (incoming > 0) > max_files

    def score(snapshot: Snapshot) -> float:
        benefit = costs.prefill(index.covered(snapshot), snapshot.n_tokens)
        benefit -= costs.restore(snapshot.size)
        age = max(1.0, NOW - snapshot.last_used)
        return max(0.0, benefit) / (max(1, snapshot.size) * age)

    assert len(set(gone)) == len(gone)
    for name in gone:
        assert over()
        assert name not in keep
        scores = {s.id: score(s) for s in index if s.id not in keep}
        assert scores[name] == pytest.approx(min(scores.values()))
        index.remove(name)
    assert not over() or all(snapshot.id in keep for snapshot in index)


def test_another_answer_to_the_same_prompt_is_a_branch_and_stays() -> None:
    """A regenerated answer does not delete the long one before it."""
    long = Snapshot("old", "f", b"s", array("i", range(5000)), 100, 1, "0", 0.0, 0.0, 0.0)
    short = array("i", [*range(100), 7, 7, 7])
    again = Snapshot("new", "f", b"s", short, 100, 1, "0", 0.0, 0.0, 0.0)
    longer = Snapshot(
        "next", "f", b"s", array("i", [*short, *range(50)]), 150, 1, "0", 0.0, 0.0, 0.0
    )
    assert superseded(again, [long]) == []
    assert superseded(longer, [long, again]) == ["old", "new"]


def test_what_is_pinned_stays() -> None:
    """Neither age, nor room, nor a longer snapshot removes it; beside it, the others go."""
    kept = replace(snap("kept", range(100), size=500, age=1000), pinned=True)
    other = snap("other", range(500, 600), size=500, age=1)
    index = index_of(kept, other)
    limits = Limits(max_bytes=100, max_files=1, max_age=10)
    assert evict(index, limits, Costs(), NOW) == ["other"]
    longer = snap("longer", range(200))
    assert superseded(longer, [kept]) == []
    assert superseded(longer, [replace(kept, pinned=False)]) == ["kept"]


def test_values_are_what_eviction_goes_by() -> None:
    """The least valuable goes first; a snapshot another one covers is worth nothing."""
    costs = Costs()
    snapshots = [snap("a", range(50), age=10), snap("b", range(900)), snap("c", range(5000, 9000))]
    index = index_of(*snapshots)
    worth = values(index, costs, NOW)
    assert worth.keys() == {"a", "b", "c"}
    assert worth["a"] == Worth(0.0, 0.0)
    assert worth["c"].seconds == costs.prefill(0, 4000) - costs.restore(snapshots[2].size)
    order = evict(index, Limits(10**9, 1, 10**9), costs, NOW)
    assert order == sorted(order, key=lambda name: worth[name].value)
    assert values(index_of(), costs, NOW) == {}


def test_why_there_is_no_room() -> None:
    """Pins that fill the store are told from a file that is too large for it."""
    pinned = replace(snap("a", range(9), size=60), pinned=True)
    limits = replace(WIDE, max_bytes=100, max_files=2)
    assert unroomy(limits, [pinned, snap("b", range(9), size=40)], 40) is None
    assert unroomy(limits, [pinned], 41) is Refusal.PINS_FULL
    assert unroomy(replace(limits, max_files=1), [pinned], 1) is Refusal.PINS_FULL
    assert unroomy(limits, [pinned], 101) is Refusal.TOO_LARGE
    assert "cache.max_bytes" in Refusal.TOO_LARGE.advice
    assert Refusal.FORGOTTEN.advice == "", "its owner wanted that"


@pytest.mark.parametrize(
    ("why", "least"),
    [
        (Refusal.FORGOTTEN, math.inf),
        (Refusal.WRITE_BUDGET, 500),
        (Refusal.TOO_LARGE, 500),
        (Refusal.PINS_FULL, 0),
        (Refusal.DISK_FULL, 500),
        (Refusal.NO_DIRECTORY, 0),
        (Refusal.UNDELETED, 0),
    ],
)
def test_which_others_a_refusal_is_about(why: Refusal, least: float) -> None:
    """Where room is what lacks smaller states may have it; a broken folder takes none."""
    assert refused_from(math.inf, 500, why) == least
    assert refused_from(200, 500, why) == min(200, least), "what is known of smaller ones stays"
    assert refused_from(least, 500, None) == math.inf, "it goes through again"


def test_a_small_state_that_is_saved_says_nothing_of_large_ones() -> None:
    """One as large as the smallest that was refused says: it is over."""
    assert refused_from(500, 499, None) == 500
    assert refused_from(500, 500, None) == math.inf


@given(
    shapes, shapes, st.integers(0, 4000), st.integers(0, 8), st.integers(0, 500),
    st.sets(st.integers(0, 15)),
)  # fmt: skip
def test_limits_hold_for_the_whole_store(
    ours: list[tuple[object, int, int]],
    theirs: list[tuple[object, int, int]],
    max_bytes: int,
    max_files: int,
    incoming: int,
    pinned: set[int],
) -> None:
    """Others' go first, none needlessly; what is pinned stays; ours go when no other is left."""
    rows = [
        replace(snap(str(i), range(i), size=size, age=age), pinned=i in pinned)
        for i, (_, size, age) in enumerate([*ours, *theirs])
    ]
    mine = {row.id: row for row in rows[: len(ours)]}
    others = {row.id: row for row in rows[len(ours) :]}
    limits = Limits(max_bytes, max_files, max_age=900.0)
    index = index_of(*mine.values())
    gone = overflow(index, others.values(), limits, Costs(), NOW, incoming)
    incoming = incoming if fits(limits, incoming) else 0
    assert len(set(gone)) == len(gone)
    left = {**mine, **others}

    def over() -> bool:
        held = sum(row.size for row in left.values()) + incoming
        return held > max_bytes or len(left) + (incoming > 0) > max_files

    for name in gone:
        old = NOW - left[name].last_used > limits.max_age
        assert not left[name].pinned
        assert old or over() or unroomy(limits, left.values(), incoming) is not None
        if name in mine and not old:
            assert all(row.pinned for row in left.values() if row.id in others)
        del left[name]
    free = [row for row in left.values() if not row.pinned]
    assert all(NOW - row.last_used <= limits.max_age for row in free)
    if unroomy(limits, left.values(), incoming) is None:
        assert not over()
