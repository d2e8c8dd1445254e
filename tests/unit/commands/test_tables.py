"""``proxy.commands.tables``: nothing in it can break on what is not known."""

from __future__ import annotations

import io
from typing import Literal

from rich.console import Console

from proxy.commands import tables
from tests.unit.commands.fake_api import OTHER_SNAPSHOT, SLOT, SNAPSHOT, STATUS


def drawn(what: object, *, colour: bool = False, width: int = 200) -> str:
    """As text."""
    out = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, color_system=system)
    console.print(what)
    return out.getvalue()


def test_pinned_and_barred() -> None:
    """What is special about a snapshot is a word."""
    shown = drawn(tables.snapshots([SNAPSHOT, OTHER_SNAPSHOT], 0.0, 200)).splitlines()
    _, first, second, legend = shown
    assert legend.startswith("VALUE: prefill time it can still save")
    assert ("pinned" in first, "barred" in first) == (True, False)
    assert ("barred" in second, "pinned" in second) == (True, False)


def test_the_best_snapshot_is_worth_100() -> None:
    """Others in proportion; what nobody knows is a dash."""
    rows = [SNAPSHOT, SNAPSHOT | {"value": 0.05}, OTHER_SNAPSHOT, SNAPSHOT | {"value": -1.0}]
    _, *lines, _ = drawn(tables.snapshots(rows, 0.0, 200)).splitlines()
    assert [line.split()[9] for line in lines] == ["100", "20", "-", "0"]
    (_, line, _) = drawn(tables.snapshots([SNAPSHOT | {"value": 0.0}], 0.0, 200)).splitlines()
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


def test_a_state_has_its_colour() -> None:
    """Green for ready, red for a backend that is down."""
    down = STATUS | {"backend": STATUS["backend"] | {"up": False, "total_slots": None}}
    text = drawn(tables.status(down), colour=True)
    assert "\x1b[32mready" in text
    assert "\x1b[31mdown" in text


def test_what_is_not_known_yet_is_not_told() -> None:
    """Until the disk was looked at there is no figure of it; a full one has refused a save."""
    unknown = STATUS["store"] | {"free": 0}
    assert "free" not in drawn(tables.status(STATUS | {"store": unknown}))
    full = unknown | {"refused": "disk-full"}
    assert "; 0 B free, of which" in drawn(tables.status(STATUS | {"store": full}))


def test_slots_of_a_backend_that_is_down() -> None:
    """What they do is not known, and not told."""
    down = STATUS | {"backend": STATUS["backend"] | {"up": False}}
    for shown in (tables.slots([SLOT], 0.0, up=False), tables.watched(down, [SLOT], [])):
        line = " ".join(drawn(shown).splitlines()[-1].split())
        assert line.startswith("1 unknown 3,667")


def test_a_slot_is_told_as_the_dashboard_tells_it() -> None:
    """What it does, and whether what it holds could be restored."""
    rows: list[tuple[dict[str, object], str]] = [
        ({"state": "free", "tokens": None, "saved_tokens": 0}, "1 free - -"),
        ({"state": "free", "saved_tokens": 0}, "1 warm 3,667 not saved"),
        ({"state": "free", "saved_tokens": 3667}, "1 warm 3,667 saved"),
        ({"storable": False}, "1 answering 3,667 cannot be saved"),
    ]
    _, *lines = drawn(tables.slots([SLOT | row for row, _ in rows], 0.0)).splitlines()
    for line, (_, words) in zip(lines, rows, strict=True):
        assert " ".join(line.split()).startswith(words), line
