"""What all llama-server request bodies have in common: reading them, judging them, adding to them.

The engine's own rules for types (which it refuses, which it ignores) were measured on b11549;
``tests/real/test_equality.py`` asks it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.core.prefix import seed
from proxy.core.splice import splice
from proxy.dialects.base import Call, Unreadable
from proxy.errors import BadRequestError

_BOM = b"\xef\xbb\xbf"
_FLAGS = ("stream", "cache_prompt", "return_progress")
# The stream lacks part of what these ask for; "stop": text held back at the limit is lost in it.
_UNSTREAMABLE = (
    "logprobs", "n_probs", "response_fields", "return_tokens", "stop", "top_logprobs", "verbose",
)  # fmt: skip


def read(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``; of duplicate names the last.

    Raises ``BadRequestError`` when the engine would refuse it too, else ``Unreadable``.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # The three things nlohmann's parser takes and orjson does not.
        if raw.startswith(_BOM) or b"\0" in raw or "depth limit" in str(error):
            raise Unreadable(str(error)) from error
        raise BadRequestError(f"The request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    for name in _FLAGS:
        _check_flag(body, name)
    options = body.get("stream_options")
    if isinstance(options, dict):
        _check_flag(options, "include_usage")
    return body


def call(
    raw: bytes,
    body: dict[str, Any],
    *,
    several: bool,
    streamable: bool,
    known: bool,
    chat: bool = False,
    **extra: Any,
) -> Call:
    """The request as the proxy sees it.

    ``several``: more than one prompt. ``streamable``: the dialect knows nothing against it.
    ``known``: there is a way to learn the prompt's tokens; what cannot be looked up is not stored.
    ``chat``: it has messages. ``extra``: what else the dialect wants to know of it later.
    """
    wide = several or _number(body.get("n")) > 1 or _number(body.get("n_cmpl")) > 1
    whole = streamable and not wide
    storable = known and body.get("lora") is None and not _number(body.get("n_cache_reuse"))
    cache = body.get("cache_prompt") is not False
    model = body.get("model")
    return Call(
        raw=raw,
        body=body,
        stream=body.get("stream") is True,
        streamable=whole and not any(map(body.get, _UNSTREAMABLE)),
        wide=wide,
        id_slot=_slot(body),
        cache=cache,
        store=storable and cache,
        model=model if isinstance(model, str) else "",
        chat=chat,
        keep=chat and whole,
        # One progress event per prompt would take the place of the engine's "null" events.
        extra={"progress": not several, **extra},
    )


def adapters(call: Call) -> bytes:
    """The LoRA set the request names, canonical; the server's own where it names none."""
    return orjson.dumps(call.body.get("lora"), option=orjson.OPT_SORT_KEYS)


def prompt_seed(call: Call, namespace: bytes) -> bytes:
    """What must be equal before two prompts may share KV: API key and LoRA set."""
    return seed(namespace, adapters(call))


def upstream(call: Call, slot: int | None, *, fresh: bool = False, usage: bool = False) -> bytes:
    """The client's bytes with what the proxy adds.

    ``fresh``: nothing the backend holds may be reused. ``usage``: ask for it when re-assembling.
    """
    fields: dict[str, Any] = {}
    if fresh:
        fields["cache_prompt"] = False
    elif call.body.get("cache_prompt") is None:
        fields["cache_prompt"] = True  # builds before b4170 reuse nothing unasked (continue#2845)
    if slot is not None:
        fields["id_slot"] = slot
        if "n_cache_reuse" not in call.body:
            fields["n_cache_reuse"] = 0  # the server's own default could shift KV (rule 8)
    elif isinstance(call.body.get("id_slot"), int | float):
        fields["id_slot"] = -1
    if not call.stream and call.streamable:
        fields["stream"] = True
        if usage:
            fields["stream_options"] = {"include_usage": True}
    if own_progress(call):
        fields["return_progress"] = True
    return splice(call.raw, fields)


def own_progress(call: Call) -> bool:
    """Whether progress events are there only because the proxy asks for them."""
    streamed = call.stream or call.streamable
    asked = call.stream and call.body.get("return_progress") is True
    return streamed and bool(call.extra["progress"]) and not asked


def _check_flag(body: Mapping[str, Any], name: str) -> None:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequestError(f"Field '{name}' must be true or false.")


def _slot(body: Mapping[str, Any]) -> int | None:
    """The engine truncates numbers, takes booleans for numbers and ignores everything else."""
    value = body.get("id_slot")
    if not isinstance(value, int | float) or value < 0:
        return None
    return int(value)


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
