"""Figures and foreign text as people read them. Sizes in bytes, times in seconds."""

from __future__ import annotations

import re
import time

MINUTE, HOUR, DAY = 60, 3600, 86_400
NOW = 5  # seconds: what is younger happened just now
NONE = "-"
_SHORT = 12  # characters of an id that tell it from others
_WORDS = re.compile(r"[\w:-]+|[^\w:-]")
_SIDE = 40  # characters of one side of a difference


def plain(value: object) -> str:
    """One line without control characters: a title is a stranger's text, a terminal obeys it."""
    text = NONE if value is None or value == "" else str(value)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def short(identity: object) -> str:
    """The beginning of an id; commands understand it."""
    return plain(identity)[:_SHORT]


def number(value: object) -> str:
    """Thousands apart."""
    return f"{value:,}" if isinstance(value, int) else NONE


def many(count: int, what: str) -> str:
    """``"1 snapshot"``, ``"2 snapshots"``."""
    return f"{number(count)} {what}{'' if count == 1 else 's'}"


def percent(part: int, whole: int) -> str:
    """``"92 %"``; never rounded up to all or down to nothing. ``whole`` is not 0."""
    share = 100 * part / whole
    if 0 < share < 1:
        return "< 1 %"
    return "> 99 %" if 99 < share < 100 else f"{int(share + 0.5)} %"  # noqa: PLR2004 - as it says


def differing(before: str, after: str) -> tuple[str, str]:
    """The words in the middle that two texts do not share, cut to 40 characters each."""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    shorter = min(len(old), len(new))
    start = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    rest = range(shorter - start)
    end = next((n for n in rest if old[-1 - n] != new[-1 - n]), len(rest))
    sides = ("".join(side[start : len(side) - end]).strip() for side in (old, new))
    first, second = (side if len(side) <= _SIDE else f"{side[: _SIDE - 1]}…" for side in sides)
    return first, second


def size(value: object) -> str:
    """``"1.2 GiB"``."""
    if not isinstance(value, int | float):
        return NONE
    amount, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:  # noqa: PLR2004 - what the units are made of
        amount /= 1024
        units.pop(0)
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def seconds(value: object) -> str:
    """``"17 ms"``, ``"2.3 s"``, ``"4 min 10 s"``, ``"2 h 3 min"``, ``"3 d 4 h"``."""
    if not isinstance(value, int | float):
        return NONE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < MINUTE:
        return f"{value:.1f} s"
    whole = int(value)
    for unit, name, below, small in (
        (DAY, "d", HOUR, "h"),
        (HOUR, "h", MINUTE, "min"),
        (MINUTE, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {small}"
    return NONE


def since(then: object, now: float) -> str:
    """For how long: ``"2 h 3 min"``."""
    return seconds(max(0.0, now - then)) if isinstance(then, int | float) else NONE


def ago(then: object, now: float) -> str:
    """How long ago, in one unit, as the dashboard says it: ``"just now"``, ``"3 min ago"``."""
    if not isinstance(then, int | float):
        return NONE
    age = int(max(0.0, now - then))
    for size, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if age >= size:
            return f"{age // size} {name} ago"
    return f"{age} s ago" if age >= NOW else "just now"


def moment(at: object) -> str:
    """Day and time here."""
    if not isinstance(at, int | float):
        return NONE
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def clock(at: object) -> str:
    """The time of day here."""
    return time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) else NONE
