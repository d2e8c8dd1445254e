"""The parser of llama-server's slot files, on files built here byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.core.slotfile import Reader, SlotFileError, StateFile, kv_bytes, layout, leftover, parse


def u32(*values: int) -> bytes:
    """Little-endian words."""
    return struct.pack(f"<{len(values)}I", *values)


def packed(tokens: Sequence[int], n_media: int = 0, media: bytes = b"") -> bytes:
    """A token payload with a head of its own, media bytes as given."""
    words = struct.pack(f"<{len(tokens)}i", *tokens)
    return struct.pack("<i", -1) + u32(1, len(tokens)) + words + u32(n_media) + media


@dataclass(frozen=True)
class Build:
    """A state file in parts; ``bytes()`` puts it together."""

    payload: bytes = packed([5, 6, 7])
    streams: tuple[int, ...] = (3,)
    ext: int = 0  # words between n_seq_id and seq_id
    seq: int = 0
    v_trans: bool = False
    k: tuple[tuple[int, int], ...] = ((1, 8), (1, 12))
    v: tuple[tuple[int, int], ...] = ((1, 8), (8, 34))
    n_rot: tuple[int, int] = (0, 64)
    tail: bytes = b""
    magic: int = 0x67677371
    version: int = 4

    def body(self, cells: int) -> bytes:
        """The part of a stream with cells."""
        out = b"".join(
            struct.pack("<iI", i, 1) + u32(*range(70, 70 + self.ext)) + u32(self.seq)
            for i in range(cells)
        )
        out += u32(int(self.v_trans), len(self.k), *self.n_rot)
        fill = 0
        for kind, rows in (("k", self.k), ("v", self.v)):
            for ggml_type, row in rows:
                fill += 1
                if kind == "v" and self.v_trans:
                    out += struct.pack("<iII", ggml_type, 2, row // 2)
                else:
                    out += struct.pack("<iQ", ggml_type, row)
                out += bytes([fill % 256]) * (cells * row)
        return out

    def __bytes__(self) -> bytes:
        """The file."""
        out = u32(self.magic, self.version, len(self.payload) // 4) + self.payload
        out += u32(len(self.streams))
        for cells in self.streams:
            out += u32(cells) + (self.body(cells) if cells else b"")
        return out + self.tail


def reader(data: bytes) -> Reader:
    """Read from memory as from a file."""
    return lambda offset, n: data[offset : offset + n]


def state_of(data: bytes) -> StateFile:
    """Parse a file in memory."""
    return parse(reader(data), len(data))


def test_plain_full_attention_file() -> None:
    """Every fact of the header comes out, and the file ends where its KV ends."""
    data = bytes(Build())
    state = state_of(data)
    assert list(state.tokens) == [5, 6, 7]
    assert (state.has_media, state.n_stream, state.cells, state.v_trans) == (False, 1, 3, False)
    assert (state.n_layer, state.n_rot_k, state.n_rot_v) == (2, 0, 64)
    assert state.k_rows == ((1, 8), (1, 12))
    assert state.v_rows == ((1, 8), (8, 34))
    assert state.kv_end == state.size == len(data)
    assert leftover(state) == 0


def test_size_formula_of_the_reference_page() -> None:
    """A text state has the size llama-server.md 3.1 gives for it."""
    n, streams, layers, row = 10, 2, 4, 64
    build = Build(
        payload=packed(range(n)),
        streams=(0, n),
        k=((1, row),) * layers,
        v=((1, row),) * layers,
    )
    size = 12 + 4 * (n + 4) + 4 + 4 * streams + 12 * n + 16 + layers * (24 + n * 2 * row)
    assert len(bytes(build)) == size == state_of(bytes(build)).kv_end


@pytest.mark.parametrize("streams", [(3, 0, 0, 0), (0, 3, 0, 0), (0, 0, 0, 3)])
def test_one_stream_of_several_holds_the_cells(streams: tuple[int, ...]) -> None:
    """Wherever the body stands, the KV section ends behind the last stream."""
    state = state_of(bytes(Build(streams=streams, tail=b"xy")))
    assert (state.n_stream, state.cells) == (4, 3)
    assert leftover(state) == 2


def test_transposed_v() -> None:
    """Without flash attention V rows are given per element; the sum per token is the same."""
    state = state_of(bytes(Build(v_trans=True)))
    assert state.v_trans
    assert state.v_rows == ((1, 8), (8, 34))
    assert leftover(state) == 0


@pytest.mark.parametrize("ext", [3, 2])
@pytest.mark.parametrize("cells", [3, 5])
def test_wide_cells(ext: int, cells: int) -> None:
    """Cells with positions in several dimensions are recognised."""
    state = state_of(bytes(Build(ext=ext, streams=(0, cells), seq=1)))
    assert (state.cells, state.n_layer, leftover(state)) == (cells, 2, 0)


def test_second_section_is_left_over() -> None:
    """A window or recurrent part shows as bytes after the first section."""
    assert leftover(state_of(bytes(Build(tail=bytes(Build().body(2)))))) > 0


def test_old_plain_token_list() -> None:
    """Files with nothing but tokens as payload still read; their media are the -1s."""
    plain = struct.pack("<3i", 5, 6, 7)
    assert list(state_of(bytes(Build(payload=plain))).tokens) == [5, 6, 7]
    assert not state_of(bytes(Build(payload=plain))).has_media
    media = struct.pack("<3i", 5, -1, 7)
    assert state_of(bytes(Build(payload=media))).has_media


def test_media() -> None:
    """Media show by their count or by the tokens they stand for; their bytes are skipped."""
    media = u32(1) + u32(8) + b"12345678"
    state = state_of(bytes(Build(payload=packed([5, -1, -1], 1, media))))
    assert state.has_media
    assert list(state.tokens) == [5, -1, -1]
    assert state_of(bytes(Build(payload=packed([5, -1, 6])))).has_media


@pytest.mark.parametrize("payload", [packed([]), b""])
def test_empty_slot(payload: bytes) -> None:
    """The state of an empty slot reads as one without tokens and layers."""
    data = bytes(Build(payload=payload, streams=(0,)))
    state = state_of(data)
    assert (len(state.tokens), state.cells, state.n_layer, leftover(state)) == (0, 0, 0, 0)
    assert list(kv_bytes(reader(data), state)) == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Build(magic=0x67676D6C), "magic"),
        (Build(version=3), "version 3"),
        (Build(streams=()), "0 streams"),
        (Build(streams=(0,) * 5000), "5000 streams"),
        (Build(streams=(3, 3)), "two streams"),
        (Build(streams=(2,)), "2 cells for 3 tokens"),
        (Build(streams=(0,)), "0 cells for 3 tokens"),
        (Build(payload=packed([5, -2, 7])), "negative"),
        (Build(payload=struct.pack("<i", -1)), "payload of 1 words"),
        (Build(payload=struct.pack("<i", -1) + u32(2, 0, 0)), "payload version 2"),
        (Build(payload=struct.pack("<i", -1) + u32(1, 9, 0)), "9 tokens in 4 words"),
        (Build(payload=packed([5, 6, 7], 2, u32(0))), "2 media in 1 words"),
        (Build(payload=packed([5, 6, 7], 0, u32(0))), "0 media in 1 words"),
        (Build(k=((-1, 8), (1, 8))), "type -1"),
        (Build(k=((1, 0), (1, 8))), "0 bytes"),
        (Build(k=(), v=()), "0 layers"),
        (Build(k=((1, 8),) * 5000, v=((1, 8),) * 5000), "5000 layers"),
        (Build(k=((1, 8),), v=()), "ends at"),
    ],
)
def test_malformed(build: Build, message: str) -> None:
    """What cannot be one slot's state is refused, with the reason."""
    with pytest.raises(SlotFileError, match=message):
        state_of(bytes(build))


