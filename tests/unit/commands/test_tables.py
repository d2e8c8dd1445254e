"""``proxy.commands.tables``: nothing in it can break on what is not known."""

from __future__ import annotations

import io
from typing import Literal

import pytest
from rich.console import Console

from proxy.commands import tables
from tests.unit.commands.fake_api import COLD, OPTION, OTHER_SNAPSHOT, REQUEST, SNAPSHOT, STATUS


def drawn(what: object, *, colour: bool = False, width: int = 200) -> str:
    """As text."""
    out = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, color_system=system)
    console.print(what)
    return out.getvalue()


def test_the_chosen_option_is_marked() -> None:
    """Only the choice has the arrow."""
    other = OPTION | {"slot": 1, "snapshot": None}
    _, first, second = drawn(tables.costs([other, OPTION], OPTION)).splitlines()
    assert not first.lstrip().startswith(">")
    assert second.startswith(">")


def test_pinned_and_barred() -> None:
    """What is special about a snapshot is a word."""
    _, first, second = drawn(tables.snapshots([SNAPSHOT, OTHER_SNAPSHOT], 0.0, 200)).splitlines()
    assert ("pinned" in first, "barred" in first) == (True, False)
    assert ("barred" in second, "pinned" in second) == (True, False)


def test_the_best_snapshot_is_worth_100() -> None:
    """Others in proportion; what nobody knows is a dash."""
    rows = [SNAPSHOT, SNAPSHOT | {"value": 0.05}, OTHER_SNAPSHOT, SNAPSHOT | {"value": -1.0}]
    _, *lines = drawn(tables.snapshots(rows, 0.0, 200)).splitlines()
    assert [line.split()[9] for line in lines] == ["100", "20", "-", "0"]
    (_, line) = drawn(tables.snapshots([SNAPSHOT | {"value": 0.0}], 0.0, 200)).splitlines()
    assert line.split()[9] == "0"


def test_a_narrow_terminal() -> None:
    """What is less important is left out, and the title alone is cut."""
    row = SNAPSHOT | {"title": "Rivers of the north " * 5}
    head, line, *more = drawn(tables.snapshots([row], 1.8e9 + 9e4, 80), width=80).splitlines()
    assert more == []
    assert head.split() == ["SNAPSHOT", "TOKENS", "SIZE", "AGE", "USED", "TITLE"]
    assert line.split()[:4] == ["ab" * 6, "3,660", "1.0", "MiB"]
    assert "1 d 1 h" in line
    assert line.rstrip().endswith("…")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"reason": "slot-hit", "reused": 3600}, "\x1b[32mslot-hit, 98 %"),
        ({"reason": "slot-hit", "reused": 110}, "\x1b[33mslot-hit, 3 %"),
        ({"reason": "restored", "reused": 3666}, "\x1b[32mrestored, > 99 %"),
        ({"reason": "slot-hit", "reused": None}, "\x1b[33mslot-hit "),
        ({"reason": "slot-hit", "reused": None, "prompt": None}, "\x1b[32mslot-hit "),
        ({"reason": "cold", "reused": 20}, "\x1b[33mcold, < 1 %"),
    ],
)
def test_reusing_little_is_not_green(changes: dict[str, object], shown: str) -> None:
    """The colour goes by the share, which stands beside the word."""
    assert shown in drawn(tables.request(REQUEST | changes), colour=True)


def test_a_difference_is_told_in_a_line() -> None:
    """The words that differ; nothing is made up where the sides are not known."""
    clocks = {"before": "It is 14:02:11, and you", "after": "It is 14:09:59, and you"}
    told = tables.because(COLD | clocks)
    assert told.endswith("at character 118: 14:02:11 → 14:09:59")
    assert tables.because(COLD | {"before": ""}).endswith(": nothing → 14:03")
    assert tables.because(COLD | {"before": "", "after": ""}).endswith("character 118")
    assert tables.because({"cause": "system"}) == ""
    assert tables.because(None) == ""


def test_a_state_has_its_colour() -> None:
    """Green for ready, red for a backend that is down."""
    down = STATUS | {"backend": STATUS["backend"] | {"up": False, "total_slots": None}}
    text = drawn(tables.status(down), colour=True)
    assert "\x1b[32mready" in text
    assert "\x1b[31mdown" in text
