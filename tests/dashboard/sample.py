"""A busy proxy, as its API tells it: what the page is tested and pictured with."""

from __future__ import annotations

import math
import zlib
from typing import Any

NOW = 1_790_000_000.0
MIB = 1024**2
MODEL = "qwen3-8b-q4_k_m"
TITLES = [
    "Refactor the parser so that errors carry positions",
    "Trip to Oslo in February",
    "Weekly report for the team",
    "Why does the boiler lose pressure?",
]


def status(now: float = NOW, **changes: Any) -> dict[str, Any]:
    """``/api/status``."""
    return {
        "version": "1.0.0",
        "started": now - 273_600,
        "now": now,
        "mode": "exclusive",
        "why": "proved: pins are honoured, states survive",
        "advice": "",
        "ready": True,
        "paused": False,
        "draining": False,
        "restores": "in use",
        "backend": {
            "kind": "llama-server", "url": "http://127.0.0.1:8080", "up": True, "model": MODEL,
            "n_ctx": 32768, "total_slots": 4, "version": "b11549", "restarts": 1,
        },
        "store": {
            "path": "/var/lib/slots", "used": 15_247_000_000, "limit": 53_687_091_200,
            "free": 180_000_000_000, "snapshots": 4, "keep_free": 10_737_418_240,
            "refused": None, "advice": "",
        },
        "queue": {"waiting": 1, "running": 2},
        "totals": {
            "requests": 1284,
            "prompt_tokens": {"slot": 3_310_000, "snapshot": 498_000, "computed": 331_000},
            "seconds_saved": 6_735.0, "saves": 190, "restores": 61, "evictions": 4,
        },
        "first_token": {"p50": 0.21, "p95": 1.44, "count": 63},
        "hide_titles": False,
        **changes,
    }  # fmt: skip


def slots(now: float = NOW) -> list[dict[str, Any]]:
    """``/api/slots``: one of each state."""
    shapes: list[tuple[str, int | None, int, int | None]] = [
        ("leased", 12_411, 11_900, 0),
        ("free", 3_902, 3_902, 1),
        ("restoring", 8_120, 8_120, 2),
        ("free", None, 0, None),
    ]
    return [
        {
            "index": index,
            "state": state,
            "conversation": None if title is None else f"c{title}aa4f21b7",
            "title": None if title is None else TITLES[title],
            "client": "" if title is None else ("opencode", "open-webui", "goose")[title],
            "tokens": tokens,
            "saved_tokens": saved,
            "used": None if title is None else now - 250,
            "since": now - 12,
            "storable": True,
        }
        for index, (state, tokens, saved, title) in enumerate(shapes)
    ]


def running(now: float = NOW) -> list[dict[str, Any]]:
    """``/api/running``: reading a prompt, answering, waiting."""
    common = {"path": "/v1/chat/completions", "queued": 0.1}
    return [
        {
            **common, "request_id": "run-1", "client": "opencode", "conversation": "c0aa4f21b7",
            "title": TITLES[0], "slot": 0, "reason": "slot-hit", "state": "prefill",
            "prompt": 12_411, "cached": 7_288, "processed": 9_800, "at": now - 12,
            "generated": None,
        },
        {
            **common, "request_id": "run-2", "client": "goose", "conversation": "c2aa4f21b7",
            "title": TITLES[2], "slot": 2, "reason": "restored", "state": "preparing",
            "prompt": None, "cached": None, "processed": None, "at": now - 1, "generated": None,
        },
    ]  # fmt: skip


def costs(slot: int) -> list[dict[str, Any]]:
    """The options of one decision."""

    def row(at: int, reason: str, hit: int, parts: tuple[float, ...]) -> dict[str, Any]:
        names = ("wait", "prefill", "transfer", "loss")
        return {
            "slot": at,
            "reason": reason,
            "hit": hit,
            "prompt": 8_120,
            "save_first": reason == "cold",
            "snapshot": "5d0c77e19a" if reason == "restored" else None,
            **dict(zip(names, parts, strict=True)),
            "cost": round(sum(parts), 4),
        }

    return [
        row(slot, "restored", 8_064, (0.0, 0.31, 0.42, 0.6)),
        row(slot, "cold", 0, (0.0, 41.2, 0.8, 0.6)),
        row(0, "slot-hit", 212, (9.5, 40.1, 0.0, 3.2)),
    ]


COLD = {
    "cause": "system",
    "sentence": "system prompt changed at character 118",
    "before": "Today is Monday, 30 November 2026, 13:58. You are",
    "after": "Today is Monday, 30 November 2026, 14:01. You are",
    "advice": "A clock in the system prompt. Take it out, or let the rules for clocks freeze it and"
    " tell the newer value at the end.",
    "text": "",
}


