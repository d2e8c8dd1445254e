"""Placement: the least costly option wins, in seconds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import placement
from proxy.core.placement import Option, displaced, hit, hot, length, options, remaining, reuse
from proxy.core.records import Reason, Reuse
from proxy.core.slots import Slot, SlotState
from tests.unit.factories import chat, content, costs, need, snapshot

COSTS = costs()
NOW = 1000.0


def best(request: placement.Need, *slots: Slot) -> Option:
    """The cheapest option."""
    return options(request, slots, COSTS, NOW, 5.0)[0]


def test_a_conversation_goes_on_in_its_slot() -> None:
    """The slot that holds the conversation's earlier turn is taken."""
    turn1 = chat("sys", "hello")
    slots = [Slot(0, content=content(chat("other"), 900)), Slot(1, content=content(turn1, 1500))]
    found = best(need(chat("sys", "hello", "answer", "more")), *slots)
    assert (found.slot, found.reason, found.hit) == (1, Reason.SLOT_HIT, 1500)


def test_a_new_conversation_takes_an_empty_slot() -> None:
    """Nothing worth keeping is overwritten while there is room."""
    slots = [Slot(0, content=content(chat("other"), 900, used=NOW)), Slot(1)]
    found = best(need(chat("mine", tokens=range(500))), *slots)
    assert (found.slot, found.reason) == (1, Reason.COLD)


def test_a_snapshot_is_restored_into_the_slot_that_loses_least() -> None:
    """A known prefix comes from disk, not over the hot slot."""
    state = snapshot(range(2000))
    slots = [Slot(0, content=content(chat("hot"), 3000, used=NOW)), Slot(1)]
    request = need(chat("new", tokens=range(2100)), matches=((state, 2000),))
    found = best(request, *slots)
    assert (found.slot, found.reason, found.snapshot) == (1, Reason.RESTORED, state)


def test_a_resident_prefix_is_not_overwritten_by_restoring_the_same() -> None:
    """The slot already holds what the snapshot has."""
    state = snapshot(range(2000))
    held = content(chat("x", tokens=range(2000)), 2000, tokens=state.tokens, n_saved=2000)
    request = need(chat("y", tokens=range(2050)), matches=((state, 2000),))
    found = best(request, Slot(0, content=held), Slot(1))
    assert (found.slot, found.snapshot, found.hit) == (0, None, 2000)


def test_waiting_for_a_warm_slot_beats_a_long_cold_prefill() -> None:
    """A busy slot that will be free soon and spares 30 seconds is waited for."""
    turn1 = chat("sys", "hello")
    busy = Slot(0, SlotState.LEASED, content(turn1, 3000), since=NOW - 1)
    found = best(need(chat("sys", "hello", "more")), busy, Slot(1))
    assert (found.slot, found.ready) == (0, False)


def test_a_cheap_prefill_does_not_wait() -> None:
    """Computing 100 tokens elsewhere is quicker than waiting for the slot that holds them."""
    turn1 = chat("sys")
    busy = Slot(0, SlotState.LEASED, content(turn1, 100), since=NOW)
    found = best(need(chat("sys", "more", tokens=range(120))), busy, Slot(1))
    assert (found.slot, found.ready) == (1, True)


def test_unsaved_work_is_saved_before_it_is_displaced() -> None:
    """A slot worth a save is not simply overwritten."""
    slots = [Slot(0, content=content(chat("old"), 3000, used=NOW - 9000))]
    found = best(need(chat("new", tokens=range(500))), *slots)
    assert found.save_first
    assert found.transfer > 0


def test_saved_work_costs_no_more_than_its_restore() -> None:
    """What is on disk is lost only for the time it takes to come back."""
    held = content(chat("old"), 3000, used=NOW, n_saved=3000)
    save_first, seconds, loss = displaced(held, 0, COSTS, NOW)
    assert not save_first
    assert seconds == 0.0
    assert loss < reuse(0.0) * COSTS.prefill(0, 3000) / 10


def test_work_that_may_not_be_stored_is_a_full_loss() -> None:
    """Without a copy the whole prefill would have to be done again."""
    held = content(chat("old"), 3000, used=NOW, storable=False)
    assert displaced(held, 0, COSTS, NOW) == (
        False,
        0.0,
        pytest.approx(reuse(0.0) * COSTS.prefill(0, 3000)),
    )


@pytest.mark.parametrize(
    ("known", "refused_from", "want"),
    [
        ({}, 3_000_001, (True, COSTS.save(3_000_000), COSTS.restore(3_000_000))),
        ({}, 3_000_000, (True, 0.0, COSTS.prefill(0, 3000))),
        ({}, 0, (True, 0.0, COSTS.prefill(0, 3000))),
        (
            {"n_saved": 1000},
            0,
            (True, 0.0, COSTS.restore(3_000_000) + COSTS.prefill(1000, 3000)),
        ),
        ({"n_saved": 3000}, 0, (False, 0.0, COSTS.restore(3_000_000))),
        ({"storable": False}, 0, (False, 0.0, COSTS.prefill(0, 3000))),
    ],
)
def test_a_save_that_would_be_refused_is_not_counted_on(
    known: dict[str, Any], refused_from: float, want: tuple[bool, float, float]
) -> None:
    """It is tried, in no time; what no snapshot holds is lost for as long as computing takes."""
    held = content(chat("old"), 3000, used=NOW, **known)
    save_first, seconds, lost = want
    found = displaced(held, 0, COSTS, NOW, refused_from)
    assert found == (save_first, seconds, pytest.approx(reuse(0.0) * lost))


