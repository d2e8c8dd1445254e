"""Clocks and counters: what is one, what is none, and what is told about it.

Also ``proxy.core.normalise.clock_shapes``, which only it uses.
"""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.normalise.clock_shapes import DENSE
from proxy.core.normalise.clock_table import KNOWN, Place
from proxy.core.normalise.clocks import (
    coarse,
    differences,
    masked,
    note,
    only_clock,
    pinned,
    shaped,
    vanished,
)

MASK = "\uffff"

TIMES = [
    ("2026-10-09", "2026-10-10"),
    ("2026-10-09T14:31:07Z", "2026-10-09T14:32:10Z"),
    ("2026-10-09T14:31:07.532+02:00", "2026-11-01T09:00:00+01:00"),
    ("2026-10-09 14:31:07.532123", "2026-10-09 14:31:08.1"),
    ("2026-10-09 14:31:07 +02:00 (Friday)", "2026-10-10 00:01:02 +02:00 (Saturday)"),
    ("2026-10-09 (Friday)", "2026-10-10 (Saturday)"),
    ("2026-10-09 14:00 +00:00", "2026-10-09 15:00 +00:00"),
    ("2026/10/09", "2026/10/10"),
    ("2026年10月9日", "2026年10月10日"),
    ("Fri Oct 09 2026", "Sat Oct 10 2026"),
    ("Fri Oct  9 14:31:07 2026", "Fri Oct  9 14:31:08 2026"),
    ("Fri Oct  9 14:31:07 UTC 2026", "Fri Oct  9 14:31:08 UTC 2026"),
    ("Fri, 09 Oct 2026 14:31:07 +0000", "Sat, 10 Oct 2026 00:00:00 +0000"),
    (
        "Fri Oct 09 2026 14:31:07 GMT+0200 (Central European Summer Time)",
        "Mon Nov 30 2026 14:31:07 GMT+0100 (Central European Standard Time)",
    ),
    ("Friday, October 9, 2026", "Thursday, December 31, 2026"),
    ("Friday, October 09, 2026 02:31 PM", "Saturday, October 10, 2026 11:05 AM"),
    ("October 9, 2026", "May 31, 2026"),
    ("Sept. 9, 2026", "Oct. 10, 2026"),
    ("October 9th, 2026", "October 22nd, 2026"),
    ("9 October 2026", "30 November 2026"),
    ("9th of October 2026", "1st of November 2026"),
    ("09 Oct 2026", "10 Oct 2026"),
    ("10/9/2026", "12/31/2026"),
    ("9.10.2026", "31.12.2026"),
    ("14:31", "09:05"),
    ("14:31:07.532", "23:59:59.1"),
    ("14:31:07,532", "14:31:08,1"),
    ("2:31 PM", "12:05 AM"),
    ("2:31\u202fPM", "12:05\u202fAM"),
    ("02:31 p.m.", "11:00 a.m."),
    ("5 pm", "11 am"),
    ("14:31 UTC+2", "14:32 UTC+2"),
    ("06:00:31 PM PDT", "06:00:31 PM PST"),
    ("6:47 PM (America/New_York)", "9:00 AM (America/New_York)"),
    ("3:16", "4:20"),
]
NEEDS_A_CUE = [
    ("October 2026", "November 2026"),
    ("Friday", "Wednesday"),
    ("Oct 9", "Nov 30"),
    ("9 October", "30 November"),
    ("1760000000", "1760000061"),
    ("1760000000123", "1760000061007"),
]
COUNTERS = [
    ("[49% — 1,085/2,200 chars]", "[55% — 1,210/2,200 chars]"),
    ("123 tokens left", "99 tokens left"),
    ("~41k tokens remaining", "~9.5k tokens remaining"),
    ("<b>12/20 used</b>", "<b>13/20 used</b>"),
    ("3/20 messages", "4/20 messages"),
    ("turn 3 of 20", "turn 14 of 20"),
    ("#123 of 500", "#124 of 500"),
    ("count: 7", "count: 8"),
    ('{"message_count": 7}', '{"message_count": 12}'),
    ('"message_id":"682"', '"message_id":"1024"'),
    ("Message ID: 3EB0A1", "Message ID: 3EB0C2"),
    ("request_id = 'a1b2'", "request_id = 'ffe0'"),
    ("idle for 3 minutes", "idle for 2 hours"),
    ("idle for a few seconds", "idle for 45 minutes"),
    ("seen 3 minutes ago", "seen a minute ago"),
    ("elapsed: 5 sec", "elapsed: 12 sec"),
]
CONTENT = [
    ("state: 'off'", "state: 'on'"),
    ("state: '07:30'", "state: '08:00'"),
    ("temperature 21.5", "temperature 22.0"),
    ("temperature: 21", "temperature: 22"),
    ("brightness 40%", "brightness 50%"),
    ("battery 40% remaining", "battery 39% remaining"),
    ("$4.59 remaining", "$3.10 remaining"),
    ("price 10.50 EUR", "price 11.50 EUR"),
    ("version 2.1.188", "version 2.1.189"),
    ("OpenClaw 2026.9.6", "OpenClaw 2026.10.1"),
    ("http://127.0.0.1:8080", "http://127.0.0.1:8081"),
    ("localhost:11:30", "localhost:12:30"),
    ("main.py:12:30", "main.py:14:55"),
    ("port 12:30", "port 12:31"),
    ("line 12:30", "line 14:55"),
    ("16:9 aspect", "4:3 aspect"),
    ("16:10 ratio", "14:10 ratio"),
    ("1a2b3c4 fix", "9f8e7d6 fix"),
    (" M src/a.py", "?? src/b.py"),
    ("up to 3 commits", "up to 4 commits"),
    ("#ff8800", "#ff8801"),
    ("#123456", "#123457"),
    ("00:11:22:33:44:55", "00:11:22:33:44:56"),
    ("fe80::12:34", "fe80::12:35"),
    ("ISBN 1596543210", "ISBN 1596543211"),
    ("call 1650555123", "call 1650555124"),
    ("+1 650 555 1234", "+1 650 555 1235"),
    ("gpt-4o-2024-08-06", "gpt-4o-2024-11-20"),
    ("log-2026-10-09.txt", "log-2026-10-10.txt"),
    ("/var/2026-10-09/x", "/var/2026-10-10/x"),
    ("open 08:00-17:00", "open 09:00-18:00"),
    ("timeout 30 seconds", "timeout 60 seconds"),
    ("section 3 May be", "section 4 May be"),
    ("The user likes tea", "The user likes coffee"),
    ("Every Monday we ship", "Every Friday we ship"),
    ("May 3 people join", "May 4 people join"),
    ("message_id: string", "message_id: text"),
    ("99:99", "98:98"),
    ("2026-13-40", "2026-14-41"),
    ("cwd: /a/1", "cwd: /a/2"),
]
STARTUP = "We are setting up the context for our chat.\n"
LOCALE = "(formatted according to the user's locale)"
META = "Conversation info (untrusted metadata):"
LINES = {  # by (row, client, what leads to it): the text around a value, and two values
    ("CC-4", "claude-code", "Today's date: "): (
        "  Today's date: {}\n</env>",
        "2026-10-09",
        "2026-10-10",
    ),
    ("CC-4", "claude-code", "Today's date is "): (
        "x\n\nToday's date is {}.",
        "2026-11-30",
        "2026-12-01",
    ),
    ("CC-4", "claude-code", "# currentDate\n"): (
        "# currentDate\nToday's date is {}.\n</system-reminder>",
        "2026-10-09",
        "2026-10-10",
    ),
    ("OC-1", "opencode", "Today's date: "): (
        "<env>\n  Platform: linux\n  Today's date: {}\n</env>",
        "Sun Mar 22 2026",
        "Mon Mar 23 2026",
    ),
    ("KI-1", "kilo", "Today's date: "): (
        "  Today's date: {}\n",
        "Fri Oct 09 2026",
        "Sat Oct 10 2026",
    ),
    ("CL-1", "cline", ". Date: "): (
        "1. OS: x\n2. Date: {}\n3. IDE",
        "10/9/2026",
        "31. 12. 2026 r.",
    ),
    ("GO-1", "goose", "It is currently "): (
        "You are goose. It is currently {}\n",
        "2026-10-09 14:00 +00:00",
        "2026-10-09 15:00 +00:00",
    ),
    ("GO-1", "goose", "The current date is "): (
        "The current date is {}.\n",
        "2026-10-09 14:31:07",
        "2026-10-09 14:31:59",
    ),
    ("QW-1", "qwen-code", "This is the Qwen Code. "): (
        f"<system-reminder>\nThis is the Qwen Code. {STARTUP}Today's date is {{}}.\nMy system",
        "Monday, November 30, 2026",
        "Tuesday, December 1, 2026",
    ),
    ("GE-1", "gemini-cli", "This is the Gemini CLI. "): (
        f"  This is the Gemini CLI. {STARTUP}  Today's date is {{}} {LOCALE}.\n  My system",
        "Friday, October 9, 2026",
        "Samstag, 10. Oktober 2026",
    ),
    ("AI-1", "aider", "Current date: "): ("- Current date: {}\n- lint", "2026-10-09", "2026-10-10"),
    ("CO-1", "continue", "Today's date: "): (
        "Today's date: {}\n</env>",
        "2026-11-30",
        "2026-12-01",
    ),
    ("ZE-1", "zed", "Today's Date: "): ("- Today's Date: {}\n", "2026-10-09", "2026-10-10"),
    ("CR-1", "crush", "Today's date: "): ("Today's date: {}\n</env>", "10/9/2026", "10/10/2026"),
    ("PI-1", "pi", "Current date: "): ("Current date: {}\nCurrent wo", "2026-11-30", "2026-12-01"),
    ("PI-1", "pi", "Current date and time: "): (
        "Current date and time: {}\n",
        "Monday, March 9, 2026 at 06:00:31 PM PDT",
        "Monday, March 9, 2026 at 06:02:00 PM PDT",
    ),
    ("HE-1", "hermes", "Conversation started: "): (
        "Conversation started: {}\nModel: m",
        "Friday, October 09, 2026 02:31 PM",
        "Saturday, October 10, 2026 09:00 AM",
    ),
    ("HE-1", "hermes", "MEMORY (your personal notes) ["): (
        "══\nMEMORY (your personal notes) [{} chars]\n══",
        "49% — 1,085/2,200",
        "100% — 2,200/2,200",
    ),
    ("HE-1", "hermes", "USER PROFILE (who the user is) ["): (
        "══\nUSER PROFILE (who the user is) [{} chars]\n══",
        "9% — 123/1,375",
        "10% — 130/1,375",
    ),
    ("HE-1", "hermes", "Session ID: "): (
        "Session ID: {}\n",
        "20261009_143107_ab12",
        "20261010_0_ff",
    ),
    ("OW-1", "openclaw", "## Current Date & Time\n"): (
        "## Current Date & Time\n{}\n## Runtime",
        "Sunday, February 2, 2026, 6:47 PM (Europe/Berlin)",
        "Sunday, February 2, 2026, 6:49 PM (Europe/Berlin)",
    ),
    ("OW-1", "openclaw", "Current date: "): ("Current date: {}\n", "2026-11-30", "2026-12-01"),
    ("OW-1", "openclaw", "timestamp"): (
        f'{META}\n{{{{"message_id":"682","timestamp":"{{}}"}}}}',
        "17:41 CDT",
        "Sun 2026-04-05 20:59 GMT+3",
    ),
    ("OW-1", "openclaw", "message_id"): (
        f'{META}\n```json\n{{{{\n  "sender": "Ann",\n  "message_id": "{{}}"\n}}}}\n```',
        "682",
        "07975c3f-1e28-4748-8c99-8b40e23631d5",
    ),
    ("GP-1", "gptme", "**UTC:** "): ("## Current Date\n\n**UTC:** {}", "2026-11-30", "2026-12-01"),
    ("HA-1", "home-assistant", "Current time is "): (
        "Current time is {}. Today's date is 2026-10-09.\nYou are",
        "20:37:19",
        "20:41:02",
    ),
    ("HA-1", "home-assistant", "Today's date is "): (
        "Current time is 00:00:01. Today's date is {}.\nYou are",
        "2026-10-09",
        "2026-10-10",
    ),
    ("AL-1", "anything-llm", "The current date and time is "): (
        "Be kind. The current date and time is {}. More",
        "10/9/2026, 2:31:07 PM",
        "10/9/2026, 2:32:10 PM",
    ),
}
CUES = [
    "Current time is {}.",
    "Today's date: {}",
    "datetime={}",
    '"timestamp": "{}"',
    "<current_datetime>{}</current_datetime>",
    "currentDate: {}",
    "It is now {}",
    "Heute ist der {}",
    "## Current Time\n{}",
    "Date:\n\n{}",
]


