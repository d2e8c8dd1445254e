"""Adds fields to a JSON object without touching a byte of what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_SPACE = b" \t\r\n"


def splice(raw: bytes, fields: Mapping[str, Any]) -> bytes:
    """Put ``fields`` before the closing brace of ``raw``, the bytes of a valid JSON object.

    A name that ``raw`` has already is overridden: of duplicate names llama-server's parser takes
    the last (``tests/real/test_equality.py``). Without fields, ``raw`` itself is returned. Raises
    ``ValueError`` when ``raw`` is no object.
    """
    if not fields:
        return raw
    head = raw.rstrip(_SPACE)
    if not head.endswith(b"}"):
        raise ValueError("not a JSON object")
    head = head[:-1].rstrip(_SPACE)
    # Only an empty object can end in an opening brace here.
    comma = b"" if head.endswith(b"{") else b","
    return head + comma + orjson.dumps(fields)[1:]
