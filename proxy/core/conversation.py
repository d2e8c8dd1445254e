"""Chat messages: as bytes for the prefix chain, and when two of them mean the same.

Real clients re-order, re-space, trim and un-escape what they were sent (clients.md 4, 6). Two
messages with one ``key`` are the same message, sent once more by such a client.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

KEY_BYTES = 16
SYSTEM = ("system", "developer")  # no set: a client's role may be a list
# More digits than a double holds: the parser rounds them, so they are compared as text.
_LONG_NUMBER = re.compile(r"\d[\d.]{15,}")
_NUMBER = re.compile(r"\d[\d.]*")


def segments(messages: Iterable[Any]) -> list[bytes]:
    """One canonical byte string per message.

    A content that is a single text part equals the plain string, because templates render both the
    same; keys keep the order they came in.
    """
    return [orjson.dumps(plain(message)) for message in messages]


def has_media(messages: Iterable[Any]) -> bool:
    """Whether a message has a part that is no text: its tokens cannot be told from the request."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                return True
    return False


def plain(message: Any) -> Any:
    """``message`` with a content of one text part as a string; itself wherever there is none."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if not isinstance(content, list) or len(content) != 1:
        return message
    part = content[0]
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {**message, "content": part["text"]}
    return message


def head_length(messages: Iterable[Any]) -> int:
    """How many leading messages are system text."""
    count = 0
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in SYSTEM:
            break
        count += 1
    return count


def text_of(message: Any) -> str | None:
    """The text of a message that is nothing but text: a string, or one text part; else None."""
    content = plain(message).get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else None


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """A message's texts, part by part; what is no text is left out."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def key(message: Any) -> bytes:
    """Equal for messages that mean the same; 16 bytes.

    Left out: ids, reasoning and what no template renders (``name``, ``refusal`` ...). Texts are
    compared stripped; tool arguments, and tool results that are JSON, as JSON.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for part in _meaning(message):
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def json_equal(ours: Any, theirs: Any) -> bool:
    """Whether two argument strings are the same JSON: ``1.0`` is ``1``, key order aside."""
    return ours == theirs or _json(ours) == _json(theirs)


def both_json(ours: str, theirs: str) -> bool:
    """Whether two texts are JSON objects or lists, and equal as such."""
    one, other = _json(ours), _json(theirs)
    return isinstance(one, bytes) and one == other and bool(ours.strip() and theirs.strip())


def sorted_json(data: bytes) -> bytes:
    """The same JSON with its members in order."""
    return orjson.dumps(orjson.loads(data), option=orjson.OPT_SORT_KEYS)


def calls(message: Any) -> list[Mapping[str, Any]]:
    """The tool calls of a message that have the expected shape."""
    found = message.get("tool_calls") if isinstance(message, dict) else None
    return [
        call
        for call in (found if isinstance(found, list) else ())
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]


def _meaning(message: Any) -> Iterable[str | bytes]:
    if not isinstance(message, dict):
        yield orjson.dumps(message)
        return
    role = str(message.get("role"))
    yield role
    content = plain(message).get("content")
    if isinstance(content, str):
        yield (content.strip() and _json(content)) if role == "tool" else content.strip()
    elif isinstance(content, list):
        for part in content:
            yield from _part(part)
    else:
        yield "" if content is None else orjson.dumps(content)
    for call in calls(message):
        yield str(call["function"].get("name"))
        yield _json(call["function"].get("arguments"))
    if message.get("function_call") is not None:
        yield orjson.dumps(message["function_call"])


def _part(part: Any) -> Iterable[str | bytes]:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        yield "text"
        yield part["text"].strip()
    else:
        yield orjson.dumps(part)


def _json(value: Any) -> str | bytes:
    """Canonical bytes of JSON in a string (or of a value); a string that is none, stripped.

    Where a number is long, all of them stand behind it in the order of the text, and its members
    stay in theirs: so each belongs to its place.
    """
    if not isinstance(value, str):
        return orjson.dumps(_whole(value), option=orjson.OPT_SORT_KEYS)
    text = value.strip()
    if not text.startswith(("{", "[")):
        return text or b"{}"
    numbers = _NUMBER.findall(text) if _LONG_NUMBER.search(text) else []
    option = 0 if numbers else orjson.OPT_SORT_KEYS
    try:
        data = orjson.dumps(_whole(orjson.loads(text)), option=option)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return text  # too deep to be written again
    return data + "".join(f"#{digits}" for digits in numbers).encode()


def _whole(value: Any) -> Any:
    """``value`` with whole floats as integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value
