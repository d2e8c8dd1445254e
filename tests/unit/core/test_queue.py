"""The queue: who starts now, who waits, and what a lease learns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from proxy.core.hold import SIDE_PATIENCE
from proxy.core.placement import LARGE_SECONDS, Need, Option
from proxy.core.queue import Engine, Grant, Kind, Lease, Waiting, any_start, next_up, weigh
from proxy.core.records import Prompt, Reason, Reuse, Snapshot
from proxy.core.slots import Content, Slot, SlotState
from tests.unit.factories import chat, content, costs, need, snapshot

COSTS = costs()
NOW = 1000.0
FREE = Slot(0)
BUSY = Slot(1, SlotState.LEASED, since=NOW)


def no_matches(_prompt: Prompt) -> tuple[tuple[Snapshot, int], ...]:
    """Nothing on disk."""
    return ()


def engine(*slots: Slot, **other: object) -> Engine:
    """A backend with these slots and nothing else going on."""
    made = Engine(slots, len(slots), permits=0, wide=False, large=False, typical=5.0)
    return replace(made, **other)  # type: ignore[arg-type]


def waiting(prompt: Need, kind: Kind = Kind.NARROW, queued: float = NOW) -> Waiting:
    """A request in the queue."""
    return Waiting(prompt, kind, queued)


SMALL = need(chat("q", tokens=range(50)))


def test_an_empty_queue_starts_nothing() -> None:
    """No request, no grant."""
    assert next_up([], engine(FREE), COSTS, NOW, no_matches) is None


def test_a_request_starts_in_the_free_slot() -> None:
    """The busy one is left alone."""
    request = waiting(SMALL)
    found = next_up([request], engine(FREE, BUSY), COSTS, NOW, no_matches)
    assert found is not None
    assert found[0] is request
    assert found[1].option.slot == 0
    assert len(found[1].weighed) == 2


@pytest.mark.parametrize(("refused_from", "slot"), [(math.inf, 0), (0, 1)])
def test_what_cannot_be_saved_is_spared(refused_from: float, slot: int) -> None:
    """The decision goes by which saves are refused at the moment."""
    useful = content(chat("s" * 40, "u" * 360), 990, used=NOW)
    slots = [Slot(0, content=useful), Slot(1, content=content(chat("given up"), 334, used=NOW))]
    request = waiting(need(chat("s" * 40, "n" * 200, tokens=range(600))))
    busy = engine(*slots, refused_from=refused_from)
    found = next_up([request], busy, COSTS, NOW, no_matches)
    assert found is not None
    assert found[1].option.slot == slot
    assert list(found[1].weighed) == weigh(request.need, busy, COSTS, NOW)


def test_a_request_waits_when_every_slot_is_busy() -> None:
    """There is nothing to bind it to."""
    assert next_up([waiting(SMALL)], engine(BUSY), COSTS, NOW, no_matches) is None


def test_a_request_whose_prompt_is_being_looked_at_is_not_bound_cold() -> None:
    """Milliseconds later a snapshot may be found."""
    request = waiting(replace(SMALL, exact=False))
    assert next_up([request], engine(FREE), COSTS, NOW, no_matches) is None


def test_a_hot_request_starts_without_a_further_look() -> None:
    """Its slot is free and holds nearly all of it."""
    slot = Slot(0, content=content(chat("sys", "q"), 900))
    request = waiting(Need(chat("sys", "q", "a", "next")))
    found = next_up([request], engine(slot), COSTS, NOW, no_matches)
    assert found is not None
    assert found[1].option.reason is Reason.SLOT_HIT


def test_snapshots_are_looked_up_for_tokenised_prompts() -> None:
    """What is on disk is part of every decision."""
    state = snapshot(range(1000))
    request = waiting(need(chat("q", tokens=range(1010))))
    found = next_up([request], engine(FREE), COSTS, NOW, lambda _: ((state, 1000),))
    assert found is not None
    assert found[1].option.snapshot is state


def test_the_slot_a_client_named_is_called_pinned() -> None:
    """Unless a snapshot goes into it."""
    request = waiting(replace(SMALL, wanted=0))
    found = next_up([request], engine(FREE), COSTS, NOW, no_matches)
    assert found is not None
    assert found[1].option.reason is Reason.PINNED


def test_only_one_large_prefill_at_a_time() -> None:
    """A second one would slow every other slot; a small one may start."""
    large = waiting(need(chat("big", tokens=range(int(LARGE_SECONDS / 0.01) + 500))), queued=0.0)
    small = waiting(SMALL)
    busy = engine(FREE, large=True)
    assert next_up([large], busy, COSTS, NOW, no_matches) is None
    found = next_up([large, small], busy, COSTS, NOW, no_matches)
    assert found is not None
    assert found[0] is small
    assert next_up([large], engine(FREE), COSTS, NOW, no_matches) is not None


def test_the_hot_request_goes_first_and_age_makes_up_for_cost() -> None:
    """Least cost first, but nobody starves."""
    dear = waiting(need(chat("dear", tokens=range(150))))
    cheap = waiting(SMALL)
    found = next_up([dear, cheap], engine(FREE), COSTS, NOW, no_matches)
    assert found is not None
    assert found[0] is cheap
    aged = replace_queued(dear, NOW - 60)
    found = next_up([cheap, aged], engine(FREE), COSTS, NOW, no_matches)
    assert found is not None
    assert found[0] is aged


def replace_queued(request: Waiting, queued: float) -> Waiting:
    """The same request, come earlier."""
    return Waiting(request.need, request.kind, queued)


def test_a_wide_request_waits_for_every_slot_and_holds_back_those_behind_it() -> None:
    """Or it would never have them all."""
    wide, behind = waiting(SMALL, Kind.WIDE), waiting(SMALL)
    assert next_up([wide, behind], engine(FREE, BUSY), COSTS, NOW, no_matches) is None
    before = next_up([behind, wide], engine(FREE, BUSY), COSTS, NOW, no_matches)
    assert before is not None
    assert before[0] is behind
    found = next_up([wide, behind], engine(FREE), COSTS, NOW, no_matches)
    assert found is not None
    assert found[0] is wide
    assert found[1].option.reason is Reason.WIDE


@pytest.mark.parametrize("other", [{"wide": True}, {"permits": 1}])
def test_nothing_is_pinned_while_an_unpinned_request_runs(other: dict[str, object]) -> None:
    """DESIGN.md rule 2."""
    for kind in (Kind.NARROW, Kind.WIDE):
        assert (
            next_up([waiting(SMALL, kind)], engine(FREE, **other), COSTS, NOW, no_matches) is None
        )


@pytest.mark.parametrize(("total", "used", "starts"), [(4, 3, True), (4, 4, False), (0, 99, True)])
def test_permits_are_as_many_as_slots(total: int, used: int, *, starts: bool) -> None:
    """Where nothing is pinned a lease only counts; unknown totals do not limit."""
    state = engine(total_slots=total, permits=used)
    found = next_up([waiting(SMALL, Kind.PERMIT)], state, COSTS, NOW, no_matches)
    assert (found is not None) is starts
    if found:
        assert found[1].option.reason is Reason.FORWARD


def test_when_weighing_fails_any_free_slot_will_do() -> None:
    """A fault costs time, not the answer: first come, first served, ids and widths respected."""
    named, plain = waiting(replace(SMALL, wanted=1)), waiting(SMALL)
    wide, permit = waiting(SMALL, Kind.WIDE), waiting(SMALL, Kind.PERMIT)
    found = any_start([named, plain], engine(FREE, BUSY), NOW)
    assert found is not None
    assert found[0] is plain
    assert (found[1].option.slot, found[1].option.reason) == (0, Reason.BYPASS)
    assert any_start([wide, plain], engine(FREE, BUSY), NOW) is None
    found = any_start([wide], engine(FREE), NOW)
    assert found is not None
    assert found[1].option.reason is Reason.WIDE
    assert any_start([permit], engine(FREE), NOW) is None
    assert any_start([plain], engine(BUSY), NOW) is None
    assert any_start([plain], engine(FREE, permits=1), NOW) is None


def lease(
    reason: Reason = Reason.COLD, kind: Kind = Kind.NARROW, prompt: Prompt | None = None
) -> Lease:
    """A lease on slot 3."""
    option = Grant(Option(3, reason, 0, 100)).option
    return Lease(option, kind, prompt or chat("q"), reason, queued=0.0, started=NOW)


def test_only_a_narrow_lease_names_a_slot() -> None:
    """Elsewhere the backend chooses."""
    assert lease().slot == 3
    assert lease(kind=Kind.PERMIT).slot is None
    assert lease(kind=Kind.WIDE).slot is None


@pytest.mark.parametrize(
    ("planned", "cache_n", "shown"),
    [
        (Reason.COLD, 0, Reason.COLD),
        (Reason.COLD, 40, Reason.SLOT_HIT),
        (Reason.SLOT_HIT, 40, Reason.SLOT_HIT),
        (Reason.SLOT_HIT, 0, Reason.COLD),
        (Reason.RESTORED, 40, Reason.RESTORED),
        (Reason.RESTORED, 0, Reason.COLD),
        (Reason.FORWARD, 40, Reason.FORWARD),
        (Reason.PINNED, 0, Reason.PINNED),
    ],
)
def test_the_reason_follows_what_the_engine_says(
    planned: Reason, cache_n: int, shown: Reason
) -> None:
    """The plan is a guess, the engine's count is the truth; it is taken once."""
    held = lease(planned)
    assert held.observed(cache_n, 100)
    assert not held.observed(99, 99)
    assert (held.reason, held.cache_n, held.prompt_n) == (shown, cache_n, 100)


