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
    talk=st.text(max_size=40),
)
def test_a_row_gives_the_snapshot_back(
    key: str,
    seed: bytes,
    sizes: tuple[int, int, int],
    times: tuple[float, float, float],
    talk: str,
) -> None:
    """Through JSON and back, with the tokens from elsewhere, it is an equal snapshot."""
    tokens = array("i", [1, 2, 3])
    n_prompt, size, restores = sizes
    snapshot = Snapshot(
        key, "f-1_x", seed, tokens, n_prompt, size, "c" * 64, *times, restores, talk
    )
    row = from_row(key, orjson.loads(orjson.dumps(to_row(snapshot))))
    assert row is not None
    assert Snapshot(id=key, tokens=tokens, **row) == snapshot


@given(st.dictionaries(st.text(max_size=12), st.none() | st.integers() | st.text()))
def test_any_other_object_is_no_row(value: dict[str, object]) -> None:
    """Random JSON is refused, never raised about."""
    assert from_row("0" * 32, value) is None
    assert from_row("0" * 32, None) is None


def test_a_row_of_an_older_version_belongs_to_no_conversation() -> None:
    """Snapshots were kept before there were conversations; they stay."""
    snapshot = Snapshot("0" * 32, "f", b"s", array("i"), 1, 2, "c", 1.0, 2.0, 3.0, 4, "talk")
    row = to_row(snapshot)
    del row["conversation"]
    found = from_row("0" * 32, row)
    assert found is not None
    assert found["conversation"] == ""
    assert from_row("0" * 32, row | {"conversation": 5}) is None
