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
TITLE = "TITLE"  # the column that is cut first
LEVELS = {"debug": FAINT, "warning": ODD, "error": BAD, "critical": BAD}
MOMENTS = {"at", "created", "last_used"}
TOKENS = {"tokens", "prompt_tokens", "prompt", "reused", "computed"}
SPANS = {"total", "queued", "first_token"}
CLIENT_ERROR = 400
ID_DIGITS = 8  # of a request in the list: enough to ask for it
MUCH = 0.5  # of a prompt: who reuses less computed most of it
NARROW = 100  # columns: fewer have no room for everything about a snapshot
BEST = 100  # the value of the snapshot that is worth most


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> Table:
    """``right``: names of the columns whose figures stand one below the other."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        drawn.add_column(
            head,
            justify="right" if head in right.split() else "left",
            no_wrap=head != TITLE,  # what may be wrapped gives way first; its text is not
            overflow="ellipsis",
        )
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else _line(cell) for cell in row))
    return drawn


def _line(cell: object) -> Text:
    return Text(words.plain(cell), no_wrap=True, overflow="ellipsis")


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
    if name == "bytes":
        return words.size(value)
    if isinstance(value, int | float) and name in SPANS:
        return words.seconds(value)
    if isinstance(value, int) and name in TOKENS:
        return words.many(value, "token")
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
        f"{totals['saves']} saved, {totals['restores']} restored, {totals['evictions']} evicted;"
        f" restores are {restores}"
    )


def _first_token(first: Row) -> str:
    if not first["count"]:
        return "no streamed request in the last hour"
    half, most = words.seconds(first["p50"]), words.seconds(first["p95"])
    return f"half within {half}, 95 % within {most}, {first['count']} in the last hour"


def _prompts(totals: Row) -> str:
    tokens = totals["prompt_tokens"]
    whole = sum(tokens.values())
    if not whole:
        return f"{words.many(totals['requests'], 'request')}; no prompts yet"
    share = words.percent(whole - tokens["computed"], whole)
    return (
        f"{words.many(totals['requests'], 'request')}; {share} of {words.number(whole)} tokens"
        f" not computed ({words.number(tokens['slot'])} in slots,"
        f" {words.number(tokens['snapshot'])} from snapshots)"
    )


def slots(rows: Sequence[Row], now: float) -> RenderableType:
    """One line per slot."""
    return table(
        ("SLOT", "STATE", "TOKENS", "SAVED", "USED", "CONVERSATION", "CLIENT", TITLE),
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
        ("SLOT", "STATE", "PROMPT", "DONE", "SINCE", "CLIENT", TITLE),
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
        ("CONVERSATION", "USED", "MESSAGES", "TOKENS", "SIZE", "CLIENT", TITLE),
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


def snapshots(rows: Sequence[Row], now: float, width: int) -> RenderableType:
    """One line per snapshot, in ``width`` columns.

    The value is what retention goes by; the best one's is 100. Where there is little room, it and
    the number of restores are left out.
    """
    best = max((row["value"] or 0.0 for row in rows), default=0.0)
    heads = ("SNAPSHOT", "TOKENS", "SIZE", "AGE", "USED", "RESTORES", "VALUE", "", TITLE)
    wide = width >= NARROW

    def cells(row: Row) -> Sequence[object]:
        return (
            words.short(row["id"]),
            words.number(row["tokens"]),
            words.size(row["bytes"]),
            words.ago(row["created"], now),
            words.ago(row["last_used"], now),
            row["restores"],
            _worth(row["value"], best),
            Text("pinned" if row["pinned"] else "barred" if row["barred"] else "", style=ODD),
            row["title"],
        )

    kept = [n for n, head in enumerate(heads) if wide or head not in {"RESTORES", "VALUE"}]
    return table(
        [heads[n] for n in kept],
        ([cells(row)[n] for n in kept] for row in rows),
        "TOKENS SIZE AGE USED RESTORES VALUE",
    )


def _worth(value: float | None, best: float) -> str:
    if value is None:
        return words.NONE
    return f"{BEST * max(0.0, value) / best:.0f}" if best > 0 else "0"


def request(row: Row) -> Text:
    """One line of the decision log."""
    line = Text(f"{words.clock(row['at'])}  {words.plain(row['request_id'])[:ID_DIGITS]:<8}  ")
    line.append(f"{_got(row):<16}", style=_colour(row))
    failed = int(row["status"]) >= CLIENT_ERROR
    line.append(f" {row['status']}", style=BAD if failed else "default")
    reused, prompt = words.number(row["reused"]), words.number(row["prompt"])
    line.append(f"  {reused:>7} of {prompt:>7} reused  slot {words.plain(row['slot'])}")
    line.append(f"  {words.seconds(row['total']):>8}")
    whose = [row[name] for name in ("client", "title") if row.get(name)]
    for name in whose if whose or row["conversation"] else [row["path"]]:
        line.append(f"  {words.plain(name)}", style=FAINT)
    why = because(row["cold"]) or row["note"]
    return line.append(f"  {words.plain(why)}", style=ODD) if why else line


def _got(row: Row) -> str:
    """The reason, with how much of the prompt was reused where that was something."""
    if row["reused"] and row["prompt"]:
        return f"{row['reason']}, {words.percent(row['reused'], row['prompt'])}"
    return str(row["reason"])


def _colour(row: Row) -> str:
    """Reusing little is not green, whatever it is called."""
    style = REASONS.get(str(row["reason"]), "default")
    if style == GOOD and row["prompt"] and (row["reused"] or 0) < MUCH * row["prompt"]:
        return ODD
    return style


def because(cold: Row | None) -> str:
    """Why it was cold, with the words that differ; ``""`` where nothing is known."""
    if not cold or not cold.get("sentence"):
        return ""
    said = f"cold because {cold['sentence']}"
    before, after = words.differing(cold.get("before") or "", cold.get("after") or "")
    if not (before or after):
        return said
    return f"{said}: {before or 'nothing'} → {after or 'nothing'}"


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
