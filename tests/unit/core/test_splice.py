"""Fields added to a client's JSON without touching its bytes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.splice import splice

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
