"""The slot table: transitions and what may not happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.slots import Slot, SlotState, SlotTable, restored
from tests.unit.factories import chat, content, snapshot

BUSY = [state for state in SlotState if state is not SlotState.FREE]


def test_a_new_table_is_free_and_knows_nothing() -> None:
    """A backend just proved holds nothing we know of."""
    table = SlotTable(3)
    assert list(table) == [Slot(0), Slot(1), Slot(2)]
    assert len(table) == 3
    assert table.all_free()


@pytest.mark.parametrize("state", BUSY)
def test_a_busy_slot_cannot_be_taken_again(state: SlotState) -> None:
    """One holder per slot."""
    table = SlotTable(1)
    table.begin(0, state, 1.0)
    with pytest.raises(ValueError, match="slot 0"):
        table.begin(0, SlotState.LEASED, 2.0)
    assert table[0].state is state
    assert not table.all_free()


def test_a_free_slot_cannot_begin_to_be_free_nor_end() -> None:
    """Freeing is only for holders."""
    table = SlotTable(1)
    with pytest.raises(ValueError, match="cannot become"):
        table.begin(0, SlotState.FREE, 0.0)
    with pytest.raises(ValueError, match="already free"):
        table.end(0, 0.0)
    with pytest.raises(ValueError, match="cannot go on"):
        table.become(0, SlotState.LEASED, 0.0)


def test_a_busy_slot_goes_on_to_its_next_step() -> None:
    """Restoring becomes leased without anybody getting in between."""
    table = SlotTable(1)
    table.begin(0, SlotState.RESTORING, 1.0, n_expected=7)
    table.become(0, SlotState.LEASED, 2.0)
    assert (table[0].state, table[0].since, table[0].n_expected) == (SlotState.LEASED, 2.0, 7)
    with pytest.raises(ValueError, match="cannot go on"):
        table.become(0, SlotState.FREE, 3.0)
    table.end(0, 4.0)
    assert (table[0].state, table[0].since, table[0].n_expected) == (SlotState.FREE, 4.0, 0)


def test_a_restart_forgets_contents_and_keeps_states() -> None:
    """Whoever holds a slot still has to end it."""
    table = SlotTable(2)
    table.hold(0, content(chat("a"), 5))
    table.begin(1, SlotState.LEASED, 0.0)
    table.forget()
    assert table[0].content is None
    assert table[1].state is SlotState.LEASED


def test_repr_answers_the_operators_question() -> None:
    """Which slot does what, in one line."""
    table = SlotTable(2)
    table.begin(1, SlotState.SAVING, 0.0)
    assert repr(table) == "<SlotTable [0 free | 1 saving]>"


def test_a_restored_state_answers_only_to_tokens() -> None:
    """Its chain is empty: nobody knows from which messages it came."""
    state = snapshot(range(100))
    held = restored(state, chat("sys", "hello", tokens=range(120)), 9.0)
    assert held.prompt.chain == ()
    assert (held.n_tokens, held.n_prompt, held.n_saved) == (100, 100, 100)
    assert held.tokens == state.tokens


def test_what_is_held_of_a_forgotten_conversation_is_not_saved() -> None:
    """Only that conversation's; it counts as not saved, for nothing of it is on disk any more."""
    table = SlotTable(4)
    for index, name in enumerate(("a", "b", "")):
        prompt = replace(chat("x"), conversation=name)
        table.hold(index, content(prompt, 50, n_saved=40))
    table.begin(0, SlotState.LEASED, 1.0)
    table.unsave("a")
    table.unsave("")
    table.unsave("unknown")
    rows = [slot.content for slot in table]
    assert [(c.storable, c.n_saved) for c in rows if c] == [(False, 0), (True, 40), (True, 40)]
    assert table[0].state is SlotState.LEASED
    assert table[3].content is None


def test_a_restored_state_belongs_to_the_conversation_that_asked() -> None:
    """It goes on there, wherever it came from."""
    state = replace(snapshot(range(9)), conversation="old")
    held = restored(state, replace(chat("sys"), conversation="new"), 9.0)
    assert held.prompt.conversation == "new"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(list(SlotState))), max_size=40))
def test_a_slot_is_never_held_twice(steps: list[tuple[int, SlotState]]) -> None:
    """Whatever is tried, a begin succeeds exactly on free slots."""
    table = SlotTable(3)
    for index, state in steps:
        before = table[index].state
        try:
            if state is SlotState.FREE:
                table.end(index, 0.0)
            else:
                table.begin(index, state, 0.0)
        except ValueError:
            assert (before is SlotState.FREE) == (state is SlotState.FREE)
            assert table[index].state is before
        else:
            assert (before is SlotState.FREE) != (state is SlotState.FREE)
            assert table[index].state is state