@pytest.mark.parametrize(("old", "new"), TIMES)
def test_a_time_is_shaped_wherever_it_stands(old: str, new: str) -> None:
    """Within a conversation the shape is enough, and both values end up as the same mask."""
    assert differences(f"Say ({old}) twice", f"Say ({new}) twice", shared=False) == [
        (f"Say ({old}) twice", f"Say ({new}) twice")
    ]


@pytest.mark.parametrize("cue", CUES)
@pytest.mark.parametrize(("old", "new"), [*TIMES, *NEEDS_A_CUE])
def test_a_time_under_a_cue_is_shaped_for_all(old: str, new: str, cue: str) -> None:
    """In a line that speaks of time or date, a clock is one between conversations too."""
    for shared in (True, False):
        assert masked(cue.format(old), shared=shared) == masked(cue.format(new), shared=shared)
        assert MASK in masked(cue.format(old), shared=shared)


@pytest.mark.parametrize(("old", "new"), [pair for pair in TIMES if "Time" not in pair[0]])
def test_a_time_without_a_cue_is_not_shared(old: str, new: str) -> None:
    """Between conversations a time that no line calls one is content."""
    assert shaped(f"Sun rose\n\nDeliver {old} or\n", shared=True) == []
    assert differences(f"Deliver {old}", f"Deliver {new}", shared=True) is None


