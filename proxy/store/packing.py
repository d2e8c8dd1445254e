"""A conversation's row in the ledger's catalogue: packed, and refused when damaged. Pure.

``{"v": 1, "data": base64 of zlib of JSON}``. In that JSON bytes are text, one character a byte
(latin-1), because a message need not be UTF-8 for the ledger to give it back as it was.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from proxy.core.ledger import Answer, Conversation, Line

VERSION = 1
LEVEL = 1  # of zlib: messages shrink to a third at 100 MB/s, and more effort gains little
LARGEST = 512 * 1024**2  # bytes one conversation may have unpacked; no request is that long


def to_row(conversation: Conversation) -> dict[str, Any]:
    """Plain JSON values; nothing in them can be read without unpacking."""
    packed = zlib.compress(orjson.dumps(_plain(conversation)), LEVEL)
    return {"v": VERSION, "data": b64encode(packed).decode()}


def from_row(
    key: str, row: Mapping[str, Any], pool: dict[bytes, bytes] | None = None
) -> Conversation | None:
    """The conversation of a row; None for a row this program did not write.

    ``pool``: bytes seen so far; equal ones become the same object, which saves memory and is what
    ``Line`` promises of ``went`` where nothing changed.
    """
    pool = {} if pool is None else pool

    def taken(value: Any) -> bytes:
        data = _text(value).encode("latin-1")
        return pool.setdefault(data, data)

    if row.get("v") != VERSION or not isinstance(row.get("data"), str):
        return None
    try:
        conversation = _conversation(orjson.loads(_unpacked(row["data"])), taken)
    except (ValueError, TypeError, KeyError, zlib.error, binascii.Error):
        return None
    return conversation if conversation.id == key else None


def _plain(conversation: Conversation) -> dict[str, Any]:
    c = conversation
    return {
        "id": c.id,
        "namespace": _latin(c.namespace),
        "client": c.client,
        "lines": [
            [
                _latin(line.came),
                None if line.went == line.came else _latin(line.went),
                _latin(line.key),
                line.note,
            ]
            for line in c.lines
        ],
        "head": c.head,
        "tools": [_latin(tool) for tool in c.tools],
        "order": [[name, _latin(schema)] for name, schema in c.order],
        "settings": _latin(c.settings),
        "answers": [[a.at, _latin(a.message), _latin(a.key)] for a in c.answers],
        "prompt_n": c.prompt_n,
        "used": float(c.used),
        "title": c.title,
    }


def _conversation(data: dict[str, Any], taken: Callable[[Any], bytes]) -> Conversation:
    """Raises ``ValueError``, ``TypeError`` or ``KeyError`` for what ``_plain`` cannot have made."""
    prompt_n = data["prompt_n"]
    return Conversation(
        id=_text(data["id"]),
        namespace=taken(data["namespace"]),
        client=_text(data["client"]),
        lines=tuple(_line(*line, taken=taken) for line in data["lines"]),
        head=_count(data["head"]),
        tools=tuple(taken(tool) for tool in data["tools"]),
        order=tuple((_text(name), taken(schema)) for name, schema in data["order"]),
        settings=taken(data["settings"]),
        answers=tuple(Answer(_count(at), taken(m), taken(k)) for at, m, k in data["answers"]),
        prompt_n=None if prompt_n is None else _count(prompt_n),
        used=_seconds(data["used"]),
        title=_text(data["title"]),
    )


def _line(came: Any, went: Any, key: Any, note: Any, *, taken: Callable[[Any], bytes]) -> Line:
    return Line(taken(came), taken(came if went is None else went), taken(key), _text(note))


def _unpacked(data: str) -> bytes:
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(b64decode(data, validate=True), LARGEST)
    if not unpacker.eof or unpacker.unused_data:
        message = "cut short, too long, or followed by something"
        raise ValueError(message)
    return found


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        message = "not a text"
        raise TypeError(message)
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        message = "not a count"
        raise TypeError(message)
    return value


def _seconds(value: Any) -> float:
    if type(value) is not float:
        message = "not a time"
        raise TypeError(message)
    return value
