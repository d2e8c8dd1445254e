"""What FastFlowLM holds, as its last requests tell: when it would go on from the wrong thing.

It compares less than it reuses. Images are in no checksum (fastflowlm.md 3.3). Releases 0.9.24 to
0.9.42 compare neither the answer nor, mostly, tools, and insert the last message only (section 0).
After a cancel the identical conversation leaves nothing to compute, which is a crash (5.9). A
flush, a request for one word, makes it forget. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Any

import orjson

from proxy.backends.flm_spelling import Spellings

_MEDIA = ("image_url", "input_audio")
_MISSES = 2  # so few messages are never looked up (3.1)
_TURN = 2  # the answer, and one message behind it
_SPACE = str.maketrans("", "", " \t\r\n\v\f\u3000")


class Cache(StrEnum):
    """How a release keeps a conversation (section 0)."""

    NONE = "none"  # era A
    DELTA = "delta"  # era B
    WHOLE = "whole"  # eras C to E


def cache_of(version: Sequence[int]) -> Cache:
    """By the release; an unknown one is taken for new."""
    if not version or tuple(version) >= (0, 9, 43):
        return Cache.WHOLE
    return Cache.DELTA if tuple(version) >= (0, 9, 24) else Cache.NONE


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat as the server takes it. ``messages``: neighbours of one role made one (1.5)."""

    messages: tuple[dict[str, Any], ...]
    tools: bytes = b""
    effort: str = ""

    @classmethod
    def of(cls, sent: dict[str, Any]) -> Prompt:
        """Of a request body that is ready to be sent (``flm_request.chat``)."""
        tools = orjson.dumps(sent["tools"]) if "tools" in sent else b""
        return cls(tuple(merged(sent["messages"])), tools, str(sent.get("reasoning_effort", "")))

    @property
    def media(self) -> bool:
        """It has images or sound."""
        return any(map(_media, self.messages))

    def extends(self, older: Prompt) -> bool:
        """Whether all of ``older`` is its beginning, with something behind it."""
        count = len(older.messages)
        return len(self.messages) > count and self.messages[:count] == older.messages

    def begins_as(self, older: Prompt) -> bool:
        """Whether they are two questions behind one system text, and nothing more."""
        return (
            len(self.messages) == len(older.messages) == _MISSES
            and self.messages[0] == older.messages[0]
            and self.messages[0]["role"] == "system"
            and self.messages != older.messages
        )

    def replaces(self, older: Prompt) -> bool:
        """Whether it asks something else in place of the last message of ``older``."""
        shared = older.messages[:-1]
        began = any(message["role"] == "assistant" for message in shared)
        count = len(shared)
        return (
            began
            and self.messages[:count] == shared
            and self.messages[count : count + 1] != older.messages[-1:]
        )


