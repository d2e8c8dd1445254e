"""A request as FastFlowLM takes it without harm (fastflowlm.md 1.5 and 5). Pure.

Its handler throws at ``null``, loads another model at a name that is not letter by letter the
loaded one's, and keeps every sampling value it was ever sent. So only what it reads is sent, with
the types it expects, and the sampling values each time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from proxy.errors import BadRequestError

_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_WHOLE = ("top_k", "image-max-tokens")
_LIMITS = ("max_tokens", "max_completion_tokens")
# ``min_p`` is missing on purpose: it is read as an integer, so all it could do is stick at 0.
_DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
}
# Families that think, and whether they do unasked (3.3); others have nothing to switch.
_THINKS: Mapping[str, bool] = {
    "deepseek-r1": True,
    "deepseek-r1-0528": True,
    "gemma4-it": False,
    "gpt-oss": True,
    "lfm2.5-tk": True,
    "nanbeige4.1": True,
    "qwen3": True,
    "qwen3-tk": True,
    "qwen3.5": True,
    "qwen3.6-moe": True,
}
_EFFORTS: Mapping[str, str] = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_ERASED = ("reasoning_content", "reasoning", "thinking")  # by the server, before it looks (1.5)
_PARTS = ("text", "image_url", "input_audio")
# Era E reads these. Where they only say what holds anyway, they would still make it buffer.
_CHOICES: Mapping[str, Any] = {"tool_choice": "auto", "parallel_tool_calls": True}


def chat(
    body: Mapping[str, Any], *, catalogue: Collection[str], loaded: str, modern: bool
) -> dict[str, Any]:
    """The body for ``/v1/chat/completions``; streamed, with usage, whatever the client asked.

    ``catalogue``: the tags the server lists. ``loaded``: the one it has loaded, "" if not known.
    ``modern``: era E. Raises ``BadRequestError`` for what it could not read.
    """
    messages = _messages(body.get("messages"))
    tag = named(body, catalogue) or loaded
    sent: dict[str, Any] = {"messages": messages, "stream": True}
    if modern:
        sent["stream_options"] = {"include_usage": True}
    if named(body, catalogue):
        sent["model"] = tag
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        sent["tools"] = [_tool(tool) for tool in tools]
        sent |= {
            name: body[name]
            for name, default in _CHOICES.items()
            if modern and body.get(name) not in (None, default)
        }
    for name in _LIMITS:
        if body.get(name) is not None:
            sent["max_tokens"] = int(_number(body, name))
            break
    return sent | _sampling(body, tag) | _thinking(body, tag)


def other(body: Mapping[str, Any], *, catalogue: Collection[str]) -> dict[str, Any]:
    """The body for any other path that computes: no nulls, no name that loads a model."""
    sent = {name: value for name, value in body.items() if value is not None}
    if "prompt" in sent and "model" in sent and not named(body, catalogue):
        del sent["model"]  # embeddings and speech have engines of their own, and need theirs
    return sent


def named(body: Mapping[str, Any], catalogue: Collection[str]) -> str:
    """The tag a request asks for, "" where it is none: then the loaded model answers.

    A missing ``model`` is the loaded one; a name without a size, or an unknown one, would be
    loaded anew for each request (fastflowlm.md 2).
    """
    model = body.get("model")
    return model if isinstance(model, str) and model in catalogue else ""


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("'messages' must be a list of at least one message.")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequestError("Each of 'messages' must be an object with a 'role'.")
    sent = {k: v for k, v in message.items() if v is not None and k not in _ERASED}
    if sent["role"] == "developer":
        sent["role"] = "system"
    sent["content"] = _content(sent.get("content", ""))
    return sent


def _content(content: Any) -> Any:
    """Text as one string, its parts joined as the server joins them: with nothing between."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError("A message's 'content' must be text or a list of parts.")
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in _PARTS]
    if any(part["type"] == "text" and not isinstance(part.get("text"), str) for part in parts):
        raise BadRequestError("A text part must have a 'text'.")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [{k: v for k, v in part.items() if v is not None} for part in parts]


def _tool(tool: Any) -> Any:
    """A tool without ``strict``, which era E refuses."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequestError("Each of 'tools' must have a function with a name.")
    return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}


def _sampling(body: Mapping[str, Any], tag: str) -> dict[str, Any]:
    found = {**_DEFAULTS, **_FAMILY_DEFAULTS.get(_family(tag), {})}
    asked = dict(body)
    asked.setdefault("repetition_penalty", body.get("repeat_penalty"))  # llama.cpp's name for it
    for name in (*_NUMBERS, *_WHOLE):
        if asked.get(name) is not None:
            value = _number(asked, name)
            found[name] = int(value) if name in _WHOLE else float(value)
    return found


def _thinking(body: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """``think`` by any of its names; left out only where the loaded model is not known."""
    kwargs = body.get("chat_template_kwargs")
    asked = body.get("think")
    if asked is None and isinstance(kwargs, dict):
        asked = kwargs.get("enable_thinking")
    think = asked if isinstance(asked, bool) else _THINKS.get(_family(tag))
    effort = _EFFORTS.get(str(body.get("reasoning_effort")), "medium")
    return {"reasoning_effort": effort} | ({} if think is None else {"think": think})


def _family(tag: str) -> str:
    return tag.partition(":")[0]


def _number(body: Mapping[str, Any], name: str) -> int | float:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequestError(f"Field '{name}' must be a number.")
    return value