def test_a_finished_lease_leaves_prompt_and_generated_tokens() -> None:
    """The slot holds both; what was saved of it counts as far as it was reused."""
    before = content(chat("a"), 80, n_saved=70, tokens=chat("a", tokens=range(80)).tokens)
    held = lease(prompt=chat("a", "b"))
    held.observed(60, 100)
    held.finish(120)
    after = held.content(before, 120, NOW)
    assert after is not None
    assert (after.n_tokens, after.n_prompt, after.n_saved, after.used) == (120, 100, 60, NOW)
    assert after.tokens is not None
    assert list(after.tokens) == list(range(60))


def test_counted_tokens_of_the_prompt_are_kept() -> None:
    """They are certain as far as the slot reaches."""
    held = lease(prompt=chat("a", tokens=range(100)))
    held.observed(0, 100)
    after = held.content(None, 40, NOW)
    assert after is not None
    assert after.tokens is not None
    assert list(after.tokens) == list(range(40))
    assert (after.n_prompt, after.n_saved) == (40, 0)


def test_storable_once_forbidden_stays_forbidden() -> None:
    """Client and engine both have a say."""
    held = lease()
    held.storable = False
    held.finish(5, storable=True)
    assert not held.storable
    other = lease()
    other.finish(5, storable=False)
    assert not other.storable


