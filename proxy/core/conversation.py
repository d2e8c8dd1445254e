"""Chat messages as bytes: equal bytes, equal place in the prefix chain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson


def segments(messages: Iterable[Any]) -> list[bytes]:
    """One canonical byte string per message.

    A content that is a single text part equals the plain string, because templates render both the
    same; keys keep the order they came in.
    """
    return [orjson.dumps(_plain(message)) for message in messages]


def has_media(messages: Iterable[Any]) -> bool:
    """Whether a message has a part that is no text: its tokens cannot be told from the request."""
    return any(
        isinstance(part, dict) and part.get("type") != "text"
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _plain(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if not isinstance(content, list) or len(content) != 1:
        return message
    part = content[0]
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {**message, "content": part["text"]}
    return message
