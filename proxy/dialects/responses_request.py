"""OpenAI's Responses request as a chat request.

Nothing is kept between requests, so what refers to something kept is refused. Tools that would run
at OpenAI are left out: clients send them unasked (Codex: ``web_search``). Functions grouped in a
namespace become functions named ``<namespace>__<function>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from proxy.dialects import responses_input
from proxy.errors import BadRequestError

_KEPT_THERE = ("background", "conversation", "previous_response_id", "prompt")
_KEEP = "Send the whole conversation in 'input'; nothing is kept between requests."
_LEFT_OUT = (
    *_KEPT_THERE,
    "client_metadata", "context_management", "include", "input", "instructions",
    "max_output_tokens", "max_tool_calls", "messages", "metadata", "moderation",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning",
    "safety_identifier", "service_tier", "store", "stream_options", "text", "tool_choice", "tools",
    "top_logprobs", "truncation", "user",
)  # fmt: skip
_CHOICES = ("auto", "none", "required")


def convert(given: Mapping[str, Any]) -> dict[str, Any]:
    """A chat request that says the same; equal input, equal output, in the same order.

    Raises ``BadRequestError`` for what is no Responses request, or needs a server with a memory.
    """
    for name in _KEPT_THERE:
        if given.get(name):
            raise BadRequestError(f"Field '{name}' cannot be served here.", hint=_KEEP)
    chat = {name: value for name, value in given.items() if name not in _LEFT_OUT}
    if given.get("max_output_tokens") is not None:
        chat["max_tokens"] = given["max_output_tokens"]
    reasoning = given.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    _format(given.get("text"), chat)
    if tools := [_function(tool, name) for name, tool in _functions(given.get("tools"))]:
        chat["tools"] = tools
        _choice(given.get("tool_choice"), chat)
    else:
        chat.pop("parallel_tool_calls", None)
    chat["messages"] = responses_input.messages(given.get("instructions"), given.get("input"))
    return chat


def namespaces(given: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """By its name in chat, the namespace and the own name of each grouped function."""
    return {
        name: (name.removesuffix(f"__{tool['name']}"), tool["name"])
        for name, tool in _functions(given.get("tools"))
        if name != tool["name"]
    }


def _functions(tools: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The client's own tools, each with its name in chat."""
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequestError("'tools' must be a list of objects.")
    for tool in tools:
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        for one in [tool] if inner is None else inner:
            if not isinstance(one, dict) or one.get("type") != "function":
                continue
            if not isinstance(one.get("name"), str):
                raise BadRequestError("Each function in 'tools' must have a name.")
            space = None if inner is None else tool.get("name")
            yield responses_input.called(space, one["name"]), one


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
    if isinstance(tool.get("strict"), bool):
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _choice(choice: Any, chat: dict[str, Any]) -> None:
    if choice is None:
        return
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = responses_input.called(choice.get("namespace"), str(choice.get("name")))
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif choice in _CHOICES:
        chat["tool_choice"] = choice
    else:
        raise BadRequestError("Field 'tool_choice' asks for what cannot be chosen here.")


def _format(text: Any, chat: dict[str, Any]) -> None:
    """A form for the answer. Where the backend cannot hold to it, neither can we."""
    wanted: Any = text.get("format") if isinstance(text, dict) else None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        chat["response_format"] = {"type": kind, "json_schema": schema}
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}