@pytest.mark.parametrize(("reused", "storable"), [(0, True), (1, True), (60, False)])
def test_what_reuses_tainted_kv_is_tainted(reused: int, *, storable: bool) -> None:
    """KV that is no function of its tokens stays so in every later turn."""
    first = lease()
    first.tainted = True
    first.observed(0, 80)
    before = first.content(None, 80, NOW)
    assert before is not None
    assert not before.storable
    later = lease()
    later.observed(reused, 100)
    after = later.content(before, 100, NOW)
    assert after is not None
    assert after.storable is storable


@pytest.mark.parametrize(("n_tokens", "kept"), [(80, True), (79, False), (0, False)])
def test_a_refused_request_leaves_the_slot_as_it_was(n_tokens: int, *, kept: bool) -> None:
    """Without progress and with as many tokens as before nothing ran."""
    before: Content = content(chat("a"), 80)
    after = lease().interrupted(before, n_tokens, NOW)
    assert (after is before) is kept
    assert lease().interrupted(None, n_tokens, NOW) is None


def test_an_interrupted_answer_leaves_the_part_that_was_computed() -> None:
    """The retry finds the partial KV."""
    held = lease(prompt=chat("a"))
    held.observed(10, 1000)
    after = held.interrupted(None, 300, NOW)
    assert after is not None
    assert (after.n_tokens, after.n_prompt) == (300, 300)
    assert held.interrupted(None, 0, NOW) is None


def scarce(*slots: Slot, **other: object) -> Engine:
    """Processes that hold one conversation each."""
    return engine(*slots, **{"reuse": Reuse.EXTENSION, **other})


