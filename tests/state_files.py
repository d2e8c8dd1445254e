"""Writes state files as llama-server does (format: llama-server.md 3.1), of a tiny model."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

F16 = 1  # ggml type
LAYERS = 2
ROW = 16  # bytes of K, and of V, per token and layer


def state_bytes(
    tokens: Sequence[int], *, n_stream: int = 2, slot: int = 0, window: bool = False
) -> bytes:
    """A whole state: the KV rows are a function of the token, so equal tokens give equal files.

    ``window``: append a second KV section, as sliding-window models have.
    """
    packed = struct.pack(f"<iII{len(tokens)}iI", -1, 1, len(tokens), *tokens, 0)
    head = struct.pack("<III", 0x67677371, 4, len(packed) // 4) + packed
    section = _section(tokens, n_stream, slot)
    return head + section + (section if window else b"")


def _section(tokens: Sequence[int], n_stream: int, slot: int) -> bytes:
    parts = [struct.pack("<I", n_stream)]
    for stream in range(n_stream):
        if stream != slot % n_stream or not tokens:
            parts.append(struct.pack("<I", 0))
            continue
        parts.append(struct.pack("<I", len(tokens)))
        parts += [struct.pack("<iIi", position, 1, slot) for position in range(len(tokens))]
        parts.append(struct.pack("<IIII", 0, LAYERS, 0, 0))
        for _ in range(2 * LAYERS):  # K of every layer, then V of every layer
            parts.append(struct.pack("<iQ", F16, ROW))
            parts += [
                hashlib.blake2b(struct.pack("<i", t), digest_size=ROW).digest() for t in tokens
            ]
    return b"".join(parts)


def _row(token: int) -> bytes:
    return hashlib.blake2b(struct.pack("<i", token), digest_size=ROW).digest()
