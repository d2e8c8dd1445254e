"""``slotkeeper doctor``: the report, printed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from proxy import words
from proxy.client import ApiError, Client
from proxy.commands.common import (
    PROBLEM,
    AsJson,
    BackendUrl,
    ConfigFile,
    SlotFolder,
    console,
    own_url,
    print_json,
    settings,
)
from proxy.telemetry.lines import BAD, FAINT, GOOD, ODD

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.doctor import Report

STYLES = {"ok": GOOD, "note": FAINT, "warning": ODD, "problem": BAD}


def doctor(
    *,
    backend: BackendUrl = None,
    slot_save_path: SlotFolder = None,
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

    Needs no running proxy.
    """
    flags = {"backend.url": backend, "backend.slot_save_path": slot_save_path}
    found = settings(config, {name: value for name, value in flags.items() if value is not None})
    # Only here: the drivers and what comes with them take half a second.
    from proxy.doctor import examine  # noqa: PLC0415
    from proxy.telemetry import logs  # noqa: PLC0415

    logs.setup("error", "console")
    out = console(stderr=True)
    with out.status("looking") as doing:
        ready = _running(found)
        report = asyncio.run(examine(found, ready, probe=probe, step=doing.update))
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        print_json({"good": report.good, "findings": findings, "launch": report.launch})
    else:
        _print(report)
    if not report.good:
        raise typer.Exit(PROBLEM)


def _running(config: Config) -> dict[str, Any] | None:
    """What the proxy at this address says of itself; None when there is none."""
    if not config.server.port:
        return None
    try:
        ready = Client(own_url(config)).ready()
        if ready is None:
            return None
        status = Client(own_url(config), config.server.admin_key.get_secret_value())
        found: dict[str, Any] = status.get("api/status")
    except ValueError:  # nothing can listen there: the report says so
        return None
    except ApiError:  # it shows no more than that to this user
        return ready
    return found


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