def request(number: int, now: float = NOW, **changes: Any) -> dict[str, Any]:
    """One row of ``/api/requests``; ``number`` 0 is the newest."""
    reason = ("slot-hit", "restored", "cold", "slot-hit", "slot-hit")[number % 5]
    title = (0, 2, 1, 0, 3)[number % 5]
    prompt = 12_411 - 700 * (number % 5)
    reused = {"slot-hit": prompt - 123, "restored": prompt - 56, "cold": 118}[reason]
    row = {
        "request_id": f"7f3a{number:04d}",
        "at": now - 40 - 67.0 * number,
        "path": "/v1/messages" if title == 0 else "/v1/chat/completions",
        "reason": reason,
        "status": 200,
        "total": 9.4 if reason == "cold" else 3.1,
        "queued": 0.002,
        "slot": title,
        "reused": reused,
        "computed": prompt - reused,
        "prompt": prompt,
        "first_token": {"slot-hit": 0.18, "restored": 1.31, "cold": 6.9}[reason],
        "costs": costs(title),
        "note": "",
        "conversation": f"c{title}aa4f21b7",
        "title": TITLES[title],
        "client": ("opencode", "open-webui", "goose", "open-webui")[title],
        "side": "title" if number % 5 == 4 else "",
        "rules": ["anthropic-billing", "tool-order"] if title == 0 else [],
        "cold": COLD if reason == "cold" else None,
        **changes,
    }
    return {"seq": zlib.crc32(str(row["request_id"]).encode()), **row}


def snapshots(now: float = NOW) -> list[dict[str, Any]]:
    """``/api/snapshots``."""
    return [
        {
            "id": f"{number}d0c77e19a", "tokens": tokens, "bytes": size * MIB,
            "created": now - 90_000, "last_used": now - age, "restores": restores,
            "barred": number == 3, "pinned": number == 1, "conversation": f"c{number}aa4f21b7",
            "title": TITLES[number], "value": value, "prompt_tokens": tokens - 50,
        }
        for number, (tokens, size, age, restores, value) in enumerate([
            (11_900, 620, 260, 3, 4.1e-5), (3_902, 203, 500, 12, 1.9e-5),
            (8_120, 410, 4_000, 1, 9.0e-6), (22_800, 1190, 200_000, 0, 4.0e-7),
        ])
    ]  # fmt: skip


def conversations(now: float = NOW) -> list[dict[str, Any]]:
    """``/api/conversations``."""
    return [
        {
            "id": f"c{number}aa4f21b7", "client": ("opencode", "open-webui", "goose", "")[number],
            "messages": 34 - 8 * number, "used": now - 60 - 4_000 * number, "prompt_n": 9_000,
            "title": title, "bytes": 80_000,
        }
        for number, title in enumerate(TITLES)
    ]  # fmt: skip


def logs(now: float = NOW) -> list[dict[str, Any]]:
    """``/api/logs``: quiet lines and loud ones."""
    events = [
        ("info", "request", {"request_id": "7f3a0002", "reason": "cold", "status": 200}),
        ("info", "saved", {"slot": 1, "tokens": 3902, "seconds": 0.31}),
        ("debug", "reconciled", {"snapshots": 4}),
        ("info", "restored", {"slot": 2, "tokens": 8120, "seconds": 0.42}),
        ("warning", "slow client", {"request_id": "7f3a0004", "seconds": 31.0}),
        ("error", "save refused", {"slot": 3, "status": 400}),
    ]
    return [
        {"seq": seq, "at": now - 300 + 9 * seq, "level": level, "event": event, "fields": fields}
        for seq in range(24)
        for level, event, fields in [events[seq % len(events)]]
    ]


def history(span: int, now: float = NOW) -> dict[str, Any]:
    """``/api/history``: a working day's waves."""
    rows: list[list[Any]] = []
    for number in range(span // 60):
        at = math.floor(now / 60) * 60 - span + 60 + 60 * number
        age = now - at
        wave = max(0.0, math.cos(age / 1900) + 0.5 * math.sin(age / 310))
        busy = wave > 0.1
        rows.append([
            at, round(4 * wave), round(26_000 * wave), round(4_000 * wave * (number % 3 == 0)),
            round(2_600 * wave + 900 * (number % 11 == 0)), 52 * wave,
            0.2 + 0.05 * math.sin(at / 240) if busy else None,
            1.1 + 0.6 * math.sin(at / 410) if busy else None,
            round(wave), 14e9 + 4e4 * (at % 86_400),
        ])  # fmt: skip
    columns = [
        "t", "requests", "slot", "snapshot", "computed", "seconds_saved", "first_token_p50",
        "first_token_p95", "queue", "disk",
    ]  # fmt: skip
    return {"step": 60, "columns": columns, "rows": rows}
