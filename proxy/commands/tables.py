"""The proxy's own pages as tables and lines: JSON of the API in, something to print out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy import words
from proxy.telemetry.lines import BAD, FAINT, GOOD, ODD

Row = Mapping[str, Any]
TITLE = "TITLE"  # the column that is cut first
SLOT = {"leased": "answering", "saving": "saving", "restoring": "restoring"}
NARROW = 100  # columns: fewer have no room for everything about a snapshot
BEST = 100  # the value of the snapshot that is worth most
VALUE = (
    f"VALUE: prefill time it can still save for its size and age, in % of the best ({BEST});"
    " the lowest goes first"
)


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


def status(found: Row) -> RenderableType:
    """The state of the proxy in a dozen lines."""
    now = float(found["now"])
    backend, queue, totals = found["backend"], found["queue"], found["totals"]
    rows: list[tuple[str, object]] = [
        ("slotkeeper", f"{found['version']}, up {words.since(found['started'], now)}"),
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
        ("prefill", f"{words.seconds(totals['seconds_saved'])} saved since the start"),
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
        each = f" of {words.many(context, 'token')}" if context else ""
        told.append(f"{words.many(slots, 'slot')}{each}")
    if backend["restarts"]:
        told.append(f"{words.many(backend['restarts'], 'restart')}")
    return up.append("  ".join(words.plain(one) for one in told if one), style="default")


def _model(name: str | None) -> str:
    """llama-server without an alias names the whole path."""
    return re.split(r"[/\\]", name)[-1] if name and name.endswith(".gguf") else name or ""


def _store(store: Row | None) -> str:
    if store is None:
        return "none: nothing is saved"
    said = f"{store['path']}  {words.many(store['snapshots'], 'snapshot')},"
    said += f" {words.size(store['used'])} of {words.size(store['limit'])}"
    if not store["free"] and not store.get("refused"):  # it was not looked at yet
        return said
    free, keep = words.size(store["free"]), words.size(store["keep_free"])
    return f"{said}; {free} free, of which {keep} stay free"


def _moved(totals: Row, restores: str) -> str:
    told = f"{totals['saves']} saved, {totals['restores']} restored, {totals['evictions']} evicted"
    return told if restores == "in use" else f"{told}; restores are {restores}"


def _first_token(first: Row) -> str:
    if not first["count"]:
        return "no streamed request in the last hour"
    half, most = words.seconds(first["p50"]), words.seconds(first["p95"])
    count = words.many(first["count"], "request")
    return f"half within {half}, 95 % within {most}; {count} in the last hour"


def _prompts(totals: Row) -> str:
    tokens = totals["prompt_tokens"]
    whole = sum(tokens.values())
    if not whole:
        return f"{words.many(totals['requests'], 'request')}; no prompts yet"
    share = words.percent(whole - tokens["computed"], whole)
    return (
        f"{words.many(totals['requests'], 'request')}; {share} of {words.number(whole)} tokens"
        f" reused ({words.number(tokens['slot'])} from slots,"
        f" {words.number(tokens['snapshot'])} from snapshots)"
    )


def slots(rows: Sequence[Row], now: float, *, up: bool = True) -> RenderableType:
    """One line per slot; ``up``: the backend is there."""
    return table(
        ("SLOT", "STATE", "TOKENS", "SAVED", "USED", "CONVERSATION", "CLIENT", TITLE),
        (
            (
                row["index"],
                _slot_state(row) if up else "unknown",
                words.number(row["tokens"]),
                _saved(row),
                words.ago(row["used"], now),
                words.short(row["conversation"]),
                row["client"],
                row["title"],
            )
            for row in rows
        ),
        "SLOT TOKENS USED",
    )


def _slot_state(row: Row) -> str:
    """In the dashboard's words."""
    return SLOT.get(row["state"]) or ("warm" if row["tokens"] else "free")