def test_cells_of_two_sequences() -> None:
    """Cells that belong to several or to different sequences are no slot's state."""
    data = bytearray(bytes(Build()))
    first = data.index(u32(3, 0, 1, 0)) + 4
    for offset, value in ((4, 2), (8, 7)):
        bad = data.copy()
        bad[first + offset : first + offset + 4] = u32(value)
        with pytest.raises(SlotFileError, match="not those of one sequence"):
            state_of(bytes(bad))


@pytest.mark.parametrize("field", ["words", "stream", "cells", "row"])
def test_lying_lengths_cost_nothing(field: str) -> None:
    """A length beyond the file is refused before anything of that size is asked for."""
    data = bytearray(bytes(Build()))
    at = {"words": 8, "stream": 40, "cells": 44, "row": len(data) - 3 * 34 - 8}[field]
    data[at : at + 4] = u32(0xFFFFFFFF)
    asked: list[int] = []

    def read(offset: int, n: int) -> bytes:
        asked.append(n)
        return bytes(data[offset : offset + n])

    with pytest.raises(SlotFileError):
        parse(read, len(data))
    assert max(asked) < len(data)


BUILDS = [
    Build(),
    Build(v_trans=True, streams=(0, 3)),
    Build(ext=3, seq=2, streams=(0, 0, 3)),
    Build(payload=packed([5, -1, -1], 1, u32(1, 8, 0, 0))),
]


