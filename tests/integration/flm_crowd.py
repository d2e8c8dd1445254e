"""Requests of every kind at once for FastFlowLM: good, wrong, too long, given up, cancelled.

Each conversation has a word of its own in everything it says, and the emulated model answers with
all such words that its memory holds: whatever of another conversation it should ever see is told.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import aiohttp
import orjson

from tests.emulators.fastflowlm import Answer, Record
from tests.emulators.fastflowlm.engine import Engine

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
KEYS = ("key-a", "key-b")
CONTEXT = 4096
WORD = re.compile(r"canary[0-9a-f]{8}z[0-9]+")
CLIENTS = (8, 1, 4, 1)  # at a time, one number after the other,
PHASE = 40  # for so many requests each
FULL = 8  # messages, then a conversation is over
OK, WRONG = 200, 400
SPOKEN = {
    "content", "text", "arguments", "partial_json", "reasoning_content", "thinking",
    "response", "delta",
}  # fmt: skip
Body = dict[str, Any]
Message = dict[str, Any]
Leave = Literal["", "before", "during", "after"]


def tells(record: Record, engine: Engine) -> Answer:
    """All words the model can see; a tool call first, where there are tools."""
    words = sorted(set(WORD.findall("".join(engine.history))))
    messages = record.body.get("messages") or [{}]
    if record.body.get("tools") and messages[-1].get("role") == "user":
        return Answer("Hm.", calls=(("look", orjson.dumps({"words": words}).decode()),))
    return Answer(f"\n\nSeen: {' '.join(words)}.")


@dataclass
class Talk:
    """A conversation: whose it is, its word, and what was said."""

    key: str
    word: str
    tools: bool
    messages: list[Message] = field(default_factory=list)
    turn: int = 0

    def says(self) -> str:
        """The next thing to say."""
        self.turn += 1
        return f"{self.word}z{self.turn} is my word."


@dataclass
class Got:
    """What came of a request. ``left``: the client went before the end."""

    status: int = 0
    raw: bytes = b""
    left: bool = False

    @property
    def json(self) -> Any:
        """A whole answer."""
        return orjson.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """A stream's events, those that came whole; ``[DONE]`` as a string."""
        whole = self.raw[: self.raw.rfind(b"\n\n") + 1]
        lines = re.findall(rb"^data: ?(.*)$", whole, re.MULTILINE)
        return ["[DONE]" if line == b"[DONE]" else orjson.loads(line) for line in lines]

    @property
    def lines(self) -> list[Any]:
        """A stream of lines, as Ollama's API has them; a whole answer is none."""
        whole = self.raw[: self.raw.rfind(b"\n") + 1].splitlines()
        return [orjson.loads(line) for line in whole]

    @property
    def said(self) -> str:
        """All that was said, the pieces of a stream put together."""
        if self.raw.startswith((b"data:", b"event:")):
            return "".join(text for event in self.events for text in spoken(event))
        if self.lines:
            return "".join(text for line in self.lines for text in spoken(line))
        return self.raw.decode(errors="replace")


def spoken(value: Any, name: str = "") -> Iterator[str]:
    """The texts in an event, wherever its API puts them."""
    if isinstance(value, str) and name in SPOKEN:
        yield value
    for key, part in value.items() if isinstance(value, dict) else ():
        yield from spoken(part, key)
    for part in value if isinstance(value, list) else ():
        yield from spoken(part)


class ForeignWordError(AssertionError):
    """A word of another conversation, or none of its own, in an answer."""


@dataclass
class Mix:
    """The clients. ``outcomes`` counts what became of the requests of each kind."""

    url: str
    session: aiohttp.ClientSession
    seed: int
    kinds: Sequence[tuple[int, str, Kind]] = ()  # weight, name, what to do
    patience: float = 15.0  # seconds after which a request counts as hanging
    dead: Callable[[], bool] | None = None  # asked without the proxy: then nothing else is judged
    outcomes: Counter[str] = field(default_factory=Counter)

    async def run(self, count: int) -> None:
        """So many requests, at most 8 at a time; each client has conversations of its own.

        At times there is but one client: nobody comes between what it left and what it asks next.
        """
        numbers = iter(range(count))
        talks: dict[tuple[int, int], Talk] = {}

        async def client(name: int, share: int) -> None:
            for number in islice(numbers, share):
                if self.dead is not None and self.dead():
                    return
                rng = random.Random(f"{self.seed}-{number}")
                place = name, rng.randrange(3)
                talk = talks.get(place)
                if talk is None or len(talk.messages) >= FULL:
                    word = f"canary{rng.getrandbits(32):08x}"
                    talk = talks[place] = Talk(rng.choice(KEYS), word, tools=rng.random() < 0.3)
                await self._one(rng, talk)

        for phase in range(count // PHASE + 1):
            clients = CLIENTS[phase % len(CLIENTS)]
            async with asyncio.TaskGroup() as group:
                for name in range(clients):
                    group.create_task(client(name, PHASE // clients))

    async def _one(self, rng: random.Random, talk: Talk) -> None:
        weights = [weight for weight, _, _ in self.kinds]
        _, name, kind = rng.choices(self.kinds, weights)[0]
        try:
            async with asyncio.timeout(self.patience):
                await kind(self, rng, talk, name)
        except Exception:
            if self.dead is None:
                raise
            self.outcomes["no good answer"] += 1

    async def post(
        self, path: str, body: Any, key: str, *, leave: Leave = "", after: float = 0.0
    ) -> Got:
        """One request. ``leave``: when the client goes; ``after`` seconds, if before the answer."""
        got = Got()
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(after if leave == "before" else None),
                self.session.post(self.url + path, data=data, headers=headers) as answer,
            ):
                got.status = answer.status
                async for chunk in answer.content.iter_any():
                    got.raw += chunk
                    end = b"[DONE]" in got.raw or b"message_stop" in got.raw
                    if leave == "during" or (leave == "after" and end):
                        got.left = True
                        answer.close()
                        break
        except TimeoutError:
            got.left = True
        return got

    def told(self, kind: str, got: Got, talk: Talk, *, whole: bool = True) -> None:
        """Judge what came. ``whole``: it must be an answer, and name the newest word."""
        outcome = "left" if got.left else str(got.status)
        self.outcomes[f"{kind}: {outcome}"] += 1
        words = set(WORD.findall(got.said))
        if any(not word.startswith(talk.word) for word in words):
            raise ForeignWordError(f"{kind}: {words} told to {talk.word}")
        if got.left:
            return
        if got.status != OK:
            clear(kind, got)
            assert not whole, (kind, got.status, got.raw)
        elif whole and f"{talk.word}z{talk.turn}" not in words:
            raise ForeignWordError(f"{kind}: {got.said!r} does not know {talk.word}z{talk.turn}")


Kind = Callable[[Mix, random.Random, Talk, str], Coroutine[Any, Any, None]]


def clear(kind: str, got: Got) -> None:
    """An error has a status and says what is wrong, in one of the shapes clients know."""
    assert 400 <= got.status < 600, (kind, got.status)
    error = got.json["error"]
    said = error if isinstance(error, str) else error["message"]
    assert isinstance(said, str), (kind, got.raw)
    assert said, (kind, got.raw)


def ended(got: Got) -> None:
    """A stream that nobody left has an end; an error event is one."""
    last = got.events[-1]
    ends = {"message_stop", "error", "response.completed", "response.failed"}
    assert last == "[DONE]" or last.get("type") in ends or "error" in last, last