def _saved(row: Row) -> str:
    """Whether what the slot holds could be restored if it were lost; in the dashboard's words."""
    if not row["tokens"]:
        return words.NONE
    if not row["storable"]:
        return "cannot be saved"
    if not row["saved_tokens"]:
        return "not saved"
    if row["saved_tokens"] >= row["tokens"]:
        return "saved"
    return f"{words.number(row['saved_tokens'])} saved"


def running(rows: Sequence[Row], now: float) -> RenderableType:
    """Requests that wait or run, with how far their prompt is."""
    return table(
        ("SLOT", "STATE", "PROMPT", "SINCE", "CLIENT", TITLE),
        (
            (
                row["slot"],
                row["state"],
                f"{words.number(row['processed'])} of {words.number(row['prompt'])} tokens",
                words.since(row["at"], now),
                row["client"],
                row["title"],
            )
            for row in rows
        ),
        "SLOT PROMPT SINCE",
    )


def watched(status_row: Row, slot_rows: Sequence[Row], running_rows: Sequence[Row]) -> Group:
    """``status --watch``: all three below each other."""
    now = float(status_row["now"])
    up = status_row["backend"]["up"]
    parts: list[RenderableType] = [status(status_row), "", slots(slot_rows, now, up=up)]
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
            words.since(row["created"], now),
            words.ago(row["last_used"], now),
            row["restores"],
            _worth(row["value"], best),
            Text("pinned" if row["pinned"] else "barred" if row["barred"] else "", style=ODD),
            row["title"],
        )

    kept = [n for n, head in enumerate(heads) if wide or head not in {"RESTORES", "VALUE"}]
    drawn = table(
        [heads[n] for n in kept],
        ([cells(row)[n] for n in kept] for row in rows),
        "TOKENS SIZE AGE USED RESTORES VALUE",
    )
    return Group(drawn, Text(VALUE, style=FAINT)) if wide and rows else drawn


def _worth(value: float | None, best: float) -> str:
    if value is None:
        return words.NONE
    return f"{BEST * max(0.0, value) / best:.0f}" if best > 0 else "0"


def snapshot(row: Row, others: Sequence[Row], now: float) -> Table:
    """Everything about one; ``others``: all of them, for its place among them."""
    title = f"  {words.plain(row['title'])}" if row["title"] else ""
    prompt = min(row["prompt_tokens"], row["tokens"])
    answer = f"{words.number(prompt)} of prompt, {words.number(row['tokens'] - prompt)} of answer"
    rows = [
        ("snapshot", row["id"]),
        ("conversation", f"{words.short(row['conversation'])}{title}"),
        ("holds", f"{words.many(row['tokens'], 'token')}: {answer}"),
        ("size", words.size(row["bytes"])),
        ("written", f"{words.ago(row['created'], now)}  ({words.moment(row['created'])})"),
        ("last used", f"{words.ago(row['last_used'], now)}  ({words.moment(row['last_used'])})"),
        ("restored", words.many(row["restores"], "time") if row["restores"] else "never"),
        ("can save", _can_save(row)),
        ("stays", _stays(row, others)),
    ]
    if row["barred"]:
        rows.append(("barred", "not restored: this backend refused it, or went down over it"))
    return pairs([*rows, ("model", f"fingerprint {words.short(row['fingerprint'])}")])


def _can_save(row: Row) -> str:
    seconds = row.get("seconds_saved")
    if seconds is None:
        return words.NONE
    if not seconds:
        return "nothing: its prompt is held elsewhere too, or computed as fast as it is restored"
    return f"about {words.seconds(seconds)} of prefill, if it is restored instead of computed"


def _stays(row: Row, others: Sequence[Row]) -> str:
    """What decides how long."""
    if row["pinned"]:
        return "pinned: no limit and no newer snapshot removes it"
    rivals = [one for one in others if not one["pinned"] and one["value"] is not None]
    said = "while there is room; what can save the least time for its size and age goes first"
    if row["value"] is None or len(rivals) <= 1:
        return said
    place = 1 + sum(one["value"] < row["value"] for one in rivals)
    return f"{said}: it is number {place} of {len(rivals)} to go"