@pytest.mark.parametrize(
    "line",
    [
        "Current time is 20:37:19. Today's date is 2026-10-09.",
        "Today's date: Fri Oct 09 2026",
        "The current date and time is 10/9/2026, 2:31:07 PM.",
        "It is currently 2026-10-09 14:00 +00:00",
        "Current date: 2026-11-30",
        "Conversation started: Friday, October 09, 2026 02:31 PM",
        "  <current_date>2026-10-09</current_date>",
        "当前时间: 2026-10-09 14:31",
    ],
)
def test_a_line_that_only_tells_the_time_is_shared(line: str) -> None:
    """Whatever program wrote it."""
    assert shaped(f"Be kind.\n{line}\nBe brief.", shared=True)


@pytest.mark.parametrize(
    "line",
    [
        "Patient's date of birth: 1971-03-04",
        "Appointment date: 2026-10-09",
        "Passport expiry date: 2031-10-09",
        "Today's customer signed the contract on 2026-10-09.",
        "## Birth date\n1971-03-04",
        "Date of the surgery:\n\n2026-10-09 08:00",
        "You are Ann's clock. The time is 14:31.",
    ],
)
def test_a_date_of_somebodys_own_is_not_shared(line: str) -> None:
    """A line, or a heading, that says more than the time is this conversation's own."""
    assert shaped(f"Be kind.\n{line}\nBe brief.", shared=True) == []
    assert shaped(f"Be kind.\n{line}\nBe brief.", shared=False)


