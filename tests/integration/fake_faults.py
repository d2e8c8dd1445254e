"""What the fake can be told to do wrong, and what it remembers of each request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from aiohttp import web

Kind = Literal["stall", "reset", "cut", "error", "bad-json", "lie", "die"]
At = Literal["headers", "progress", "stream"]


@dataclass
class Fault:
    """Strikes requests whose path and query begin with ``on`` (an action: ``"save"``).

    stall: waits for ``release``. reset: the connection breaks. cut: it breaks within a chunk.
    error: an answer with ``status`` (503: "Loading model"). bad-json: 200 and no JSON. lie: a
    restore that says it worked and did nothing, a save that wrote less than it says. die: the
    whole server is gone. ``at``: before the answer's headers, after the first progress event,
    after the first token.
    """

    kind: Kind
    on: str = ""
    at: At = "headers"
    times: int = 1
    status: int = 500
    hit: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Seen:
    """One request as it arrived. ``cancelled``: its client left before the answer's end."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    slot: int | None = None
    cancelled: bool = False
    done: bool = False

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)


def matches(target: str, on: str) -> bool:
    """Whether a fault or a question about ``on`` means this target."""
    return target.startswith(on) or target.endswith(f"action={on}")


def as_json(value: Any) -> web.Response:
    """A 200 as llama-server writes it."""
    return web.Response(body=orjson.dumps(value), content_type="application/json", charset="utf-8")


def as_error(status: int, message: str, kind: str) -> web.Response:
    """llama-server's error shape (1.2)."""
    body = {"error": {"code": status, "message": message, "type": kind}}
    return web.Response(
        status=status, body=orjson.dumps(body), content_type="application/json", charset="utf-8"
    )
