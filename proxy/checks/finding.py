"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # nothing is wrong, and it may be worth knowing
    WARNING = "warning"  # it works, and not as well as it could
    PROBLEM = "problem"  # it does not work, or caches nothing


@dataclass(frozen=True, slots=True)
class Finding:
    """``subject``: what was looked at. ``text`` says what was seen, ``todo`` what to do."""

    subject: str
    level: Level
    text: str
    todo: str = ""
