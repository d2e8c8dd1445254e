"""One scene per rule: a conversation in which it fires, with and without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.core.normalise import Result
from proxy.core.normalise.system import AGAIN
from proxy.core.template import Traits
from tests.unit.core.normalise.kit import (
    Desk,
    Message,
    assistant,
    call,
    result,
    system,
    tool,
    user,
)

BILLING = "x-anthropic-billing-header: cc_version=2.1.188.4f3; cc_entrypoint=cli; cch=0a1b2;"
DATED = Traits(writes_date=True, has_date_string=True)
GIT = "gitStatus: This is the git status.\nCurrent branch: {}\n\nRecent commits:\n1a2b3c4 fix"
REMINDER = "<system-reminder>\nYour mode has changed from plan to build.\n</system-reminder>"
TODAY = "<system-reminder>\nToday's date is 2026-10-09.\n</system-reminder>\n\n"
LONG = "a long answer that no other conversation has"


@dataclass(frozen=True)
class Scene:
    """``play`` returns the last request; ``want``: what is sent of it, ``was``: without the rule.

    ``desk``: how the proxy is set up. ``also``: other rules that have to be off for ``was``.
    """

    play: Callable[[Desk], Result]
    want: Mapping[str, Any]
    was: Mapping[str, Any]
    desk: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def part(text: str, **more: Any) -> dict[str, Any]:
    """A text part."""
    return {"type": "text", "text": text, **more}


def told(*pairs: tuple[str, str], where: str = "the system prompt") -> str:
    """A note as the model reads it."""
    lines = "\n".join(f'Where {where} says "{old}", it is now "{new}".' for old, new in pairs)
    return f"\n\n<system-reminder>\n{lines}\n</system-reminder>"


def once(*messages: Message, **more: Any) -> Callable[[Desk], Result]:
    """A single request."""
    return lambda desk: desk.ask(*messages, **more)


def twice(
    first: list[Message],
    said: Message,
    then: list[Message],
    tools: tuple[list[Message], list[Message]] | None = None,
) -> Callable[[Desk], Result]:
    """A request, its answer, and the request that follows."""

    def play(desk: Desk) -> Result:
        before: dict[str, Any] = {"tools": tools[0]} if tools else {}
        after: dict[str, Any] = {"tools": tools[1]} if tools else {}
        desk.hear(desk.ask(*first, **before), said)
        return desk.ask(*then, **after)

    return play


def replayed(desk: Desk) -> Result:
    """The client trims an answer, twice; the second time it is known how it went."""
    desk.hear(desk.ask(user("q")), assistant("hi \n"))
    desk.hear(desk.ask(user("q"), assistant("hi"), user("r")), assistant("ho"))
    return desk.ask(user("q"), assistant("hi"), user("r"), assistant("ho"), user("s"))


def next_day(desk: Desk) -> Result:
    """A conversation that goes on behind midnight."""
    desk.today = "09 Oct 2026"
    desk.hear(desk.ask(user("q")), assistant(LONG))
    desk.today = "10 Oct 2026"
    return desk.ask(user("q"), assistant(LONG), user("r"))


def _clocked(text: str, date: str) -> Message:
    return system(f"You are nice.\n{text}\nToday's date: {date}\nBe brief.")


_ASKED = call("f", '{"a": 1.0, "b": 2}', "id-one")
_AGAIN = call("f", '{"b":2,"a":1}', "id-one")
_LATER = call("f", '{"a": 1.0, "b": 2}', "id-two")
_Q = user("q")
_HISTORY = [_Q, assistant("first"), user("p")]
_TWO = [system("a"), system("b"), _Q]
_MID = [system("a"), _Q, system("b")]

SCENES: Mapping[str, Scene] = {
    "billing-header": Scene(
        once(system([part(BILLING), part("You are"), part("nice.")]), _Q),
        {"messages": [system([part("You are"), part("nice.")]), _Q]},
        {"messages": [system([part(BILLING), part("You are"), part("nice.")]), _Q]},
    ),
    "cache-control": Scene(
        once(
            user([part("a"), part("b", cache_control={"type": "ephemeral"})]),
            context_management={"edits": []},
            tools=[{**tool("f"), "cache_control": {}}],
        ),
        {"messages": [user([part("a"), part("b")])], "tools": [tool("f")]},
        {
            "messages": [user([part("a"), part("b", cache_control={"type": "ephemeral"})])],
            "tools": [{**tool("f"), "cache_control": {}}],
            "context_management": {"edits": []},
        },
    ),
    "single-part": Scene(
        once(user([part("a")])), {"messages": [user("a")]}, {"messages": [user([part("a")])]}
    ),
    "total-tokens": Scene(
        once(_Q, system("<total_tokens>14 tokens left</total_tokens>")),
        {"messages": [_Q]},
        {"messages": [_Q, system("<total_tokens>14 tokens left</total_tokens>")]},
    ),
    "replay": Scene(
        replayed,
        {"messages": [_Q, assistant("hi \n"), user("r"), assistant("ho"), user("s")]},
        {"messages": [_Q, assistant("hi"), user("r"), assistant("ho"), user("s")]},
        also=("trimmed-text",),
    ),
    "known-clocks": Scene(
        twice(
            [_clocked("Skills: a, b", "2026-10-09"), *_HISTORY],
            assistant("hm"),
            [_clocked("Skills: a, b, c", "2026-10-10"), *_HISTORY, assistant("hm"), user("r")],
        ),
        {
            "messages": [
                _clocked("Skills: a, b, c", "2026-10-09"),
                *_HISTORY,
                assistant("hm"),
                user("r" + told(("Today's date: 2026-10-09", "Today's date: 2026-10-10"))),
            ]
        },
        {
            "messages": [
                _clocked("Skills: a, b, c", "2026-10-10"),
                *_HISTORY,
                assistant("hm"),
                user("r"),
            ]
        },
        {"client": "opencode"},
    ),
    "clock": Scene(
        twice(
            [system("It is 10:00."), _Q],
            assistant("hm"),
            [system("It is 10:01."), _Q, assistant("hm"), user("r")],
        ),
        {
            "messages": [
                system("It is 10:00."),
                _Q,
                assistant("hm"),
                user("r" + told(("It is 10:00.", "It is 10:01."))),
            ]
        },
        {"messages": [system("It is 10:01."), _Q, assistant("hm"), user("r")]},
    ),
    "git-status": Scene(
        twice(
            [system(GIT.format("main")), _Q],
            assistant("hm"),
            [system(GIT.format("dev")), _Q, assistant("hm"), user("r")],
        ),
        {
            "messages": [
                system(GIT.format("main")),
                _Q,
                assistant("hm"),
                user("r" + told((GIT.format("main"), GIT.format("dev")))),
            ]
        },
        {"messages": [system(GIT.format("dev")), _Q, assistant("hm"), user("r")]},
    ),
    "memory": Scene(
        twice(
            [system("S\n<memory_context>likes tea</memory_context>"), *_HISTORY],
            assistant("hm"),
            [
                system("S\n<memory_context>likes coffee</memory_context>"),
                *_HISTORY, assistant("hm"), user("r"),
            ],
        ),
        {
            "messages": [
                system("S\n<memory_context>likes tea</memory_context>"),
                *_HISTORY,
                assistant("hm"),
                user(
                    "r"
                    + told(
                        (
                            "<memory_context>likes tea</memory_context>",
                            "<memory_context>likes coffee</memory_context>",
                        )
                    )
                ),
            ]
        },
        {
            "messages": [
                system("S\n<memory_context>likes coffee</memory_context>"),
                *_HISTORY, assistant("hm"), user("r"),
            ]
        },
    ),
    "vanished-clock": Scene(
        twice(
            [user(TODAY + "q")], assistant("hm"), [user("q"), assistant("hm"), user("r")]
        ),
        {"messages": [user(TODAY + "q"), assistant("hm"), user("r")]},
        {"messages": [user("q"), assistant("hm"), user("r")]},
    ),
    "moved-reminder": Scene(
        twice(
            [user(f"q\n\n{REMINDER}")],
            assistant("hm"),
            [user("q"), assistant("hm"), user(f"r\n\n{REMINDER}")],
        ),
        {"messages": [user(f"q\n\n{REMINDER}"), assistant("hm"), user(f"r\n\n{REMINDER}")]},
        {"messages": [user("q"), assistant("hm"), user(f"r\n\n{REMINDER}")]},
    ),
    "tool-order": Scene(
        twice(
            [_Q],
            assistant("hm"),
            [_Q, assistant("hm"), user("r")],
            ([tool("f"), tool("g")], [tool("h"), tool("g"), dict(reversed(tool("f").items()))]),
        ),
        {"tools": [tool("f"), tool("g"), tool("h")]},
        {"tools": [tool("h"), tool("g"), dict(reversed(tool("f").items()))]},
    ),
    "removed-tools": Scene(
        twice(
            [_Q],
            assistant("hm"),
            [_Q, assistant("hm"), user("r")],
            ([tool("f"), tool("g")], [tool("g"), tool("h")]),
        ),
        {"tools": [tool("f"), tool("g"), tool("h")]},
        {"tools": [tool("g"), tool("h")]},
    ),
    "trimmed-text": Scene(
        twice([_Q], assistant("\nhi  "), [_Q, assistant("hi"), user("r")]),
        {"messages": [_Q, assistant("\nhi  "), user("r")]},
        {"messages": [_Q, assistant("hi"), user("r")]},
    ),
    "tool-arguments": Scene(
        twice([_Q], assistant("", _ASKED), [_Q, assistant("", _AGAIN), result("ok", "id-one")]),
        {"messages": [_Q, assistant("", _ASKED), result("ok", "id-one")]},
        {"messages": [_Q, assistant("", _AGAIN), result("ok", "id-one")]},
    ),
    "tool-results": Scene(
        twice(
            [_Q, assistant("", _ASKED), result('{"a": 1}', "id-one")],
            assistant("hm"),
            [_Q, assistant("", _ASKED), result('{"a":1.0}', "id-one"), assistant("hm"), user("r")],
        ),
        {
            "messages": [
                _Q, assistant("", _ASKED), result('{"a": 1}', "id-one"),
                assistant("hm"), user("r"),
            ]
        },
        {
            "messages": [
                _Q, assistant("", _ASKED), result('{"a":1.0}', "id-one"),
                assistant("hm"), user("r"),
            ]
        },
    ),
    "call-ids": Scene(
        twice([_Q], assistant("", _ASKED), [_Q, assistant("", _LATER), result("ok", "id-two")]),
        {"messages": [_Q, assistant("", _ASKED), result("ok", "id-one")]},
        {"messages": [_Q, assistant("", _LATER), result("ok", "id-two")]},
    ),
    "reasoning": Scene(
        twice(
            [_Q],
            assistant("", _ASKED, reasoning_content="\nbecause"),
            [_Q, assistant("", _ASKED), result("ok", "id-one")],
        ),
        {
            "messages": [
                _Q,
                assistant("", _ASKED) | {"reasoning_content": "\nbecause"},
                result("ok", "id-one"),
            ]
        },
        {"messages": [_Q, assistant("", _ASKED), result("ok", "id-one")]},
    ),
    "template-date": Scene(
        next_day,
        {
            "chat_template_kwargs": {"date_string": "09 Oct 2026"},
            "messages": [
                _Q,
                assistant(LONG),
                user("r" + told(("Today Date: 09 Oct 2026", "Today Date: 10 Oct 2026"))),
            ],
        },
        {"messages": [_Q, assistant(LONG), user("r")]},
        {"traits": DATED},
    ),
    "preserve-thinking": Scene(
        once(_Q, chat_template_kwargs={"a": 1}),
        {"chat_template_kwargs": {"a": 1, "preserve_thinking": True}},
        {"chat_template_kwargs": {"a": 1}},
    ),
    "tail-note": Scene(
        lambda desk: (
            desk.ask(system("It is 10:00."), _Q),
            desk.ask(system("It is 10:01."), _Q, assistant("hm"), user("r")),
            desk.ask(
                system("It is 10:00."), _Q, assistant("hm"), user("r"), assistant("a"), user("s")
            ),
        )[-1],
        {
            "messages": [
                system("It is 10:00."),
                _Q,
                assistant("hm"),
                user("r" + told(("It is 10:00.", "It is 10:01."))),
                assistant("a"),
                user("s" + AGAIN),
            ]
        },
        {
            "messages": [
                system("It is 10:00."), _Q, assistant("hm"), user("r"), assistant("a"), user("s"),
            ]
        },
    ),
    "leading-systems": Scene(
        once(*_TWO),
        {"messages": [system("a\n\nb"), _Q]},
        {"messages": _TWO},
        {"traits": Traits(two_systems=False)},
    ),
    "system-in-place": Scene(
        once(*_MID),
        {
            "messages": [
                system("a"), user("q\n\n<system-reminder>\nb\n</system-reminder>"),
            ]
        },
        {"messages": _MID},
        {"traits": Traits(mid_system=False)},
    ),
}  # fmt: skip
