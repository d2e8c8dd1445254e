"""A line of the log as people read it: on the terminal of ``serve``, and from ``slotkeeper logs``.

Ids are cut as in every table, figures have their unit, what is empty is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from proxy import words

GOOD, ODD, BAD, FAINT = "green", "yellow", "red", "dim"
LEVELS = {"debug": FAINT, "warning": ODD, "error": BAD, "critical": BAD}
_ID = re.compile(r"[0-9a-f]{24,64}")  # ours; whoever wants all of it takes --json
_EMPTY: tuple[object, ...] = (None, "", [], {})


def _tokens(value: object) -> str:
    return words.many(value, "token") if isinstance(value, int) else words.plain(value)


_UNITS: Mapping[str, Callable[[object], str]] = {
    **dict.fromkeys(("total", "queued", "first_token", "seconds"), words.seconds),
    **dict.fromkeys(("reused", "computed", "tokens", "prompt_tokens"), _tokens),
    "bytes": words.size,
}


def line(row: Mapping[str, Any]) -> Text:
    """One row of the log (``telemetry.logs.row``), coloured."""
    level = str(row["level"])
    text = Text(f"{words.clock(row['at'])}  ")
    text.append(f"{level:<9}", style=LEVELS.get(level, "default"))
    text.append(words.plain(row["event"]), style="bold")
    for name, value in row["fields"].items():
        if value not in _EMPTY:
            text.append(f"  {words.plain(name)}=", style=FAINT).append(_told(name, value))
    return text


def _told(name: str, value: object) -> str:
    if name in _UNITS:
        return _UNITS[name](value)
    if isinstance(value, list):
        return ", ".join(_told("", one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = words.plain(value)
    return words.short(text) if _ID.fullmatch(text) else text
