"""Commands that look: ``status``, ``slots``, ``conversations``, ``requests``, ``logs``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live

from proxy.client import Client
from proxy.commands import decisions, follow, tables
from proxy.commands.common import (
    PROBLEM,
    AsJson,
    asking,
    console,
    one_of,
    print_json,
    show,
)
from proxy.telemetry import limits, lines

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
]


@asking
def status(
    api: Client,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """How the proxy is, in a dozen lines. Exit status 1 while it is not ready."""
    if watch:
        with follow.until_interrupted():
            _watch(api, as_json=as_json)
    found = api.get("api/status")
    show(found, as_json, lambda: tables.status(found))
    if not found["ready"]:
        raise typer.Exit(PROBLEM)


@asking
def slots(api: Client, *, as_json: AsJson = False) -> None:
    """What each slot of the backend does and holds."""
    found = api.get("api/slots")
    show(found, as_json, lambda: tables.slots(found["slots"], time.time(), up=_up(api)))


def _up(api: Client) -> bool:
    """While the backend is down nobody knows what its slots hold."""
    return bool(api.get("api/status")["backend"]["up"])


@asking
def conversations(api: Client, *, as_json: AsJson = False) -> None:
    """What is remembered, the last used first; the command forget takes the ids."""
    found = api.get("api/conversations")
    show(found, as_json, lambda: tables.conversations(found["conversations"], time.time()))


@asking
def requests(
    api: Client,
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="[REQUEST_ID]", help="Only this one, or that begins so, in full."),
    ] = None,
    *,
    follow_on: Follow = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=limits.REQUESTS, help="At most so many.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """The decision log: what each request reused, and why it was cold."""
    if request_id is not None:
        known = {str(row["request_id"]): row for row in DECISIONS.rows(api, limits.REQUESTS)}
        row = known[one_of("request", request_id, list(known))]
        show(row, as_json, lambda: decisions.request_in_full(row, time.time()))
        return
    DECISIONS.print(api, limit, follow_on=follow_on, as_json=as_json)


@asking
def logs(
    api: Client,
    *,
    follow_on: Follow = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=limits.LOG_LINES, help="At most so many.")
    ] = 100,
    level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error, and above.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The proxy's log, as long as it is kept in memory."""
    if level is not None and level not in LEVELS:
        raise typer.BadParameter(f"one of {', '.join(LEVELS)}", param_hint="--level")
    LINES.print(api, limit, follow_on=follow_on, as_json=as_json, level=level)


LEVELS = ("debug", "info", "warning", "error")


def _rank(level: str | None) -> int:
    """What is no level of ours is as grave as the gravest; none asked for lets all pass."""
    if level is None:
        return 0
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


@dataclass(frozen=True, slots=True)
class Log:
    """One of the two logs: the ``name`` of its page, the ``kind`` of the events that go on with it.

    ``version`` tells its rows apart, ``draw`` makes a line of one, below ``head`` where people
    read; ``most`` are remembered.
    """

    name: str
    kind: str
    version: Callable[[Any], Any]
    draw: Callable[[Any], RenderableType]
    most: int
    newest_first: bool
    head: str = ""

    def rows(self, api: Client, limit: int, **query: str | None) -> list[Any]:
        """What there is, the newest last."""
        found: list[Any] = api.get(f"api/{self.name}", limit=limit, **query)[self.name]
        return found[::-1] if self.newest_first else found

    def print(
        self, api: Client, limit: int, *, follow_on: bool, as_json: bool, level: str | None = None
    ) -> None:
        """The newest ``limit`` rows of at least ``level``; and all that come, until Ctrl-C."""
        query = {} if level is None else {"level": level}
        if as_json and not follow_on:
            print_json(api.get(f"api/{self.name}", limit=limit, **query))
            return
        rows = self._all(api, limit, query) if follow_on else self.rows(api, limit, **query)
        if not rows:
            follow.say(f"no line of {level} or worse" if level else f"no {self.name} yet")
        out, head = console(), self.head
        with follow.until_interrupted():
            for row in rows:
                if level is not None and _rank(row["level"]) < _rank(level):
                    continue
                if as_json:
                    print_json(row, line=True)
                    continue
                if head:
                    out.print(head, style="bold")
                out.print(self.draw(row))
                head = ""

    def _all(self, api: Client, limit: int, query: dict[str, str]) -> Iterable[Any]:
        remembered = functools.partial(self.rows, api, self.most, **query)
        return follow.rows(api, self.kind, remembered, self.version, limit)


def _version_of_request(row: Any) -> Any:
    """A request is told twice when the cause of its cold answer was found afterwards.

    Its id may be the client's, who may give it twice.
    """
    return row["request_id"], row["at"], bool(row["cold"])


def _version_of_line(row: Any) -> Any:
    """A proxy that was started again counts from the start again."""
    return row["seq"], row["at"]


DECISIONS = Log(
    "requests",
    "request",
    _version_of_request,
    decisions.request,
    limits.REQUESTS,
    newest_first=True,
    head=decisions.HEAD,
)
LINES = Log("logs", "log", _version_of_line, lines.line, limits.LOG_LINES, newest_first=False)


def _watch(api: Client, *, as_json: bool) -> None:
    """Draw the state anew whenever it changes: in place on a terminal, else below."""
    out = console()
    state: dict[str, Any] = {"slots": {"slots": []}, "running": {"running": []}}
    with Live(console=out, auto_refresh=False, screen=False, transient=False) as live:
        say = live.console.print if out.is_terminal else follow.say  # it must not tear the picture
        for kind, found in follow.lasting(api, tell=say):
            if kind not in {"status", "slots", "running"}:
                continue
            state[kind] = found
            if "status" not in state:
                continue
            rows = state["slots"]["slots"], state["running"]["running"]
            if as_json:
                if kind == "status":
                    print_json(found, line=True)
            elif out.is_terminal:
                live.update(tables.watched(state["status"], *rows), refresh=True)
            elif kind == "status":
                out.print(tables.watched(found, *rows), "")