@pytest.mark.parametrize("shared", [True, False])
def test_a_text_full_of_times_is_a_log(shared: bool) -> None:
    """Up to a number of spans they are clocks; one more, and there are none."""
    line = "time: 14:31\n"
    assert len(shaped(line * DENSE, shared=shared)) == DENSE
    assert shaped(line * (DENSE + 1), shared=shared) == []
    assert masked(line * (DENSE + 1), shared=shared) == line * (DENSE + 1)


def test_more_differing_lines_than_one_looks_at_are_content() -> None:
    """Even where all of them say the same."""
    line = "time: 14:31\n"
    for count, found in ((64, [("time: 14:31", "time: 14:32")]), (65, None)):
        was = "\n".join(f"{line}{'x' * 9}" for _ in range(count))
        now = differences(was, was.replace("31", "32"), shared=False)
        assert (now is None) is (found is None)


def test_clocks_far_apart_are_told_both() -> None:
    """Only what surrounds a difference is read, wherever it stands."""
    text = "time: {}\n" + "Be kind.\n" * 100 + "date: {}"
    pairs = differences(
        text.format("14:31", "2026-10-09"), text.format("14:32", "2026-10-10"), shared=True
    )
    assert pairs == [("time: 14:31", "time: 14:32"), ("date: 2026-10-09", "date: 2026-10-10")]


