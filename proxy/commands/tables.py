"""The proxy's own pages as tables and lines: JSON of the API in, something to print out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.commands import words

Row = Mapping[str, Any]
GOOD, ODD, BAD, FAINT = "green", "yellow", "red", "dim"
REASONS = {"slot-hit": GOOD, "restored": GOOD, "cold": ODD, "refused": BAD, "bypass": ODD}
LEVELS = {"debug": FAINT, "warning": ODD, "error": BAD, "critical": BAD}
MOMENTS = {"at", "created", "last_used"}
CLIENT_ERROR = 400


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> Table:
    """``right``: names of the columns whose figures stand one below the other."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        drawn.add_column(
            head,
            justify="right" if head in right.split() else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else words.plain(cell) for cell in row))
    return drawn


def pairs(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one a line; long values go on below themselves."""
    drawn = Table.grid(padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column()
    for name, value in rows:
        drawn.add_row(name, value if isinstance(value, Text) else words.plain(value))
    return drawn


def record(row: Row) -> Table:
    """Every field of one row; lists and objects are shown elsewhere."""
    plain = ((name, value) for name, value in row.items() if not isinstance(value, list | dict))
    return pairs((name, _field(name, value)) for name, value in plain)


def _field(name: str, value: object) -> object:
    if name in MOMENTS:
        return words.moment(value)
    return f"{value:.4g}" if isinstance(value, float) else value


def status(found: Row) -> RenderableType:
    """The state of the proxy in a dozen lines."""
    now = float(found["now"])
    backend, queue, totals = found["backend"], found["queue"], found["totals"]
    rows: list[tuple[str, object]] = [
        ("slotkeeper", f"{found['version']}, up {words.ago(found['started'], now)}"),
        ("state", _state(found)),
        ("mode", f"{found['mode']}: {found['why']}"),
    ]
    if found["advice"]:
        rows.append(("advice", found["advice"]))
    rows += [
        ("backend", _backend(backend)),
        ("store", _store(found["store"])),
        ("queue", f"{queue['running']} running, {queue['waiting']} waiting"),
        ("prompts", _prompts(totals)),
        ("saved", f"{words.seconds(totals['seconds_saved'])} of computing since start"),
        ("snapshots", _moved(totals, found["restores"])),
        ("first token", _first_token(found["first_token"])),
    ]
    return pairs(rows)


def _state(found: Row) -> Text:
    if found["draining"]:
        return Text("shutting down", style=ODD)
    if not found["ready"]:
        return Text("not ready", style=BAD)
    if found["paused"]:
        return Text("caching is paused; requests are forwarded", style=ODD)
    return Text("ready", style=GOOD)


def _backend(backend: Row) -> Text:
    up = Text("up  ", style=GOOD) if backend["up"] else Text("down  ", style=BAD)
    told = [backend["kind"], backend["url"], _model(backend["model"])]
    slots, context = backend["total_slots"], backend["n_ctx"]
    if slots:
        told.append(f"{slots} slots of {words.number(context)} tokens" if context else f"{slots}")
    if backend["restarts"]:
        told.append(f"{words.many(backend['restarts'], 'restart')}")
    return up.append("  ".join(words.plain(one) for one in told if one), style="default")


def _model(name: str | None) -> str:
    """llama-server without an alias names the whole path."""
    return re.split(r"[/\\]", name)[-1] if name and name.endswith(".gguf") else name or ""


def _store(store: Row | None) -> str:
    if store is None:
        return "none: nothing is saved"
    return (
        f"{store['path']}  {words.many(store['snapshots'], 'snapshot')},"
        f" {words.size(store['used'])} of {words.size(store['limit'])};"
        f" {words.size(store['free'])} free, {words.size(store['keep_free'])} are left alone"
    )


def _moved(totals: Row, restores: str) -> str:
    return (
        f"{totals['saves']} saved, {totals['restores']} restored, {totals['evictions']} removed;"
        f" restores are {restores}"
    )


def _first_token(first: Row) -> str:
    if not first["count"]:
        return "none in the last hour"
    half, most = words.seconds(first["p50"]), words.seconds(first["p95"])
    return f"half within {half}, 95 % within {most}, {first['count']} in the last hour"


def _prompts(totals: Row) -> str:
    tokens = totals["prompt_tokens"]
    whole = sum(tokens.values())
    reused = whole - tokens["computed"]
    share = f"{100 * reused / whole:.0f} %" if whole else "none"
    return (
        f"{words.many(totals['requests'], 'request')}; {share} of {words.number(whole)} tokens"
        f" not computed ({words.number(tokens['slot'])} in slots,"
        f" {words.number(tokens['snapshot'])} from snapshots)"
    )


def slots(rows: Sequence[Row], now: float) -> RenderableType:
    """One line per slot."""
    return table(
        ("SLOT", "STATE", "TOKENS", "SAVED", "USED", "CONVERSATION", "CLIENT", "TITLE"),
        (
            (
                row["index"],
                row["state"],
                words.number(row["tokens"]),
                words.number(row["saved_tokens"]),
                words.ago(row["used"], now),
                words.short(row["conversation"]),
                row["client"],
                row["title"],
            )
            for row in rows
        ),
        "SLOT TOKENS SAVED USED",
    )


def running(rows: Sequence[Row], now: float) -> RenderableType:
    """Requests that wait or run, with how far their prompt is."""
    return table(
        ("SLOT", "STATE", "PROMPT", "DONE", "SINCE", "CLIENT", "TITLE"),
        (
            (
                row["slot"],
                row["state"],
                words.number(row["prompt"]),
                words.number(row["processed"]),
                words.ago(row["at"], now),
                row["client"],
                row["title"],
            )
            for row in rows
        ),
        "SLOT PROMPT DONE SINCE",
    )


def watched(status_row: Row, slot_rows: Sequence[Row], running_rows: Sequence[Row]) -> Group:
    """``status --watch``: all three below each other."""
    now = float(status_row["now"])
    parts: list[RenderableType] = [status(status_row), "", slots(slot_rows, now)]
    if running_rows:
        parts += ["", running(running_rows, now)]
    return Group(*parts)


def conversations(rows: Sequence[Row], now: float) -> RenderableType:
    """One line per conversation that is remembered."""
    return table(
        ("CONVERSATION", "USED", "MESSAGES", "TOKENS", "SIZE", "CLIENT", "TITLE"),
        (
            (
                words.short(row["id"]),
                words.ago(row["used"], now),
                words.number(row["messages"]),
                words.number(row["prompt_n"]),
                words.size(row["bytes"]),
                row["client"],
                row["title"],
            )
            for row in rows
        ),
        "USED MESSAGES TOKENS SIZE",
    )


def snapshots(rows: Sequence[Row], now: float) -> RenderableType:
    """One line per snapshot; the value is what retention goes by."""
    return table(
        ("SNAPSHOT", "TOKENS", "SIZE", "AGE", "USED", "RESTORES", "VALUE", "", "TITLE"),
        (
            (
                words.short(row["id"]),
                words.number(row["tokens"]),
                words.size(row["bytes"]),
                words.ago(row["created"], now),
                words.ago(row["last_used"], now),
                row["restores"],
                f"{row['value']:.2g}" if isinstance(row["value"], int | float) else words.NONE,
                Text("pinned" if row["pinned"] else "barred" if row["barred"] else "", style=ODD),
                row["title"],
            )
            for row in rows
        ),
        "TOKENS SIZE AGE USED RESTORES VALUE",
    )


def request(row: Row) -> Text:
    """One line of the decision log."""
    reason = str(row["reason"])
    line = Text(f"{words.clock(row['at'])}  ")
    line.append(f"{reason:<9}", style=REASONS.get(reason, "default"))
    failed = int(row["status"]) >= CLIENT_ERROR
    line.append(f" {row['status']}", style=BAD if failed else "default")
    reused, prompt = words.number(row["reused"]), words.number(row["prompt"])
    line.append(f"  {reused:>7} of {prompt:>7} reused  slot {words.plain(row['slot'])}")
    line.append(f"  {words.seconds(row['total']):>8}")
    for name in ("client", "title"):
        if row.get(name):
            line.append(f"  {words.plain(row[name])}", style=FAINT)
    why = (row["cold"] or {}).get("sentence") or row["note"]
    return line.append(f"  {words.plain(why)}", style=ODD) if why else line


def request_in_full(row: Row) -> RenderableType:
    """One decision with what was weighed and why it was cold."""
    parts: list[RenderableType] = [record(row)]
    if row["rules"]:
        parts += ["", pairs([("rules", ", ".join(map(str, row["rules"])))])]
    if row["costs"]:
        parts += ["", costs(row["costs"], None)]
    if row["cold"]:
        parts += ["", record(row["cold"])]
    return Group(*parts)


def costs(rows: Sequence[Row], choice: Row | None) -> Table:
    """The options that were weighed, in seconds; the chosen one is marked."""
    names = ("wait", "prefill", "transfer", "loss", "cost")
    return table(
        ("", "SLOT", "HOW", "HIT", "PROMPT", *(name.upper() for name in names), "SNAPSHOT"),
        (
            (
                Text(">" if row == choice else "", style=GOOD),
                row["slot"],
                row["reason"],
                words.number(row["hit"]),
                words.number(row["prompt"]),
                *(f"{row[name]:.3f}" for name in names),
                words.short(row["snapshot"]),
            )
            for row in rows
        ),
        "SLOT HIT PROMPT WAIT PREFILL TRANSFER LOSS COST",
    )


def log_line(row: Row) -> Text:
    """One event of the log."""
    level = str(row["level"])
    line = Text(f"{words.clock(row['at'])}  ")
    line.append(f"{level:<8}", style=LEVELS.get(level, "default"))
    line.append(words.plain(row["event"]), style="bold")
    for name, value in row["fields"].items():
        line.append(f"  {words.plain(name)}=", style=FAINT).append(words.plain(value))
    return line
