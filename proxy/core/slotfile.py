"""The state file llama-server writes for one slot: what it holds, read from its own header.

Format: llama-server.md 3.1 (version 4, little-endian; read and checked there against b11434).
Order of the first KV section: cells, then the K rows of all layers, then the V rows of all.
Nothing here trusts a length: every one is held against the file's size before it is used.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Reader = Callable[[int, int], bytes]
"""``(offset, n)`` -> ``n`` bytes of the file from ``offset``."""

_MAGIC = 0x67677371
_VERSION = 4
_PACKED = -1  # first word of a token payload with a head of its own
_PACKED_VERSION = 1
_PACKED_HEAD = 4  # words around the tokens: -1, version, n_tokens, n_media
_MAX_STREAMS = 4096  # the engine stops at 256 sequences
_MAX_LAYERS = 4096  # the engine stops at 512
_CELLS_AT_ONCE = 65_536
# Words per cell: pos, n_seq_id, seq_id, with 3 or 2 more in between for models with positions in
# several dimensions. The file does not say which: the one under which all the rest fits is it.
_CELL_WORDS = (3, 6, 5)
_ROW_HEAD = 12  # bytes before a layer's rows: type and row size; transposed V: type and two sizes


class SlotFileError(ValueError):
    """No state file, a damaged one, or one of a kind this parser does not know."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """One slot's state as its file describes it. Offsets and sizes in bytes.

    ``tokens``: as the engine will compare them, -1 where media stand. ``cells``: filled positions
    of the first KV section. ``k_rows``, ``v_rows``: per layer, ggml type and bytes per token.
    ``kv_start``: the first layer's K; ``kv_end``: behind the first KV section. A file of an empty
    slot has no layers.
    """

    tokens: array[int] = field(repr=False)
    has_media: bool
    n_stream: int
    cells: int
    v_trans: bool
    n_layer: int
    n_rot_k: int
    n_rot_v: int
    k_rows: tuple[tuple[int, int], ...]
    v_rows: tuple[tuple[int, int], ...]
    kv_start: int
    kv_end: int
    size: int


@dataclass(frozen=True, slots=True)
class _Body:
    """The one stream of the file that holds cells."""

    cells: int = 0
    v_trans: bool = False
    n_rot_k: int = 0
    n_rot_v: int = 0
    k_rows: tuple[tuple[int, int], ...] = ()
    v_rows: tuple[tuple[int, int], ...] = ()
    start: int = 0
    end: int = 0


class _Cursor:
    """A position in the file that never leaves it."""

    def __init__(self, read: Reader, size: int, pos: int = 0) -> None:
        self._read = read
        self.size = size
        self.pos = pos

    def take(self, n: int) -> bytes:
        start = self.pos
        self.skip(n)
        data = self._read(start, n) if n else b""
        if len(data) != n:
            message = f"read {len(data)} of {n} bytes at {start}"
            raise SlotFileError(message)
        return data

    def skip(self, n: int) -> None:
        if n > self.size - self.pos:
            message = f"ends at {self.size}, {n} bytes more were announced at {self.pos}"
            raise SlotFileError(message)
        self.pos += n

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def words(self, n: int) -> array[int]:
        words = array("i")
        words.frombytes(self.take(4 * n))
        return words


def parse(read: Reader, size: int) -> StateFile:
    """Read the header of a state file of ``size`` bytes; the KV data itself is not read.

    Raises ``SlotFileError`` for anything malformed or cut short within the first KV section, and
    for a state with fewer cells than tokens (the engine would abort on none, llama-server.md
    3.2, and answer from a hole on fewer).
    """
    cursor = _Cursor(read, size)
    magic, version, n_words = cursor.unpack("III")
    if (magic, version) != (_MAGIC, _VERSION):
        message = f"magic {magic:#x} version {version}, not {_MAGIC:#x} version {_VERSION}"
        raise SlotFileError(message)
    tokens, has_media = _parse_tokens(cursor, n_words)
    (n_stream,) = cursor.unpack("I")
    if not 1 <= n_stream <= _MAX_STREAMS:
        message = f"{n_stream} streams"
        raise SlotFileError(message)
    body = _Body()
    for _ in range(n_stream):
        (cells,) = cursor.unpack("I")
        if not cells:
            continue
        if body.cells:
            message = "two streams hold cells: not the state of one slot"
            raise SlotFileError(message)
        body = _parse_body(read, size, cursor.pos, cells)
        cursor.pos = body.end
    if body.cells < len(tokens):
        message = f"{body.cells} cells for {len(tokens)} tokens"
        raise SlotFileError(message)
    return StateFile(
        tokens=tokens,
        has_media=has_media,
        n_stream=n_stream,
        cells=body.cells,
        v_trans=body.v_trans,
        n_layer=len(body.k_rows),
        n_rot_k=body.n_rot_k,
        n_rot_v=body.n_rot_v,
        k_rows=body.k_rows,
        v_rows=body.v_rows,
        kv_start=body.start,
        kv_end=cursor.pos,
        size=size,
    )


def leftover(state: StateFile) -> int:
    """Bytes after the first KV section: 0 means full attention, else a window or recurrence."""
    return state.size - state.kv_end


def layout(state: StateFile) -> dict[str, Any]:
    """What a state says of its engine whatever its length: plain JSON, for the fingerprint.

    Only a state with at least one token says anything.
    """
    return {
        "version": _VERSION,
        "n_stream": state.n_stream,
        "v_trans": state.v_trans,
        "n_layer": state.n_layer,
        "n_rot_k": state.n_rot_k,
        "n_rot_v": state.n_rot_v,
        "k_rows": [list(row) for row in state.k_rows],
        "v_rows": [list(row) for row in state.v_rows],
        "full_attention": leftover(state) == 0,
    }


def kv_bytes(read: Reader, state: StateFile) -> Iterator[tuple[int, bytes]]:
    """Yield ``(ggml type, data)`` in the file's order: K of every layer, then V of every layer.

    Raises ``SlotFileError`` when the file has become shorter than ``state`` says.
    """
    cursor = _Cursor(read, state.size, state.kv_start)
    for ggml_type, row in state.k_rows + state.v_rows:
        cursor.skip(_ROW_HEAD)
        yield ggml_type, cursor.take(state.cells * row)


def _parse_tokens(cursor: _Cursor, n_words: int) -> tuple[array[int], bool]:
    """Read the token payload, leave the cursor behind it; media bytes are skipped."""
    start = cursor.pos
    cursor.skip(4 * n_words)
    end = cursor.pos
    cursor.pos = start
    n_media = 0
    if n_words == 0 or cursor.unpack("i") != (_PACKED,):
        cursor.pos = start
        tokens = cursor.words(n_words)
    else:
        if n_words < _PACKED_HEAD:
            message = f"token payload of {n_words} words"
            raise SlotFileError(message)
        version, n_tokens = cursor.unpack("II")
        left = n_words - _PACKED_HEAD - n_tokens
        if version != _PACKED_VERSION or left < 0:
            message = f"payload version {version}, {n_tokens} tokens in {n_words} words"
            raise SlotFileError(message)
        tokens = cursor.words(n_tokens)
        (n_media,) = cursor.unpack("I")
        if n_media > left or (n_media == 0 and left):
            message = f"{n_media} media in {left} words"
            raise SlotFileError(message)
    if tokens and min(tokens) < -1:
        message = "a negative token"
        raise SlotFileError(message)
    cursor.pos = end
    return tokens, n_media > 0 or -1 in tokens


def _parse_body(read: Reader, size: int, pos: int, cells: int) -> _Body:
    """Read the stream with the cells, under the cell width that makes sense of all of it."""
    errors: list[SlotFileError] = []
    for width in _CELL_WORDS:
        try:
            return _parse_layers(_Cursor(read, size, pos), cells, width)
        except SlotFileError as error:
            errors.append(error)
    raise errors[0]


def _parse_layers(cursor: _Cursor, cells: int, width: int) -> _Body:
    _check_cells(cursor, cells, width)
    v_trans, n_layer, n_rot_k, n_rot_v = cursor.unpack("IIII")
    if v_trans > 1 or not 1 <= n_layer <= _MAX_LAYERS:
        message = f"v_trans {v_trans}, {n_layer} layers"
        raise SlotFileError(message)
    start = cursor.pos
    k_rows = tuple(_parse_rows(cursor, cells, transposed=False) for _ in range(n_layer))
    v_rows = tuple(_parse_rows(cursor, cells, transposed=bool(v_trans)) for _ in range(n_layer))
    return _Body(cells, bool(v_trans), n_rot_k, n_rot_v, k_rows, v_rows, start, cursor.pos)


def _check_cells(cursor: _Cursor, cells: int, width: int) -> None:
    """Skip the cells; each must belong to one sequence, and all to the same."""
    start = cursor.pos
    cursor.skip(4 * width * cells)
    end = cursor.pos
    cursor.pos = start
    owners: set[int] = set()
    while cursor.pos < end:
        words = cursor.words(min(width * _CELLS_AT_ONCE, (end - cursor.pos) // 4))
        owners.update(words[width - 1 :: width])
        if set(words[1::width]) != {1} or len(owners) > 1:
            message = f"cells before {cursor.pos} are not those of one sequence"
            raise SlotFileError(message)


def _parse_rows(cursor: _Cursor, cells: int, *, transposed: bool) -> tuple[int, int]:
    """Read one layer's K or V head, skip its data. Returns type and bytes per cell."""
    if transposed:
        ggml_type, element, width = cursor.unpack("iII")
        row = element * width
    else:
        ggml_type, row = cursor.unpack("iQ")
    if ggml_type < 0 or row == 0:
        message = f"rows of type {ggml_type} and {row} bytes"
        raise SlotFileError(message)
    cursor.skip(cells * row)
    return ggml_type, row
