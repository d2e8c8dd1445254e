"""The objects of a Responses answer: the response, its items, its usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.retelling import cached, text_of

# What a response repeats of its request, and what it says where the request was silent.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_STAMPS = {"message": "msg", "reasoning": "rs"}


def response(
    given: Mapping[str, Any],
    head: Mapping[str, Any],
    status: str,
    output: list[dict[str, Any]],
    spent: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The response to the request ``given``; ``head`` has the chat answer's id, model and time."""
    repeated = {
        name: default if given.get(name) is None else given[name]
        for name, default in _REPEATED.items()
    }
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{_stem(head.get('id'))}",
        "object": "response",
        "created_at": head.get("created"),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": incomplete,
        "model": head.get("model"),
        "output": output,
        "previous_response_id": None,
        "store": False,
        "usage": spent,
        **repeated,
    }


def item(kind: str, identity: Any, index: int) -> dict[str, Any]:
    """A message or a reasoning without content; ``index`` in the output makes its id unique."""
    made: dict[str, Any] = {"id": f"{_STAMPS[kind]}_{_stem(identity)}_{index}", "type": kind}
    said = {"role": "assistant"} if kind == "message" else {"summary": [], "encrypted_content": ""}
    return {**made, "status": "completed", **said, "content": []}


def function(
    call: Mapping[str, Any],
    identity: Any,
    index: int,
    namespaces: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    """A function call of which only the name is known yet."""
    stem = f"{_stem(identity)}_{index}"
    name = text_of(call.get("function") or {}, "name")
    space, own = namespaces.get(name, ("", name))
    return {
        "id": f"fc_{stem}",
        "type": "function_call",
        "status": "completed",
        "arguments": "",
        "call_id": call.get("id") or f"call_{stem}",
        "name": own,
        **({"namespace": space} if space else {}),
    }


def answered(finish: str | None) -> str:
    """The status of a response whose chat answer ended like this."""
    return "incomplete" if finish == "length" else "completed"


def usage(spent: Any) -> dict[str, Any] | None:
    """A chat answer's usage in this API's words; None where there is none."""
    if not isinstance(spent, dict) or not spent:
        return None
    prompt, answer = spent.get("prompt_tokens") or 0, spent.get("completion_tokens") or 0
    details = spent.get("completion_tokens_details")
    thought = details.get("reasoning_tokens") if isinstance(details, dict) else 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached(spent), "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": thought or 0},
        "total_tokens": prompt + answer,
    }


def _stem(identity: Any) -> str:
    return str(identity).removeprefix("chatcmpl-")
