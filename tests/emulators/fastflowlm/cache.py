"""Layer 1: does a request extend the last one, judged by checksums of its messages.

``Checksums`` is era C to E (fastflowlm.md 3.1), ``Delta`` era B. The page says of era B what is
summed and when it hits; that a request of two messages stores nothing, and that messages of tools
are left out, is how the header of that release reads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import orjson

from tests.emulators.fastflowlm.normalise import Message

MASK = (1 << 64) - 1
HASHED = ("role", "content", "tool_calls", "tool_call_id", "name")


def checksum(data: bytes, start: int = 0) -> int:
    """Little-endian 8-byte words and the bytes of the tail, added up modulo 2^64."""
    words = len(data) // 8
    total: int = start + sum(struct.unpack_from(f"<{words}Q", data)) + sum(data[words * 8 :])
    return total & MASK


def dump(value: Any) -> bytes:
    """Compact JSON, keys in the order they came in."""
    return orjson.dumps(value)


def message_checksum(message: Message) -> int:
    """Of the fields that count; images and audio do not."""
    return checksum(dump({key: message[key] for key in HASHED if key in message}))


def tool_checksums(tools: Any) -> list[int]:
    """One per tool, order kept."""
    return [checksum(dump(tool)) for tool in tools] if isinstance(tools, list) else []


@dataclass(frozen=True, slots=True)
class Verdict:
    """What layer 1 says, why, and how many cached messages were found again."""

    hit: bool
    reason: str
    matched: int = 0


class Checksums:
    """One checksum per message and per tool of the last request."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.tools: list[int] = []

    def store(self, messages: list[Message], tools: Any) -> None:
        """Remember a request without comparing it."""
        self.messages = [message_checksum(m) for m in messages]
        self.tools = tool_checksums(tools)

    def judge(self, messages: list[Message], tools: Any) -> Verdict:
        """Compare with the last request, and remember this one in any case."""
        cached, cached_tools = self.messages, self.tools
        self.store(messages, tools)
        if len(messages) <= 2:
            return Verdict(hit=False, reason="at most two messages")
        if len(cached) > len(messages) - 2:
            return Verdict(hit=False, reason="fewer than two new messages")
        if cached != self.messages[: len(cached)]:
            return Verdict(hit=False, reason="a message differs")
        if cached_tools != self.tools:
            return Verdict(hit=False, reason="tools differ")
        return Verdict(hit=True, reason="extension", matched=len(cached))

    def reset(self) -> None:
        """After a cancel or an error."""
        self.messages, self.tools = [], []


class Delta:
    """Era B: one sum over all contents of the last request."""

    def __init__(self, *, harmony: bool = False) -> None:
        """``harmony``: gpt-oss counts tool messages too."""
        self.harmony = harmony
        self.sum = 0
        self.tools: list[int] = []

    def _counts(self, message: Message) -> bool:
        return self.harmony or not (message.get("role") == "tool" or "tool_calls" in message)

    def store(self, messages: list[Message], tools: Any) -> None:
        """Remember a request without comparing it: here every message counts."""
        self.sum = 0
        for message in messages:
            self.sum = checksum(str(message.get("content", "")).encode(), self.sum)
        self.tools = tool_checksums(tools)

    def judge(self, messages: list[Message], tools: Any) -> Verdict:
        """A hit if all but the last two messages add up to the last request."""
        cached_tools, self.tools = self.tools, tool_checksums(tools)
        if len(messages) <= 2:
            return Verdict(hit=False, reason="at most two messages")
        before = after = 0
        for place, message in enumerate(messages):
            if self._counts(message):
                content = str(message.get("content", "")).encode()
                if place < len(messages) - 2:
                    before = checksum(content, before)
                after = checksum(content, after)
        cached, self.sum = self.sum, after
        if cached != before:
            return Verdict(hit=False, reason="the sum differs")
        if cached_tools != self.tools[: len(cached_tools)]:
            return Verdict(hit=False, reason="tools differ")
        return Verdict(hit=True, reason="extension", matched=len(messages) - 2)

    def reset(self) -> None:
        """Force a miss, as the header does it."""
        self.sum = (self.sum + 1) & MASK
