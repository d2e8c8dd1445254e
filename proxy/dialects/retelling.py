"""What all APIs have in common that become a chat request and tell its answer in other words.

The ``Call`` holds the chat form, so everything after ``parse`` is what it is for chat, and a
conversation is the same one whichever API it comes through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from proxy.core.sse import Event
from proxy.dialects import body as bodies
from proxy.dialects.base import Call, Unreadable
from proxy.dialects.openai_chat import OpenAIChat
from proxy.dialects.stream import ChatFilter, choice_of, json_object
from proxy.errors import BackendBrokenError, BadRequestError

CHAT = "/v1/chat/completions"
DONE = b"[DONE]"
OK = 200


class Translated(OpenAIChat, ABC):
    """An API the backend has not (or not in working order), so it never sees a request of it."""

    def parse(self, raw: bytes) -> Call:
        """See ``Dialect``. ``extra["given"]`` is the client's own body, for the answer.

        What only a backend could read is refused too: there is none that reads this API.
        """
        try:
            given = bodies.read(raw)
            body = self.convert(given)
            if body.get("stream") is True:
                body["stream_options"] = {"include_usage": True}
            call = self.call(orjson.dumps(body), body)
        except (Unreadable, orjson.JSONEncodeError) as error:
            raise BadRequestError("The request body is nested too deep, or odd JSON.") from error
        return replace(call, path=CHAT, extra={**call.extra, "given": given})

    @abstractmethod
    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request that says the same; equal input, equal output, in the same order.

        Raises ``BadRequestError`` for what would be lost without a word.
        """


class Retold(ChatFilter):
    """One chat answer, told event by event or as a whole."""

    def __init__(self, *, ping_id: str, created: int, model: str) -> None:
        """See ``Filter``."""
        super().__init__(own_progress=True, ping_id=ping_id, created=created, model=model)
        self._failed = False
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}

    def wire(self, event: Event) -> bytes:
        """See ``EventFilter``: nothing, one or several events of the client's protocol."""
        if event.comment_only:
            return event.raw
        data = self.feed(event.data)
        if self._failed or data == b"null":
            return b""
        if data is None:
            return self._start()
        if data == DONE:
            return self._end()
        chunk = json_object(data)
        if chunk is None or "error" in chunk:
            return self.fail(data)
        return self._start() + self._chunk(chunk)

    def fail(self, error: bytes) -> bytes:
        """See ``EventFilter``."""
        self._failed = True
        return self._failure(error)

    def whole(self, status: int, body: bytes) -> bytes:
        """See ``EventFilter``. Raises ``BackendBrokenError`` for what is no chat answer."""
        if status != OK:
            return self._refusal(status, body)
        answer = json_object(body) or {}
        try:
            choice = answer["choices"][0]
            return orjson.dumps(self._told(answer, choice["message"], choice.get("finish_reason")))
        except (LookupError, TypeError, AttributeError) as error:
            raise BackendBrokenError("the answer is no chat answer") from error

    def _chunk(self, chunk: Mapping[str, Any]) -> bytes:
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        choice = choice_of(chunk)
        if choice is None:
            return b""
        if isinstance(choice.get("finish_reason"), str):
            self._finish = choice["finish_reason"]
        return self._delta(choice["delta"])

    def _start(self) -> bytes:
        """What opens a stream; asked for before every chunk, so nothing from the second time on."""
        return b""

    @abstractmethod
    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        """What is told of one piece of the answer."""

    @abstractmethod
    def _end(self) -> bytes:
        """What closes the stream."""

    @abstractmethod
    def _failure(self, error: bytes) -> bytes:
        """An error's JSON as the event that ends the stream."""

    @abstractmethod
    def _told(
        self, answer: Mapping[str, Any], message: Mapping[str, Any], finish: str | None
    ) -> Mapping[str, Any]:
        """The whole answer, of a chat answer and its message."""

    def _refusal(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 - other APIs need it
        """An OpenAI-shaped error's JSON in the API's shape; ``body`` itself where that is it."""
        return body


def text_of(values: Mapping[str, Any], name: str) -> str:
    """A piece of text of an answer, ``""`` where there is none."""
    text = values.get(name)
    return text if isinstance(text, str) else ""


def arguments_of(call: Mapping[str, Any]) -> Any:
    """A tool call's arguments as a JSON object, as generated, to the digit.

    ``{}`` for an unfinished call, which has no arguments one could rely on.
    """
    arguments = text_of(call.get("function") or {}, "arguments").encode()
    return orjson.Fragment(arguments) if json_object(arguments) is not None else {}


def cached(usage: Mapping[str, Any]) -> int:
    """How much of the prompt the backend says it had, in tokens."""
    details = usage.get("prompt_tokens_details")
    found = details.get("cached_tokens") if isinstance(details, dict) else 0
    return found if isinstance(found, int) else 0
