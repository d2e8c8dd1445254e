"""The parser of server-sent events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.sse import Event, Parser, encode


def parse(*chunks: bytes) -> list[Event]:
    """All events of a stream that came in these chunks."""
    parser = Parser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def datas(*chunks: bytes) -> list[bytes]:
    """The payloads of the events that carry one."""
    return [event.data for event in parse(*chunks) if not event.comment_only]


def test_one_chunk_many_events() -> None:
    """Whole events in one chunk come out at once, with their own bytes."""
    parser = Parser()
    events = parser.feed(b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n')
    assert [event.data for event in events] == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
    assert events[0].raw == b'data: {"a":1}\n\n'
    assert not any(event.comment_only for event in events)
    assert not parser.pending


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data\n\n", b""),
        (b"data:\n\n", b""),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\ndata\ndata: b\n\n", b"a\n\nb"),
        (b"event: ping\ndata: {}\nid: 3\nretry: 5\n\n", b"{}"),
        (b": hello\ndata: x\n\n", b"x"),
        (b"data: x\r\n\r\n", b"x"),
        (b"data: x\r\r", b"x"),
        (b"data: x\n\r\n", b"x"),
        (b"data: x\r\n\n", b"x"),
        (b"data: a\rdata: b\ndata: c\r\n\n", b"a\nb\nc"),
        (b"database: no\ndata: yes\n\n", b"yes"),
        (b"data: a: b\n\n", b"a: b"),
    ],
)
def test_lines_of_an_event(raw: bytes, data: bytes) -> None:
    """Fields, comments and line ends are read as the specification says."""
    (event,) = parse(raw)
    assert event == Event(data, raw, comment_only=False)
    assert datas(*(bytes([byte]) for byte in raw)) == [data]


@pytest.mark.parametrize(
    "raw", [b":\n\n", b": ping\n\n", b"\n", b"\r\n", b"event: x\n\n", b":a\r\n:b\r\n\r\n"]
)
def test_events_without_data(raw: bytes) -> None:
    """What no client would see as an event is marked, its bytes kept."""
    assert parse(raw) == [Event(b"", raw, comment_only=True)]


def test_crlf_is_one_line_end() -> None:
    """A CRLF between two lines does not end the event."""
    assert datas(b"event: x\r\ndata: y\r\n\r\ndata: z\r\n\r\n") == [b"y", b"z"]


def test_bare_cr_is_not_held_back() -> None:
    """An event ended by a CR comes at once; a late LF goes before the next event's bytes."""
    parser = Parser()
    (event,) = parser.feed(b"data: x\r\n\r")
    assert event == Event(b"x", b"data: x\r\n\r", comment_only=False)
    assert parser.feed(b"\n") == []
    assert not parser.pending
    assert parser.feed(b"") == []
    assert parser.feed(b"data: y\n\n") == [Event(b"y", b"\ndata: y\n\n", comment_only=False)]
    assert parser.feed(b"data: z\r\r")[0].data == b"z"
    assert parser.feed(b"") == []
    assert parser.feed(b"\ndata: 1\n\ndata: 2\n\n") == [
        Event(b"1", b"\ndata: 1\n\n", comment_only=False),
        Event(b"2", b"data: 2\n\n", comment_only=False),
    ]


def test_pending_until_the_blank_line() -> None:
    """Bytes of an unfinished event show, and are gone once it is whole."""
    parser = Parser()
    seen = [(b"", 0, parser.pending)]
    chunks = (b"data: x\n", b"\ndata: y", b"\n\n")
    seen += [(chunk, len(parser.feed(chunk)), parser.pending) for chunk in chunks]
    assert seen == [
        (b"", 0, False),
        (b"data: x\n", 0, True),
        (b"\ndata: y", 1, True),
        (b"\n\n", 1, False),
    ]


def test_limit_on_one_event() -> None:
    """An event above the limit raises, finished or not; many small ones do not."""
    parser = Parser(limit=20)
    assert len(parser.feed(b"data: 12345\n\n" * 50)) == 50
    with pytest.raises(ValueError, match="larger than 20 bytes"):
        parser.feed(b"data: " + b"x" * 20)
    with pytest.raises(ValueError, match="larger than 20 bytes"):
        Parser(limit=20).feed(b"data: " + b"x" * 20 + b"\n\n")
    parser = Parser(limit=20)
    assert parser.feed(b"data: 12345678901") == []
    with pytest.raises(ValueError, match="larger than 20 bytes"):
        parser.feed(b"2345")


pieces = st.lists(
    st.sampled_from(
        [b"data: ", b"data", b":", b"x", b"\n", b"\r", b"\r\n", b"\n\n", b"event: e", b"id"]
    ),
    max_size=30,
)


@given(pieces, st.data())
def test_any_split_gives_the_same(parts: list[bytes], data: st.DataObject) -> None:
    """Payloads do not depend on how the stream is cut, and no byte is lost or doubled."""
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    parser = Parser()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    assert [e.data for e in events if not e.comment_only] == datas(stream)
    joined = b"".join(event.raw for event in events)
    assert stream.startswith(joined)
    rest = stream[len(joined) :]
    # A LF that completes the CR of an event already given is no unfinished event.
    assert parser.pending == (
        rest not in (b"", b"\n") or (rest == b"\n" and not joined.endswith(b"\r"))
    )


@given(pieces)
def test_payloads_equal_a_line_by_line_reading(parts: list[bytes]) -> None:
    """The fast parser agrees with the plain algorithm of the specification."""
    stream = b"".join(parts)
    text = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    expected, lines = [], list[bytes]()
    for line in text.split(b"\n")[:-1]:
        name, _, value = line.partition(b":")
        if not line:
            expected += [b"\n".join(lines)] if lines else []
            lines = []
        elif name == b"data":
            lines.append(value[1:] if value.startswith(b" ") else value)
    assert datas(stream) == expected


@given(st.binary(max_size=40).map(lambda raw: raw.replace(b"\r", b"\n")))
def test_encode_is_read_back(data: bytes) -> None:
    """What is framed is read back as it was, line ends included."""
    (event,) = parse(encode(data, "message"))
    assert event.data == data
    assert event.raw.startswith(b"event: message\n")
    assert parse(encode(data))[0].data == data


def test_encode_exact_bytes() -> None:
    """The framing is the one servers use; CRs cannot break out of it."""
    assert encode(b"{}") == b"data: {}\n\n"
    assert encode(b"{}", "ping") == b"event: ping\ndata: {}\n\n"
    assert encode(b"a\r\nb\rc\n") == b"data: a\ndata: b\ndata: c\ndata: \n\n"


def test_large_event_in_many_chunks() -> None:
    """A megabyte in small chunks is one event."""
    stream = b"data: " + b"x" * 1_000_000 + b"\n\n"
    events = parse(*(stream[i : i + 1000] for i in range(0, len(stream), 1000)))
    assert [len(event.data) for event in events] == [1_000_000]
