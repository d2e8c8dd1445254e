"""Errors in Anthropic's shape, whoever made them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_CODES: Mapping[str, int] = {"context_length_exceeded": 400}  # where a word is the code
_KEPT = ("source", "hint")
_SERVER = 500


def shaped(status: int, error: Any) -> dict[str, Any]:
    """``error`` is what stands under ``error`` in an OpenAI-shaped answer of this ``status``."""
    known = error if isinstance(error, dict) else {"message": error}
    message = known.get("message")
    if not isinstance(message, str) or not message:
        message = f"The backend answered with status {status}."
    other = "api_error" if status >= _SERVER else "invalid_request_error"
    found = {"type": _KINDS.get(status, other), "message": _too_long(known) + message}
    found |= {name: known[name] for name in _KEPT if name in known}
    return {"type": "error", "error": found}


def translated(body: bytes, status: int | None = None) -> bytes:
    """An OpenAI-shaped error's JSON; ``status`` None: the one it names itself."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    if status is None:
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) else _CODES.get(str(code), _SERVER)
    return orjson.dumps(shaped(status, error))


def _too_long(error: Mapping[str, Any]) -> str:
    """The words by which clients know that they have to compact, before the engine's own."""
    if error.get("type") != "exceed_context_size_error":
        return ""
    needed, limit = error.get("n_prompt_tokens"), error.get("n_ctx")
    return f"prompt is too long: {needed} tokens > {limit} maximum: "
