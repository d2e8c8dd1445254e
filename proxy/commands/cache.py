"""``slotkeeper cache``: the snapshots on disk."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from proxy.client import RUN_SECONDS, Client, segment
from proxy.commands import tables, words
from proxy.commands.common import (
    PROBLEM,
    AsJson,
    ConfigFile,
    Key,
    Url,
    Yes,
    console,
    one_of,
    print_json,
    show,
    sure,
    talking,
    working,
)

Snapshot = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Its id, or how that begins.")]


def ls(
    *, url: Url = None, key: Key = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """All snapshots of the backend's present model and settings, the last used first."""
    with talking(url, key, config) as api:
        found = api.get("api/snapshots")
    show(found, as_json, lambda: tables.snapshots(found["snapshots"], time.time(), console().width))


def show_one(
    snapshot: Snapshot,
    *,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Everything about one snapshot."""
    with talking(url, key, config) as api:
        rows = {str(row["id"]): row for row in api.get("api/snapshots")["snapshots"]}
    row = rows[one_of("snapshot", snapshot, list(rows))]
    show(row, as_json, lambda: tables.record(row))


def verify(
    *, url: Url = None, key: Key = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """Read every file and compare it with its checksum. Exit status 1 if one is damaged."""
    with talking(url, key, config) as api, working("reading every snapshot"):
        found = api.post("api/snapshots/verify", seconds=RUN_SECONDS)
    if as_json:
        print_json(found)
    else:
        out = console()
        out.print(f"{words.many(found['checked'], 'snapshot')} read, {len(found['bad'])} damaged")
        for bad in found["bad"]:
            out.print(f"  {words.plain(bad)}", style=tables.BAD)
    if found["bad"]:
        raise typer.Exit(PROBLEM)


def prune(
    *, url: Url = None, key: Key = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """Remove what is beyond the limits of the settings, as every save does."""
    with talking(url, key, config) as api, working("removing snapshots"):
        found = api.post("api/snapshots/prune", seconds=RUN_SECONDS)
    if as_json:
        print_json(found)
    else:
        freed = words.size(found["bytes"])
        console().print(f"{words.many(len(found['removed']), 'snapshot')} removed, {freed} freed")


def pin(
    snapshot: Snapshot,
    *,
    off: Annotated[bool, typer.Option("--off", help="No longer.")] = False,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
) -> None:
    """Keep a snapshot whatever the limits say."""
    with talking(url, key, config) as api:
        identity = _resolve(api, snapshot)
        api.post(f"api/snapshots/{segment(identity)}/pin", {"pinned": not off})
    console().print(f"{identity} {'may be removed again' if off else 'is kept'}")


def rm(
    snapshots: Annotated[
        list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids, or how they begin.")
    ],
    *,
    yes: Yes = False,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
) -> None:
    """Remove snapshots. Their prompts are computed again when they are needed."""
    with talking(url, key, config) as api:
        found = [_resolve(api, snapshot) for snapshot in snapshots]
        sure(f"Remove {words.many(len(found), 'snapshot')}?", yes)
        for identity in found:
            api.delete(f"api/snapshots/{segment(identity)}")
            console().print(f"{identity} is removed")


def _resolve(api: Client, snapshot: str) -> str:
    rows = api.get("api/snapshots")["snapshots"]
    return one_of("snapshot", snapshot, [str(row["id"]) for row in rows])