@pytest.mark.parametrize(("old", "new"), NEEDS_A_CUE)
def test_half_a_date_without_a_cue_is_content(old: str, new: str) -> None:
    """A weekday, a month or a long number is no clock unless the line says so."""
    assert differences(f"Deliver {old} or", f"Deliver {new} or", shared=False) is None


@pytest.mark.parametrize(("old", "new"), COUNTERS)
def test_counters(old: str, new: str) -> None:
    """A counter with a cue is shaped within a conversation, and never between two."""
    assert differences(old, new, shared=False) == [(old, new)]
    assert differences(old, new, shared=True) is None


@pytest.mark.parametrize(("old", "new"), CONTENT)
def test_content_is_never_shaped(old: str, new: str) -> None:
    """States, prices, versions, addresses, positions and the like stay what they are."""
    for shared in (True, False):
        assert differences(f"- {old}\n", f"- {new}\n", shared=shared) is None


@pytest.mark.parametrize(("key", "example"), LINES.items(), ids=[f"{k[1]}-{k[2]}" for k in LINES])
def test_known_clocks(key: tuple[str, str, str], example: tuple[str, str, str]) -> None:
    """Each row finds its value at its place, for its client only, and pins it."""
    _, client, _ = key
    line, old, new = example
    place: Place = "first-user" if line.startswith(("# cur", "<system-", "  This is")) else "system"
    was, now = f"Be kind.\n{line.format(old)}", f"Be kind.\n{line.format(new)}"
    frozen = pinned(now + "\nmore", was, client, place=place)
    assert frozen == was + "\nmore"
    assert pinned(now, was, "llm", place=place) == now
    told = differences(frozen, now + "\nmore", shared=False, client=client, place=place)
    assert told is not None
    assert any(new in pair[1] and old in pair[0] for pair in told)


def test_every_row_has_an_example() -> None:
    """The examples find every row of the table, and nothing but a row finds them."""
    texts = [(client, line.format(old)) for (_, client, _), (line, old, _) in LINES.items()]
    for row in KNOWN:
        assert any(row.client == client and list(row.spans(text)) for client, text in texts), row
    assert len(KNOWN) == len(LINES)


def test_counters_of_a_client_are_not_shared() -> None:
    """A message id of one conversation never becomes another one's."""
    line, old, new = LINES["OW-1", "openclaw", "message_id"]
    a, b = line.format(old), line.format(new)
    assert differences(a, b, shared=True, client="openclaw") is None
    assert differences(a, b, shared=False, client="openclaw") is not None


def test_a_user_message_has_known_clocks_only() -> None:
    """What a user wrote is never looked at for shapes."""
    assert shaped("Today is 2026-10-09, 14:31", shared=False, place="first-user") == []
    said = "Tell me what `Today's date is 2026-10-09.` means"
    for client in ("claude-code", "qwen-code", "gemini-cli"):
        assert shaped(said, shared=False, client=client, place="first-user") == []


def test_differences_are_told_by_the_line() -> None:
    """A short line is shown whole and once; a long one is cut around the clock."""
    was = "Current time is 20:37:19. Today's date is 2026-10-09.\nBe kind."
    now = was.replace("20:37:19", "00:01:02").replace("10-09", "10-10")
    assert differences(was, now, shared=True, client="home-assistant") == [
        (was.removesuffix("\nBe kind."), now.removesuffix("\nBe kind."))
    ]
    long = f"{'a' * 100} the time is {{}} {'b' * 100}"
    [(old, new)] = differences(long.format("14:31"), long.format("14:32"), shared=False) or []
    assert old == f"{'a' * 27} the time is 14:31 {'b' * 39}"
    assert new == old.replace("31", "32")


def test_a_line_that_occurs_twice_is_told_with_the_one_above() -> None:
    """The note must say which of two equal lines it means."""
    was = "## Rome\ntime: 14:31\n## Oslo\ntime: 14:31"
    assert differences(was, was[:-2] + "32", shared=True) == [
        ("## Oslo\ntime: 14:31", "## Oslo\ntime: 14:32")
    ]