@pytest.mark.parametrize("build", BUILDS)
def test_any_cut_is_noticed(build: Build) -> None:
    """No file cut short passes: the engine would abort on it."""
    data = bytes(build)
    for size in range(len(data)):
        with pytest.raises(SlotFileError):
            state_of(data[:size])


@pytest.mark.parametrize("build", BUILDS)
def test_reader_that_comes_short(build: Build) -> None:
    """A file that is shorter than it is said to be is refused, KV reading included."""
    data = bytes(build)
    state = state_of(data)
    with pytest.raises(SlotFileError):
        parse(lambda offset, n: data[offset : offset + n] if offset < 60 else b"", len(data))
    with pytest.raises(SlotFileError, match="read"):
        list(kv_bytes(reader(data[:-1]), state))


@given(st.sampled_from(BUILDS), st.data())
def test_damage_never_escapes(build: Build, data: st.DataObject) -> None:
    """Whatever words are overwritten, the answer is a state within the file or SlotFileError."""
    raw = bytearray(bytes(build))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) // 4 - 1)) * 4
        raw[at : at + 4] = u32(data.draw(st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1))))
    try:
        state = state_of(bytes(raw))
    except SlotFileError:
        return
    assert 0 <= leftover(state) <= state.size
    assert sum(len(block) for _, block in kv_bytes(reader(bytes(raw)), state)) <= state.size


@given(st.binary(max_size=200))
@example(b"")
def test_noise_is_refused(noise: bytes) -> None:
    """Bytes that are no state file raise SlotFileError and nothing else, with a true head too."""
    with pytest.raises(SlotFileError):
        state_of(noise)
    with pytest.raises(SlotFileError):
        state_of(u32(0x67677371, 4, 1, 5) + noise[:20])


def test_kv_bytes_in_file_order() -> None:
    """K of all layers, then V of all, each with its type and all its rows."""
    for build in (Build(streams=(0, 3)), Build(streams=(0, 3), v_trans=True, tail=b"more")):
        data = bytes(build)
        blocks = list(kv_bytes(reader(data), state_of(data)))
        assert blocks == [
            (1, b"\1" * 24),
            (1, b"\2" * 36),
            (1, b"\3" * 24),
            (8, b"\4" * 102),
        ]


def test_layout_is_independent_of_length() -> None:
    """Two states of one server have one layout, plain enough for JSON; another server's differs."""
    short = layout(state_of(bytes(Build())))
    long = layout(state_of(bytes(Build(payload=packed(range(90)), streams=(90,)))))
    assert short == long
    assert orjson.loads(orjson.dumps(short)) == short
    assert short["full_attention"] is True
    others = [
        Build(streams=(3, 0)),
        Build(v_trans=True),
        Build(tail=b"x"),
        Build(n_rot=(0, 0)),
        Build(k=((1, 8), (8, 12))),
        replace(Build(), v=((1, 8), (8, 68))),
    ]
    assert all(layout(state_of(bytes(other))) != short for other in others)
