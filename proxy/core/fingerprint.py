"""The fingerprint: one digest of everything that must be equal before a state may be restored.

The engine checks shapes only (llama-server.md 3.2): a state of other weights or other rope
settings is accepted and answers wrongly. So what HTTP tells of the server, what the file system
tells of the model file and what a saved state tells of its layout all go in, and ``same_kv``
compares what none of them shows.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from operator import eq, sub
from typing import Any

import orjson

_FORMAT = 1  # raise it when the meaning of the facts changes: all stored states become strangers
_F32, _F16, _BF16 = 0, 1, 30  # ggml types
_ITEM = {_F32: 4, _F16: 2, _BF16: 2}  # bytes per number
_MAX_RELATIVE_L1 = 1e-2  # kernels on a GPU differ by less, rope settings by 0.35 (page, section 4)
_MIN_EQUAL_BYTES = 0.9  # quantised types cannot be subtracted; a few codes flip between kernels


def fingerprint(
    identity: Mapping[str, Any],
    file_identity: Mapping[str, Any] | None,
    layout: Mapping[str, Any],
    variant: int = 0,
) -> str:
    """Digest the facts into 32 hex characters, independent of the order of keys.

    ``identity``: ``Facts.identity``. ``file_identity``: of the model file, where it is readable.
    ``layout``: ``slotfile.layout`` of a probe state. ``variant`` tells apart servers whose facts
    are all equal and whose probe states are not (``same_kv``). Raises ``TypeError`` for values
    JSON has no form for.
    """
    facts = _facts(identity, file_identity, layout, variant)
    canonical = orjson.dumps(facts, default=_plain, option=orjson.OPT_SORT_KEYS)
    return blake2b(canonical, digest_size=16).hexdigest()


def manifest(
    identity: Mapping[str, Any],
    file_identity: Mapping[str, Any] | None,
    layout: Mapping[str, Any],
    variant: int = 0,
) -> dict[str, Any]:
    """Say in words what a fingerprint was made of: the ``manifest.json`` beside its states."""
    return {
        "fingerprint": fingerprint(identity, file_identity, layout, variant),
        "meaning": "States here fit only a server for which all of made_of is equal.",
        "made_of": _facts(identity, file_identity, layout, variant),
    }


def same_kv(a: Iterable[tuple[int, bytes]], b: Iterable[tuple[int, bytes]]) -> bool:
    """Whether two states of the same tokens come from the same weights and rope settings.

    Takes ``slotfile.kv_bytes`` of two probe states (some 32 tokens: the comparison is plain
    Python). Equal bytes settle it; else float KV may differ by 1 % (L1, relative) and quantised
    KV in a tenth of its bytes, which is what GPU kernels do between two runs.
    """
    difference = total = 0.0
    equal = n_bytes = 0
    for ours, theirs in zip_longest(a, b):
        if ours is None or theirs is None:
            return False
        (ggml_type, x), (other_type, y) = ours, theirs
        if ggml_type != other_type or len(x) != len(y) or len(x) % _ITEM.get(ggml_type, 1):
            return False
        if ggml_type not in _ITEM:
            n_bytes += len(x)
            equal += len(x) if x == y else sum(map(eq, x, y))
            continue
        left = _numbers(ggml_type, x)
        total += sum(map(abs, left))
        if x != y:
            difference += sum(map(abs, map(sub, left, _numbers(ggml_type, y))))
    # Not the other way round: a NaN in either state must come out as "not the same".
    close = difference == 0 or difference < _MAX_RELATIVE_L1 * total
    return close and (equal == n_bytes or equal > _MIN_EQUAL_BYTES * n_bytes)


def _facts(
    identity: Mapping[str, Any],
    file_identity: Mapping[str, Any] | None,
    layout: Mapping[str, Any],
    variant: int,
) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "server": dict(identity),
        "model_file": None if file_identity is None else dict(file_identity),
        "state_layout": dict(layout),
        "variant": variant,
    }


def _plain(value: object) -> dict[str, Any]:
    """Let orjson write read-only mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


def _numbers(ggml_type: int, data: bytes) -> Sequence[float]:
    """Read the numbers of one block (native order: the engine runs on this machine)."""
    if ggml_type == _F16:
        return struct.unpack(f"{len(data) // 2}e", data)
    if ggml_type == _BF16:  # the upper half of a 32-bit float
        data = array("I", (half << 16 for half in memoryview(data).cast("H"))).tobytes()
    return memoryview(data).cast("f")
