"""Chat templates: enough of each family that the same prefixes are equal, and the same differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from tests.emulators.fastflowlm.errors import type_error
from tests.emulators.fastflowlm.models import Model
from tests.emulators.fastflowlm.normalise import Message
from tests.emulators.fastflowlm.tokens import IMAGE, IMAGE_TOKENS

EOS: dict[str, str] = {
    "chatml-stock": "<|im_end|>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "harmony": "<|return|>",
    "gemma": "<end_of_turn>",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a template sees beside the messages."""

    think: bool
    effort: str  # reasoning_effort, in gpt-oss's system part
    date: str  # in gpt-oss's system part too: a new day is a full miss


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _tool_head(tools: list[Any]) -> str:
    lines = "".join(f"{_json(tool)}\n" for tool in tools)
    return f"# Tools\n\n<tools>\n{lines}</tools>" if tools else ""


def _calls(message: Message) -> str:
    """A turn's tool calls as the model writes them, with the client's argument text as it is."""
    out = ""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise type_error("array", calls)  # the template engine's words are not known
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else _json(arguments)
        name = _json(function.get("name", ""))
        out += f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'
    return out


def _images(model: Model, message: Message) -> str:
    count = len(message.get("images", [])) if model.family.vision else 0
    return IMAGE * (IMAGE_TOKENS * count)


def _split_system(messages: list[Message]) -> tuple[str, list[Message]]:
    if messages and messages[0].get("role") == "system":
        return messages[0]["content"], messages[1:]
    return "", messages


def _chatml(model: Model, messages: list[Message], tools: list[Any], setting: Setting) -> str:
    """``<think>`` of finished turns: the stock template writes it only behind the last question."""
    system, rest = _split_system(messages)
    head = "\n\n".join(part for part in (system, _tool_head(tools)) if part)
    out = f"<|im_start|>system\n{head}<|im_end|>\n" if head else ""
    asked = max((i for i, m in enumerate(rest) if m.get("role") == "user"), default=-1)
    stock = model.family.template == "chatml-stock"
    for place, message in enumerate(rest):
        role, content = message.get("role", ""), message["content"]
        if role == "assistant":
            if model.family.memory == "CKPT":
                content = content.rpartition("</think>")[2].strip()
            block = "<think>\n\n</think>\n\n" if stock and place > asked else ""
            out += f"<|im_start|>assistant\n{block}{content}{_calls(message)}<|im_end|>\n"
        elif role == "tool":
            out += f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
        else:
            out += f"<|im_start|>{role}\n{_images(model, message)}{content}<|im_end|>\n"
    out += "<|im_start|>assistant\n"
    if model.thinks is None:
        return out
    if not setting.think:
        return out + "<think>\n\n</think>\n\n"
    return out + ("<think>\n" if model.family.think_in_prompt else "")


def _llama3(model: Model, messages: list[Message], tools: list[Any], setting: Setting) -> str:
    """Trims every content; never shows tools."""
    out = "<|begin_of_text|>"
    for message in messages:
        role = {"tool": "ipython"}.get(message.get("role", ""), message.get("role", ""))
        text = message["content"].strip() + _calls(message)
        out += f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
    return out + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def _harmony(model: Model, messages: list[Message], tools: list[Any], setting: Setting) -> str:
    """Date and effort stand before everything."""
    system, rest = _split_system(messages)
    out = (
        f"<|start|>system<|message|>Current date: {setting.date}\n"
        f"Reasoning: {setting.effort}<|end|>"
    )
    if system:
        out += f"<|start|>developer<|message|># Instructions\n\n{system}<|end|>"
    for message in rest:
        role = message.get("role", "")
        channel = "<|channel|>final" if role == "assistant" else ""
        text = message["content"] + _calls(message)
        out += f"<|start|>{role}{channel}<|message|>{text}<|end|>"
    return out + "<|start|>assistant"


def _gemma(model: Model, messages: list[Message], tools: list[Any], setting: Setting) -> str:
    """The system text is part of the first question; contents are trimmed."""
    system, rest = _split_system(messages)
    head = "\n\n".join(part for part in (system.strip(), _tool_head(tools)) if part)
    out = "<bos>" + ("<|think|>" if setting.think else "")
    for place, message in enumerate(rest):
        role = {"assistant": "model"}.get(message.get("role", ""), message.get("role", ""))
        before = f"{head}\n\n" if place == 0 and head else ""
        text = _images(model, message) + message["content"].strip() + _calls(message)
        out += f"<start_of_turn>{role}\n{before}{text}<end_of_turn>\n"
    return out + "<start_of_turn>model\n"


_RENDER = {
    "chatml-stock": _chatml,
    "chatml": _chatml,
    "llama3": _llama3,
    "harmony": _harmony,
    "gemma": _gemma,
}


def render(model: Model, messages: list[Message], tools: Any, setting: Setting) -> str:
    """The prompt's text, generation prompt included; tools only where the family shows them."""
    shown = list(tools) if model.tools and isinstance(tools, list) else []
    return _RENDER[model.family.template](model, messages, shown, setting)


def render_head(model: Model, messages: list[Message], tools: Any, setting: Setting) -> str:
    """The part before the first question: what "flash" models pin (section 2)."""
    system, _ = _split_system(messages)
    text = render(model, messages, tools, setting)
    before, found, _ = text.partition(system.strip())
    return before + found if system else ""


def wrapped(model: Model, answer: str, reasoning: str, setting: Setting) -> str:
    """What a model generates to say ``answer``, its thinking included where it thinks."""
    if model.family.template == "harmony":
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
        return f"{thought}<|channel|>final<|message|>{answer}"
    if not setting.think or model.thinks is None or "</think>" in answer:
        return answer
    opening = "" if model.family.think_in_prompt else "<think>\n"
    return f"{opening}{reasoning}\n</think>\n\n{answer}"
