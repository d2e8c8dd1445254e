"""Clocks in a prompt: found, masked, compared, pinned, and told again at the end.

Only spans whose shape or place says "clock" are ever touched; any doubt means it is content
(volatile-fields.md, sections 0 and 8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, islice, takewhile

from proxy.core.normalise.clock_shapes import Lines, Span, found, speaks
from proxy.core.normalise.clock_table import KNOWN, Clock, Place
from proxy.core.text import CLOSE, OPEN, shared_end
from proxy.core.text import shared as common

_MASK = "\uffff"  # a non-character: no text may contain it
_WIDTH = 120  # a line up to this long is shown whole in a note
_AROUND = 40  # of a longer line: characters on each side
_MOST = 12  # more differences than this are a log, not a clock
_DIFFERING = 64  # more lines than this differing are one, too
_LINES = 16  # a known clock with its surroundings is never longer
_BLOCK = 2048  # nothing but a clock is never longer
_TRIES = 8  # places where a vanished block may have stood

_SECONDS = re.compile(
    r"(?<![0-9:.])((?:[01]?[0-9]|2[0-3]):[0-5][0-9]):[0-5][0-9](?:[.,][0-9]{1,9})?(?![0-9:])"
)
_UNIX = re.compile(r"(?<![\w.])(1[5-9][0-9]{8})(?:[0-9]{3})?(?![\w.])")
_EDGE = re.compile(rf"^|(?=\n)|(?={OPEN})", re.MULTILINE)  # where a block may begin
_TAG = re.compile(r"[ \t]*</?[a-z][a-z_-]{0,40}>[ \t]*")
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
# Words that tell the time and nothing else.
_PLAIN = re.compile(
    r"an?|and|as|at|conversation|current(?:ly)?|current_?(?:date|time)|date|datetime|day|in|is"
    r"|it(?:'s)?|local|message|now|of|on|sent|session|started|the|this|time|timestamp|timezone"
    r"|today(?:'s)?|user(?:'s)?|utc|weekday|zone|heute|ist|der|datum|uhrzeit|fecha|hora|hoy|oggi"
    r"|(?:当前|现在|今天|的|时间|日期|是|現在|今日|時刻|日時|は|です){1,6}"
)


def shaped(text: str, *, shared: bool, client: str = "", place: Place = "system") -> list[Span]:
    """Spans of ``text`` that are time- or counter-shaped, in order, not overlapping.

    ``shared``: only clocks: a known clock of ``client``, or a time-shaped span in a line that
    tells the time and nothing else. Else every time-shaped span, and counters with a cue. In a user
    message (``place="first-user"``) only the known clocks count. A text with more than
    ``clock_shapes.DENSE`` spans is a log: it has none.
    """
    rows = [row for row in _rows(client, place) if not (shared and row.counter)]
    known = [span for row in rows for span in row.spans(text)]
    if place != "system":
        return _disjoint(known, [])
    spans = found(text, shared=shared)
    if spans is None:
        return []
    free = _disjoint([], spans) if shared else spans
    return _disjoint(known, _plain(text, free) if shared else free)


def masked(text: str, *, shared: bool, client: str = "", place: Place = "system") -> str:
    """``text`` with one fixed character for each span: equal masks, equal but for the clock."""
    return _MASK.join(_gaps(text, shaped(text, shared=shared, client=client, place=place)))


def differences(
    old: str, new: str, *, shared: bool, client: str = "", place: Place = "system"
) -> list[tuple[str, str]] | None:
    """What differs, None unless all of it is shaped (and there are at most a dozen places).

    Each pair is (old, new), widened to the line it stands in when that has at most 120 characters,
    else by 40 characters each way; by the line above where it would not say which place is meant.
    """
    if old == new:
        return []
    start, tail = _surroundings(old, new)
    left, right = old[start : len(old) - tail], new[start : len(new) - tail]
    told: dict[tuple[str, str], None] = {}
    twice: dict[str, bool] = {}
    for one, other in _windows(left, right):
        was = shaped(one, shared=shared, client=client, place=place)
        now = shaped(other, shared=shared, client=client, place=place)
        if _gaps(one, was) != _gaps(other, now):
            return None
        for a, b in zip(was, now, strict=True):
            if one[slice(*a)] != other[slice(*b)]:
                line = _shown(one, a)
                above = twice.setdefault(line, line not in twice and old.count(line) > 1)
                told[_shown(one, a, above=above), _shown(other, b, above=above)] = None
            if len(told) > _MOST:
                return None
    return list(told) or None


def pinned(text: str, frozen: str, client: str, *, place: Place = "system") -> str:
    """``text`` with the client's known clocks set to what they are in ``frozen``.

    ``frozen`` is an earlier text of the same conversation; the two may differ elsewhere. A clock
    that does not stand equally often in both is left as it is.
    """
    swaps: dict[Span, str] = {}
    for row in _rows(client, place):
        here, there = list(row.spans(text)), list(row.spans(frozen))
        if len(here) == len(there):
            swaps |= {a: frozen[slice(*b)] for a, b in zip(here, there, strict=True)}
    for start, stop in reversed(_disjoint(list(swaps), [])):
        text = text[:start] + swaps[start, stop] + text[stop:]
    return text


def note(pairs: Sequence[tuple[str, str]], *, where: str = "the system prompt") -> str:
    """The tail note that tells the newer values; ``""`` for no pairs."""
    if not pairs:
        return ""
    told = "\n".join(f'Where {where} says "{old}", it is now "{new}".' for old, new in pairs)
    return f"\n\n{OPEN}\n{told}\n{CLOSE}"


def coarse(text: str) -> str:
    """``text`` without the seconds of its clock times: equal results differ by under a minute."""
    text = _SECONDS.sub(r"\1", text)
    return _UNIX.sub(lambda match: str(int(match[1]) // 60 * 60), text)


def vanished(old: str, new: str) -> bool:
    """Whether ``new`` is ``old`` without one block of whole lines that is nothing but a clock.

    Qwen Code's date reminder in front of a user message, AnythingLLM's date behind one.
    """
    size = len(old) - len(new)
    if not 0 < size <= _BLOCK:
        return False
    first, last = len(new) - shared_end(old, new), common(old, new)
    edges = takewhile(lambda at: at <= last, (m.start() for m in _EDGE.finditer(old, first)))
    places = (at for at in edges if _whole(old, at, at + size))
    return any(only_clock(old[at : at + size]) for at in islice(places, _TRIES))


def only_clock(text: str) -> bool:
    """Whether ``text`` consists of nothing but a clock, with tags and blank lines around it.

    Within one ``<system-reminder>`` any line that speaks of time or date counts; elsewhere a line
    must have no word beyond those that tell the time.
    """
    if len(text) > _BLOCK:
        return False
    body = text.strip()
    reminder = body.startswith(OPEN) and body.endswith(CLOSE) and body.count(OPEN) == 1
    lines = [line for line in body.split("\n") if line.strip() and not _TAG.fullmatch(line)]
    return bool(lines) and all(_tells_time(line, any_words=reminder) for line in lines)


def _tells_time(line: str, *, any_words: bool) -> bool:
    spans = _disjoint([], found(line, shared=True) or [])
    return bool(spans) and speaks(line) and (any_words or _only_time(" ".join(_gaps(line, spans))))


def _only_time(words: str) -> bool:
    return all(_PLAIN.fullmatch(word) for word in _WORD.findall(words.lower()))


def _plain(text: str, spans: list[Span]) -> list[Span]:
    """Those in a line without a word beyond those that tell the time, heading included."""
    kept: list[Span] = []
    lines = Lines(text)
    for (start, stop), group in groupby(spans, key=lambda span: lines.cue(span[0])):
        here = list(group)
        edges = [start, *(edge for span in here for edge in span), stop]
        around = (text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
        if _only_time(" ".join(around)):
            kept += here
    return kept


def _rows(client: str, place: Place) -> Iterator[Clock]:
    return (row for row in KNOWN if row.client == client and row.place == place)


def _disjoint(known: list[Span], spans: list[Span]) -> list[Span]:
    """In order; of two that overlap a known clock wins, then the earlier, then the longer."""
    free = [s for s in spans if not any(s[0] < stop and start < s[1] for start, stop in known)]
    kept: list[Span] = []
    for start, stop in sorted(known + free, key=lambda span: (span[0], -span[1])):
        if not kept or start >= kept[-1][1]:
            kept.append((start, stop))
    return kept


def _surroundings(old: str, new: str) -> Span:
    """Where what differs begins and how much is equal behind it, some whole lines further out.

    What a span is depends on a few lines at most, so only these need to be read.
    """
    start = common(old, new)
    tail = shared_end(old, new, min(len(old), len(new)) - start)
    for _ in range(_LINES):
        start = old.rfind("\n", 0, max(start - 1, 0)) + 1
        end = old.find("\n", len(old) - tail + 1)
        tail = len(old) - end if end >= 0 else 0
    return start, tail


def _windows(old: str, new: str) -> list[tuple[str, str]]:
    """The lines that differ with some around them, neighbours together; else the whole texts.

    Empty when they cannot differ in clocks alone: no clock holds a line end, and a dozen lines are
    a log.
    """
    ours, theirs = old.split("\n"), new.split("\n")
    if len(ours) != len(theirs):
        return []
    pairs = enumerate(zip(ours, theirs, strict=True))
    differing = list(islice((at for at, (a, b) in pairs if a != b), _DIFFERING + 1))
    if len(differing) > _DIFFERING:
        return []
    windows: list[list[int]] = []
    for at in differing:
        if windows and at - _LINES <= windows[-1][1]:
            windows[-1][1] = at + _LINES
        else:
            windows.append([max(at - _LINES, 0), at + _LINES])
    return [("\n".join(ours[a : b + 1]), "\n".join(theirs[a : b + 1])) for a, b in windows]


def _gaps(text: str, spans: list[Span]) -> list[str]:
    """What stands between the spans, one more than there are spans."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _shown(text: str, span: Span, *, above: bool = False) -> str:
    start, stop = text.rfind("\n", 0, span[0]) + 1, text.find("\n", span[1])
    stop = len(text) if stop < 0 else stop
    if stop - start > _WIDTH:
        start, stop = max(start, span[0] - _AROUND), min(stop, span[1] + _AROUND)
    elif above:
        start = max(text.rfind("\n", 0, max(start - 1, 0)) + 1, start - _WIDTH)
    return text[start:stop].strip()


def _whole(text: str, start: int, stop: int) -> bool:
    """Whether a block is made of whole lines, or is one reminder."""
    if text.startswith(OPEN, start) and text[start:stop].rstrip().endswith(CLOSE):
        return True
    if start == 0 or text[start - 1] == "\n":
        return stop == len(text) or text[stop - 1] == "\n"
    return text[start] == "\n" and text[stop : stop + 1] in {"", "\n"}
