"""The decision log in the user's words: a line, a request in full, what was weighed, why cold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy import words
from proxy.commands.tables import pairs
from proxy.core.queue import SPARED_TOKENS
from proxy.telemetry.lines import BAD, FAINT, GOOD, ODD

Row = Mapping[str, Any]
REASONS = {"slot-hit": GOOD, "restored": GOOD, "cold": ODD, "refused": BAD, "bypass": ODD}
MEANT = {
    "slot-hit": "the slot already held the beginning of the prompt",
    "restored": "a snapshot was restored into the slot first",
    "cold": "nothing was reused, or only the template's opening",
    "pinned": "the client named the slot",
    "wide": "it took every slot: it cannot name one",
    "forward": "passed on; the backend chose the slot",
    "bypass": "choosing a slot failed; it went to any free one",
    "pending": "it is not known yet",
    "refused": "the proxy sent an error",
}
CLIENT_ERROR, NOT_FOUND = 400, 404
ID_DIGITS = 8  # of a request in the list: enough to ask for it
MUCH = 0.5  # of a prompt: who reuses less computed most of it
PARTS = ("wait", "prefill", "transfer", "loss")  # of the cost
LEGEND = (
    "wait: until the slot is free; prefill: computing what is not reused; transfer: saving and"
    " restoring; loss: what bringing back the slot's present content may cost later"
)


HEAD = (
    f"{'TIME':<8}  {'REQUEST':<8}  {'GOT':<16} HTTP{'REUSED':>8} OF {'PROMPT':>7}{'SLOT':>20}"
    f"{'TOOK':>12}  CLIENT, TITLE, WHY"
)


def request(row: Row) -> Text:
    """One line of the decision log."""
    line = Text(f"{words.clock(row['at'])}  {words.plain(row['request_id'])[:ID_DIGITS]:<8}  ")
    line.append(f"{_got(row):<16}", style=_colour(row))
    failed = int(row["status"]) >= CLIENT_ERROR
    line.append(f" {row['status']}", style=BAD if failed else "default")
    line.append(f"{_reused(row):<42}")
    line.append(f"  {words.seconds(row['total']):>8}")
    whose = [row[name] for name in ("client", "title") if row.get(name)]
    for name in whose if whose or row["conversation"] else [row["path"]]:
        line.append(f"  {words.plain(name)}", style=FAINT)
    why = because(row["cold"]) or ("" if _unknown(row) else _note(row))
    return line.append(f"  {words.plain(why)}", style=ODD) if why else line


def _reused(row: Row) -> str:
    """Of how much of its prompt, in which slot; empty for what has neither."""
    if row["prompt"] is None and row["slot"] is None:
        return ""
    reused, prompt = words.number(row["reused"]), words.number(row["prompt"])
    return f"  {reused:>7} of {prompt:>7} tokens reused  slot {words.plain(row['slot'])}"


def _unknown(row: Row) -> bool:
    """The backend has no such path: nothing was computed, whatever slots it was given."""
    return row["status"] == NOT_FOUND and row["prompt"] is None and not row["conversation"]


def _got(row: Row) -> str:
    """The reason, with how much of the prompt was reused where that was something."""
    if _unknown(row):
        return "unknown path"
    if row["reused"] and row["prompt"]:
        return f"{row['reason']}, {words.percent(row['reused'], row['prompt'])}"
    return str(row["reason"])


def _note(row: Row) -> str:
    if _unknown(row):
        return "the model server has no such path"
    return str(row["note"] or (MEANT["wide"] if row["reason"] == "wide" else ""))


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


def request_in_full(row: Row, now: float) -> RenderableType:
    """One decision with what was weighed and why it was cold."""
    parts: list[RenderableType] = [pairs(_facts(row, now))]
    if row["cold"]:
        parts += ["", Text("Why it was cold", style="bold"), pairs(cold(row["cold"]))]
    if row["costs"]:
        # The cheapest comes first, and of a slot it is what was done to it
        chosen = next((one for one in row["costs"] if one["slot"] == row["slot"]), None)
        parts += ["", Text("What was weighed", style="bold"), costs(row["costs"], chosen)]
        parts.append(Text(LEGEND, style=FAINT))
    return Group(*parts)


def _facts(row: Row, now: float) -> Iterator[tuple[str, object]]:
    yield "request", row["request_id"]
    yield "came in", f"{words.moment(row['at'])}, {words.ago(row['at'], now)}"
    yield "path", row["path"]
    meant = _note(row) if _unknown(row) else MEANT.get(row["reason"], "")
    yield "got", f"{_got(row)}: {meant}" if meant else _got(row)
    yield "status", row["status"]
    if row["prompt"] is not None:
        reused, prompt = words.number(row["reused"]), words.many(row["prompt"], "token")
        yield "reused", f"{reused} of {prompt}, {words.number(row['computed'])} computed"
    yield "slot", row["slot"]
    yield "waited", words.seconds(row["queued"])
    yield "first token", words.seconds(row["first_token"])
    yield "whole answer", words.seconds(row["total"])
    talk = words.short(row["conversation"])
    yield "conversation", f"{talk}  {words.plain(row['title'])}" if row.get("title") else talk
    yield "client", row["client"] or "not recognised"
    if row["side"]:
        yield "side request", row["side"]
    yield "rules", ", ".join(map(str, row["rules"])) or "none changed anything"
    if row["note"]:
        yield "note", row["note"]


def cold(found: Row) -> Iterator[tuple[str, object]]:
    """Why a request was, or would be, cold: both sides, and what could be done."""
    yield "because", found.get("sentence") or found["cause"]
    if found.get("before") or found.get("after"):
        yield "last time", found.get("before") or "nothing"
        yield "this time", found.get("after") or "nothing"
    if found.get("advice"):
        yield "what to do", found["advice"]


def _hardly(option: Row) -> bool:
    """So little would be reused of a slot that the answer says ``cold``."""
    hit = int(option["hit"])
    return option["reason"] == "slot-hit" and hit < SPARED_TOKENS and 2 * hit < option["prompt"]


def how(option: Row) -> str:
    """What an option would do, in words: ``restore snapshot 3f2a… into slot 1``."""
    slot = "any slot" if option["slot"] is None else f"slot {option['slot']}"
    if option["snapshot"]:
        done = f"restore snapshot {words.short(option['snapshot'])} into {slot}"
    elif option["reason"] == "cold" or _hardly(option):
        done = f"start cold in {slot}"
    else:
        done = f"use {slot} as it is"
    first = f"save {slot}, then " if option["save_first"] else ""
    return f"{f'wait for {slot}, then ' if option['wait'] else ''}{first}{done}"


def costs(rows: Sequence[Row], choice: Row | None) -> RenderableType:
    """The options that were weighed, with the time each would cost; the chosen one is marked.

    Where there is little room the option goes on below itself; no figure is cut.
    """
    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    drawn.add_column("", min_width=1, no_wrap=True)
    drawn.add_column("OPTION", overflow="fold")
    for head in ("REUSED", "OF TOKENS", *(name.upper() for name in PARTS), "COST"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        parts = (words.seconds(row[name]) if row[name] else words.NONE for name in PARTS)
        drawn.add_row(
            Text(">" if row == choice else "", style=GOOD),
            how(row),
            words.number(row["hit"]),
            words.number(row["prompt"]),
            *parts,
            words.seconds(row["cost"]),
        )
    return drawn
