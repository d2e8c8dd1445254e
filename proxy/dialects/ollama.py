"""Ollama's ``/api/chat`` and ``/api/generate`` as chat requests.

Streamed unless ``stream`` is false, as Ollama's clients expect; FastFlowLM's own ``/api/chat``
takes the opposite for granted, and crashes when it is asked to stream (fastflowlm.md 1.4).

A request that says nothing loads its model, or unloads it. Here no server does either, so it is
answered as Ollama answers it, and nobody else is asked.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from proxy.dialects.base import Call, EventFilter
from proxy.dialects.ollama_answer import ChatLines, GenerateLines
from proxy.dialects.retelling import Translated
from proxy.errors import BadRequestError

Message = dict[str, Any]

# How a model is loaded, or what has no meaning here; everything else has llama.cpp's own name.
_LOADING = (
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx",
    "num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
)  # fmt: skip
_CONVERTED = (
    "context", "format", "images", "keep_alive", "logprobs", "messages", "options", "prompt",
    "raw", "shift", "stream", "suffix", "system", "template", "think", "tools", "top_logprobs",
    "truncate",
)  # fmt: skip
# The first characters of a picture in base64, and what it is.
_PICTURES = {"/9j/": "jpeg", "iVBORw": "png", "R0lGOD": "gif", "UklGR": "webp"}
_HINT = "/api/chat takes whole conversations; the server behind applies the model's own template."
_ROLES = ("assistant", "system", "tool", "user")
# As Go writes a duration of nothing. Nothing is given back (``++``): it is a client's text.
_NO_TIME = re.compile(r"[-+]?(?:0++(?:\.0*+)?+(?:[nuµm]?s|m|h)?+)++")


class OllamaDialect(Translated):
    """What the two APIs share; they differ in how they name what was and what is said."""

    def parse(self, raw: bytes) -> Call:
        """See ``Dialect``."""
        call = super().parse(raw)
        if call.body["messages"]:
            return call
        if not call.model:
            raise BadRequestError("Nothing is said, and 'model' names nothing to be loaded.")
        reason = "unload" if _at_once(call.extra["given"].get("keep_alive")) else "load"
        choice = {"message": {"role": "assistant", "content": ""}, "finish_reason": reason}
        return replace(call, settled=orjson.dumps({"choices": [choice]}))

    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Translated``. ``keep_alive`` is the backend's own business."""
        chat = {name: value for name, value in given.items() if name not in _CONVERTED}
        options = given.get("options") or {}
        if not isinstance(options, dict):
            raise BadRequestError("Field 'options' must be an object.")
        chat |= {name: value for name, value in options.items() if name not in _LOADING}
        if (limit := chat.pop("num_predict", None)) is not None:
            chat["max_tokens"] = limit
        chat["stream"] = given.get("stream") is not False
        chat |= _thinking(given.get("think")) | _format(given.get("format"))
        return {**chat, "messages": self.messages(given)}

    @abstractmethod
    def messages(self, given: Mapping[str, Any]) -> list[Message]:
        """What was said, as chat messages; nothing, where the model is only to be loaded."""


class OllamaChat(OllamaDialect):
    """Messages and tools in, lines (or one object) out."""

    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Translated``. Tools have OpenAI's shape here, too."""
        tools = given.get("tools")
        return {**super().convert(given), **({"tools": tools} if tools else {})}

    def messages(self, given: Mapping[str, Any]) -> list[Message]:
        """See ``OllamaDialect``."""
        values = [] if given.get("messages") is None else given["messages"]
        if not isinstance(values, list):
            raise BadRequestError("Field 'messages' must be a list.")
        found: list[Message] = []
        waiting = _Waiting(())
        for index, value in enumerate(values):
            place = f"messages[{index}]"
            if not isinstance(value, dict) or value.get("role") not in _ROLES:
                raise BadRequestError(f"'{place}' must have a role: {', '.join(_ROLES)}.")
            content = value.get("content")
            if content is not None and not isinstance(content, str):
                raise BadRequestError(f"The content of '{place}' must be a string.")
            message = _said(value["role"], content or "", value.get("images"), place)
            if value["role"] == "tool":
                message["tool_call_id"] = waiting.answered(value)
            elif value["role"] == "assistant":
                _thought(message, value)
                message |= _called(value.get("tool_calls"), index)
                waiting = _Waiting(message.get("tool_calls", ()))
            found.append(message)
        return found

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        return ChatLines(ping_id=ping_id, created=created, model=call.model)


