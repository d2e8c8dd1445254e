"""Where two texts differ, and the few words around that place that a person wants to see."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.text import shared, shared_end

QUOTED = 60  # characters of either side, at most
_WIDEN = 30  # characters a quote grows to either side in search of the word's end
_WORD_END = 40  # a cut at the end of a word must keep this many characters
_INNER = frozenset("_:./+-@=")  # inside a word: 14:02, v1.2, 2026-10-09, cch=ab12f


@dataclass(frozen=True, slots=True)
class Difference:
    """``at``: the first character that differs, from 0; the two sides are cut to be shown."""

    at: int
    before: str
    after: str


def difference(before: str, after: str) -> Difference:
    """The smallest span that differs, widened to whole words."""
    at = shared(before, after)
    room = min(len(before), len(after)) - at
    tail = shared_end(before, after, room)
    start = _word_start(before, at)
    stop = tail
    while stop > max(0, tail - _WIDEN) and (
        _in_word(before, len(before) - stop, len(before) - stop - 1)
        or _in_word(after, len(after) - stop, len(after) - stop - 1)
    ):
        stop -= 1
    return Difference(
        at, shown(before[start : len(before) - stop]), shown(after[start : len(after) - stop])
    )


def parting(before: str, after: str) -> Difference:
    """How two texts go on where they part, whatever they may share at their ends."""
    at = shared(before, after)
    start = _word_start(before, at)
    return Difference(at, shown(before[start:]), shown(after[start:]))


def shown(text: str) -> str:
    """At most ``QUOTED`` characters in one line: line ends escaped, nothing unprintable."""
    start = text[: 2 * QUOTED].replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")
    line = "".join(char if char.isprintable() else "?" for char in start)
    if len(line) <= QUOTED:
        return line
    line = line[: QUOTED - 1]
    word_end = line.rfind(" ")
    return (line[:word_end] if word_end >= _WORD_END else line) + "…"


def _word_start(text: str, at: int) -> int:
    start = at
    while start > max(0, at - _WIDEN) and _in_word(text, start - 1, start):
        start -= 1
    return start


def _in_word(text: str, place: int, beside: int) -> bool:
    """Whether the character at ``place`` belongs to one word with its neighbour at ``beside``."""
    if not (0 <= place < len(text) and 0 <= beside < len(text)) or not _wordy(text[beside]):
        return False
    if text[place].isalnum():
        return True
    beyond = 2 * place - beside  # a full stop at the end of a word is not in it
    return text[place] in _INNER and 0 <= beyond < len(text) and text[beyond].isalnum()


def _wordy(char: str) -> bool:
    return char.isalnum() or char in _INNER