@pytest.mark.parametrize(("refused_from", "slot"), [(math.inf, 0), (990_001, 0), (0, 1)])
def test_while_saves_are_refused_what_is_useful_stays(refused_from: float, slot: int) -> None:
    """A hundred tokens less to compute are no reason any more to displace a conversation."""
    useful = content(chat("s" * 40, "u" * 360), 990, used=NOW)
    slots = [Slot(0, content=useful), Slot(1, content=content(chat("given up"), 334, used=NOW))]
    request = need(chat("s" * 40, "n" * 200, tokens=range(600)))
    found = options(request, slots, COSTS, NOW, 5.0, refused_from)
    assert found[0].slot == slot


@pytest.mark.parametrize(("refused_from", "slot"), [(math.inf, 0), (2_000_000, 0), (0, 1)])
def test_while_saves_are_refused_a_restore_displaces_what_is_old(
    refused_from: float, slot: int
) -> None:
    """It took the slot whose state is the quickest to save; now it takes what is wanted least."""
    old = content(chat("given up"), 2000, used=NOW - 1e6)
    slots = [Slot(0, content=content(chat("useful"), 990, used=NOW)), Slot(1, content=old)]
    state = snapshot(range(500))
    request = need(chat("new", tokens=range(600)), matches=((state, 500),))
    found = options(request, slots, COSTS, NOW, 5.0, refused_from)
    assert (found[0].slot, found[0].snapshot) == (slot, state)


@pytest.mark.parametrize("kept", [3000, 4000])
def test_what_is_extended_is_not_lost(kept: int) -> None:
    """A conversation that goes on displaces nothing."""
    assert displaced(content(chat("x"), 3000), kept, COSTS, NOW) == (False, 0.0, 0.0)


def test_nothing_is_displaced_in_an_unknown_slot() -> None:
    """Unknown content is worth nothing."""
    assert displaced(None, 0, COSTS, NOW) == (False, 0.0, 0.0)


def test_the_client_may_name_the_slot() -> None:
    """``id_slot`` limits the options to that slot, a restore into it included."""
    state = snapshot(range(2000))
    request = need(chat("q", tokens=range(2100)), wanted=1, matches=((state, 2000),))
    found = options(request, [Slot(0), Slot(1)], COSTS, NOW, 5.0)
    assert {option.slot for option in found} == {1}
    assert found[0].snapshot is state


def test_cache_prompt_false_reuses_nothing() -> None:
    """The client asked for a computation from scratch."""
    held = content(chat("sys"), 1500)
    request = need(chat("sys", "more"), cache=False, matches=((snapshot(range(9)), 9),))
    found = options(request, [Slot(0, content=held)], COSTS, NOW, 5.0)
    assert [(option.hit, option.snapshot) for option in found] == [(0, None)]


def test_prompts_of_different_seeds_share_nothing() -> None:
    """Another API key's content is no hit."""
    mine = chat("sys", seed=b"m" * 16)
    assert hit(content(chat("sys"), 100), mine) == 0


def test_a_partial_match_is_estimated_by_its_share_of_the_bytes() -> None:
    """Two of three equal segments of equal size: two thirds of the prompt's tokens."""
    held = content(chat("aaaa", "bbbb", "cccc"), 900)
    assert hit(held, chat("aaaa", "bbbb", "dddd")) == 600


def test_a_tokenised_match_is_exact() -> None:
    """Where both are tokenised the common prefix is counted, not estimated."""
    held = content(chat("x", tokens=range(500)), 500, tokens=chat("x", tokens=range(500)).tokens)
    assert hit(held, chat("y", tokens=[*range(321), 7, 7, 7])) == 321


def test_length_is_counted_or_extrapolated_or_guessed() -> None:
    """Tokens if known; a slot's count plus what is new; else four bytes a token."""
    held = content(chat("a" * 400), 90)
    assert length(chat("z", tokens=range(7)), [held], 4.0) == 7
    assert length(chat("a" * 400, "b" * 40), [None, held], 4.0) == 100
    assert length(chat("c" * 400), [held], 4.0) == 100