def test_one_difference_that_is_content_is_enough() -> None:
    """Anything else that differs leaves everything as it is."""
    was = "Current time is 20:37:19.\nlamp: 'off'"
    now = "Current time is 20:41:02.\nlamp: 'on'"
    assert differences(was, now, shared=False) is None
    assert differences(was, was + "\nBe brief.", shared=False) is None
    assert pinned(now, was, "home-assistant") == "Current time is 20:37:19.\nlamp: 'on'"


def test_a_log_is_no_clock() -> None:
    """More than a dozen differing lines are content."""
    was = "\n".join(f"{n}x at 14:{n}" for n in range(10, 40))
    assert differences(was, was.replace("14:", "15:"), shared=False) is None


def test_pinned_leaves_a_clock_that_came_or_went() -> None:
    """Pinning needs the clock equally often on both sides."""
    line = "Today's date: Fri Oct 09 2026"
    assert pinned(line, "Be kind.", "opencode") == line
    assert pinned(line, f"{line}\n{line}", "opencode") == line


def test_a_clock_is_looked_for_in_a_few_places_only() -> None:
    """A text made of nothing but leads costs a bounded number of looks."""
    line = "Current date: 2026-10-09\n"
    assert len(shaped(line * 20, shared=True, client="pi", place="system")) == 20
    assert pinned(line * 20, line.replace("09", "08") * 20, "pi").count("08") == 8


def test_note() -> None:
    """The note tells each newer value once, and is empty when nothing changed."""
    assert note([]) == ""
    assert note([("Current time is 20:37:19", "Current time is 20:41:02")]) == (
        '\n\n<system-reminder>\nWhere the system prompt says "Current time is 20:37:19", it is now'
        ' "Current time is 20:41:02".\n</system-reminder>'
    )
    assert 'Where the first message says "a"' in note([("a", "b")], where="the first message")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at 14:31:07.532 sharp", "at 14:31 sharp"),
        ("2026-10-09T14:31:07Z", "2026-10-09T14:31Z"),
        ("06:00:31 PM PDT", "06:00 PM PDT"),
        ("14:31", "14:31"),
        ("ts 1760000047, 1760000047123", "ts 1760000040, 1760000040"),
        ("00:11:22:33:44:55", "00:11:22:33:44:55"),
        ("42 tokens left", "42 tokens left"),
    ],
)
def test_coarse(text: str, expected: str) -> None:
    """Seconds go, everything else stays."""
    assert coarse(text) == expected


QWEN = (
    "<system-reminder>\nThe current date is: Monday, November 30, 2026. Note: This is the"
    ' authoritative current date — it may differ from the "Today\'s date" mentioned earlier in the'
    " conversation startup context.\n</system-reminder>"
)
APPENDED = "The current date and time is 10/9/2026, 2:31:07 PM."


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{QWEN}\nShow me a.py.", "Show me a.py."),
        (f"{QWEN}Show me a.py.", "Show me a.py."),
        (
            f"{QWEN}\n<system-reminder>\nTodo.\n</system-reminder>",
            "<system-reminder>\nTodo.\n</system-reminder>",
        ),
        (f"Hello.\n\n{APPENDED}", "Hello."),
        (f"Hello.\n\n{APPENDED}", "Hello.\n\n"),
        (f"Hello.\n{APPENDED}\nBye.", "Hello.\nBye."),
        ("<current_date>2026-10-09</current_date>\nHello.", "Hello."),
        ("<now>\nIt is 14:31 UTC\n</now>\nHello.", "Hello."),
        (QWEN, ""),
    ],
)
def test_a_clock_that_vanished(old: str, new: str) -> None:
    """A block of whole lines that is nothing but a clock may be gone."""
    assert vanished(old, new)
    assert not vanished(new, old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Hello.", "Hello."),
        ("Hello.\n\nRemind me today at 14:31", "Hello."),
        ("Hello.\nBye.", "Hello."),
        (f"Hello. {APPENDED}", "Hello. "),
        (f"{QWEN}\nShow me a.py.", "Show me b.py."),
        (
            "<system-reminder>\nPlan mode is on since 14:31.\nNo edits.\n</system-reminder>\nHi",
            "Hi",
        ),
        ("<a>\n\n</a>\nHello.", "Hello."),
        (f"{QWEN}\n<system-reminder>\nNo edits.\n</system-reminder>\nHi", "Hi"),
        ("Meet at 14:31.\nHi", "Hi"),
        ("A\nTime 14:31\nB", "AB"),
        ("aaaa", "aa"),
    ],
)
def test_what_vanished_is_no_clock(old: str, new: str) -> None:
    """Anything else that is gone, or a clock that shares its line, is a change of the text."""
    assert not vanished(old, new)


