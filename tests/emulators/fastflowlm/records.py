"""What the emulator remembers of each request, for the tests to judge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Point = Literal["queued", "prefill", "decode", "before-clear"]


@dataclass(slots=True)
class Hold:
    """Stops requests at a point until the test lets them go on."""

    at: Point
    after: int = 0  # tokens generated, or prefill chunks, before it stops
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Record:
    """One request. All seconds are emulated ones."""

    number: int
    path: str
    body: dict[str, Any]  # as received; {} if it was no JSON object
    model: str = ""  # the tag that answered
    stream: bool = False
    layer1: str = ""  # hit, miss, switch; "" where no layer 1 is asked
    reason: str = ""
    matched: int = 0
    layer2: str = ""  # hit, miss, empty
    diverged: int | None = None  # first token that differs
    kept: int = 0
    prefilled: int = 0
    completion: int = 0
    loaded: bool = False  # a model was loaded for it
    last_only: bool = False  # era B: the model saw nothing but the last message
    race: bool = False  # it was in the engine together with another
    disconnected: bool = False
    context_full: bool = False
    leaked: bool = False  # its connection slot is lost
    finish: str = ""
    status: int = 0
    error: str = ""
    text: str = ""  # what was generated, special tokens included
    arrived: float = 0.0
    started: float = 0.0
    first_byte: float | None = None
    ended: float | None = None
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    log: list[str] = field(default_factory=list)
    gate: Callable[[Record, Point], Awaitable[None]] | None = field(default=None, repr=False)

    def note(self, line: str) -> None:
        """A line of the server's own log."""
        self.log.append(line)

    async def pause(self, point: Point) -> None:
        """Where a test may hold the request."""
        if self.gate is not None:
            await self.gate(self, point)

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.kept + self.prefilled

    def as_json(self) -> dict[str, Any]:
        """For the debug routes."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gate"}
