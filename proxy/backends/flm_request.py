"""A request as FastFlowLM takes it without harm (fastflowlm.md 1.5 and 5). Pure.

Its handler throws at ``null``, loads another model at a name that is not letter by letter the
loaded one's, and keeps every sampling value it was ever sent. So only what it reads is sent, with
the types it expects, and the sampling values each time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from proxy.backends.flm_models import family
from proxy.errors import BadRequestError

# APIs it has not, and those it has but that lose the cache or bring it down (1.4).
LACKING = frozenset(
    {
        "/api/chat",
        "/api/generate",
        "/v1/chat/completions/input_tokens",
        "/v1/completions",
        "/v1/responses",
    }
)
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
_EFFORTS: Mapping[str, str] = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_MESSAGE = ("role", "content", "tool_calls", "tool_call_id", "name")  # what is compared (3.1)
_PARTS = ("text", "image_url", "input_audio")
_IMAGES = tuple(f"data:image/{kind};base64," for kind in ("png", "jpeg", "jpg"))
# Era E reads these. Where they only say what holds anyway, they would still make it buffer.
_CHOICES: Mapping[str, Any] = {"tool_choice": "auto", "parallel_tool_calls": True}
# What no release reads though an answer would be another one, and the values that ask for nothing.
_UNREAD = ("grammar", "json_schema", "logit_bias", "logprobs", "response_format", "seed")
_MEANT = (
    "model", "messages", "tools", "stop", "stream", "stream_options", "think", "reasoning_effort",
    "chat_template_kwargs", "repeat_penalty", *_NUMBERS, *_WHOLE, *_LIMITS, *_CHOICES, *_UNREAD,
)  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, {}, [], {"type": "text"})
_MOST = 1_000_000  # what it reads into 32 bits
# Without these its handlers read what is not there (1.4).
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "/api/chat": ("messages",),
    "/api/embeddings": ("model", "input"),
    "/api/generate": ("prompt",),
    "/api/show": ("model",),
    "/v1/completions": ("prompt",),
    "/v1/embeddings": ("model", "input"),
}


def chat(
    body: Mapping[str, Any], *, catalogue: Collection[str], loaded: str, modern: bool
) -> dict[str, Any]:
    """The body for ``/v1/chat/completions``; streamed, with usage, whatever the client asked.

    ``catalogue``: the tags the server lists. ``loaded``: the one it has loaded, "" if not known.
    ``modern``: era E. Raises ``BadRequestError`` for what it could not read.
    """
    if isinstance(body.get("n"), int) and body["n"] > 1:
        raise BadRequestError("This server gives one answer to a request; 'n' must be 1.")
    tag = named(body, catalogue) or loaded
    sent: dict[str, Any] = {"messages": _messages(body.get("messages")), "stream": True}
    if modern:
        sent["stream_options"] = {"include_usage": True}
    if named(body, catalogue):
        sent["model"] = tag
    tools = body.get("tools")
    if isinstance(tools, list) and tools and body.get("tool_choice") != "none":
        sent["tools"] = [_tool(tool) for tool in tools]
        sent |= {
            name: body[name]
            for name, default in _CHOICES.items()
            if modern and body.get(name) not in (None, default)
        }
    for name in _LIMITS:
        if body.get(name) is not None:
            # 0 and less mean "no limit" to it
            sent["max_tokens"] = _whole(body, name) or 1
            break
    return sent | _sampling(body, tag) | _thinking(body, tag)


def identity(body: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a chat another one: not who asks, nor what is learned of the server meanwhile."""
    return {name: body[name] for name in _MEANT if body.get(name) is not None}


def unread(body: Mapping[str, Any], *, modern: bool) -> list[str]:
    """Fields that ask for another answer than this server will give; it says nothing of them."""
    found = [name for name in _UNREAD if body.get(name) not in _NOTHING]
    if not modern and body.get("tools"):
        asked = {name: body.get(name) for name in _CHOICES if body.get(name) != "none"}
        found += [n for n, value in asked.items() if value not in (None, _CHOICES[n])]
    return found


def other(path: str, body: Mapping[str, Any], *, catalogue: Collection[str]) -> dict[str, Any]:
    """The body for any other path: no nulls, no name that loads a model.

    Raises ``BadRequestError`` for what the server would not survive.
    """
    sent = {name: value for name, value in body.items() if value is not None}
    for name in _REQUIRED.get(path, ()):
        if name not in sent:
            raise BadRequestError(f"'{name}' is required.")
    if not isinstance(sent.get("request_id", ""), str):
        del sent["request_id"]  # it would lock the NPU for ever (1.3)
    if path == "/api/chat" and sent.get("stream") is True:
        raise BadRequestError("FastFlowLM cannot stream this path; use /v1/chat/completions.")
    if ("prompt" in sent or path == "/api/chat") and not named(body, catalogue):
        sent.pop("model", None)  # embeddings and speech have engines of their own, and need theirs
    return sent


