"""``proxy.telemetry.lines``: a line of the log as a person reads it."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.telemetry.lines import line

ROW: dict[str, Any] = {"at": 0.0, "level": "info", "event": "request", "fields": {}}


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"total": 0.2345, "first_token": 2.0}, "total=234 ms  first_token=2.0 s"),
        ({"reused": 3660, "tokens": 1}, "reused=3,660 tokens  tokens=1 token"),
        ({"bytes": 2**20}, "bytes=1.0 MiB"),
        ({"rules": ["clock", "tools"], "on": True, "off": False},
         "rules=clock, tools  on=yes  off=no"),
        ({"share": 0.123456}, "share=0.1235"),
        ({"conversation": "ab" * 16, "path": "/x"}, "conversation=abababababab  path=/x"),
        ({"a": None, "b": "", "c": [], "slot": 0}, "slot=0"),
    ],
)  # fmt: skip
def test_fields(fields: dict[str, object], shown: str) -> None:
    """Figures have units, ids are cut, what is empty is left out."""
    told = line(ROW | {"fields": fields}).plain
    assert told.partition("request")[2].strip() == shown


def test_foreign_text_commands_no_terminal() -> None:
    """Neither in the event nor in a field."""
    hostile = ROW | {"event": "\x1b[2J", "fields": {"\x1b": "\x1b[31m"}}
    assert "\x1b" not in line(hostile).plain


@pytest.mark.parametrize(("level", "style"), [("error", "red"), ("warning", "yellow")])
def test_levels_have_colours(level: str, style: str) -> None:
    """What is bad is seen at once."""
    assert style in {str(span.style) for span in line(ROW | {"level": level}).spans}
