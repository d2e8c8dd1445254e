"""``slotkeeper cache``: the snapshots on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from proxy import words
from proxy.client import RUN_SECONDS, ApiError, Client, segment
from proxy.commands import tables
from proxy.commands.common import (
    PROBLEM,
    AsJson,
    Yes,
    asking,
    console,
    one_of,
    print_json,
    show,
    sure,
    working,
)
from proxy.telemetry.lines import BAD

GONE = 404
WITHIN = "what is not pinned is within the limits"
Snapshot = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Its id, or how that begins.")]
Rows = Mapping[str, Mapping[str, Any]]


def _there(api: Client) -> Rows:
    """The snapshots by id."""
    return {str(row["id"]): row for row in api.get("api/snapshots")["snapshots"]}


@asking
def ls(api: Client, *, as_json: AsJson = False) -> None:
    """All snapshots of the backend's present model and settings, the last used first.

    VALUE: the prefill time one can still save, for its size and age; the best is 100, and the
    lowest goes first when room is needed.
    """
    found = api.get("api/snapshots")
    show(found, as_json, lambda: tables.snapshots(found["snapshots"], time.time(), console().width))


@asking
def show_one(api: Client, snapshot: Snapshot, *, as_json: AsJson = False) -> None:
    """Everything about one snapshot."""
    rows = _there(api)
    row = rows[one_of("snapshot", snapshot, list(rows))]
    show(row, as_json, lambda: tables.snapshot(row, list(rows.values()), time.time()))


@asking
def verify(api: Client, *, as_json: AsJson = False) -> None:
    """Read every file and compare it with its checksum. Exit status 1 if one is damaged."""
    with working("reading every snapshot"):
        found = api.post("api/snapshots/verify", seconds=RUN_SECONDS)
    if as_json:
        print_json(found)
    else:
        out = console()
        out.print(f"{words.many(found['checked'], 'snapshot')} read, {len(found['bad'])} damaged")
        for bad in found["bad"]:
            out.print(f"  {words.plain(bad)}", style=BAD)
    if found["bad"]:
        raise typer.Exit(PROBLEM)


@asking
def prune(api: Client, *, as_json: AsJson = False) -> None:
    """Remove what is beyond the limits of the settings, as every save does."""
    rows = {} if as_json else _there(api)
    with working("removing snapshots"):
        found = api.post("api/snapshots/prune", seconds=RUN_SECONDS)
    if as_json:
        print_json(found)
    else:
        out = console()
        for identity in found["removed"]:
            _say_removed(out, identity, rows)
        _say_freed(out, len(found["removed"]), found["bytes"], WITHIN)


@asking
def pin(
    api: Client,
    snapshot: Snapshot,
    *,
    off: Annotated[bool, typer.Option("--off", help="No longer.")] = False,
) -> None:
    """Keep a snapshot whatever the limits say."""
    identity = one_of("snapshot", snapshot, list(_there(api)))
    api.post(f"api/snapshots/{segment(identity)}/pin", {"pinned": not off})
    kept = "may be removed again when room is needed" if off else "is kept whatever the limits say"
    console().print(f"snapshot {identity} {kept}")


@asking
def rm(
    api: Client,
    snapshots: Annotated[
        list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids, or how they begin.")
    ],
    *,
    yes: Yes = False,
) -> None:
    """Remove snapshots. Their prompts are computed again when they are needed."""
    rows = _there(api)
    chosen = list(dict.fromkeys(one_of("snapshot", one, list(rows)) for one in snapshots))
    sure(f"Remove {words.many(len(chosen), 'snapshot')}?", yes)
    out = console()
    freed = [rows[one]["bytes"] for one in chosen if _remove(api, out, rows, one)]
    _say_freed(out, len(freed), sum(freed), "they were gone already")


def _remove(api: Client, out: Console, rows: Rows, identity: str) -> bool:
    """Remove one and say so at once; False when it is gone already."""
    try:
        api.delete(f"api/snapshots/{segment(identity)}")
    except ApiError as error:
        if error.status != GONE:
            raise
        return False
    _say_removed(out, identity, rows)
    return True


def _say_removed(out: Console, identity: str, rows: Rows) -> None:
    """Which it was. What is not in ``rows`` is another model's."""
    out.print(f"removed {words.plain(identity)}  {_was(rows.get(identity))}", soft_wrap=True)


def _say_freed(out: Console, count: int, freed: int, none: str) -> None:
    if count:
        out.print(f"{words.many(count, 'snapshot')} removed, {words.size(freed)} freed")
    else:
        out.print(f"nothing was removed: {none}")


def _was(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "of another model or other settings"
    titled = f"  {words.plain(row['title'])}" if row["title"] else ""
    return f"{words.many(row['tokens'], 'token')}  {words.size(row['bytes'])}{titled}"
