"""What is shaped like a clock or a counter, wherever it stands (volatile-fields.md, section 0).

Linear in the length of the text: nothing in a pattern repeats without a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

Span = tuple[int, int]

DENSE = 512  # a text with more times and counters than this is a log,
LOOKS = 4096  # or with more numbers,
READ = 65_536  # or with more characters around them that may speak of time
_HEADING_MAX = 120  # a longer line above is a paragraph, not a heading

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAYNAME = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_WEEKDAY = rf"(?:{_DAYNAME}|Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_YEAR = r"(?:19|20)[0-9]{2}"
_NTH = r"(?:st|nd|rd|th)?"
_OFFSET = r"[+-][0-9]{2}:?[0-9]{2}"
_TIME = r":[0-5][0-9](?::[0-5][0-9](?:[.,][0-9]{1,9})?)?"
_AMPM = r"[ \u00a0\u202f]?(?:[AP]M|[ap]m|[AaPp]\.[Mm]\.)"  # ICU writes U+202F
_UNIT = r"(?:sec(?:ond)?|min(?:ute)?|hour|day|week|month)s?"
_ZONE = (
    r"(?:UTC|GMT|[PMCEA][SD]T|CES?T|EES?T|WES?T|BST|IST|MSK|JST|KST|SGT|HKT|AE[SD]T|AC[SD]T|AWST"
    r"|NZ[SD]T)"
)
_THING = r"(?:tokens?|messages?|turns?|requests?|steps?|calls?|chars|characters)"
_AMOUNT = r"[0-9,]{0,12}(?:\.[0-9]{1,3})?[kKmM]?"

# The first digit is eaten before the alternatives, which look back at it where its value counts.
_START = r"[0-9](?<![A-Za-z0-9_.:/+$€£-][0-9])(?<![0-9],[0-9])"
_H = r"(?:(?<=[01])[0-9]|(?<=2)[0-3])?"  # the rest of an hour
_D = r"(?:(?<=[0-2])[0-9]|(?<=3)[01])?"  # the rest of a day or month
_Y = r"(?:(?<=1)9|(?<=2)0)[0-9]{2}"  # the rest of a year
_AFTER_MONTH = (
    r"(?:(?<=(?:ary|ber|rch|ril|May|une|uly|ust|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|ept|Oct|Nov|Dec)"
    r" [0-9])|(?<=[a-z]  [0-9])|(?<=[a-z]\. [0-9]))"
)
_STOP = r"(?![A-Za-z0-9_:/%]|[.,-][A-Za-z0-9_])"
_CLOCKS = (
    rf"(?P<iso>{_Y}([-/])(?:0?[1-9]|1[0-2])\2(?:[12][0-9]|3[01]|0?[1-9])"
    rf"(?:[T ](?:[01]?[0-9]|2[0-3]){_TIME}(?:Z|{_OFFSET})?)?)"
    # 08:00-17:00 are opening hours, so an offset needs seconds in front of it
    rf"|(?P<clock>{_H}(?:{_TIME}(?:Z|(?<=:[0-9]{{2}}:[0-9]{{2}}){_OFFSET}|{_AMPM})?|{_AMPM}))"
    rf"|(?P<numeric>{_D}/[0-3]?[0-9]/{_YEAR}|{_D}\. ?[01]?[0-9]\. ?{_YEAR})"
    rf"|(?P<daymonth>{_D}(?:{_NTH}|\.) (?:of )?{_MONTH}\b\.?(?:,? {_YEAR})?)"
    r"|(?P<cjk>[0-9]{3}年[0-9]{1,2}月[0-9]{1,2}日)"
    rf"|(?P<month>{_AFTER_MONTH}(?:{_D}{_NTH}(?:,? {_YEAR})?|{_Y}))"
    r"|(?P<unix>(?<=1)[5-9][0-9]{8}(?:[0-9]{3})?)"
)
_COUNTERS = (
    rf"|(?P<duration>[0-9]{{0,4}} ?{_UNIT}(?: ago)?)"
    rf"|(?P<left>[0-9]{{0,2}}% — [0-9][0-9,]*/[0-9][0-9,]* chars"
    rf"|{_AMOUNT}(?: ?/ ?[0-9]{_AMOUNT})?(?: {_THING})? ?(?:left|remaining|used)"
    rf"|{_AMOUNT} ?/ ?[0-9]{_AMOUNT} {_THING})"
    r"|(?P<of>[0-9]{0,6} of [0-9]{1,7})"
    r"|(?P<count>(?:(?<=[:=#] [0-9])|(?<=[:=#][0-9]))[0-9]{0,8})"
)
_CLOCK_SHAPE = re.compile(f"{_START}(?:{_CLOCKS}){_STOP}")
_ANY_SHAPE = re.compile(f"{_START}(?:{_CLOCKS}{_COUNTERS}){_STOP}")

_BEFORE = re.compile(rf"(?<![A-Za-z])(?:{_WEEKDAY}\.?,? {{1,2}})?({_MONTH}\.? {{1,2}})?$")
_FULL = re.compile(rf"[^0-9]{{1,16}}{_YEAR}$")  # a day, then a year
_CTIME = re.compile(r" {1,2}[0-9]{1,2}:[0-9]{2}")  # Oct  9 14:31:07 2026
_BEHIND = re.compile(
    rf"(?: ?{_ZONE}(?:[+-][0-9]{{1,2}}(?::?[0-9]{{2}})?)?(?!\w)| {_OFFSET}(?!\w)"
    rf"| {_YEAR}(?![\w:/-])"
    rf"| \((?:{_DAYNAME}|{_ZONE}|[A-Z][A-Za-z_]{{1,20}}(?:/[A-Za-z_]{{2,20}}){{1,2}}"
    r"|[A-Z][a-z]{2,12}(?: [A-Z][a-z]{2,12}){0,3} Time)\)){0,4}"
)
CUE = re.compile(
    r"(?<![a-z])(?:date|time|datetime|timestamp|today|tonight|now|clock|weekday|currently|o'clock"
    r"|as of|started|current day|day of (?:the )?week|day:|unix|epoch|heute|datum|uhrzeit|heure"
    r"|aujourd'hui|fecha|hora|hoy|oggi)(?![a-z])"
    rf"|(?-i:[a-z](?:Date|Time|Day)(?![a-z]))|(?<![a-z])it(?: is|'s) (?:[0-9]|{_DAYNAME})"
    r"|当前|现在|今天|时间|日期|現在|今日|時刻",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[ \t]*(?:#{1,6} |\*\*|<[a-z])|[^\n]*[:>][ \t]*$")
_ELAPSED = re.compile(
    r"\b(?:ago|idle|elapsed|inactive|uptime)\b|\bsince (?:the |your |our )?last\b", re.IGNORECASE
)
# The word in front of digits that are something else: a state, a position, a version.
_OTHER = re.compile(
    r"state|last_changed|last_updated|version|port|lines?|col|column|ratio|aspect|isbn|chapter|verse"
)
_NOT_BEHIND = re.compile(r" (?:aspect|ratio|display|screen|monitor)\b")
_COUNTER_KINDS = frozenset({"duration", "left", "of", "count"})
_THINGS = re.compile(_THING)
_NUMBERED = frozenset({"turn", "step", "message", "iteration", "request", "round"})
_COUNTED = re.compile(
    r"counter|(?:(?:message|msg|turn|token|request|step)_)?count|turn|iteration|tokens_(?:left|used)"
)
_ID = re.compile(
    r"(?:(?<=M)|(?<=m)|(?<=R)|(?<=r))(?:essage|equest)[_ ]?[Ii][Dd]['\"]?\s{0,4}[:=]\s{0,4}['\"]?"
    r"([\w:.-]{0,60}[0-9][\w:.-]{0,60})"
)
_DAY_OF_WEEK = re.compile(rf"(?<![A-Za-z]){_DAYNAME}$")
_FEW = ("a few seconds", "a minute", "an hour", "a day")

# Where a number begins, searched in bytes whose digits are all zeros: a pattern that starts with
# one literal skips all other text at memory speed.
_NUMBER = re.compile(rb"0(?<![A-Za-z0-9_.:/+$-]0)")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def found(text: str, *, shared: bool) -> list[Span] | None:
    """Spans that look like a clock, in no order and possibly overlapping; None for a log.

    ``shared``: only where the line, or the heading above it, speaks of time or date; no counters,
    no durations. A log has more than ``DENSE`` of them, or ``LOOKS`` places that could be one.
    """
    lines = Lines(text)
    looks = chain(_digits(text, lines, shared=shared), _weekdays(text, lines))
    if not shared:
        looks = chain(looks, _words(text, lines), _ids(text))
    spans: list[Span] = []
    for count, span in enumerate(looks):
        if span is not None:
            spans.append(span)
        if len(spans) > DENSE or count >= LOOKS or lines.read > READ:
            return None
    return spans


def speaks(line: str) -> bool:
    """Whether ``line`` speaks of time or date."""
    return bool(CUE.search(line))


class Lines:
    """Whether the line around a place speaks of time; read once as long as places ascend."""

    def __init__(self, text: str) -> None:
        """Nothing is read yet."""
        self._text = text
        self.read = 0  # characters looked through
        self._start, self._end = 0, -1
        self._speak: bool | None = None
        self._elapsed: bool | None = None

    def speak(self, at: int) -> bool:
        """Whether the line at ``at``, or the heading right above it, speaks of time or date."""
        self._go(at)
        if self._speak is None:
            self._speak = self._own() or self._heading() is not None
        return self._speak

    def cue(self, at: int) -> Span:
        """The line at ``at``, from the heading right above it if only that one speaks of time."""
        self._go(at)
        heading = None if self._own() else self._heading()
        return self._start if heading is None else heading, self._end

    def elapsed(self, at: int) -> bool:
        """Whether the line at ``at`` tells how long something lasts or how long ago it was."""
        self._go(at)
        if self._elapsed is None:
            self._elapsed = self._search(_ELAPSED)
        return self._elapsed

    def _go(self, at: int) -> None:
        if not self._start <= at <= self._end:
            end = self._text.find("\n", at)
            self._start = self._text.rfind("\n", 0, at) + 1
            self._end = len(self._text) if end < 0 else end
            self._speak = self._elapsed = None

    def _own(self) -> bool:
        return self._search(CUE)

    def _search(self, words: re.Pattern[str]) -> bool:
        self.read += self._end - self._start
        return self.read <= READ and bool(words.search(self._text, self._start, self._end))

    def _heading(self) -> int | None:
        """Where a heading begins that speaks of time."""
        end = max(self._start - 1, 0)
        if end and self._text[end - 1] == "\n":
            end -= 1  # one blank line below a heading
        start = self._text.rfind("\n", 0, end) + 1
        if end - start > _HEADING_MAX:
            return None
        above = self._text[start:end]
        return start if _HEADING.match(above) and CUE.search(above) else None


def _digits(text: str, lines: Lines, *, shared: bool) -> Iterator[Span | None]:
    """Everything that starts with a digit, with what belongs to it before and behind.

    None, here and below: looked at, and nothing.
    """
    shape = _CLOCK_SHAPE if shared else _ANY_SHAPE
    marks, done = text.encode("latin-1", "replace").translate(_ZEROS), 0
    for number in _NUMBER.finditer(marks):
        match = shape.match(text, number.start()) if number.start() >= done else None
        if not match:
            yield None
            continue
        start, done = match.span()
        before = text[max(0, start - 40) : start]
        words = before.rstrip(" '\":=#").split()
        word = words[-1].lower().lstrip("{[(*-'\"") if words else ""
        if _OTHER.fullmatch(word) or _NOT_BEHIND.match(text, done):
            yield None
            continue
        if match.lastgroup in _COUNTER_KINDS:
            if _counts(match, before, word) or (
                match.lastgroup == "duration" and lines.elapsed(start)
            ):
                yield start, done
            else:
                yield None
            continue
        lead = _lead(match, before)
        # Half a date, or a bare number, is a clock only by what the line says.
        whole = _whole(match) and not shared
        if lead is not None and (whole or lines.speak(start)):
            behind = _BEHIND.match(text, done)
            done = behind.end() if behind else done
            yield start - len(lead), done
        else:
            yield None


def _lead(match: re.Match[str], before: str) -> str | None:
    """The weekday and month in front, None where a month is wanted and there is none."""
    lead = _BEFORE.search(before)
    if match.lastgroup == "month":
        return lead[0] if lead and lead[1] else None
    return lead[0] if lead and not lead[1] else ""


def _whole(match: re.Match[str]) -> bool:
    if match.lastgroup not in {"month", "daymonth", "unix"}:
        return True
    return bool(_FULL.search(match[0]) or _CTIME.match(match.string, match.end()))


def _counts(match: re.Match[str], before: str, word: str) -> bool:
    """Whether there is a cue that the number is a counter."""
    if match.lastgroup == "left":
        return "/" in match[0] or bool(_THINGS.search(match[0]))
    if match.lastgroup == "of":
        return word in _NUMBERED or before.endswith("#")
    return match.lastgroup == "count" and bool(_COUNTED.fullmatch(word))


def _weekdays(text: str, lines: Lines) -> Iterator[Span | None]:
    """Days of the week in a line that speaks of time or date."""
    at = text.find("day")
    while at >= 0:
        name = _DAY_OF_WEEK.search(text, max(0, at - 6), at + 3)
        named = name and not text[at + 3 : at + 4].isalnum() and lines.speak(at)
        yield name.span() if name and named else None
        at = text.find("day", at + 3)


def _words(text: str, lines: Lines) -> Iterator[Span | None]:
    """Durations without a digit."""
    for few in _FEW:
        at = text.find(few)
        while at >= 0:
            end = at + len(few)
            lasts = not text[end : end + 1].isalnum() and lines.elapsed(at)
            yield (at, end + 4 * text.startswith(" ago", end)) if lasts else None
            at = text.find(few, end)


def _ids(text: str) -> Iterator[Span | None]:
    """The number of a message or request."""
    for name in ("essage", "equest"):
        at = text.find(name)
        while at >= 0:
            value = _ID.match(text, at)
            yield value.span(1) if value else None
            at = text.find(name, at + len(name))
