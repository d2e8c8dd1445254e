"""FastFlowLM's answers as every other server gives them (fastflowlm.md 1.5, 5.6, 5.11). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson

from proxy.backends.flm_stop import Stopper
from proxy.core.assemble import ChatAnswer
from proxy.core.sse import Parser, encode

DONE = b"[DONE]"
TOO_LONG = "Max length reached"
OVERFLOW = b"context_length_exceeded"
# What is known of errors that come with HTTP 200, by a part of their text.
_LONG = "exceed_context_size_error"  # llama-server's word for it
_MEANT: tuple[tuple[str, int, str], ...] = (
    (TOO_LONG, HTTPStatus.BAD_REQUEST, _LONG),
    ("single-turn", HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    ("[json.exception", HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    ("not implemented", HTTPStatus.NOT_IMPLEMENTED, "not_supported_error"),
    ("Failed to load", HTTPStatus.BAD_GATEWAY, "backend_error"),
)
_NOTHING = "the server answered nothing: was it started for this (--embed 1, --asr 1)?"
_SPENT = ("prompt_tokens", "completion_tokens", "active_kv_tokens")
_SECONDS = ("prefill_duration_ttft", "decoding_duration")


def judged(status: int, body: bytes, capacity: int = 0) -> tuple[int, bytes]:
    """A whole answer with the status it deserves; errors in one shape.

    Errors come with HTTP 200, as a string or an object; ``null`` stands for "not started for this".
    ``capacity``: tokens of its context, if known.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return status, body
    if value is None:
        return HTTPStatus.NOT_IMPLEMENTED, _error(HTTPStatus.NOT_IMPLEMENTED, "", _NOTHING)
    error = value.get("error") if isinstance(value, dict) else None
    if not error:
        return status, body
    said = error if isinstance(error, dict) else {"message": error}
    message, code = str(said.get("message", "")), said.get("code")
    if status == HTTPStatus.OK:
        status = code if isinstance(code, int) and code >= HTTPStatus.BAD_REQUEST else 500
    kind = str(said.get("type", ""))
    for part, meant, name in _MEANT:
        if part in message:
            status, kind = meant, name
    if kind == _LONG:
        return status, too_long(0, capacity, source="backend")
    return status, _error(status, kind, message)


def _error(status: int, kind: str, message: str) -> bytes:
    error = {"message": message, "type": kind or "backend_error", "code": int(status)}
    return orjson.dumps({"error": {**error, "source": "backend"}})


def too_long(tokens: int, capacity: int, *, source: str) -> bytes:
    """The body of a 400: OpenAI's code, llama-server's type and figures, and what to do.

    ``tokens``: what the prompt has at least, 0: not known; ``capacity`` likewise.
    """
    figures = {"n_prompt_tokens": max(tokens, capacity), "n_ctx": capacity} if capacity else {}
    sizes = f": {tokens} tokens or more, {capacity} at most" if tokens and capacity else ""
    error = {
        "message": f"The prompt exceeds the maximum context length{sizes}.",
        "type": _LONG,
        "param": "messages",
        "code": "context_length_exceeded",
        **figures,
        "source": source,
        "hint": "shorten the conversation, or start flm serve with a larger --ctx-len",
    }
    return orjson.dumps({"error": error})


