"""Anthropic's request as a chat request: the fields around the messages.

What llama-server knows under its own name passes as it is, what only Anthropic's servers understand
is left out, and no field that is new to us gives an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects import anthropic_content as content
from proxy.errors import BadRequestError

MAX_TOKENS = 4096  # llama-server's own default for this API (llama-server.md 1.11)
_CONVERTED = (
    "messages", "output_config", "output_format", "stop_sequences", "system", "thinking",
    "tool_choice", "tools",
)  # fmt: skip
_DROPPED = (
    "anthropic_beta", "anthropic_version", "betas", "cache_control", "container",
    "context_management", "inference_geo", "mcp_servers", "metadata", "safeguards", "service_tier",
    "speed",
    # Of chat: this API's answer has no place for what they ask for.
    "logprobs", "n", "n_cmpl", "n_probs", "response_fields", "return_tokens", "stream_options",
    "top_logprobs", "verbose",
)  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def convert(body: Mapping[str, Any], inputs: Mapping[tuple[int, int], bytes]) -> dict[str, Any]:
    """A chat request that says the same; equal input, equal output, in the same order.

    ``inputs``: by message and block, tool inputs whose own bytes are to be kept.
    Raises ``BadRequestError`` for what is no Anthropic request.
    """
    left_out = {*_CONVERTED, *_DROPPED}
    chat = {name: value for name, value in body.items() if name not in left_out}
    if chat.get("max_tokens") is None:
        chat["max_tokens"] = MAX_TOKENS
    if body.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    _tools(body, chat)
    _thinking(body, chat)
    _format(body, chat)
    if stops := body.get("stop_sequences"):
        chat["stop"] = stops
        chat["verbose"] = True  # only so the engine tells which of them it met
    chat["messages"] = content.system(body.get("system")) + content.messages(
        body.get("messages"), inputs
    )
    return chat


def _tools(body: Mapping[str, Any], chat: dict[str, Any]) -> None:
    """Tools of the client's own; those that run on Anthropic's servers have no schema."""
    tools = body.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequestError("'tools' must be a list of objects.")
    found = [_function(tool) for tool in tools if "input_schema" in tool]
    choice = body.get("tool_choice")
    if not isinstance(choice, dict):
        choice = {}
    if choice.get("type") == "tool":
        # The engine has no word for one certain tool and would take any.
        found = [tool for tool in found if tool["function"]["name"] == choice.get("name")]
        if not found:
            raise BadRequestError("'tool_choice' names a tool that is not among 'tools'.")
    if not found:
        return
    chat["tools"] = found
    if choice.get("type") in _CHOICES:
        chat["tool_choice"] = _CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use") is True:
        chat["parallel_tool_calls"] = False


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise BadRequestError("Each of 'tools' must have a name.")
    function = {"name": tool["name"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _thinking(body: Mapping[str, Any], chat: dict[str, Any]) -> None:
    thinking = body.get("thinking")
    if not isinstance(thinking, dict):
        return
    if thinking.get("type") == "enabled" and isinstance(thinking.get("budget_tokens"), int):
        chat.setdefault("thinking_budget_tokens", thinking["budget_tokens"])
    elif thinking.get("type") == "disabled":
        own = chat.get("chat_template_kwargs")
        chat["chat_template_kwargs"] = {
            "enable_thinking": False,
            **(own if isinstance(own, dict) else {}),
        }


def _format(body: Mapping[str, Any], chat: dict[str, Any]) -> None:
    """A schema for the answer; ``output_format`` is its name in older versions of the API."""
    config = body.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else body.get("output_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {"schema": wanted.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
