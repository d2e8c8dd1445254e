"""``proxy.commands.tables``: nothing in it can break on what is not known."""

from __future__ import annotations

import io
from typing import Literal

from rich.console import Console

from proxy.commands import tables
from tests.unit.commands.fake_api import OPTION, OTHER_SNAPSHOT, SNAPSHOT, STATUS


def drawn(what: object, *, colour: bool = False) -> str:
    """As text."""
    out = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(file=out, width=200, force_terminal=colour, color_system=system)
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
    _, first, second = drawn(tables.snapshots([SNAPSHOT, OTHER_SNAPSHOT], 0.0)).splitlines()
    assert ("pinned" in first, "0.25" in first) == (True, True)
    assert ("barred" in second, "pinned" in second) == (True, False)


def test_a_state_has_its_colour() -> None:
    """Green for ready, red for a backend that is down."""
    down = STATUS | {"backend": STATUS["backend"] | {"up": False, "total_slots": None}}
    text = drawn(tables.status(down), colour=True)
    assert "\x1b[32mready" in text
    assert "\x1b[31mdown" in text
