"""Anthropic's messages and system text as chat messages (OpenAI's shape).

Blocks keep their order. Of what the API allows and llama-server has no word for, text is kept as
text and the rest left out; what would silently lose the user's own content is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from proxy.errors import BadRequestError

Part = dict[str, Any]
Message = dict[str, Any]

_HINT = "Send its text instead."


def system(value: Any) -> list[Message]:
    """The field ``system``: one message, or none when it says nothing."""
    if value is None:
        return []
    parts = [part for part in _parts(value, "system") if part.get("text") != ""]
    return [{"role": "system", "content": _content(parts)}] if parts else []


def messages(values: Any, inputs: Mapping[tuple[int, int], bytes]) -> list[Message]:
    """The field ``messages``; ``inputs``: by message and block, tool inputs to be taken as spelt.

    Raises ``BadRequestError`` for what is no list of messages.
    """
    if not isinstance(values, list):
        raise BadRequestError("'messages' must be a list.")
    found: list[Message] = []
    for index, value in enumerate(values):
        place = f"messages[{index}]"
        if not isinstance(value, dict):
            raise BadRequestError(f"'{place}' must be an object.")
        role, content = value.get("role"), value.get("content")
        if role == "user":
            found += _user(content, place)
        elif role == "assistant":
            spelt = {at: text for (number, at), text in inputs.items() if number == index}
            found.append(_assistant(content, place, spelt))
        elif role == "system":  # in the middle of a conversation: it stays where it is
            found.append({"role": "system", "content": _content(_parts(content, place))})
        else:
            raise BadRequestError(f"'{place}.role' must be user, assistant or system.")
    return found


def _user(content: Any, place: str) -> list[Message]:
    """Tool messages first, then everything else in one user message.

    Images of a tool's result go there too: templates render media in a user's turn at best.
    """
    results: list[Message] = []
    moved: list[Part] = []
    rest: list[Part] = []
    for block in _blocks(content, place):
        if block.get("type") != "tool_result":
            rest += _part(block, place)
            continue
        parts = [] if block.get("content") is None else _parts(block["content"], place)
        texts = [part for part in parts if part["type"] == "text"]
        media = [part for part in parts if part["type"] != "text"]
        text = _content(texts)
        if not text:
            text = "[image]" if media else "Error" if block.get("is_error") is True else ""
        identity = block.get("tool_use_id")
        results.append({"role": "tool", "tool_call_id": identity, "content": text})
        moved += media
    if moved or rest or not results:
        results.append({"role": "user", "content": _content(moved + rest)})
    return results


def _assistant(content: Any, place: str, inputs: Mapping[int, bytes]) -> Message:
    """One message: what the model generated as one text was cut into blocks for the client."""
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(_blocks(content, place)):
        kind = block.get("type")
        if kind == "text":
            text.append(_string(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", place))
        elif kind == "tool_use":
            spelt = inputs.get(at) or orjson.dumps(block.get("input", {}))
            arguments = spelt.decode()
            function = {"name": _string(block, "name", place), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    message: Message = {"role": "assistant", "content": "".join(text)}
    if any(thoughts):  # a client may have kept none of the words
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadRequestError(f"The content of '{place}' must be a string or a list of objects.")
    return content


def _parts(content: Any, place: str) -> list[Part]:
    return [part for block in _blocks(content, place) for part in _part(block, place)]


def _part(block: Mapping[str, Any], place: str) -> list[Part]:
    """A block as parts of a chat message; none for what only Anthropic's own servers use."""
    convert = _KINDS.get(str(block.get("type")))
    return convert(block, place) if convert else []


def _content(parts: list[Part]) -> str | list[Part]:
    """One text part is the same message as the plain string."""
    if not parts:
        return ""
    text: str | None = parts[0].get("text") if len(parts) == 1 else None
    return parts if text is None else text


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequestError(f"'{name}' of a {block.get('type')} block in '{place}' is missing.")
    return value


def _as_text(text: str) -> Part:
    return {"type": "text", "text": text}


def _text(block: Mapping[str, Any], place: str) -> list[Part]:
    return [_as_text(_string(block, "text", place))]


def _image(block: Mapping[str, Any], place: str) -> list[Part]:
    source = _source(block)
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif source.get("type") == "url":
        url = str(source.get("url"))
    else:
        raise BadRequestError(
            f"An image in '{place}' has no source of type base64 or url.",
            hint="Files kept by Anthropic cannot be had here.",
        )
    return [{"type": "image_url", "image_url": {"url": url}}]


def _document(block: Mapping[str, Any], place: str) -> list[Part]:
    source = _source(block)
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        parts = [_as_text(source["data"])]
    elif source.get("type") == "content":
        parts = _parts(source.get("content"), place)
    else:
        what = source.get("media_type") or source.get("type") or "unknown"
        raise BadRequestError(f"A document in '{place}' is no text ({what}).", hint=_HINT)
    return _titled(block, parts)


def _search_result(block: Mapping[str, Any], place: str) -> list[Part]:
    return _titled(block, _parts(block.get("content"), place))


def _tool_reference(block: Mapping[str, Any], place: str) -> list[Part]:
    return [_as_text(f"Loaded tool: {_string(block, 'tool_name', place)}")]


def _titled(block: Mapping[str, Any], parts: list[Part]) -> list[Part]:
    title = block.get("title")
    return [_as_text(title), *parts] if isinstance(title, str) and title else parts


def _source(block: Mapping[str, Any]) -> Mapping[str, Any]:
    source = block.get("source")
    return source if isinstance(source, dict) else {}


_KINDS: Mapping[str, Callable[[Mapping[str, Any], str], list[Part]]] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}
