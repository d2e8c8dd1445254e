"""A conversation's row gives it back as it was, and refuses what was not written here."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.ledger import Answer, Conversation, Line
from proxy.store import packing
from proxy.store.packing import from_row, to_row

BYTES = st.binary(max_size=60)
COUNTS = st.integers(0, 2**40)
TEXT = st.text(max_size=20)
LINES = st.builds(Line, BYTES, BYTES, BYTES, TEXT) | BYTES.map(lambda data: Line(data, data, b"k"))
CONVERSATIONS = st.builds(
    Conversation,
    id=TEXT,
    namespace=BYTES,
    client=TEXT,
    lines=st.lists(LINES, max_size=4).map(tuple),
    head=COUNTS,
    tools=st.lists(BYTES, max_size=3).map(tuple),
    order=st.lists(st.tuples(TEXT, BYTES), max_size=3).map(tuple),
    settings=BYTES,
    answers=st.lists(st.builds(Answer, COUNTS, BYTES, BYTES), max_size=3).map(tuple),
    prompt_n=st.none() | COUNTS,
    used=st.floats(0, 4e9),
    title=TEXT,
)
TALK = Conversation("c", b"n", lines=(Line(b"came", b"went", b"k", "note"),), used=1.5)


def packed(value: object) -> dict[str, Any]:
    """A row as ``to_row`` would make it of any JSON."""
    return {"v": 1, "data": b64encode(zlib.compress(orjson.dumps(value))).decode()}


def with_data(change: Callable[[Any], object]) -> dict[str, Any]:
    """The row of a good conversation, but for one change."""
    plain = packing._plain(TALK)
    return packed(change(plain) or plain)


@given(CONVERSATIONS)
def test_a_row_gives_the_conversation_back(conversation: Conversation) -> None:
    """Through JSON and back it is an equal one; a line that nothing changed has one object."""
    row = orjson.loads(orjson.dumps(to_row(conversation)))
    found = from_row(conversation.id, row)
    assert found == conversation
    assert all((a.went is a.came) == (a.went == a.came) for a in found.lines)


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text()))
def test_any_other_object_is_no_row(value: dict[str, object]) -> None:
    """Random JSON is refused, never raised about."""
    assert from_row("c", value) is None


@given(
    st.recursive(
        st.none() | COUNTS | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)
    )
)
def test_any_other_content_is_no_conversation(value: object) -> None:
    """A row of our own form with something else in it is refused as well."""
    assert from_row("c", packed(value)) is None


@given(st.data())
def test_a_damaged_row_is_refused_or_whole(data: st.DataObject) -> None:
    """Whatever byte of it changes: the conversation as it was, or none."""
    row = to_row(TALK)
    text = list(row["data"])
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.characters(codec="ascii"))
    assert from_row("c", row | {"data": "".join(text)}) in (None, TALK)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(id=3),
        lambda d: d.update(head=-1),
        lambda d: d.update(head=True),
        lambda d: d.update(used=3),
        lambda d: d.update(prompt_n="3"),
        lambda d: d.update(title=None),
        lambda d: d.update(namespace="ŵ"),
        lambda d: d.update(order=[["a"]]),
        lambda d: d.update(answers=[[0, "m"]]),
        lambda d: d["lines"].append(["only"]),
        lambda d: d["lines"].append([1, None, "k", ""]),
        lambda d: d["lines"].append(["a", None, "k", 1]),
        lambda d: d.pop("settings") and None,
    ],
)
def test_each_field_is_checked(change: Callable[[Any], object]) -> None:
    """A field that is missing or of another kind makes the row none of ours."""
    assert from_row("c", with_data(lambda _: None)) == TALK
    assert from_row("c", with_data(change)) is None


def test_a_row_belongs_to_its_key_and_version() -> None:
    """Under another key it is not that conversation; a later version's row is not ours."""
    assert from_row("d", to_row(TALK)) is None
    assert from_row("c", to_row(TALK) | {"v": 2}) is None


def test_a_row_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes must not become gigabytes."""
    row = to_row(Conversation("c", b"n", lines=(Line(b"a" * 9000, b"b", b"k"),)))
    assert from_row("c", row) is not None
    monkeypatch.setattr(packing, "LARGEST", 9000)
    assert from_row("c", row) is None
    data = to_row(TALK)["data"]
    more = b64encode(zlib.compress(b"{}") + b"more").decode()
    for wrong in (data[:-8], more):
        assert from_row("c", {"v": 1, "data": wrong}) is None


def test_equal_bytes_are_kept_once() -> None:
    """Tools and system text that conversations share are one object in memory."""
    tool = b'{"a long tool":1}'
    pool: dict[bytes, bytes] = {}
    rows = [to_row(Conversation(name, b"n", tools=(tool,), settings=b"s")) for name in "ab"]
    one, other = (from_row(n, r, pool) for n, r in zip("ab", rows, strict=True))
    assert one is not None
    assert other is not None
    assert one.tools[0] is other.tools[0]
    assert one.namespace is other.namespace
    assert one.settings is other.settings


def test_a_row_shows_no_text() -> None:
    """What lies in the database is packed: no message can be read in passing."""
    secret = b"the secret of this conversation " * 3
    row = to_row(Conversation("c", b"n", lines=(Line(secret, secret, b"k"),), title="secret"))
    assert b"secret" not in orjson.dumps(row)