def test_only_clock() -> None:
    """A part of its own is a clock by the same measure; an empty one is none."""
    assert only_clock(QWEN)
    assert not only_clock("")
    assert not only_clock("The time has come")


MOMENTS = st.datetimes(dt.datetime(2020, 1, 1), dt.datetime(2039, 1, 1))  # noqa: DTZ001
FORMATS = st.sampled_from(
    [
        "Current time is %H:%M:%S. Today's date is %Y-%m-%d.",
        "datetime: %Y-%m-%dT%H:%M:%S.%f+00:00",
        "Today is %A, %B %d, %Y at %I:%M %p",
        "<date>%a %b %d %Y</date>",
        "the time: %a %b %d %H:%M:%S %Y",
        "Date: %d.%m.%Y; time: %I:%M %p UTC",
    ]
)
CLOCKY = (
    "14:31 :07 2026 2026-10-09 T Z Oct May Monday Fri 9 3 of turn count: message_id: # 16:9 time"
    " date state: ' / . , - ( ) \n \n\n ago idle a few seconds minutes tokens left used PM pm UTC"
    " +02:00 1760000000 \uffff é 年 月"
)
PIECES = st.sampled_from(CLOCKY.split(" ")) | st.text(max_size=3)
MESSES = st.builds(str.join, st.sampled_from(["", " "]), st.lists(PIECES, max_size=30))
CLIENTS = st.sampled_from(["", "pi", "home-assistant", "goose", "openclaw"])


@given(st.lists(st.tuples(FORMATS, MOMENTS, MOMENTS, st.text(max_size=20)), max_size=4))
def test_texts_equal_but_for_the_clock_have_equal_masks(
    lines: list[tuple[str, dt.datetime, dt.datetime, str]],
) -> None:
    """Whatever the moment, the mask is the same, between conversations too."""
    one = "\n".join(f"{a.strftime(how)}\n{rest}" for how, a, _, rest in lines)
    two = "\n".join(f"{b.strftime(how)}\n{rest}" for how, _, b, rest in lines)
    for shared in (True, False):
        assert masked(one, shared=shared) == masked(two, shared=shared)
        assert differences(one, two, shared=shared) is not None


@given(MESSES, CLIENTS, st.booleans())
def test_spans_and_masks(text: str, client: str, shared: bool) -> None:
    """Spans ascend and never touch nothing; masking again changes nothing; equal is equal."""
    spans = shaped(text, shared=shared, client=client)
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(edges)
    assert all(start < stop for start, stop in spans)
    mask = masked(text, shared=shared, client=client)
    assert masked(mask, shared=shared, client=client) == mask
    assert differences(text, text, shared=shared, client=client) == []
    assert pinned(text, text, client) == text


@given(MESSES, MESSES, MESSES, CLIENTS, st.booleans())
def test_differences_agree_with_the_masks(
    front: str, one: str, two: str, client: str, shared: bool
) -> None:
    """Reading only what surrounds the difference finds the same as reading everything."""
    a, b = f"{front}\n{one}\n{front}", f"{front}\n{two}\n{front}"
    same = masked(a, shared=shared, client=client) == masked(b, shared=shared, client=client)
    assert (differences(a, b, shared=shared, client=client) is not None) == same or MASK in a + b


@given(st.text(st.characters(exclude_categories=["Nd"]), max_size=200))
def test_text_without_figures_or_days_is_untouched(text: str) -> None:
    """No digit, no day, no duration: nothing to find."""
    if not any(word in text for word in ("day", "second", "minute", "hour")):
        assert masked(text, shared=False) == text