class OllamaGenerate(OllamaDialect):
    """One prompt in, lines (or one object) out; no ``context``, so no history."""

    def messages(self, given: Mapping[str, Any]) -> list[Message]:
        """See ``OllamaDialect``."""
        for name in ("context", "raw", "suffix", "template"):
            if given.get(name):
                raise BadRequestError(f"Field '{name}' cannot be served here.", hint=_HINT)
        prompt = "" if given.get("prompt") is None else given["prompt"]
        system = given.get("system") or ""
        if not isinstance(prompt, str):
            raise BadRequestError("Field 'prompt' must be a string.")
        if not isinstance(system, str):
            raise BadRequestError("Field 'system' must be a string.")
        if not prompt:
            return []
        opening = [{"role": "system", "content": system}] if system else []
        return [*opening, _said("user", prompt, given.get("images"), "prompt")]

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        return GenerateLines(ping_id=ping_id, created=created, model=call.model)


def _at_once(keep_alive: Any) -> bool:
    """The model is to be unloaded after the request: seconds, or a duration as Go writes it."""
    if isinstance(keep_alive, str):
        return _NO_TIME.fullmatch(keep_alive) is not None
    return isinstance(keep_alive, int | float) and keep_alive == 0


def _said(role: str, text: str, images: Any, place: str) -> Message:
    if not images:
        return {"role": role, "content": text}
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise BadRequestError(f"The images of '{place}' must be a list of base64 strings.")
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    parts += [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    return {"role": role, "content": parts}


def _url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((kind for mark, kind in _PICTURES.items() if image.startswith(mark)), "jpeg")
    return f"data:image/{kind};base64,{image}"


def _thought(message: Message, value: Mapping[str, Any]) -> None:
    if isinstance(value.get("thinking"), str) and value["thinking"]:
        message["reasoning_content"] = value["thinking"]


def _called(calls: Any, index: int) -> Message:
    """Tool calls with arguments as text, and ids where the client kept none: by their place."""
    if not calls:
        return {}
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRequestError(f"The tool calls of 'messages[{index}]' must be a list of objects.")
    found: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequestError(f"Each tool call in 'messages[{index}]' must name a function.")
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        identity = call.get("id") or f"call_{index}_{len(found)}"
        function = {"name": function["name"], "arguments": text}
        found.append({"id": identity, "type": "function", "function": function})
    return {"tool_calls": found}


class _Waiting:
    """An answer's calls without a result; none is looked at twice: a client may send many."""

    def __init__(self, calls: Sequence[Message]) -> None:
        """``calls`` as ``_called`` made them."""
        self._ids: list[str] = [call["id"] for call in calls]
        self._rest = deque(range(len(calls)))
        self._named: dict[str, deque[int]] = {}
        self._known: dict[str, list[int]] = {}
        for at, call in enumerate(calls):
            self._named.setdefault(call["function"]["name"], deque()).append(at)
            if isinstance(call["id"], str):
                self._known.setdefault(call["id"], []).append(at)
        self._done: set[int] = set()

    def answered(self, value: Message) -> str:
        """The id of the call a tool's message belongs to: as it says, by its name, or the next."""
        given = value.get("tool_call_id")
        if isinstance(given, str) and given:
            self._done.update(self._known.pop(given, ()))
            return given
        name = value.get("tool_name") or value.get("name")
        named = self._named.get(name) if isinstance(name, str) else None
        for calls in (named or deque(), self._rest):
            while calls:
                at = calls.popleft()
                if at not in self._done:
                    self._done.add(at)
                    return self._ids[at]
        return "call_unknown"


def _thinking(think: Any) -> dict[str, Any]:
    """``think``: yes or no, or how much."""
    if think is None:
        return {}
    found: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": bool(think)}}
    if isinstance(think, str) and think:
        found["reasoning_effort"] = think
    return found


def _format(wanted: Any) -> dict[str, Any]:
    """``format``: "json" or a schema. Where the backend cannot hold to it, neither can we."""
    if not wanted:
        return {}
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(wanted, dict):
        raise BadRequestError("Field 'format' must be \"json\" or a schema.")
    schema = {"name": "format", "schema": wanted}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
