"""What a client API's dialect gives to the relay. Pure: no IO, no clock.

A dialect turns a request body into a ``Call`` and knows how to undo what the proxy asked for.
Adding an API is adding one module and one row in ``proxy/dialects/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.records import Prompt


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed request of the cached path.

    ``body`` is the client's JSON object (read only). ``stream``: the client wants events.
    ``streamable``: the backend can stream this request, so a non-streaming client's answer can be
    re-assembled. ``wide``: cannot name one slot (n>1, prompt arrays). ``id_slot``: asked for by
    the client, None when absent or negative. ``store``: may be saved to disk.
    ``cache``: False when the client said ``cache_prompt: false``.
    """

    raw: bytes
    body: Mapping[str, Any]
    stream: bool
    streamable: bool
    wide: bool
    id_slot: int | None
    cache: bool
    store: bool
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)


class EventFilter(Protocol):
    """Sees each SSE event of the backend, says what the client gets. One per request."""

    cache_n: int | None  # real reuse in tokens, from the first progress event
    prompt_n: int | None  # the prompt's length in tokens, from the first progress event
    prefilled: bool  # the prompt is computed, or the first token came
    timings: Mapping[str, Any] | None  # the engine's last timings object
    truncated: bool  # the engine shifted its context: KV is no function of the tokens

    def feed(self, data: bytes) -> bytes | None:
        """``data`` is an event's data payload; the same or changed bytes, None to swallow it."""

    def ping(self) -> bytes | None:
        """A harmless event's data payload in the client's protocol, None where there is none."""


class Assembler(Protocol):
    """Puts a non-streaming answer together from stream events; equals the direct one."""

    def feed(self, data: bytes) -> None:
        """One event's data payload (``[DONE]`` included)."""

    def error(self) -> bytes | None:
        """The backend's error object, when an error event came instead of an end."""

    def answer(self) -> bytes:
        """The JSON answer. Raises ``ValueError`` when the stream ended before its end event."""


class Dialect(Protocol):
    """One client API."""

    def parse(self, raw: bytes) -> Call:
        """Raises ``BadRequestError`` on what can be no request; unknown fields are kept."""

    def prompt(self, call: Call, namespace: bytes) -> Prompt:
        """The prefix chain: the fast hint, from bytes alone."""

    def upstream(self, call: Call, slot: int | None) -> bytes:
        """The body to send: the client's bytes with the few injected fields spliced in."""

    def filter(self, call: Call) -> EventFilter:
        """For clients that stream."""

    def assembler(self, call: Call) -> Assembler:
        """For clients that do not, when ``call.streamable``."""

    def rendered(self, call: Call) -> tuple[str, Any]:
        """How to learn the exact tokens: ``("render", body)``, ``("text", str)``, ``("tokens", list)`` or ``("none", None)``."""
