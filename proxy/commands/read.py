"""Commands that look: ``status``, ``slots``, ``conversations``, ``requests``, ``logs``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live

from proxy.commands import tables
from proxy.commands.common import (
    PROBLEM,
    AsJson,
    ConfigFile,
    Key,
    Url,
    console,
    one_of,
    print_json,
    show,
    talking,
)

REMEMBERED = 512  # requests
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")]
Limit = Annotated[
    int, typer.Option("--limit", "-n", min=1, max=REMEMBERED, help="At most so many.")
]


def status(
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, until Ctrl-C.")] = False,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """How the proxy is, in a dozen lines. Exit status 1 while it is not ready."""
    with talking(url, key, config) as api:
        if watch:
            _watch(api.events(), as_json)
            return
        found = api.get("api/status")
    show(found, as_json, lambda: tables.status(found))
    if not found["ready"]:
        raise typer.Exit(PROBLEM)


def slots(
    *, url: Url = None, key: Key = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """What each slot of the backend does and holds."""
    with talking(url, key, config) as api:
        found = api.get("api/slots")
    show(found, as_json, lambda: tables.slots(found["slots"], time.time()))


def conversations(
    *, url: Url = None, key: Key = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """What is remembered, the last used first; ``forget`` takes the ids."""
    with talking(url, key, config) as api:
        found = api.get("api/conversations")
    show(found, as_json, lambda: tables.conversations(found["conversations"], time.time()))


def requests(
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="[REQUEST_ID]", help="Only this one, or that begins so, in full."),
    ] = None,
    *,
    follow: Follow = False,
    limit: Limit = 20,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """The decision log: what each request reused, and why it was cold."""
    with talking(url, key, config) as api:
        if request_id is not None:
            newest = reversed(api.get("api/requests", limit=REMEMBERED)["requests"])
            known = {str(row["request_id"]): row for row in newest}
            row = known[one_of("request", request_id, list(known))]
            show(row, as_json, lambda: tables.request_in_full(row))
            return
        found = api.get("api/requests", limit=limit)
        rows = list(reversed(found["requests"]))
        if as_json and not follow:
            print_json(found)
            return
        events = (row for kind, row in api.events() if kind == "request") if follow else iter(())
        _print_rows(rows, events, _version_of_request, tables.request, as_json)


def logs(
    *,
    follow: Follow = False,
    limit: Limit = 100,
    level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error, and above.")
    ] = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """The proxy's log, as long as it is kept in memory."""
    wanted = _rank(level)
    if level is not None and level not in LEVELS:
        raise typer.BadParameter(f"one of {', '.join(LEVELS)}", param_hint="--level")
    with talking(url, key, config) as api:
        found = api.get("api/logs", limit=limit, level=level)
        if as_json and not follow:
            print_json(found)
            return
        events = (
            row
            for kind, row in (api.events() if follow else iter(()))
            if kind == "log" and _rank(row["level"]) >= wanted
        )
        _print_rows(found["logs"], events, lambda row: row["seq"], tables.log_line, as_json)


LEVELS = ("debug", "info", "warning", "error")


def _rank(level: str | None) -> int:
    """What is no level of ours is as grave as the gravest; none asked for lets all pass."""
    if level is None:
        return 0
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def _version_of_request(row: Any) -> Any:
    """A request is told twice when the cause of its cold answer was found afterwards.

    Its id may be the client's, who may give it twice.
    """
    return row["request_id"], row["at"], bool(row["cold"])


def _print_rows(
    rows: list[Any],
    more: Iterator[Any],
    version: Callable[[Any], Any],
    draw: Callable[[Any], RenderableType],
    as_json: bool,  # noqa: FBT001 - it is the user's flag
) -> None:
    """Rows that are there, then those that come; what was printed is not printed again."""
    out = console()
    printed: set[Any] = set()
    for source in (rows, more):
        for row in source:
            if version(row) not in printed:
                printed.add(version(row))
                if as_json:
                    print_json(row, line=True)
                else:
                    out.print(draw(row))


def _watch(events: Iterator[tuple[str, Any]], as_json: bool) -> None:  # noqa: FBT001 - as above
    """Draw the state anew whenever it changes: in place on a terminal, else below."""
    out = console()
    state: dict[str, Any] = {"slots": {"slots": []}, "running": {"running": []}}
    with Live(console=out, auto_refresh=False, screen=False, transient=False) as live:
        for kind, found in events:
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
