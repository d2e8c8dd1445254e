"""Fields added to a client's JSON without touching its bytes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.splice import elements, members, rebuild, splice

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=5)


@given(OBJECTS, OBJECTS, st.text(" \t\r\n", max_size=3), st.sampled_from([0, orjson.OPT_INDENT_2]))
def test_adds_and_overrides(
    body: dict[str, Any], fields: dict[str, Any], space: str, option: int
) -> None:
    """The result reads like the client's object with the fields put over it; its bytes lead."""
    raw = orjson.dumps(body, option=option) + space.encode()
    spliced = splice(raw, fields)
    assert orjson.loads(spliced) == body | fields
    assert spliced.startswith(raw.rstrip()[:-1].rstrip())


def test_without_fields_the_same_object() -> None:
    """Nothing to add: not even a copy."""
    raw = b'{"a": 1 } '
    assert splice(raw, {}) is raw


@pytest.mark.parametrize("raw", [b"[]", b"", b"1"])
def test_only_objects(raw: bytes) -> None:
    """Something else than an object is refused, never mangled."""
    with pytest.raises(ValueError, match="object"):
        splice(raw, {"a": 1})


def test_odd_spellings_survive() -> None:
    """Big numbers, duplicate names and escapes go on as they came."""
    raw = b'{"n":18446744073709551616,"f":1.0e0,"n":2,"s":"\\u0041"}'
    assert splice(raw, {"id_slot": 1}) == raw[:-1] + b',"id_slot":1}'


@given(
    st.lists(VALUES, max_size=6),
    OBJECTS,
    st.data(),
    st.sampled_from([0, orjson.OPT_INDENT_2]),
)
def test_rebuilds_arrays(
    items: list[Any], others: dict[str, Any], data: st.DataObject, option: int
) -> None:
    """Elements can be reordered, left out and added, members dropped and set; the rest stays."""
    body = {**others, "messages": items}
    raw = orjson.dumps(body, option=option)
    order = data.draw(st.permutations(range(len(items)))) if items else []
    new = [*((i, orjson.dumps(items[i])) for i in order), (None, b'{"new":1}')]
    built = rebuild(raw, body, {"messages": new}, ["drop"], {"set": 2})
    wanted = {**body, "messages": [*(items[i] for i in order), {"new": 1}], "set": 2}
    wanted.pop("drop", None)
    assert orjson.loads(built) == wanted


def test_untouched_elements_keep_their_bytes() -> None:
    """Spelling a parser would change (big integers, 1e2, escapes, duplicate names) is kept."""
    first = b'{"n": 123456789012345678901, "f":1e2, "s":"\\u00e9, }]", "a":1, "a":[2, {}]}'
    raw = b'{ "x" : [1,\t2], "messages" : [ ' + first + b' , {"role":"user"} ]\n}'
    built = rebuild(raw, orjson.loads(raw), {"messages": [(0, b""), (None, b"{}")]})
    assert built == b'{"x":[1,\t2],"messages":[' + first + b",{}]}"


def test_no_such_array_is_an_error() -> None:
    """Elements for a member that is not there, or is no array, are refused."""
    with pytest.raises(ValueError, match="array"):
        rebuild(b"{}", {}, {"messages": []})
    with pytest.raises(ValueError, match="array"):
        rebuild(b'{"messages":1}', {"messages": 1}, {"messages": []})
    with pytest.raises(ValueError, match="array"):
        rebuild(b'{"messages": 1}', {"messages": 1}, {"messages": []})
    with pytest.raises(ValueError, match="object"):
        members(b"[1, 2]")


@pytest.mark.parametrize("tail", [b"x" * 100_000, b'"a",' * 25_000, b'"' + b"\\" * 100_000, b'"a'])
def test_text_without_a_bracket_costs_no_time(tail: bytes) -> None:
    """It has no members, and is not looked at again and again (this would run for years)."""
    assert members(tail) == []
    assert elements(b"[1, 2]" + tail) == [b"1", b"2"]