def test_a_busy_slot_is_expected_to_take_what_is_typical_then_longer() -> None:
    """What already took long takes half as long again."""
    young = Slot(0, SlotState.LEASED, since=NOW)
    old = Slot(0, SlotState.LEASED, since=NOW - 100)
    saving = Slot(0, SlotState.SAVING, content(chat("x"), 1000), since=NOW)
    blank = Slot(0, SlotState.RESTORING, since=NOW)
    assert remaining(young, COSTS, 5.0, NOW) == 5.0
    assert remaining(old, COSTS, 5.0, NOW) == 50.0
    assert remaining(saving, COSTS, 5.0, NOW) < 1.0
    assert 0 < remaining(blank, COSTS, 5.0, NOW) < 1.0


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        (Slot(0, content=content(chat("sys", "q"), 800)), True),
        (Slot(0, SlotState.LEASED, content(chat("sys", "q"), 800)), False),
        (Slot(0), False),
        (Slot(0, content=content(chat("sys", "other"), 800)), False),
        (Slot(1, content=content(chat("sys", "q"), 800)), False),
    ],
)
def test_a_hot_slot_needs_no_further_look(slot: Slot, *, expected: bool) -> None:
    """Only a free slot the client allows, whose content is extended."""
    request = replace(need(chat("sys", "q", "a", "next")), wanted=0)
    assert hot(request, [slot], COSTS) is expected


def test_a_slot_is_not_hot_when_much_is_left_to_compute() -> None:
    """A snapshot might hold the rest: looking costs milliseconds, computing seconds."""
    held = Slot(0, content=content(chat("sys"), 800))
    assert not hot(need(chat("sys", "x" * 100_000)), [held], COSTS)


def test_the_cost_is_explained_in_its_parts() -> None:
    """The decision log shows what was weighed."""
    row = Option(1, Reason.COLD, 0, 10, wait=1.0, prefill=2.0, transfer=3.0, loss=4.0).explain()
    assert row["cost"] == 10.0
    assert (row["wait"], row["prefill"], row["transfer"], row["loss"]) == (1.0, 2.0, 3.0, 4.0)
    state = snapshot(range(3), "it")
    assert Option(1, Reason.RESTORED, 0, 10, state).explain()["snapshot"] == "it"


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    st.integers(1, 4000),
    st.floats(0, 1e5),
)
def test_costs_are_finite_and_sorted(held: list[int], n_tokens: int, age: float) -> None:
    """Whatever slots hold, every option has a finite cost of at least 0 and the least is first."""
    slots = [
        Slot(i, content=content(chat(f"c{i}"), n, used=NOW - age) if n else None)
        for i, n in enumerate(held)
    ]
    found = options(need(chat("p", tokens=range(n_tokens))), slots, COSTS, NOW, 5.0)
    sums = [option.cost for option in found]
    assert sums == sorted(sums)
    assert all(0 <= cost < 1e9 for cost in sums)


EXTENSION: dict[str, Any] = {"reuse": Reuse.EXTENSION, "storable": False}


@pytest.mark.parametrize(
    ("segments", "want"),
    [
        (("s", "q", "a", "r"), 900),
        (("s", "q", "a", "t1", "t2"), 900),
        (("s", "q"), 0),  # the same again, another answer
        (("s", "q", "a"), 0),  # the answer to be continued
        (("s", "x", "a", "r"), 0),
        (("s", "q2"), 0),
        (("s",), 0),
    ],
)
def test_all_or_nothing(segments: tuple[str, ...], want: int) -> None:
    """Where only an extension helps: the whole last prompt, followed by its answer and more."""
    held = content(chat("s", "q"), 950, n_prompt=900, **EXTENSION)
    assert hit(held, chat(*segments)) == want
    assert hit(held, chat(*segments, seed=b"another key")) == 0


def test_what_cannot_be_extended_is_lost() -> None:
    """A regenerated answer costs all of the slot, the next turn nothing of it."""
    slot = Slot(0, content=content(chat("s", "q"), 900, used=NOW, **EXTENSION))
    again, on = best(need(chat("s", "q")), slot), best(need(chat("s", "q", "a", "r")), slot)
    assert (again.hit, on.hit) == (0, 900)
    assert again.loss > 0
    assert (on.loss, on.save_first) == (0.0, False)


def test_a_side_request_that_goes_on_from_a_conversation_ends_it() -> None:
    """It finds its prefix, and what it leaves is no prefix of the next turn."""
    slot = Slot(0, content=content(chat("s", "q"), 900, used=NOW, **EXTENSION))
    side = replace(chat("s", "q", "a", "suggest"), side=True)
    found = best(need(side), slot)
    assert found.hit == 900
    assert found.loss == displaced(slot.content, 0, COSTS, NOW)[2]


def test_a_kept_slot_is_waited_for() -> None:
    """By others, until they have waited long enough; by its own conversation never."""
    held = content(chat("s", "q"), 900, used=NOW, held=NOW + 2, **EXTENSION)
    slot = Slot(0, content=held)
    other = need(chat("x"))
    assert best(other, slot).wait == 2.0
    assert best(replace(other, waited=1000.0), slot).ready
    assert best(need(chat("s", "q", "a", "r")), slot).ready
    empty = Slot(1)
    assert best(other, slot, empty).slot == 1


def test_what_runs_beside_costs_nothing() -> None:
    """Embeddings leave the conversation alone, kept or not."""
    held = content(chat("s", "q"), 900, used=NOW, held=NOW + 2, **EXTENSION)
    found = best(need(chat(), beside=True), Slot(0, content=held))
    assert (found.cost, found.hit) == (0.0, 0)