@dataclass(slots=True)
class Memory:
    """One server's. ``last`` is None when what it holds is not known."""

    cache: Cache = Cache.WHOLE
    last: Prompt | None = None
    tokens: int = 0  # of that prompt
    answer: dict[str, Any] | None = None  # the message it generated, as told
    cancelled: Prompt | None = None  # a chat that did not end by itself
    expected: bool = False  # by the rules, the chat that runs goes on from the last one
    # calls of the last answer, as told, if it comes back in that chat as it was
    repeated: list[dict[str, Any]] = field(default_factory=list)
    spellings: Spellings = field(default_factory=Spellings)

    def flush_before(self, new: Prompt) -> bool:
        """Whether what it holds must be forgotten first."""
        if self.cache is Cache.NONE or len(new.messages) <= _MISSES:
            return False
        if self.cache is Cache.DELTA:
            return not self._next_turn(new)
        gone = self.cancelled
        if gone is not None and not new.tools and _alike(gone, new):
            return True
        return new.media and _other_media(self.last or gone, new)

    def _next_turn(self, new: Prompt) -> bool:
        """Era B: exactly the last prompt, the answer as it was, and one message more."""
        last, answer = self.last, self.answer
        if last is None or answer is None or not new.extends(last):
            return False
        if len(new.messages) != len(last.messages) + _TURN or new.messages[-1]["role"] == (
            "assistant"
        ):
            return False
        same = (new.tools, new.effort) == (last.tools, last.effort)
        return same and _said(new.messages[-_TURN]) == _said(answer)

    def begins(self, new: Prompt) -> None:
        """A chat is sent: until it has ended well, it counts as cancelled."""
        last = self.last
        self.expected = (
            self.cache is Cache.WHOLE
            and last is not None
            and new.extends(last)
            and len(new.messages) >= len(last.messages) + _TURN
            and (new.tools, new.effort) == (last.tools, last.effort)
        )
        self.repeated = []
        if self.expected and last is not None and self.answer is not None:
            came_back = _said(new.messages[len(last.messages)]) == _said(self.answer)
            self.repeated = self.answer["tool_calls"] if came_back else []
        self.lost()
        self.cancelled = new

    def ended(self, prompt: Prompt, answer: dict[str, Any], tokens: int) -> None:
        """It ended by itself; ``tokens`` of its prompt."""
        self.last, self.answer, self.tokens, self.cancelled = prompt, answer, tokens, None

    def lost(self) -> None:
        """Something that is no chat used the model (1.4)."""
        self.last, self.answer, self.tokens, self.cancelled = None, None, 0, None


def merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the server merges: users with users, systems with systems, nothing put between."""
    runs: list[list[dict[str, Any]]] = []
    for message in messages:
        role = message["role"]
        if runs and role == runs[-1][0]["role"] and role in {"user", "system"}:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [
        {**run[0], "content": _one([message["content"] for message in run])}
        if len(run) > 1
        else run[0]
        for run in runs
    ]


def _one(contents: Sequence[Any]) -> Any:
    """A text as long as all are, then parts; each is copied once, however many there are."""
    texts = list(takewhile(lambda content: isinstance(content, str), contents))
    rest = contents[len(texts) :]
    text = "".join(texts)
    if not rest:
        return text
    return [*(_parts(text) if texts else []), *(part for one in rest for part in _parts(one))]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def text_of(content: Any) -> str:
    """All text of a message's content."""
    return "".join(part.get("text", "") for part in _parts(content))


def _media(message: dict[str, Any]) -> list[Any]:
    content = message["content"]
    parts = content if isinstance(content, list) else []
    return [part for part in parts if part.get("type") in _MEDIA]


def _said(message: dict[str, Any]) -> tuple[str, list[tuple[Any, Any]]]:
    """Text and calls, which is all that is rendered of an answer; ids are not."""
    return text_of(message.get("content") or ""), [
        _called(call) for call in message.get("tool_calls") or []
    ]


def _called(call: Any) -> tuple[Any, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None, function
    return function.get("name"), _value(function.get("arguments"))


def _value(arguments: Any) -> Any:
    """Arguments whatever their spelling (``flm_spelling``)."""
    try:
        return orjson.loads(arguments)
    except (orjson.JSONDecodeError, TypeError):
        return arguments


def _alike(one: Prompt, other: Prompt) -> bool:
    """Whether a template may render both the same: some trim, none shows an id."""
    return len(one.messages) == len(other.messages) and _same_text(one, other)


def _other_media(old: Prompt | None, new: Prompt) -> bool:
    """Whether ``new`` may seem to go on from ``old``, with other images in that part."""
    return old is None or (_same_text(old, new) and not new.extends(old))


def _same_text(old: Prompt, new: Prompt) -> bool:
    pairs = zip(old.messages, new.messages, strict=False)
    return all(_bare(one) == _bare(other) for one, other in pairs)


def _bare(message: dict[str, Any]) -> tuple[str, str]:
    return message["role"], text_of(message["content"]).translate(_SPACE)
