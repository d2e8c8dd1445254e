"""Ollama's answers, made of a chat answer: lines of JSON, or one object.

Counts are in tokens, durations in nanoseconds. ``prompt_eval_count`` is the whole prompt;
``prompt_tokens_details`` (not Ollama's) says how much of it the backend had.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import orjson

from proxy.core.sse import Event
from proxy.dialects.ollama_errors import translated
from proxy.dialects.retelling import Retold, arguments_of, cached, text_of

SETTLED = ("load", "unload")  # reasons of an answer to a request that says nothing
_SECOND = 1e9
_MILLISECOND = 1e6


class Lines(Retold):
    """What both APIs share: one object per line, the last one with ``done`` and the figures."""

    media: ClassVar[str] = "application/x-ndjson"

    def __init__(self, *, ping_id: str, created: int, model: str) -> None:
        """See ``Filter``."""
        super().__init__(ping_id=ping_id, created=created, model=model)
        self._calls: dict[int, dict[str, Any]] = {}  # whole only at the end: arguments are objects

    def wire(self, event: Event) -> bytes:
        """See ``EventFilter``. Lines of JSON have no comments."""
        return b"" if event.comment_only else super().wire(event)

    def ping(self) -> bytes:
        """See ``EventFilter``."""
        return self._line(self._says(""), done=False)

    @abstractmethod
    def _says(self, text: str, **more: Any) -> dict[str, Any]:
        """A piece of the answer; ``more``: ``thinking``, ``tool_calls``."""

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        for piece in delta.get("tool_calls") or ():
            self._gather(piece)
        text, thought = text_of(delta, "content"), text_of(delta, "reasoning_content")
        out = self._line(self._says("", thinking=thought), done=False) if thought else b""
        return out + (self._line(self._says(text), done=False) if text else b"")

    def _gather(self, piece: Mapping[str, Any]) -> None:
        new: dict[str, Any] = {"id": None, "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(piece.get("index") or 0, new)
        call["id"] = piece.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += text_of(piece.get("function") or {}, name)

    def _end(self) -> bytes:
        calls = _calls([self._calls[index] for index in sorted(self._calls)])
        out = self._line(self._says("", tool_calls=calls), done=False) if calls else b""
        last = {"done": True, "done_reason": _reason(self._finish)}
        figures = _figures(self._usage, self.timings)
        return out + self._line(self._says(""), **last, **figures)

    def _failure(self, error: bytes) -> bytes:
        return translated(error) + b"\n"

    def _refusal(self, status: int, body: bytes) -> bytes:
        return translated(body, status)

    def _told(
        self, answer: Mapping[str, Any], message: Mapping[str, Any], finish: str | None
    ) -> Mapping[str, Any]:
        more: dict[str, Any] = {}
        if thought := text_of(message, "reasoning_content"):
            more["thinking"] = thought
        if calls := _calls(message.get("tool_calls") or []):
            more["tool_calls"] = calls
        said = self._says(text_of(message, "content"), **more)
        if finish in SETTLED:  # nothing was computed, and Ollama tells no figures then
            last: Mapping[str, Any] = {"done": True, "done_reason": finish}
        else:
            figures = _figures(answer.get("usage"), answer.get("timings"))
            last = {"done": True, "done_reason": _reason(finish), **figures}
        return {**_head({**self._head, **answer}), **said, **last}

    def _line(self, said: Mapping[str, Any], **more: Any) -> bytes:
        return orjson.dumps({**_head(self._head), **said, **more}) + b"\n"


class ChatLines(Lines):
    """One answer of ``/api/chat``."""

    def _says(self, text: str, **more: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **more}}


class GenerateLines(Lines):
    """One answer of ``/api/generate``."""

    def _says(self, text: str, **more: Any) -> dict[str, Any]:
        return {"response": text, **more}


def _head(values: Mapping[str, Any]) -> dict[str, Any]:
    created = values.get("created")
    at = datetime.fromtimestamp(created if isinstance(created, int) else 0, UTC)
    return {"model": values.get("model"), "created_at": f"{at:%Y-%m-%dT%H:%M:%SZ}"}


def _calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        name = text_of(call["function"], "name")
        function = {"index": index, "name": name, "arguments": arguments_of(call)}
        found.append({**({"id": call["id"]} if call.get("id") else {}), "function": function})
    return found


def _reason(finish: str | None) -> str:
    return "length" if finish == "length" else "stop"


def _figures(usage: Any, timings: Any) -> dict[str, Any]:
    """From the backend's usage, and from timings in llama-server's words (milliseconds)."""
    spent: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
    known: Mapping[str, Any] = timings if isinstance(timings, dict) else {}
    prompt, answer = (_number(spent, name) for name in ("prompt_tokens", "completion_tokens"))
    load = round(_number(spent, "load_duration") * _SECOND)
    prefill, decode = (
        round(_number(known, name) * _MILLISECOND) for name in ("prompt_ms", "predicted_ms")
    )
    return {
        "total_duration": load + prefill + decode,
        "load_duration": load,
        "prompt_eval_count": prompt,
        "prompt_eval_duration": prefill,
        "eval_count": answer,
        "eval_duration": decode,
        "prompt_tokens_details": {"cached_tokens": cached(spent)},
    }


def _number(values: Mapping[str, Any], name: str) -> int | float:
    value = values.get(name)
    return value if isinstance(value, int | float) else 0
