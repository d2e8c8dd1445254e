"""``/v1/completions`` where the backend has only chat: the prompt is a user's message.

FastFlowLM does the same behind its own ``/v1/completions``, but unlocked and uncached
(fastflowlm.md 1.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.core.sse import encode
from proxy.dialects.base import Call, EventFilter
from proxy.dialects.retelling import DONE, Retold, Translated, text_of
from proxy.errors import BadRequestError

_HINT = "The server behind has only a chat API; it can do no more than continue one text."
# Refused unless they ask for what holds anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "n": (None, 1),
    "suffix": (None, ""),
}
_DROPPED = (
    *_REFUSED, "messages", "prompt", "stream_options", "tool_choice", "tools", "top_logprobs",
)  # fmt: skip


class CompletionAsChat(Translated):
    """Text in, a ``text_completion`` out; what the model thinks has no place in it."""

    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Translated``."""
        for name, allowed in _REFUSED.items():
            if given.get(name) not in allowed:
                raise BadRequestError(f"Field '{name}' cannot be served here.", hint=_HINT)
        prompt = given.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str):
            raise BadRequestError("Field 'prompt' must be one string here.", hint=_HINT)
        chat = {name: value for name, value in given.items() if name not in _DROPPED}
        return {**chat, "messages": [{"role": "user", "content": prompt}]}

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        options = call.extra["given"].get("stream_options")
        counted = isinstance(options, dict) and options.get("include_usage") is True
        return TextFilter(ping_id=ping_id, created=created, model=call.model, counted=counted)


class TextFilter(Retold):
    """One answer of ``/v1/completions``."""

    def __init__(self, *, ping_id: str, created: int, model: str, counted: bool) -> None:
        """``counted``: the client wants the usage in a chunk of its own."""
        super().__init__(ping_id=ping_id, created=created, model=model)
        self._counted = counted

    def ping(self) -> bytes:
        """See ``EventFilter``."""
        self._pinged = self._pinged or not self._known
        return self._event([_choice("", None)])

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        text = text_of(delta, "content")
        return self._event([_choice(text, None)]) if text else b""

    def _end(self) -> bytes:
        out = self._event([_choice("", _reason(self._finish))])
        if self._counted:
            out += self._event([], usage=self._usage)
        return out + encode(DONE)

    def _failure(self, error: bytes) -> bytes:
        return encode(error)

    def _told(
        self, answer: Mapping[str, Any], message: Mapping[str, Any], finish: str | None
    ) -> Mapping[str, Any]:
        choices = [_choice(text_of(message, "content"), _reason(finish))]
        return {**_head(answer), "choices": choices, "usage": answer.get("usage")}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return encode(orjson.dumps({**_head(self._head), "choices": choices, **more}))


def _head(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": "cmpl-" + str(values.get("id")).removeprefix("chatcmpl-"),
        "object": "text_completion",
        "created": values.get("created"),
        "model": values.get("model"),
    }


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}


def _reason(finish: str | None) -> str:
    """Of the reasons of chat, those this API knows."""
    return finish if finish in {"length", "content_filter"} else "stop"
