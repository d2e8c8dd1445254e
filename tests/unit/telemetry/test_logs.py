"""Log lines: their shape, and what is never in them."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.lines import line
from proxy.telemetry.logs import Ring, request_id, setup

CANARY = "canary-7f3a"


@contextmanager
def logging_restored() -> Iterator[io.StringIO]:
    """A stream to log to; the process's logging is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield io.StringIO()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The same for a whole test."""
    with logging_restored() as found:
        yield found


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """The JSON lines written so far."""
    return [orjson.loads(text) for text in stream.getvalue().splitlines()]


def test_json_line(stream: io.StringIO) -> None:
    """One object a line: event, level, time, bound and given values."""
    setup("info", "json", stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.stdlib.get_logger("x").info("answered", status=200, reuse={"n": 1}, odd={1: b"x"})
    (line,) = lines(stream)
    assert str(line.pop("timestamp")).endswith("Z")
    assert line.pop("odd") == {"1": "b'x'"}
    assert line == {
        "event": "answered", "level": "info", "request_id": "r1", "status": 200, "reuse": {"n": 1},
    }  # fmt: skip


def test_auto_is_json_where_there_is_no_terminal(stream: io.StringIO) -> None:
    """``auto`` writes for machines into a pipe; ``console`` writes for people anyway."""
    setup("info", "auto", stream)
    structlog.stdlib.get_logger().info("one")
    assert lines(stream)[0]["event"] == "one"
    setup("info", "console", stream)
    structlog.stdlib.get_logger().info("two", n=1)
    assert re.search(r"two +n=1$", stream.getvalue().splitlines()[-1])


def test_auto_is_for_people_on_a_terminal(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal ``auto`` writes no JSON."""
    monkeypatch.setattr(stream, "isatty", lambda: True)
    setup("info", "auto", stream)
    structlog.stdlib.get_logger().info("one")
    assert "one" in stream.getvalue()
    assert "{" not in stream.getvalue()


def test_on_a_terminal_a_line_is_that_of_the_command(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``slotkeeper logs`` and the terminal of ``serve`` show the same, coloured on a terminal."""
    ring = Ring()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(stream, "isatty", lambda: True)
    setup("info", "auto", stream)
    ring.attach()
    try:
        structlog.stdlib.get_logger().warning("one", total=0.25, slot=1)
        logging.getLogger("library").error("two")
    finally:
        ring.detach()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert plain.splitlines() == [line(row).plain for row in ring.recent(2)]
    assert "total=250 ms" in plain
    assert "\x1b[33m" in stream.getvalue()


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_no_value_costs_the_line(stream: io.StringIO, fmt: str) -> None:
    """What JSON cannot hold is told as text, and the other fields as they are."""

    class Unspeakable:
        def __str__(self) -> str:
            raise RuntimeError(CANARY)

    setup("info", fmt, stream)
    log = structlog.stdlib.get_logger("x")
    log.info("odd", half="a\ud800", big=2**64, deep={"n": [2**70]}, none=Unspeakable(), n=7)
    told = stream.getvalue()
    assert CANARY not in told
    assert "Traceback" not in told
    if fmt == "console":
        for part in ("half=a\\ud800", str(2**64), str(2**70), "<Unspeakable>", "n=7"):
            assert part in told
        return
    (found,) = lines(stream)
    assert (found["event"], found["half"], found["n"]) == ("odd", "a\\ud800", 7)
    assert (found["big"], found["none"]) == (str(2**64), "<Unspeakable>")


def test_level(stream: io.StringIO) -> None:
    """What is below the level is not written, neither by us nor by a library."""
    setup("warning", "json", stream)
    structlog.stdlib.get_logger().info("quiet")
    logging.getLogger("library").info("quiet")
    logging.getLogger("library").warning("loud %s", 1)
    assert [line["event"] for line in lines(stream)] == ["loud 1"]


@given(
    st.sampled_from(["key", "Authorization", "body", "prompt", "content", "X-Api-Key", "messages"]),
    st.sampled_from([lambda d: d, lambda d: {"a": d}, lambda d: {"a": [1, (d,)]}]),
)
def test_secrets_are_dropped(name: str, wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A value named like a secret is dropped, however deep it is."""
    with logging_restored() as stream:
        setup("info", "json", stream)
        structlog.stdlib.get_logger().info("event", **wrap({name: CANARY}), kept=1)
    assert CANARY not in stream.getvalue()
    assert lines(stream)[0]["kept"] == 1


def fail() -> None:
    """Raises one error because of another, both quoting what they choked on."""
    try:
        dict[str, int]()[CANARY]
    except KeyError as error:
        raise ValueError(CANARY) from error


def fail_quietly() -> None:
    """Raises an error that hides the one before."""
    try:
        fail()
    except ValueError:
        raise TypeError from None


@pytest.mark.parametrize("by", ["structlog", "logging", "instance"])
@pytest.mark.parametrize("fmt", ["json", "console"])
def test_exceptions_without_their_text(stream: io.StringIO, by: str, fmt: str) -> None:
    """Of an exception the log tells types and places, never the message."""
    setup("info", fmt, stream)
    try:
        fail()
    except ValueError as error:
        if by == "structlog":
            structlog.stdlib.get_logger().exception("failed")
        elif by == "logging":
            logging.getLogger("library").exception("failed")
        else:
            structlog.stdlib.get_logger().error("failed", exc_info=error)
    text = stream.getvalue()
    assert CANARY not in text
    assert re.search(r"ValueError < fail \(.*test_logs\.py:\d+\)", text)
    assert "after KeyError < fail" in text


def test_hidden_context_stays_hidden(stream: io.StringIO) -> None:
    """``raise ... from None`` is respected, and no exception means no field."""
    setup("info", "json", stream)
    try:
        fail_quietly()
    except TypeError:
        structlog.stdlib.get_logger().exception("failed")
    structlog.stdlib.get_logger().info("fine", exc_info=True)
    failed, fine = lines(stream)
    assert "after" not in str(failed["exception"])
    assert "exception" not in fine


@given(st.text(max_size=70))
def test_request_id(text: str) -> None:
    """A harmless id is kept; any other is replaced by a harmless one."""
    harmless = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
    assert harmless.match(request_id(text))
    assert (request_id(text) == text) == bool(harmless.match(text))


def test_new_request_ids_differ() -> None:
    """Without one from the client each request gets its own."""
    assert len({request_id(None) for _ in range(100)}) == 100
    assert request_id("a" * 64) == "a" * 64
    assert request_id("a" * 65) != "a" * 65


@pytest.fixture
def ring(stream: io.StringIO) -> Iterator[Ring]:
    """One that hears what is logged."""
    setup("info", "json", stream)
    made = Ring(limit=3)
    made.attach()
    yield made
    made.detach()


def test_the_ring_has_what_the_stream_has(ring: Ring, stream: io.StringIO) -> None:
    """Number, time, level, event, and the fields that were not secret."""
    log = structlog.stdlib.get_logger("x")
    log.info("answered", status=200, api_key=CANARY, odd={1: b"x"})
    log.debug("too quiet")
    (row,) = ring.recent(9)
    assert isinstance(row.pop("at"), float)
    assert row == {
        "seq": 1, "level": "info", "event": "answered",
        "fields": {"status": 200, "odd": {"1": "b'x'"}},
    }  # fmt: skip
    assert len(lines(stream)) == 1


def test_the_ring_is_bounded_and_asked_by_number_and_level(ring: Ring) -> None:
    """The newest stay, oldest first; at least as bad as asked; newer than the number named."""
    log = structlog.stdlib.get_logger("x")
    for number in range(4):
        log.warning("bad", n=number)
    log.info("fine")
    assert [row["seq"] for row in ring.recent(9)] == [3, 4, 5]
    assert [row["seq"] for row in ring.recent(2)] == [4, 5]
    assert [row["seq"] for row in ring.recent(9, level="warning")] == [3, 4]
    assert [row["seq"] for row in ring.recent(9, after=4)] == [5]
    assert ring.recent(0) == []
    assert ring.seq == 5


def test_the_ring_stays_when_logging_is_set_up_again(ring: Ring, stream: io.StringIO) -> None:
    """A reload changes the level, and takes nothing away."""
    setup("warning", "json", stream)
    structlog.stdlib.get_logger("x").warning("after")
    assert [row["event"] for row in ring.recent(9)] == ["after"]


def test_libraries_and_exceptions_in_the_ring(ring: Ring) -> None:
    """Where it happened, and never what the exception says."""
    try:
        int(CANARY)
    except ValueError:
        logging.getLogger("library").exception("it %s", "broke")
    (row,) = ring.recent(9)
    assert (row["event"], row["level"]) == ("it broke", "error")
    assert row["fields"]["logger"] == "library"
    assert "ValueError" in row["fields"]["exception"]
    assert CANARY not in str(row)
