"""Anthropic's answer, made of a chat answer: its named events, or the whole message.

``message_start`` goes out with the engine's first word on the prompt (before it is computed), so it
has the real usage. A ping may come before it: clients skip pings wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.core.sse import encode
from proxy.dialects.anthropic_errors import translated
from proxy.dialects.retelling import Retold
from proxy.dialects.stream import json_object

# Clients turn thinking without a signature into text (clients.md, OpenCode and pi).
SIGNATURE = "c2xvdGtlZXBlcg=="
_STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class MessagesFilter(Retold):
    """One answer of ``/v1/messages``."""

    def __init__(self, *, ping_id: str, created: int, model: str, prefill: str) -> None:
        """``prefill``: how the answer begins in the client's own words, which it knows already."""
        super().__init__(ping_id=ping_id, created=created, model=model)
        self._prefill = prefill
        self._started = False
        self._index = -1
        self._block: tuple[str, int] | None = None  # the open block: its type and tool call
        self._tools = False
        self._word: str | None = None  # the stop sequence that ended the answer

    def ping(self) -> bytes:
        """See ``EventFilter``."""
        return encode(b'{"type":"ping"}', "ping")

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        read = self.cache_n or 0
        figures = _figures((self.prompt_n or 0) - read, read, 0)
        message = _message(self._head, [], figures, None, None)
        return _named("message_start", message=message)

    def _chunk(self, chunk: Mapping[str, Any]) -> bytes:
        self._word = _word(chunk) or self._word
        return super()._chunk(chunk)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        out = self._said("thinking", delta.get("reasoning_content"))
        out += self._said("text", delta.get("content"))
        for piece in delta.get("tool_calls") or ():
            out += self._called(piece)
        return out

    def _said(self, kind: str, text: Any) -> bytes:
        if not isinstance(text, str) or not text:
            return b""
        empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        out = self._enter((kind, 0), {"type": kind, **empty})
        return out + self._changed({"type": f"{kind}_delta", kind: text})

    def _called(self, piece: Mapping[str, Any]) -> bytes:
        """A piece of a tool call; the engine sends one call after the other."""
        function = piece.get("function") or {}
        call = piece.get("index") or 0
        self._tools = True
        block = _tool(piece.get("id"), function.get("name"), {}, _identity(self._head["id"]), call)
        out = self._enter(("tool_use", call), block)
        arguments = function.get("arguments")
        if not arguments:
            return out
        return out + self._changed({"type": "input_json_delta", "partial_json": arguments})

    def _enter(self, block: tuple[str, int], content: Mapping[str, Any]) -> bytes:
        if self._block == block:
            return b""
        out = self._leave()
        self._block = block
        self._index += 1
        return out + _named("content_block_start", index=self._index, content_block=content)

    def _changed(self, delta: Mapping[str, Any]) -> bytes:
        return _named("content_block_delta", index=self._index, delta=delta)

    def _leave(self) -> bytes:
        if self._block is None:
            return b""
        thinking = self._block[0] == "thinking"
        self._block = None
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        out = self._changed(signed) if thinking else b""
        return out + _named("content_block_stop", index=self._index)

    def _end(self) -> bytes:
        reason, word = _stop(self._finish, self._word, tools=self._tools)
        delta = {"stop_reason": reason, "stop_sequence": word}
        out = self._start() + self._leave()
        out += _named("message_delta", delta=delta, usage=_usage(self._usage, self.timings))
        return out + _named("message_stop")

    def _failure(self, error: bytes) -> bytes:
        return encode(translated(error), "error")

    def _refusal(self, status: int, body: bytes) -> bytes:
        return translated(body, status)

    def _told(
        self, answer: Mapping[str, Any], message: Mapping[str, Any], finish: str | None
    ) -> Mapping[str, Any]:
        content = _content(message, self._prefill, _identity(answer.get("id")))
        tools = bool(content) and content[-1]["type"] == "tool_use"
        reason, word = _stop(finish, _word(answer), tools=tools)
        figures = _usage(answer.get("usage"), answer.get("timings"))
        return _message(answer, content, figures, reason, word)


def _named(kind: str, **fields: Any) -> bytes:
    return encode(orjson.dumps({"type": kind, **fields}), kind)


def _identity(theirs: Any) -> str:
    return "msg_" + str(theirs).removeprefix("chatcmpl-")


def _message(
    head: Mapping[str, Any],
    content: list[dict[str, Any]],
    usage: Mapping[str, int],
    reason: str | None,
    word: str | None,
) -> dict[str, Any]:
    return {
        "id": _identity(head.get("id")),
        "type": "message",
        "role": "assistant",
        "model": head.get("model"),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": word,
        "usage": usage,
    }


def _content(message: Mapping[str, Any], prefill: str, identity: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if text := (message.get("content") or "").removeprefix(prefill):
        blocks.append({"type": "text", "text": text})
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = (function.get("arguments") or "").encode()
        # As generated, to the digit; an unfinished call has no arguments one could rely on.
        known = json_object(arguments) is not None
        blocks.append(
            _tool(
                call.get("id"),
                function.get("name"),
                orjson.Fragment(arguments) if known else {},
                identity,
                index,
            )
        )
    return blocks


def _tool(theirs: Any, name: Any, arguments: Any, message: str, index: int) -> dict[str, Any]:
    identity = theirs or f"toolu_{message.removeprefix('msg_')}_{index}"
    return {"type": "tool_use", "id": identity, "name": name or "", "input": arguments}


def _word(answer: Mapping[str, Any]) -> str | None:
    """The stop sequence met; only an answer asked for verbosely tells."""
    verbose = answer.get("__verbose")
    word = verbose.get("stopping_word") if isinstance(verbose, dict) else None
    return word if isinstance(word, str) and word else None


def _stop(finish: str | None, word: str | None, *, tools: bool) -> tuple[str, str | None]:
    if finish == "stop" and word is not None:
        return "stop_sequence", word
    if finish == "stop" and tools:
        return "tool_use", None
    return _STOP_REASONS.get(finish or "stop", "end_turn"), None


def _usage(usage: Any, timings: Any) -> dict[str, int]:
    """The backend's count, from ``usage``, else from llama-server's timings."""
    if isinstance(usage, dict) and usage:
        details = usage.get("prompt_tokens_details")
        read = details.get("cached_tokens") if isinstance(details, dict) else 0
        prompt, said = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        return _figures(prompt - (read or 0), read or 0, said)
    known = timings if isinstance(timings, dict) else {}
    return _figures(*(known.get(name) or 0 for name in ("prompt_n", "cache_n", "predicted_n")))


def _figures(computed: int, read: int, said: int) -> dict[str, int]:
    return {
        "input_tokens": computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": read,
        "output_tokens": said,
    }
