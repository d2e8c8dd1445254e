"""How much two texts have in common, at their ends or line by line; compares blocks, so it is fast.

What is a plain loop over characters elsewhere is a bisection here: the texts are system prompts.
"""

from __future__ import annotations

from collections import Counter
from typing import AnyStr

SAMPLE = 32_768  # of each text, where lines are compared
OPEN, CLOSE = "<system-reminder>", "</system-reminder>"


def shared(one: AnyStr, other: AnyStr) -> int:
    """How many leading characters (or bytes) are equal."""
    low, high = 0, min(len(one), len(other)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def shared_end(one: AnyStr, other: AnyStr, room: int | None = None) -> int:
    """How many trailing characters (or bytes) are equal, ``room`` at most."""
    most = min(len(one), len(other))
    low, high = 0, (most if room is None else min(room, most)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle
    return low


def overlap(a: bytes, b: bytes) -> float:
    """Which share of the longer one the common beginning and end of the two make up."""
    start = shared(a, b)
    end = shared_end(a, b, min(len(a), len(b)) - start)
    longer = max(len(a), len(b))
    return (start + end) / longer if longer else 1.0


def common_lines(a: bytes, b: bytes) -> float:
    """Which share of the longer one the lines make up that both have (texts in JSON).

    Of long texts only their beginnings are compared.
    """
    a, b = a[:SAMPLE], b[:SAMPLE]
    ours, theirs = (Counter(text.split(b"\\n")) for text in (a, b))
    common = sum(len(line) * count for line, count in (ours & theirs).items())
    return common / max(len(a), len(b), 1)


def around_reminders(text: str) -> tuple[list[str], list[str]]:
    """The reminders of ``text``, tags included, and what stands around them, one piece more."""
    reminders: list[str] = []
    around: list[str] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0 and (end := text.find(CLOSE, start)) >= 0:
        end += len(CLOSE)
        reminders.append(text[start:end])
        around.append(text[at:start])
        at = end
    return reminders, [*around, text[at:]]
