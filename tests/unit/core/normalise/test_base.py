"""The draft rules work on."""

from __future__ import annotations

from proxy.core.ledger import Conversation, Line
from proxy.core.normalise.base import Change, Draft, Item


def test_an_item_is_written_when_asked_for() -> None:
    """Value and JSON agree, whichever of the two was put in."""
    item = Item({"a": 1.0}, 3)
    assert (item.json, item.index, item.changed) == (b'{"a":1.0}', 3, False)
    item.put_json(b'{"b":2}')
    assert (item.value, item.changed) == ({"b": 2}, True)
    item.put(["c"])
    assert (item.json, item.value, item.index) == (b'["c"]', ["c"], 3)


def test_null_is_an_item() -> None:
    """``null`` in an array is a value like others."""
    item = Item(None)
    assert (item.json, item.value, item.index) == (b"null", None, None)


def test_lines_are_those_repeated() -> None:
    """Of the conversation before, as far as it is known."""
    lines = tuple(Line(name, name, name) for name in (b"1", b"2", b"3"))
    before = Conversation("id", b"", lines=lines)
    assert Draft({}, [], None).lines == ()
    assert Draft({}, [], None, before=before, known=2).lines == lines[:2]


def test_changes_are_noted_in_order() -> None:
    """By rule and place."""
    draft = Draft({}, [], None)
    draft.did("b", "tools")
    draft.did("a", "messages[0]")
    assert draft.changes == [Change("b", "tools"), Change("a", "messages[0]")]
