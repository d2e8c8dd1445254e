"""What a streaming client gets: the backend's events without those only the proxy asked for.

Events are looked into only where a cheap look at their bytes says so. JSON text inside a model's
answer cannot mislead that look: what is found is parsed before it counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from proxy.core.sse import Event, encode
from proxy.core.timings import Observed

_NO_EVENTS = (b"[DONE]", b"null")
_SHARED = ("created", "model", "system_fingerprint", "id")


class Filter(Observed, ABC):
    """The filter of the text APIs; chat adds to it."""

    media: ClassVar[str] = ""

    def __init__(self, *, own_progress: bool, ping_id: str, created: int, model: str) -> None:
        """``own_progress``: progress events are the proxy's own and are taken out."""
        super().__init__()
        self._own_progress = own_progress
        self._head: dict[str, Any] = {"created": created, "model": model, "id": ping_id}
        self._known = False  # the head is the backend's own
        self._pinged = False  # a ping went out before that, so the answer keeps its id
        self._swap: tuple[bytes, bytes] | None = None

    def feed(self, data: bytes) -> bytes | None:
        """The data to pass on: ``data`` itself wherever nothing had to change."""
        if data in _NO_EVENTS or data.startswith(b'{"error"'):
            return data
        event: dict[str, Any] | None = None
        if not self._known or b'"prompt_progress"' in data or b'"timings"' in data:
            event = json_object(data)
        if event is not None:
            self._learn(event)
            if isinstance(event.get("prompt_progress"), dict):
                self.progress(event["prompt_progress"])
                if self._own_progress:
                    self._withheld(event)
                    return None
                return self._renamed(data)
            self.event(event)
        passed = self._content(data)
        if passed is None:
            return None
        self.generated += self.prefilled
        return self._renamed(passed)

    def wire(self, event: Event) -> bytes:
        """See ``EventFilter``. Comments pass."""
        data = event.data if event.comment_only else self.feed(event.data)
        if data is None:
            return b""
        return event.raw if data is event.data else encode(data)

    def ping(self) -> bytes:
        """An event without content, in the shape of the backend's own."""
        self._pinged = self._pinged or not self._known
        return encode(orjson.dumps(self._blank()))

    def fail(self, error: bytes) -> bytes:
        """See ``EventFilter``. No ``[DONE]`` comes after it."""
        return encode(error)

    def whole(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 - other APIs look at it
        """See ``EventFilter``. These APIs are the backend's own."""
        return body

    def _content(self, data: bytes) -> bytes | None:
        self.prefilled = True
        return data

    def _withheld(self, event: dict[str, Any]) -> None:
        """A progress event is about to be swallowed."""

    @abstractmethod
    def _blank(self) -> dict[str, Any]:
        """An event without content."""

    def _learn(self, event: dict[str, Any]) -> None:
        if self._known:
            return
        self._known = True
        ours, theirs = self._head["id"], event.get("id")
        self._head |= {name: event[name] for name in _SHARED if name in event}
        if self._pinged and isinstance(theirs, str):
            self._head["id"] = ours
            self._swap = orjson.dumps(theirs), orjson.dumps(ours)

    def _renamed(self, data: bytes) -> bytes:
        return data if self._swap is None else data.replace(*self._swap)


class TextFilter(Filter):
    """``/v1/completions``."""

    def _blank(self) -> dict[str, Any]:
        choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": None}
        return {"choices": [choice], **self._head, "object": "text_completion"}


class NativeFilter(Filter):
    """``/completion`` and ``/infill``."""

    def _blank(self) -> dict[str, Any]:
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": 0,
            "tokens_evaluated": self.prompt_n or 0,
        }


class ChatFilter(Filter):
    """``/v1/chat/completions``.

    With progress asked for, the engine parses the (empty) answer before its first token. Where the
    template opens the answer (``<think>`` with ``reasoning_format: none``, an echoed prefill), this
    opening then comes with the first progress event, after a role event of its own, and not at the
    head of the first content as it does unasked. Both are put back.
    """

    def __init__(self, *, own_progress: bool, ping_id: str, created: int, model: str) -> None:
        """See ``Filter``."""
        super().__init__(own_progress=own_progress, ping_id=ping_id, created=created, model=model)
        self._roles: set[int] = set()  # choices whose role event went out
        self._opening: dict[tuple[int, str], str] = {}  # text to put before the next such delta

    def _content(self, data: bytes) -> bytes | None:
        choice = choice_of(json_object(data)) if b'"role"' in data else None
        if choice is not None and choice["delta"] == {"role": "assistant", "content": None}:
            return self._role(choice.get("index", 0), data)
        self.prefilled = True
        return self._opened(data) if self._opening else data

    def _role(self, index: int, data: bytes) -> bytes | None:
        if self._own_progress and index in self._roles:
            return None
        self._roles.add(index)
        return data

    def _withheld(self, event: dict[str, Any]) -> None:
        choice = choice_of(event)
        if choice is None:
            return
        for name, text in choice["delta"].items():
            if name != "role" and isinstance(text, str) and text:
                self._opening[choice.get("index", 0), name] = text

    def _opened(self, data: bytes) -> bytes:
        """``data`` with the withheld opening, at the latest in the choice's last event."""
        event = json_object(data)
        choice = choice_of(event)
        if choice is None:
            return data
        index, delta = choice.get("index", 0), choice["delta"]
        last = choice.get("finish_reason") is not None
        names = [name for at, name in self._opening if at == index and (last or name in delta)]
        if not names:
            return data
        for name in names:
            delta[name] = self._opening.pop((index, name)) + (delta.get(name) or "")
        return orjson.dumps(event)

    def _blank(self) -> dict[str, Any]:
        choice = {"finish_reason": None, "index": 0, "delta": {"content": ""}}
        return {"choices": [choice], **self._head, "object": "chat.completion.chunk"}


def json_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in ``data``, None when it is none."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None


def choice_of(event: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The one choice of a chat chunk; None when it is no such chunk."""
    choices = event.get("choices") if event else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    choice: dict[str, Any] = choices[0]
    return choice if isinstance(choice.get("delta"), dict) else None
