"""Puts answers together from stream events, equal to what the engine answers unstreamed.

The engine's stream lacks what only unstreamed answers have in full: probabilities and ids of tokens
that end within a character, text held back for a stop string when the answer hits its limit
(measured on b11549). Requests that need those are not streamed (``dialects.body.streamable``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

DONE = b"[DONE]"


class _Assembled(ABC):
    """Reads events, keeps the error event if one comes. Subclasses gather what they need."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.lossy = False
        self._error: bytes | None = None
        self._done = False

    def feed(self, data: bytes) -> None:
        """Take one event's data. Raises ``ValueError`` when it is no JSON."""
        if data == DONE:
            self._done = True
            return
        event = orjson.loads(data)
        if not isinstance(event, dict):
            return  # "null": the engine marks a begin
        if "error" in event:
            self._error = data
            return
        self._take(event)

    def error(self) -> bytes | None:
        """The error event, in the form of the engine's error answers."""
        return self._error

    @abstractmethod
    def _take(self, event: dict[str, Any]) -> None:
        """Gather one event of an answer."""


class NativeAnswer(_Assembled):
    """``/completion`` and ``/infill``: the last event has everything but the text."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        super().__init__()
        self._text: list[str] = []
        self._last: dict[str, Any] | None = None

    def _take(self, event: dict[str, Any]) -> None:
        self._text.append(event.get("content") or "")
        if event.get("stop") is True:
            self._last = event

    def answer(self) -> bytes:
        """The JSON answer. Raises ``ValueError`` when the end is missing."""
        if self._last is None:
            raise ValueError("the last event is missing")
        settings = self._last.get("generation_settings")
        if isinstance(settings, dict) and "stream" in settings:
            settings["stream"] = False
        return orjson.dumps({**self._last, "content": "".join(self._text)})


class TextAnswer(_Assembled):
    """``/v1/completions``: the last chunk has everything but the text."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        super().__init__()
        self._text: list[str] = []
        self._last: dict[str, Any] | None = None

    def _take(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or ():
            self._text.append(choice.get("text") or "")
            if choice.get("finish_reason") is not None:
                self._last = event

    def answer(self) -> bytes:
        """The JSON answer. Raises ``ValueError`` when the end is missing."""
        if self._last is None or not self._done:
            raise ValueError("the last event is missing")
        choice = {**self._last["choices"][0], "text": "".join(self._text)}
        return orjson.dumps({**self._last, "choices": [choice]})


class ChatAnswer(_Assembled):
    """``/v1/chat/completions``, streamed with usage."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        super().__init__()
        self._text: dict[str, list[str]] = {"content": []}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}

    def _take(self, event: dict[str, Any]) -> None:
        self._last = event
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            for name, value in delta.items():
                if name == "tool_calls":
                    self._merge(value or [])
                elif name != "role" and isinstance(value, str):
                    self._text.setdefault(name, []).append(value)
            if choice.get("finish_reason") is not None:
                self._finish = choice

    def _merge(self, calls: list[dict[str, Any]]) -> None:
        """Arguments come in pieces, the rest of a call once."""
        for piece in calls:
            function = piece.get("function") or {}
            call = self._calls.setdefault(
                piece.get("index", 0),
                {"type": "function", "function": {"name": "", "arguments": ""}, "id": ""},
            )
            call["id"] = piece.get("id") or call["id"]
            call["type"] = piece.get("type") or call["type"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""

    def answer(self) -> bytes:
        """The JSON answer. Raises ``ValueError`` when the end is missing."""
        if self._finish is None or not self._done:
            raise ValueError("the last event is missing")
        message: dict[str, Any] = {"role": "assistant"}
        message |= {name: "".join(pieces) for name, pieces in self._text.items()}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        last = self._last
        usage = last.get("usage") or {}
        said = any(message[name] for name in message if name != "role")
        # One token and nothing said is the end token alone; more were swallowed by the parser.
        cut = self._finish["finish_reason"] == "length" or usage.get("completion_tokens", 0) > 1
        self.lossy = not said and cut
        choice = {
            "finish_reason": self._finish["finish_reason"],
            "index": self._finish.get("index", 0),
            "message": message,
        }
        order = ("created", "model", "system_fingerprint")
        known = {name: last[name] for name in order if name in last}
        known["object"] = "chat.completion"
        # ``usage`` and what is new to us keep their place before and after ``id``.
        for name in ("usage", "id", "timings", *last):
            if name in last and name not in ("choices", "object"):
                known.setdefault(name, last[name])
        return orjson.dumps({"choices": [choice], **known})
