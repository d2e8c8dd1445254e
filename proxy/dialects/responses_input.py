"""The items of a Responses request as chat messages.

What the model generated as one turn (thoughts, text, calls) came as several items and becomes one
message again. An item that could only be dropped is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from proxy.errors import BadRequestError

Part = dict[str, Any]
Message = dict[str, Any]

_ROLES = ("assistant", "developer", "system", "user")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_HINT = "Send its text instead."


def called(namespace: Any, name: str) -> str:
    """A function's name in chat, which knows no namespaces."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def messages(instructions: Any, given: Any) -> list[Message]:
    """``instructions`` (a system message) and ``input``: a text, or items.

    Raises ``BadRequestError`` for what cannot be said in chat.
    """
    turns = _Turns()
    if instructions:
        if not isinstance(instructions, str):
            raise BadRequestError("Field 'instructions' must be a string.")
        turns.found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise BadRequestError("Field 'input' must be a string or a list of items.")
    for index, item in enumerate(given):
        place = f"input[{index}]"
        if not isinstance(item, dict):
            raise BadRequestError(f"'{place}' must be an object.")
        kind = str(item.get("type") or "message")
        take = _KINDS.get(kind)
        if take is None:
            raise BadRequestError(f"'{place}' has a type that cannot be served here: {kind}.")
        take(turns, item, place)
    turns.close()
    return turns.found


class _Turns:
    """The messages so far; the last may be a turn of the model that is still being put together."""

    def __init__(self) -> None:
        self.found: list[Message] = []
        self._open: Message | None = None

    def said(self, item: Mapping[str, Any], place: str) -> None:
        """A message of whatever role."""
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequestError(f"'{place}.role' must be one of {', '.join(_ROLES)}.")
        content = _content(_parts(item.get("content"), place))
        if role != "assistant":
            self.close()
            self.found.append({"role": role, "content": content})
            return
        turn = self._turn(after=("content", "tool_calls"))
        turn["content"] = content

    def thought(self, item: Mapping[str, Any], place: str) -> None:
        """What it thought: before what it said then."""
        pieces = item.get("content") or item.get("summary") or []
        texts = [p.get("text") for p in pieces if isinstance(p, dict)]
        if not isinstance(pieces, list) or not all(isinstance(text, str) for text in texts):
            raise BadRequestError(f"The content of '{place}' must be a list of texts.")
        if text := "".join(map(str, texts)):
            turn = self._turn(after=("reasoning_content", "content", "tool_calls"))
            turn["reasoning_content"] = text

    def called(self, item: Mapping[str, Any], place: str) -> None:
        """A function it called; custom tools have a text for arguments."""
        name, arguments = item.get("name"), item.get("arguments")
        if item.get("type") == "custom_tool_call":
            arguments = orjson.dumps({"input": item.get("input")}).decode()
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise BadRequestError(f"'{place}' must have a name and arguments.")
        function = {"name": called(item.get("namespace"), name), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        self._turn(after=()).setdefault("tool_calls", []).append(call)

    def returned(self, item: Mapping[str, Any], place: str) -> None:
        """A function's result. Its pictures go to the user: templates render them there at best."""
        self.close()
        parts = _parts(item.get("output"), place)
        texts = [part for part in parts if part["type"] == "text"]
        media = [part for part in parts if part["type"] != "text"]
        text = _content(texts) or ("[image]" if media else "")
        self.found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        if media:
            self.found.append({"role": "user", "content": media})

    def close(self) -> None:
        """The model's turn is over; a thought that nothing came of was none."""
        turn, self._open = self._open, None
        if turn is not None and ("content" in turn or "tool_calls" in turn):
            self.found.append({**turn, "content": turn.get("content", "")})

    def _turn(self, after: tuple[str, ...]) -> Message:
        """The open turn; a new one if it has already one of ``after``."""
        if self._open is not None and any(name in self._open for name in after):
            self.close()
        if self._open is None:
            self._open = {"role": "assistant"}
        return self._open


def _parts(content: Any, place: str) -> list[Part]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequestError(f"The content of '{place}' must be a string or a list of objects.")
    return [_part(part, place) for part in content]


def _part(part: Mapping[str, Any], place: str) -> Part:
    kind = str(part.get("type"))
    if kind in _TEXTS and isinstance(part.get(_TEXTS[kind]), str):
        return {"type": "text", "text": part[_TEXTS[kind]]}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": kind, "input_audio": part["input_audio"]}
    raise BadRequestError(f"A part of type '{kind}' in '{place}' cannot be served.", hint=_HINT)


def _content(parts: list[Part]) -> str | list[Part]:
    """One text part is the same message as the plain string."""
    if not parts:
        return ""
    text: str | None = parts[0].get("text") if len(parts) == 1 else None
    return parts if text is None else text


_KINDS: Mapping[str, Callable[[_Turns, Mapping[str, Any], str], None]] = {
    "message": _Turns.said,
    "reasoning": _Turns.thought,
    "function_call": _Turns.called,
    "custom_tool_call": _Turns.called,
    "function_call_output": _Turns.returned,
    "custom_tool_call_output": _Turns.returned,
}
