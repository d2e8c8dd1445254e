"""The JSON of answers: events of a stream, the plain form, usage (section 1.5)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.emulators.fastflowlm.engine import Engine
from tests.emulators.fastflowlm.models import Model
from tests.emulators.fastflowlm.records import Record
from tests.emulators.fastflowlm.tokens import is_special
from tests.emulators.fastflowlm.transport import to_json

ERROR_IN_CALL = "[Error parsing tool call]"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: ``content``, ``reasoning`` or ``tool`` (a name and its arguments)."""

    kind: str
    text: str
    name: str = ""


def read_call(text: str) -> Part:
    """A generated call, its arguments written again: keys sorted, compact."""
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return Part("content", ERROR_IN_CALL)
    if not isinstance(call, dict):
        return Part("content", ERROR_IN_CALL)
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = to_json(arguments, sort=True).decode()
    return Part("tool", arguments, str(call.get("name", "")))


@dataclass(slots=True)
class Parser:
    """Tokens in, parts out. Control tokens are not shown, but an empty part may stand for them."""

    mode: str = "content"
    call: list[str] | None = None
    header: list[str] | None = None  # harmony: between <|start|> and <|message|>

    @classmethod
    def for_model(cls, model: Model, *, think: bool) -> Parser:
        """The state at the beginning of an answer."""
        opened = think and model.family.think_in_prompt
        harmony = model.family.template == "harmony"
        return cls("reasoning" if opened else "content", header=[] if harmony else None)

    def feed(self, token: str) -> Part | None:
        """What the token adds; None if nothing yet."""
        if self.call is not None:
            return self._in_call(token)
        if self.header is not None and token != "<|message|>":
            self.header.append(token)
            return None
        if not is_special(token):
            return Part(self.mode, token)
        return self._special(token)

    def _in_call(self, token: str) -> Part | None:
        if self.call is None or token != "</tool_call>":
            self.call = [*(self.call or []), token]
            return None
        text, self.call = "".join(self.call), None
        return read_call(text)

    def _special(self, token: str) -> Part | None:
        if token == "<|message|>":
            self.mode = "reasoning" if "analysis" in "".join(self.header or []) else "content"
            self.header = None
            return None
        if token in {"<|start|>", "<|channel|>"}:
            self.header = [token]
            return None
        if token == "<tool_call>":
            self.call = []
            return None
        if token in {"<think>", "</think>"}:
            self.mode = "reasoning" if token == "<think>" else "content"
            return Part(self.mode, "")
        return None


def parts_of(tokens: list[str], parser: Parser) -> Iterator[Part]:
    """All parts of a finished answer."""
    for token in tokens:
        part = parser.feed(token)
        if part is not None:
            yield part


def _speed(tokens: int, seconds: float) -> float | None:
    """Tokens per second; 0/0 is null in JSON."""
    if seconds:
        return tokens / seconds
    return math.inf if tokens else None


def usage(engine: Engine, record: Record, *, modern: bool, plain: bool) -> dict[str, Any]:
    """Token counts and times, as this release and form count them."""
    prompt = record.prompt if modern else record.prefilled
    cached = {"prompt_tokens_details": {"cached_tokens": record.kept}} if modern else {}
    active = engine.total
    capacity = {"active_kv_tokens": active, "max_kv_token_capacity": engine.limit}
    return {
        "prompt_tokens": prompt,
        **cached,
        "completion_tokens": record.completion,
        "total_tokens": prompt + record.completion,
        **({} if plain else capacity),
        "kv_token_occupancy_rate_percentage": active / engine.limit * 100,
        "load_duration": record.load_seconds,
        "prefill_duration_ttft": record.prefill_seconds,
        "decoding_duration": record.decode_seconds,
        "prefill_speed_tps": _speed(record.prefilled, record.prefill_seconds),
        "decoding_speed_tps": _speed(record.completion, record.decode_seconds),
    }


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


@dataclass(slots=True)
class Chunks:
    """Builds the events of one stream."""

    stream_id: str
    fingerprint: str
    created: int
    model: str  # as requested
    usage_null: bool = False  # era E with include_usage: on every chunk
    head: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head = {
            "id": self.stream_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
        }

    def delta(self, delta: dict[str, Any]) -> bytes:
        """A chunk with text or a call."""
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        extra = {"usage": None} if self.usage_null else {}
        return sse({**self.head, "choices": [choice], **extra})

    def text(self, part: Part) -> bytes:
        """Content or reasoning; the role is in every one."""
        field_name = "reasoning_content" if part.kind == "reasoning" else "content"
        return self.delta({"role": "assistant", field_name: part.text})

    def call(self, part: Part, index: int, call_id: str) -> bytes:
        """A whole tool call."""
        function = {"name": part.name, "arguments": part.text}
        call = {"index": index, "id": call_id, "type": "function", "function": function}
        return self.delta({"tool_calls": [call]})

    def final(self, finish: str, counted: dict[str, Any] | None) -> bytes:
        """The chunk with the reason, and with usage before era E."""
        choice = {"index": 0, "delta": {"content": None}, "finish_reason": finish}
        extra = {"usage": counted} if counted is not None or self.usage_null else {}
        head = {**self.head, "system_fingerprint": self.fingerprint}
        return sse({**head, "choices": [choice], **extra})

    def counted(self, counted: dict[str, Any]) -> bytes:
        """Era E: usage in a chunk of its own."""
        head = {**self.head, "system_fingerprint": self.fingerprint}
        return sse({**head, "choices": [], "usage": counted})


def plain(
    model: str, created: int, message: dict[str, Any], finish: str, counted: dict[str, Any]
) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return {
        "id": "fastflowlm-chat-completion",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": counted,
        "service_tier": "default",
    }
