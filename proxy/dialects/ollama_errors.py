"""Errors in Ollama's shape: a string under ``error``, whoever made them."""

from __future__ import annotations

from typing import Any

import orjson

_KEPT = ("source", "hint")


def shaped(status: int, error: Any) -> dict[str, Any]:
    """``error`` is what stands under ``error`` in an OpenAI-shaped answer of this ``status``."""
    known = error if isinstance(error, dict) else {"message": error}
    message = known.get("message")
    if not isinstance(message, str) or not message:
        message = f"The backend answered with status {status}."
    return {"error": message, **{name: known[name] for name in _KEPT if name in known}}


def translated(body: bytes, status: int = 500) -> bytes:
    """An OpenAI-shaped error's JSON."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    return orjson.dumps(shaped(status, value.get("error") if isinstance(value, dict) else None))