def side(text: str) -> Prompt:
    """What a client asks beside the conversation."""
    return replace(chat(text, tokens=range(20)), side=True)


@pytest.mark.parametrize(
    ("waited", "first"), [(0.0, "main"), (SIDE_PATIENCE - 1, "main"), (SIDE_PATIENCE + 1, "side")]
)
def test_side_requests_come_last_for_a_while(waited: float, first: str) -> None:
    """However cheap they are, and however dear the others; but they come."""
    requests = {
        "main": waiting(need(chat("m", tokens=range(9000)))),
        "side": waiting(need(side("t")), queued=NOW - waited),
    }
    found = next_up(list(requests.values()), scarce(FREE), COSTS, NOW, no_matches)
    assert found is not None
    assert found[0] is requests[first]


def test_idle_work_comes_after_everything() -> None:
    """Even after a side request, and however long it waited."""
    idle = waiting(need(chat("i"), idle=True, wanted=0), queued=0.0)
    title = waiting(need(side("t")))
    found = next_up([idle, title], scarce(FREE), COSTS, NOW, no_matches)
    assert found is not None
    assert found[0] is title
    alone = next_up([idle], scarce(FREE), COSTS, NOW, no_matches)
    assert alone is not None
    assert alone[1].option.reason is Reason.COLD  # no client named the slot


def test_nobody_is_overtaken_for_ever() -> None:
    """A dear request behind the cheap steps of a loop has its turn, the kept slot included."""
    held = content(chat("s", "q"), 5000, used=NOW, held=NOW + 5, reuse=Reuse.EXTENSION)
    slot = Slot(0, content=replace(held, storable=False))
    step = waiting(need(chat("s", "q", "a", "r")))
    for waited, want in ((100.0, step), (299.0, None)):
        dear = waiting(need(chat("x" * 40_000)), queued=NOW - waited)
        found = next_up([step, dear], scarce(slot), COSTS, NOW, no_matches)
        assert found is not None
        assert found[0] is (want or dear)


def test_processes_that_share_an_npu_take_turns() -> None:
    """Where they have one each, they do not."""
    request = waiting(SMALL)
    busy = Slot(1, SlotState.LEASED, since=NOW)
    assert next_up([request], scarce(FREE, busy, serial=True), COSTS, NOW, no_matches) is None
    assert any_start([request], scarce(FREE, busy, serial=True), NOW) is None
    assert next_up([request], scarce(FREE, busy), COSTS, NOW, no_matches) is not None


def test_what_is_not_cached_is_called_forwarded() -> None:
    """A path of its own has no reuse to speak of."""
    request = waiting(need(chat(), path="/v1/embeddings", beside=True, wanted=0))
    found = next_up([request], scarce(FREE), COSTS, NOW, no_matches)
    assert found is not None
    assert found[1].option.reason is Reason.FORWARD


def test_a_process_that_went_while_it_was_waited_for() -> None:
    """Another one does; what runs beside goes to the first that is there."""
    slots = Slot(1), Slot(2)
    for beside, expected in ((False, {1, 2}), (True, {1})):
        request = waiting(Need(chat("q"), exact=True, wanted=0, beside=beside))
        found = next_up([request], scarce(*slots), COSTS, NOW, no_matches)
        assert found is not None
        assert found[1].option.slot in expected
    idle = waiting(Need(chat("q"), exact=True, wanted=0, idle=True))
    assert next_up([idle], scarce(*slots), COSTS, NOW, no_matches) is None


@pytest.mark.parametrize("reuse", [Reuse.EXTENSION, Reuse.NONE])
def test_nobody_waits_for_a_process_that_is_gone(reuse: Reuse) -> None:
    """Also where nothing is reused, and when weighing fails."""
    slots = Slot(1), Slot(2)
    for beside, expected in ((False, {1, 2}), (True, {1})):
        request = waiting(Need(chat("q"), exact=True, wanted=0, beside=beside))
        state = scarce(*slots, reuse=reuse)
        for found in (
            next_up([request], state, COSTS, NOW, no_matches),
            any_start([request], state, NOW),
        ):
            assert found is not None
            assert found[1].option.slot in expected
    idle = waiting(Need(chat("q"), exact=True, wanted=0, idle=True))
    assert any_start([idle], scarce(*slots, reuse=reuse), NOW) is None
