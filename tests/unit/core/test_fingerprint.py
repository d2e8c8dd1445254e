"""The fingerprint, its manifest, and the comparison of probe states."""

from __future__ import annotations

import math
import struct
from types import MappingProxyType
from typing import Any

import orjson
import pytest

from proxy.core.fingerprint import fingerprint, manifest, same_kv

IDENTITY: dict[str, Any] = {"model_path": "/m.gguf", "lora": [{"id": 0, "scale": 1.0}], "n": 1}
FILE: dict[str, Any] = {"size": 5, "mtime": 7}
LAYOUT: dict[str, Any] = {"n_stream": 2, "k_rows": [[1, 8]]}

Block = tuple[int, bytes]


def f32(values: list[float]) -> Block:
    """A block of 32-bit floats."""
    return 0, struct.pack(f"{len(values)}f", *values)


def f16(values: list[float]) -> Block:
    """A block of 16-bit floats."""
    return 1, struct.pack(f"{len(values)}e", *values)


def bf16(values: list[float]) -> Block:
    """A block of bfloat16: the upper halves of 32-bit floats."""
    return 30, b"".join(struct.pack("<f", value)[2:] for value in values)


def test_fingerprint_is_stable() -> None:
    """32 hex characters that do not depend on the order of keys or the kind of mapping."""
    plain = fingerprint(IDENTITY, FILE, LAYOUT)
    assert len(plain) == 32
    assert int(plain, 16) >= 0
    assert fingerprint(dict(reversed(IDENTITY.items())), FILE, LAYOUT) == plain
    frozen = MappingProxyType({**IDENTITY, "sub": MappingProxyType({"x": 1})})
    assert fingerprint(frozen, FILE, LAYOUT) == fingerprint(
        {**IDENTITY, "sub": {"x": 1}}, FILE, LAYOUT
    )


def test_fingerprint_tells_every_fact() -> None:
    """Each fact changes it, wherever it stands."""
    prints = {
        fingerprint(IDENTITY, FILE, LAYOUT),
        fingerprint({**IDENTITY, "n": 2}, FILE, LAYOUT),
        fingerprint({**IDENTITY, "lora": [{"id": 0, "scale": 0.5}]}, FILE, LAYOUT),
        fingerprint(IDENTITY, None, LAYOUT),
        fingerprint(IDENTITY, {}, LAYOUT),
        fingerprint(IDENTITY, {**FILE, "mtime": 8}, LAYOUT),
        fingerprint(IDENTITY, FILE, {**LAYOUT, "n_stream": 1}),
        fingerprint(IDENTITY, FILE, LAYOUT, 1),
        fingerprint(LAYOUT, FILE, IDENTITY),
    }
    assert len(prints) == 9


def test_fingerprint_refuses_what_json_has_no_form_for() -> None:
    """An object that would be spelled differently each time must not go in silently."""
    with pytest.raises(TypeError):
        fingerprint({"x": object()}, None, LAYOUT)


def test_manifest_says_the_same_facts() -> None:
    """It carries the fingerprint and every fact, ready for JSON, without a file identity too."""
    told = manifest(IDENTITY, FILE, LAYOUT, 3)
    assert told["fingerprint"] == fingerprint(IDENTITY, FILE, LAYOUT, 3)
    made_of = told["made_of"]
    assert (made_of["server"], made_of["model_file"]) == (IDENTITY, FILE)
    assert (made_of["state_layout"], made_of["variant"]) == (LAYOUT, 3)
    assert orjson.loads(orjson.dumps(told)) == told
    assert manifest(IDENTITY, None, LAYOUT)["made_of"]["model_file"] is None


@pytest.mark.parametrize("block", [f32, f16, bf16])
def test_floats_may_differ_by_kernel_noise(block: Any) -> None:
    """Equal and nearly equal states are the same, 35 % apart or NaN they are not."""
    values = [math.sin(i) * 4 for i in range(256)]
    a = [block(values), block(values[::-1])]
    assert same_kv(a, a)
    assert same_kv(iter(a), iter(a))
    assert same_kv(a, [block([v * 1.005 for v in values]), a[1]])
    assert not same_kv(a, [block([v * 1.35 for v in values]), a[1]])
    assert not same_kv(a, [block([math.nan, *values[1:]]), a[1]])
    assert not same_kv([block([math.nan, *values[1:]])], [block(values)])


def test_float_difference_is_relative_to_the_whole() -> None:
    """Just under one per cent passes, just over does not; signs do not cancel out."""
    a = [f32([1.0, -1.0] * 50)]
    assert same_kv(a, [f32([1.009, -0.991] * 50)])
    assert not same_kv(a, [f32([1.011, -0.989] * 50)])
    assert same_kv([f32([0.0])], [f32([-0.0])])
    assert not same_kv([f32([0.0])], [f32([0.1])])


def test_quantised_blocks_by_equal_bytes() -> None:
    """Up to a tenth of the bytes of other types may differ."""
    a = [(8, bytes(100)), (8, bytes(100))]
    assert same_kv(a, a)
    assert same_kv(a, [(8, b"\1" * 19 + bytes(81)), a[1]])
    assert not same_kv(a, [(8, b"\1" * 20 + bytes(80)), a[1]])


def test_mixed_types_must_both_agree() -> None:
    """Good floats do not excuse bad bytes, nor the other way round."""
    a = [f16([1.0] * 8), (8, bytes(10))]
    assert same_kv(a, a)
    assert not same_kv(a, [a[0], (8, b"\1" * 10)])
    assert not same_kv(a, [f16([2.0] * 8), a[1]])


@pytest.mark.parametrize(
    "other",
    [
        [],
        [f16([1.0] * 4)],
        [f16([1.0] * 4), f16([1.0] * 5)],
        [f16([1.0] * 4), f32([1.0] * 2)],
        [f16([1.0] * 4), f16([1.0] * 4), f16([1.0] * 4)],
    ],
)
def test_other_shapes_are_never_the_same(other: list[Block]) -> None:
    """Number of blocks, types and lengths must agree."""
    a = [f16([1.0] * 4), f16([1.0] * 4)]
    assert not same_kv(a, other)
    assert not same_kv(other, a)


def test_half_a_number_is_no_state() -> None:
    """A block that is not a whole number of floats is refused, not read."""
    assert not same_kv([(0, b"123")], [(0, b"123")])
    assert same_kv([], [])
