"""A snapshot's row keeps all but the tokens, and refuses what was not written here."""

from __future__ import annotations

from array import array

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.records import Snapshot
from proxy.store.rows import from_row, to_row

TIMES = st.floats(0, 4e9)
HEX = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(
    key=HEX,
    seed=st.binary(max_size=40),
    sizes=st.tuples(st.integers(0, 2**20), st.integers(0, 2**50), st.integers(0, 2**20)),
    times=st.tuples(TIMES, TIMES, TIMES),
)
def test_a_row_gives_the_snapshot_back(
    key: str,
    seed: bytes,
    sizes: tuple[int, int, int],
    times: tuple[float, float, float],
) -> None:
    """Through JSON and back, with the tokens from elsewhere, it is an equal snapshot."""
    tokens = array("i", [1, 2, 3])
    snapshot = Snapshot(key, "f-1_x", seed, tokens, sizes[0], sizes[1], "c" * 64, *times, sizes[2])
    row = from_row(key, orjson.loads(orjson.dumps(to_row(snapshot))))
    assert row is not None
    assert Snapshot(id=key, tokens=tokens, **row) == snapshot


@given(st.dictionaries(st.text(max_size=12), st.none() | st.integers() | st.text()))
def test_any_other_object_is_no_row(value: dict[str, object]) -> None:
    """Random JSON is refused, never raised about."""
    assert from_row("0" * 32, value) is None
    assert from_row("0" * 32, None) is None
