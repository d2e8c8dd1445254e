"""Where known clients write the clock: one visible row per place (volatile-fields.md 1 to 3)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Place = Literal["system", "first-user"]

_PLACES = 8  # where one clock may stand in one text; bounds the work

_DATE = r"(?P<value>[^\n<>]{4,40})"  # a date in any locale: the label in front of it is the anchor
_ISO = r"(?P<value>[0-9]{4}-[0-9]{2}-[0-9]{2})"
_STAMP = r"(?P<value>[0-9]{4}-[^\n]{5,30}?[0-9])(?=\.?(?: [A-Z]|$))"
_TODAY = rf"[ \t]*(?:- )?[Tt]oday's [Dd]ate: {_DATE}$"
_META = "Conversation info (untrusted metadata):"
_META_LINE = (
    r"Conversation info \(untrusted metadata\):\n(?:```json\n)?\{\s*"
    r'(?:"[a-z_]{1,40}": ?"[^"\n]{0,200}",\s*){0,8}?'
)
_HERMES = r"\[(?P<value>[0-9]{1,3}% — [0-9,]{1,12}/[0-9,]{1,12}) chars\]$"
_STARTUP = r"We are setting up the context for our chat\."


@dataclass(frozen=True, slots=True)
class Clock:
    """A known client's clock.

    ``id``: as in volatile-fields.md. ``client``: the recognised program. ``lead``: literal text of
    the line, to find it without reading every line. ``line``: matches from the start of that line;
    its group ``value`` is what moves. ``place``: in the system text, or in the first user message
    (where nothing else is ever looked at). ``counter``: no clock but a counter or an id, so never
    shared between conversations.
    """

    id: str
    client: str
    lead: str
    line: re.Pattern[str]
    place: Place = "system"
    counter: bool = False

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the value stands in ``text``."""
        at = -1
        for _ in range(_PLACES):
            at = text.find(self.lead, at + 1)
            match = at >= 0 and self.line.match(text, text.rfind("\n", 0, at) + 1)
            if match and match.end("value") > at:
                yield match.span("value")
                at = match.end() - 1
            if at < 0:
                return


def _row(
    id_: str,
    client: str,
    lead: str,
    line: str,
    *,
    place: Place = "system",
    counter: bool = False,
) -> Clock:
    return Clock(id_, client, lead, re.compile(line, re.MULTILINE), place, counter)


KNOWN: tuple[Clock, ...] = (
    # Builds with `<env>` in system; since 2.1.332 the last line of the second message.
    _row("CC-4", "claude-code", "Today's date: ", _TODAY),
    _row("CC-4", "claude-code", "Today's date is ", rf"Today's date is {_ISO}\.?$"),
    _row(
        "CC-4",
        "claude-code",
        "# currentDate\n",
        rf"# currentDate\nToday's date is {_ISO}\.?$",
        place="first-user",
    ),
    _row("OC-1", "opencode", "Today's date: ", _TODAY),
    _row("KI-1", "kilo", "Today's date: ", _TODAY),
    _row("CL-1", "cline", ". Date: ", rf"[0-9]\. Date: {_DATE}$"),
    _row(
        "GO-1",
        "goose",
        "It is currently ",
        rf"(?:[^\n]*\. )?It is currently {_STAMP}",
    ),
    _row(
        "GO-1",
        "goose",
        "The current date is ",
        rf"(?:[^\n]*\. )?The current date is {_STAMP}",
    ),
    # The client's startup message; Qwen Code wraps it in <system-reminder>.
    _row(
        "QW-1",
        "qwen-code",
        "This is the Qwen Code. ",
        rf"This is the Qwen Code\. {_STARTUP}\n\s*Today's date is (?P<value>[^\n(]{{6,40}}?)\.?$",
        place="first-user",
    ),
    _row(
        "GE-1",
        "gemini-cli",
        "This is the Gemini CLI. ",
        rf"[ \t]*This is the Gemini CLI\. {_STARTUP}\n\s*Today's date is (?P<value>[^\n(]{{6,40}}?)"
        r"(?: \(formatted according to the user's locale\))?\.?$",
        place="first-user",
    ),
    _row("AI-1", "aider", "Current date: ", rf"[ \t]*(?:- )?Current date: {_ISO}$"),
    _row("CO-1", "continue", "Today's date: ", _TODAY),
    _row("ZE-1", "zed", "Today's Date: ", _TODAY),
    _row("CR-1", "crush", "Today's date: ", _TODAY),
    _row("PI-1", "pi", "Current date: ", rf"Current date: {_ISO}$"),
    _row(
        "PI-1",
        "pi",
        "Current date and time: ",
        r"Current date and time: (?P<value>[^\n]{8,80})$",
    ),
    _row(
        "HE-1",
        "hermes",
        "Conversation started: ",
        r"Conversation started: (?P<value>[A-Z][^\n]{8,60})$",
    ),
    _row(
        "HE-1",
        "hermes",
        "MEMORY (your personal notes) [",
        rf"MEMORY \(your personal notes\) {_HERMES}",
        counter=True,
    ),
    _row(
        "HE-1",
        "hermes",
        "USER PROFILE (who the user is) [",
        rf"USER PROFILE \(who the user is\) {_HERMES}",
        counter=True,
    ),
    _row(
        "HE-1",
        "hermes",
        "Session ID: ",
        r"Session ID: (?P<value>[\w-]{6,64})$",
        counter=True,
    ),
    _row(
        "OW-1",
        "openclaw",
        "## Current Date & Time\n",
        r"## Current Date & Time\n(?!Time zone:)(?P<value>[^\n]{6,100})$",
    ),
    _row("OW-1", "openclaw", "Current date: ", rf"Current date: {_ISO}$"),
    _row(
        "OW-1",
        "openclaw",
        _META,
        rf'{_META_LINE}"timestamp": ?"(?P<value>[^"\n]{{4,60}})"',
    ),
    _row(
        "OW-1",
        "openclaw",
        _META,
        rf'{_META_LINE}"message_id": ?"(?P<value>[^"\n]{{1,80}})"',
        counter=True,
    ),
    _row("GP-1", "gptme", "**UTC:** ", rf"\*\*UTC:\*\* {_ISO}$"),
    _row(
        "HA-1",
        "home-assistant",
        "Current time is ",
        r"Current time is (?P<value>[0-9]{2}:[0-9]{2}:[0-9]{2})\.",
    ),
    _row(
        "HA-1",
        "home-assistant",
        "Today's date is ",
        rf"(?:Current time is [0-9:]{{8}}\. )?Today's date is {_ISO}\.",
    ),
    _row(
        "AL-1",
        "anything-llm",
        "The current date and time is ",
        r"(?:[^\n]*[.!?] )?The current date and time is (?P<value>[^\n]{8,60}?)(?=\.(?: |$)|$)",
    ),
)