def named(body: Mapping[str, Any], catalogue: Collection[str]) -> str:
    """The tag a request asks for, "" where it is none: then the loaded model answers.

    A missing ``model`` is the loaded one; a name without a size, or an unknown one, would be
    loaded anew for each request (fastflowlm.md 2).
    """
    model = body.get("model")
    return model if isinstance(model, str) and model in catalogue else ""


def _messages(messages: Any) -> list[dict[str, Any]]:
    """With systems at the beginning only: templates refuse, or lose, one that comes later."""
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("'messages' must be a list of at least one message.")
    sent: list[dict[str, Any]] = []
    for message in messages:
        one = _message(message)
        if one["role"] == "system" and any(before["role"] != "system" for before in sent):
            # merged with its neighbours, to which nothing would hold it apart (1.5)
            one = {**one, "role": "user", "content": _apart(one["content"])}
        sent.append(one)
    return sent


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequestError("Each of 'messages' must be an object with a 'role'.")
    sent = {name: message[name] for name in _MESSAGE if message.get(name) not in (None, [])}
    if sent["role"] == "developer":
        sent["role"] = "system"
    sent["content"] = _content(message.get("content"), generated=sent["role"] == "assistant")
    if not isinstance(sent.get("tool_calls", []), list):
        raise BadRequestError("'tool_calls' must be a list.")
    return sent


def _apart(content: Any) -> Any:
    return f"\n\n{content}\n\n" if isinstance(content, str) else content


def _content(content: Any, *, generated: bool) -> Any:
    """Text as one string, its parts joined as the server joins them: with nothing between."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequestError("A message's 'content' must be text or a list of parts.")
    found = [_part(part, generated=generated) for part in content]
    parts = [part for part in found if part is not None]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, *, generated: bool) -> dict[str, Any] | None:
    """A part it reads, None for what an answer held besides text.

    What it would leave out without a word is refused: the answer would be one to another question.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _PARTS:
        if generated:
            return None
        raise BadRequestError(
            "This server reads parts of the types text, image_url and input_audio only."
        )
    if kind == "text" and not isinstance(part.get("text"), str):
        raise BadRequestError("A text part must have a 'text'.")
    if kind == "image_url":
        _check_image(part.get("image_url"))
    if kind == "input_audio" and not isinstance(_at(part.get("input_audio"), "data"), str):
        raise BadRequestError("An audio part must have an 'input_audio' with 'data'.")
    return {name: value for name, value in part.items() if value is not None}


def _check_image(image: Any) -> None:
    url = _at(image, "url")
    if not isinstance(url, str) or not url:
        raise BadRequestError("An image part must have an 'image_url' with a 'url'.")
    if url.startswith("data:") and not url.startswith(_IMAGES):
        raise BadRequestError("This server reads PNG and JPEG images only.")
    if "://" in url[:16]:
        raise BadRequestError("This server fetches no images; send it as data:image/...;base64,.")


def _at(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _tool(tool: Any) -> Any:
    """A tool without ``strict``, which era E refuses."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequestError("Each of 'tools' must have a function with a name.")
    return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}


def _sampling(body: Mapping[str, Any], tag: str) -> dict[str, Any]:
    found = {**_DEFAULTS, **family(tag).sampling}
    asked = dict(body)
    asked.setdefault("repetition_penalty", body.get("repeat_penalty"))  # llama.cpp's name for it
    for name in (*_NUMBERS, *_WHOLE):
        if asked.get(name) is not None:
            found[name] = _whole(asked, name) if name in _WHOLE else float(_number(asked, name))
    return found


def _thinking(body: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """``think`` by any of its names; left out only where the loaded model is not known."""
    asked = body.get("think")
    if asked is None:
        asked = _at(body.get("chat_template_kwargs"), "enable_thinking")
    told = str(body.get("reasoning_effort"))
    default = family(tag).thinks
    if told == "none" and default is not None:
        default = False
    think = asked if isinstance(asked, bool) else default
    effort = _EFFORTS.get(told, "medium")
    return {"reasoning_effort": effort} | ({} if think is None else {"think": think})


def _whole(body: Mapping[str, Any], name: str) -> int:
    return max(-1, min(int(_number(body, name)), _MOST))


def _number(body: Mapping[str, Any], name: str) -> int | float:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequestError(f"Field '{name}' must be a number.")
    return value
