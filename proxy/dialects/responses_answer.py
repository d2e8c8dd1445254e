"""A Responses answer made of a chat answer: its numbered events, or the whole object.

The order is OpenAI's: created, in_progress; per item added, its parts and deltas, done; then
completed, incomplete or failed, each with the whole response. There is no ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.core.sse import encode
from proxy.dialects.responses_object import answered, function, item, response, usage
from proxy.dialects.retelling import Retold, text_of
from proxy.dialects.stream import json_object

_SERVER = 500
# What clients know errors by (Codex compacts on the first), by the error's type or code.
_CODES: Mapping[str | int, str] = {
    "context_length_exceeded": "context_length_exceeded",
    "exceed_context_size_error": "context_length_exceeded",
    400: "invalid_prompt",
    429: "rate_limit_exceeded",
    503: "server_is_overloaded",
}
_PARTS: Mapping[str, Mapping[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}


class ResponsesFilter(Retold):
    """One answer of ``/v1/responses``."""

    def __init__(
        self,
        *,
        ping_id: str,
        created: int,
        model: str,
        given: Mapping[str, Any],
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        """``given``: the client's request, of which a response repeats much.

        ``namespaces``: see ``responses_request.namespaces``.
        """
        super().__init__(ping_id=ping_id, created=created, model=model)
        self._given = given
        self._namespaces = namespaces
        self._number = -1  # of the last event
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}  # the open one; empty: none is
        self._call = -1  # its place among the calls, if it is one

    def ping(self) -> bytes:
        """See ``EventFilter``: that it goes on; once more what a stream begins with."""
        self._pinged = self._pinged or not self._known
        return self._start() or self._state("response.in_progress", "in_progress")

    def _start(self) -> bytes:
        if self._number >= 0:
            return b""
        out = self._state("response.created", "in_progress")
        return out + self._state("response.in_progress", "in_progress")

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        out = self._said("reasoning", text_of(delta, "reasoning_content"))
        out += self._said("message", text_of(delta, "content"))
        for piece in delta.get("tool_calls") or ():
            out += self._called(piece)
        return out

    def _said(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        out = b""
        if self._item.get("type") != kind:
            index = len(self._output) + bool(self._item)
            out = self._enter(item(kind, self._head["id"], index))
            self._item["content"] = [dict(_PARTS[kind])]
            out += self._part("response.content_part.added")
        part = self._item["content"][0]
        part["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return out + self._event(
            f"response.{part['type']}.delta", **self._at(), content_index=0, delta=text, **more
        )

    def _called(self, piece: Mapping[str, Any]) -> bytes:
        """A piece of a call; the engine sends one call after the other."""
        out, place = b"", piece.get("index") or 0
        if self._item.get("type") != "function_call" or self._call != place:
            index = len(self._output) + bool(self._item)
            out = self._enter(function(piece, self._head["id"], index, self._namespaces))
            self._call = place
        arguments = text_of(piece.get("function") or {}, "arguments")
        if not arguments:
            return out
        self._item["arguments"] += arguments
        kind = "response.function_call_arguments.delta"
        return out + self._event(kind, **self._at(), delta=arguments)

    def _enter(self, new: dict[str, Any]) -> bytes:
        out = self._leave()
        self._item = new
        shown = {**new, "status": "in_progress"}
        index = len(self._output)
        return out + self._event("response.output_item.added", output_index=index, item=shown)

    def _leave(self) -> bytes:
        done = self._item
        if not done:
            return b""
        if done["type"] == "function_call":
            kind, said = "response.function_call_arguments.done", done["arguments"]
            out = self._event(kind, **self._at(), name=done["name"], arguments=said)
        else:
            part = done["content"][0]
            more: dict[str, Any] = {"logprobs": []} if done["type"] == "message" else {}
            out = self._event(
                f"response.{part['type']}.done",
                **self._at(), content_index=0, text=part["text"], **more,
            )  # fmt: skip
            out += self._part("response.content_part.done")
        index = len(self._output)
        self._output.append(done)
        self._item = {}
        return out + self._event("response.output_item.done", output_index=index, item=done)

    def _end(self) -> bytes:
        out = self._start() + self._leave()
        status = answered(self._finish)
        return out + self._state(f"response.{status}", status, self._usage)

    def _failure(self, error: bytes) -> bytes:
        said = (json_object(error) or {}).get("error")
        known: Mapping[str, Any] = said if isinstance(said, dict) else {}
        told = known.get("code")
        status = told if isinstance(told, str | int) else _SERVER
        code = _CODES.get(str(known.get("type"))) or _CODES.get(status, "server_error")
        message = known.get("message") or "The backend failed."
        out = self._start()  # an item that is open stays so: it was not finished
        shown = {**self._response("failed"), "error": {"code": code, "message": message}}
        return out + self._event("response.failed", response=shown)

    def _told(
        self, answer: Mapping[str, Any], message: Mapping[str, Any], finish: str | None
    ) -> Mapping[str, Any]:
        identity = str(answer.get("id"))
        output: list[dict[str, Any]] = []
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := text_of(message, name):
                part = {**_PARTS[kind], "text": text}
                output.append({**item(kind, identity, len(output)), "content": [part]})
        for call in message.get("tool_calls") or ():
            made = function(call, identity, len(output), self._namespaces)
            output.append({**made, "arguments": text_of(call["function"], "arguments")})
        status = answered(finish)
        return response(self._given, answer, status, output, usage(answer.get("usage")))

    def _response(self, status: str, spent: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return response(self._given, self._head, status, self._output, usage(spent))

    def _state(self, kind: str, status: str, spent: Mapping[str, Any] | None = None) -> bytes:
        return self._event(kind, response=self._response(status, spent))

    def _part(self, kind: str) -> bytes:
        part = self._item["content"][0]
        return self._event(kind, **self._at(), content_index=0, part=part)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        event = {"type": kind, "sequence_number": self._number, **fields}
        return encode(orjson.dumps(event), kind)
