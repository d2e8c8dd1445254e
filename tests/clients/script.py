"""What the scripted engine says: tool calls first, then text, all of it awkward but legal.

Text has white space at both ends, reasoning a line break at both, tool arguments come in reversed
order with odd spacing, an escaped letter and ``10000.0``: whatever clients make of these when they
send them back is what breaks prefixes (clients.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

MODEL = "scripted"
ROUNDS = 2  # tool calls per user turn
ANSWER_N = 20  # tokens, as far as anybody counts
CREATED = 1_700_000_000
# What a shell tool may ask for; of others the script calls none.
VALUES: Mapping[str, Any] = {
    "command": "cat a.py",
    "description": "Show the café's file",
    "timeout": 10000.0,
    "is_background": False,
}


@dataclass(frozen=True, slots=True)
class Said:
    """One answer. ``call``: name and argument text of a tool call, None for an end of turn."""

    reasoning: str
    text: str
    call: tuple[str, str] | None
    prompt_n: int
    cache_n: int = 0

    @property
    def usage(self) -> dict[str, int]:
        """In OpenAI's words."""
        return {
            "prompt_tokens": self.prompt_n,
            "completion_tokens": ANSWER_N,
            "total_tokens": self.prompt_n + ANSWER_N,
        }

    @property
    def timings(self) -> dict[str, int]:
        """In llama-server's."""
        computed = self.prompt_n - self.cache_n
        return {"cache_n": self.cache_n, "prompt_n": computed, "predicted_n": ANSWER_N}


def answer(body: Mapping[str, Any], prompt_n: int = 1000, cache_n: int = 0) -> Said:
    """The answer to a chat or Messages request; same body, same answer. The counts are tokens."""
    messages = body["messages"]
    tool = shell_tool(body)
    step = len(messages)
    text = f"\nI look at step {step}.  \n\n"
    if tool is None or tool_rounds(messages) >= ROUNDS:
        tool, text = None, f"\nDone with step {step}, café.  \n\n"
    return Said(f"\nThinking about step {step}.\n", text, tool, prompt_n, cache_n)


def tool_rounds(messages: list[dict[str, Any]]) -> int:
    """How many answers with tool calls came since the user's last word."""
    rounds = 0
    for message in reversed(messages):
        parts = message.get("content")
        kinds = {part.get("type") for part in parts} if isinstance(parts, list) else set()
        if message["role"] == "user" and "tool_result" not in kinds:
            break
        if message["role"] == "assistant":
            rounds += bool(message.get("tool_calls") or "tool_use" in kinds)
    return rounds


def shell_tool(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name and argument text of a call to the first tool that takes a command."""
    for tool in body.get("tools") or ():
        function = tool.get("function", tool)
        schema = function.get("parameters") or function.get("input_schema") or {}
        known = [name for name in schema.get("properties", {}) if name in VALUES]
        if "command" in known and set(schema.get("required", ())) <= set(known):
            pairs = (
                f"{orjson.dumps(name).decode()}: {orjson.dumps(VALUES[name]).decode()}"
                for name in reversed(known)
            )
            return function["name"], "{" + ",  ".join(pairs).replace("é", "\\u00e9") + "}"
    return None


def _halves(text: str) -> Iterator[str]:
    middle = len(text) // 2
    yield from (half for half in (text[:middle], text[middle:]) if half)


def chat_events(said: Said, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The data payloads of llama-server's chat stream."""
    head: dict[str, Any] = {"id": f"chatcmpl-{secrets.token_hex(16)}"}
    head |= {"object": "chat.completion.chunk"}
    head |= {"created": CREATED, "model": MODEL}

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return orjson.dumps({**head, "choices": [choice], **more})

    opening = {"role": "assistant", "content": None}
    if body.get("return_progress"):
        for done in (said.cache_n, said.prompt_n):
            now = {"total": said.prompt_n, "cache": said.cache_n, "processed": done, "time_ms": 1}
            yield chunk(opening, prompt_progress=now)
    yield chunk(opening)
    for half in _halves(said.reasoning):
        yield chunk({"reasoning_content": half})
    for half in _halves(said.text):
        yield chunk({"content": half})
    if said.call is not None:
        name, arguments = said.call
        call = {"index": 0, "id": secrets.token_hex(16), "type": "function"}
        yield chunk({"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})
        for half in _halves(arguments):
            yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": half}}]})
    finish = "stop" if said.call is None else "tool_calls"
    if (body.get("stream_options") or {}).get("include_usage"):
        yield chunk({}, finish)
        yield orjson.dumps({**head, "choices": [], "usage": said.usage, "timings": said.timings})
    else:
        yield chunk({}, finish, timings=said.timings)
    yield b"[DONE]"


def chat_whole(said: Said) -> dict[str, Any]:
    """The same for a client that does not stream."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    message |= {"reasoning_content": said.reasoning} if said.reasoning else {}
    if said.call is not None:
        function = {"name": said.call[0], "arguments": said.call[1]}
        message["tool_calls"] = [
            {"id": secrets.token_hex(16), "type": "function", "function": function}
        ]
    finish = "stop" if said.call is None else "tool_calls"
    return {
        "id": f"chatcmpl-{secrets.token_hex(16)}",
        "object": "chat.completion",
        "created": CREATED,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": finish, "message": message}],
        "usage": said.usage,
        "timings": said.timings,
    }


def message_events(said: Said) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and data of llama-server's Messages stream; its signature is empty."""
    usage = {"input_tokens": said.prompt_n, "cache_read_input_tokens": 0, "output_tokens": 0}
    message: dict[str, Any] = {"id": f"msg_{secrets.token_hex(12)}", "type": "message"}
    message |= {"role": "assistant"}
    message |= {"model": MODEL, "content": [], "stop_reason": None, "stop_sequence": None}
    yield "message_start", {"message": {**message, "usage": usage}}
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if said.reasoning:
        deltas = [{"type": "thinking_delta", "thinking": half} for half in _halves(said.reasoning)]
        deltas.append({"type": "signature_delta", "signature": ""})
        blocks.append(({"type": "thinking", "thinking": ""}, deltas))
    deltas = [{"type": "text_delta", "text": half} for half in _halves(said.text)]
    blocks.append(({"type": "text", "text": ""}, deltas))
    if said.call is not None:
        name, arguments = said.call
        deltas = [{"type": "input_json_delta", "partial_json": half} for half in _halves(arguments)]
        use = {"type": "tool_use", "id": secrets.token_hex(16), "name": name, "input": {}}
        blocks.append((use, deltas))
    for index, (block, deltas) in enumerate(blocks):
        yield "content_block_start", {"index": index, "content_block": block}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    reason = "end_turn" if said.call is None else "tool_use"
    yield (
        "message_delta",
        {
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": ANSWER_N},
        },
    )
    yield "message_stop", {}
