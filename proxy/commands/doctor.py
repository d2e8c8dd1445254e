"""``slotkeeper doctor``: the report, printed."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from proxy import words
from proxy.client import ApiError, Client
from proxy.commands.common import (
    PROBLEM,
    USAGE,
    AsJson,
    BackendUrl,
    ConfigFile,
    Key,
    SlotFolder,
    Url,
    console,
    fail,
    own_url,
    print_json,
    settings,
)
from proxy.config import load_with_places
from proxy.telemetry.lines import BAD, FAINT, GOOD, ODD

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.doctor import Report

STYLES = {"ok": GOOD, "note": FAINT, "warning": ODD, "problem": BAD}


def doctor(
    *,
    backend: BackendUrl = None,
    slot_save_path: SlotFolder = None,
    url: Url = None,
    key: Key = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also try it: a prompt is computed, saved and restored, the disk measured;"
            " one or two idle slots are empty afterwards.",
        ),
    ] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check everything, and say what to do. Exit status 1 if there is a problem.

    Needs no running proxy. Where one runs, and no model server is named, it looks at that one's.
    """
    flags = {"backend.url": backend, "backend.slot_save_path": slot_save_path}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    found = settings(config, given)
    # Only here: the drivers and what comes with them take half a second.
    from proxy.doctor import examine  # noqa: PLC0415
    from proxy.telemetry import logs  # noqa: PLC0415

    logs.setup("error", "console")
    out = console(stderr=True)
    with out.status("looking") as doing:
        ready, at = _running(found, url, key)
        if ready is not None and (more := _unsaid(config, given, ready)):
            found = settings(config, given | more)
        report = asyncio.run(examine(found, ready, probe=probe, at=at, step=doing.update))
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        print_json({"good": report.good, "findings": findings, "launch": report.launch})
    else:
        _print(report)
    if not report.good:
        raise typer.Exit(PROBLEM)


def _running(config: Config, url: str | None, key: str | None) -> tuple[dict[str, Any] | None, str]:
    """What the proxy says of itself, and where it is or was looked for by name.

    None, and ``""``, when there is none. A key goes to what says it is a slotkeeper; that of the
    configuration to the configuration's address alone.
    """
    own = url is None
    if url is None:
        if not config.server.port:
            return None, ""
        url, key = own_url(config), key or config.server.admin_key.get_secret_value()
    try:
        client, stranger = Client(url, key or ""), Client(url)
    except ValueError as error:
        if own:  # nothing can listen there: the report says so
            return None, ""
        fail(f"--url or --key: {error}", "", USAGE)
    ready = stranger.ready()
    if ready is None:
        return None, "" if own else client.url
    try:
        return client.get("api/status"), client.url
    except ApiError:  # it shows no more than that to this user
        return ready, client.url


def _unsaid(config: Path | None, given: dict[str, Any], ready: Mapping[str, Any]) -> dict[str, Any]:
    """The running proxy's model server and slot folder, where the user named no server anywhere."""
    named = load_with_places(None, given, os.environ)[1]
    if config is not None or "backend.url" in named:
        return {}
    url = str((ready.get("backend") or {}).get("url") or "").replace(", ", ",")
    folder = str((ready.get("store") or {}).get("slot_dir") or "")
    found = {"backend.url": url, "backend.slot_save_path": folder if Path(folder).is_dir() else ""}
    return {name: value for name, value in found.items() if value and name not in named}


def _print(report: Report) -> None:
    out = console()
    drawn = Table.grid(padding=(0, 2, 0, 0))
    drawn.add_column(no_wrap=True)
    drawn.add_column(no_wrap=True, style="bold")
    for finding in report.findings:
        level = Text(finding.level, style=STYLES[finding.level])
        said = [words.plain(line) for line in (finding.text, finding.todo) if line]
        drawn.add_row(level, finding.subject, "\n".join(said))
    out.print(drawn)
    if report.launch:
        out.print("\nllama-server as it should be started (-c: slots times tokens per slot):")
        out.print(f"  {report.launch}", soft_wrap=True)
    counted = Counter(str(finding.level) for finding in report.findings)
    summary = (words.many(counted[level], level) for level in ("problem", "warning"))
    out.print(f"\n{', '.join(summary)}")
