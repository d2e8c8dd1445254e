"""What the handler makes of ``messages`` before anything else looks at them (section 1.5)."""

from __future__ import annotations

from typing import Any

from tests.emulators.fastflowlm.errors import (
    JsonError,
    kind_of,
    member,
    string_of,
    type_error,
)

Message = dict[str, Any]

IMAGE_PREFIXES = ("data:image/png;base64,", "data:image/jpeg;base64,", "data:image/jpg;base64,")
REASONING = ("thinking", "reasoning", "reasoning_content")


def _role(message: Any) -> str:
    if not isinstance(message, dict):
        raise JsonError(
            f"[json.exception.type_error.306] cannot use value() with {kind_of(message)}"
        )
    role = message.get("role", "")
    if not isinstance(role, str):
        raise type_error("string", role)
    return role


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    if isinstance(content, str) and content:
        return [{"type": "text", "text": content}]
    return []


def merge(messages: Any) -> list[Message]:
    """Consecutive user and system messages become one; assistants lose their reasoning."""
    if messages is None:
        return []
    if not isinstance(messages, list):
        raise JsonError(
            f"[json.exception.type_error.305] cannot use operator[] with a numeric argument "
            f"with {kind_of(messages)}"
        )
    merged: list[Message] = []
    last = ""
    for message in messages:
        role = _role(message)
        if role in {"user", "system"}:
            if role == last:
                merged[-1]["content"] += _parts(message)
            else:
                merged.append({**message, "content": list(_parts(message))})
        elif role == "assistant":
            merged.append({k: v for k, v in message.items() if k not in REASONING})
        else:
            merged.append(dict(message))
        last = role
    return merged


def _image(part: dict[str, Any]) -> str:
    """The base64 of a part, or the URL that nobody fetches; "" if it is not taken."""
    url = string_of(member(member(part, "image_url"), "url"))
    for prefix in IMAGE_PREFIXES:
        if url.startswith(prefix):
            url = url.removeprefix(prefix)
            break
    return "" if url.startswith("data:") else url


def _flat(message: Message) -> Message:
    content = message.get("content")
    texts: list[str] = []
    images: list[str] = []
    audios: list[str] = []
    if isinstance(content, str):
        texts.append(content)
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(string_of(member(part, "text")))
        elif kind == "image_url":
            images.append(_image(part))
        elif kind == "input_audio":
            audios.append(string_of(member(member(part, "input_audio"), "data")))
    flat = {**message, "content": "".join(texts)}
    if any(images):
        flat["images"] = [image for image in images if image]
    if any(audios):
        flat["audios"] = [audio for audio in audios if audio]
    return flat


def normalise(messages: Any) -> list[Message]:
    """Merged messages whose content is one string; null and absent content are empty.

    Raises:
        JsonError: a value has a type the server does not take.
    """
    return [_flat(message) for message in merge(messages)]