class Repair:
    """Reads the events of one answer, gives standard ones with true figures.

    The finish chunk is held back until the usage is there, which era E sends after it.
    """

    def __init__(
        self, *, model: str, answer_id: str, usage_chunk: bool, stops: tuple[str, ...] = ()
    ) -> None:
        """``model``: the name the client asked for, "" for the server's own.

        ``answer_id`` makes the ids of tool calls unique. ``usage_chunk``: the client asked for
        usage, which then has a chunk of its own, as OpenAI sends it. ``stops``: strings where the
        text ends, though the server goes on.
        """
        self._model = model
        self._answer_id = answer_id
        self._usage_chunk = usage_chunk
        self._stopper = Stopper(stops)
        self._parser = Parser()
        self._text: list[str] = []
        self._made: list[Any] = []
        self._spoke = False
        self._calls = 0
        self._held: dict[str, Any] | None = None
        self._usage: Mapping[str, Any] | None = None
        self.told = ""  # the model by the server's own name
        self.capacity = 0  # tokens the context has, 0: not told
        self.timings: Mapping[str, Any] | None = None
        self.cancelled = False
        self.done = False

    @property
    def stopped(self) -> bool:
        """A stop string came: what follows is not shown."""
        return self._stopper.hit

    @property
    def message(self) -> dict[str, Any]:
        """What was generated, reasoning apart, whatever of it was shown."""
        return {"role": "assistant", "content": "".join(self._text), "tool_calls": self._made}

    def feed(self, chunk: bytes) -> bytes:
        """The events for ``chunk``. Raises ``ValueError`` for what is no event stream of JSON."""
        out = bytearray()
        for event in self._parser.feed(chunk):
            if event.comment_only:
                out += event.raw
            elif event.data == DONE:
                self.done = True
                out += self._end()
            else:
                out += self._event(orjson.loads(event.data))
        return bytes(out)

    def _event(self, event: Any) -> bytes:
        if not isinstance(event, dict):
            raise ValueError("an event is no object")  # noqa: TRY004 - as the parser's own
        self.told = str(event.get("model") or self.told)
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        event.pop("usage", None)
        if self._model:
            event["model"] = self._model
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return b""
        delta = self._delta(choice.get("delta") or {})
        choice["delta"] = delta
        if choice.get("finish_reason") is not None:
            self._held = event
            rest = self._spoken({"content": self._stopper.rest()})
            return self._rest(event, choice, rest) if rest else b""
        return encode(orjson.dumps(event)) if delta else b""

    def _rest(self, last: dict[str, Any], choice: dict[str, Any], delta: dict[str, Any]) -> bytes:
        """What was held back for a stop string that did not come."""
        piece = {**choice, "delta": delta, "finish_reason": None}
        return encode(orjson.dumps({**last, "choices": [piece]}))

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing empty, nothing behind a stop string, calls numbered from 0, with own ids."""
        new = {k: v for k, v in delta.items() if v not in (None, "") and k != "role"}
        text, calls = new.get("content"), new.get("tool_calls")
        if isinstance(text, str):
            self._text.append(text)
            new["content"] = self._stopper.feed(text)
        for call in calls if isinstance(calls, list) else ():
            call["index"], call["id"] = self._calls, f"call_{self._answer_id}_{self._calls}"
            self._calls += 1
            self._made.append(call)
        if self.stopped:
            new = {"content": new.get("content", "")}
        elif calls:
            new["content"] = new.get("content", "") + self._stopper.rest()
        return self._spoken(new)

    def _spoken(self, delta: dict[str, Any]) -> dict[str, Any]:
        """With the role, the first time anything is shown."""
        new = {name: value for name, value in delta.items() if value != ""}
        if new and not self._spoke:
            self._spoke = True
            return {"role": "assistant", **new}
        return new

    def _end(self) -> bytes:
        last, usage = self._held, self._usage
        if last is None:
            return encode(DONE)  # whoever reads it misses the finish chunk and says so
        counted = _counted(usage or {})
        self.capacity = _whole(counted.get("max_kv_token_capacity"))
        choice = last["choices"][0]
        if not self._spoke:
            choice["delta"] = {"role": "assistant", "content": ""}
        reason = choice["finish_reason"]
        self.cancelled = reason == "cancel"
        if self.cancelled or self.stopped:
            choice["finish_reason"] = "stop"
        elif reason == "stop" and 0 < self.capacity <= _whole(counted.get("active_kv_tokens")):
            choice["finish_reason"] = "length"
        self.timings = None if usage is None else _timings(counted)
        figures = {} if usage is None else {"usage": counted, "timings": self.timings}
        if not self._usage_chunk:
            return encode(orjson.dumps({**last, **figures})) + encode(DONE)
        extra = {**last, "choices": [], **figures}
        return encode(orjson.dumps(last)) + encode(orjson.dumps(extra)) + encode(DONE)


def _counted(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Usage in true totals: up to 1.0.6 ``prompt_tokens`` were only the computed ones (3.3)."""
    prompt, completion, active = (_whole(usage.get(name)) for name in _SPENT)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if not isinstance(cached, int):
        total = max(prompt, active - completion)
        cached, prompt = total - prompt, total
    return {
        **usage,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _timings(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The same in llama-server's words, which the rest of the proxy reads."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prefill, decode = (_milliseconds(usage.get(name)) for name in _SECONDS)
    return {
        "cache_n": cached,
        "prompt_n": usage["prompt_tokens"] - cached,
        "prompt_ms": prefill,
        "predicted_n": usage["completion_tokens"],
        "predicted_ms": decode,
    }


def assembled(events: bytes) -> bytes:
    """The whole answer that a stream says, usage and timings included.

    Raises ``ValueError`` when the stream did not end as it should.
    """
    answer = ChatAnswer()
    for event in Parser().feed(events):
        if not event.comment_only:
            answer.feed(event.data)
    return answer.answer()


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _milliseconds(value: Any) -> float:
    return value * 1e3 if isinstance(value, int | float) else 0.0
