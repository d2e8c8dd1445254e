"""What a client API's dialect gives to the relay. Pure: no IO, no clock.

A dialect turns a request body into a ``Call`` and knows how to undo what the proxy asked for.
Adding an API is adding one module and one row in ``proxy/dialects/__init__.py``: in ``DIALECTS``,
or in ``TRANSLATIONS`` if the backend may have it itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from proxy.core.records import Prompt
from proxy.core.sse import Event


class Unreadable(ValueError):  # noqa: N818 - no error: the backend may well read it
    """A body that this proxy's JSON parser refuses and llama-server's accepts.

    Very deep, a byte order mark, bytes after a NUL: pass it on untouched, as a request that can
    name no slot.
    """


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed request of the cached path.

    ``body`` is the client's JSON object (read only). ``stream``: the client wants events.
    ``streamable``: the backend can stream this request, so a non-streaming client's answer can be
    re-assembled. ``wide``: cannot name one slot (n>1, prompt arrays). ``id_slot``: asked for by
    the client, None when absent or negative. ``store``: may be saved to disk.
    ``cache``: False when the client said ``cache_prompt: false``. ``path``: where the backend takes
    it, ``""`` for the path it came on. ``chat``: ``body`` has ``messages``. ``keep``: a chat
    request whose answer is one whole assistant message, which ``openai_chat.generated`` finds in
    what the backend sent. ``settled``: a whole answer as the backend would give it (for
    ``EventFilter.whole``), where there is nothing to ask it.
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
    path: str = ""
    chat: bool = False
    keep: bool = False
    settled: bytes = b""
    extra: Mapping[str, Any] = field(default_factory=dict)


class EventFilter(Protocol):
    """Sees each SSE event of the backend, says what the client gets. One per request.

    ``wire``, ``ping`` and ``fail`` give bytes as they go out, framing and all. ``feed`` it (and
    ignore what it returns) when the answer is put together for a client that does not stream: the
    figures below come from there.
    """

    media: ClassVar[str]  # the content type of what ``wire`` gives, "": the backend's own
    cache_n: int | None  # real reuse in tokens, from the first progress event (else the timings)
    prompt_n: int | None  # the prompt's length in tokens, from the same
    processed: int | None  # how much of it is computed or reused by now
    generated: int  # tokens of the answer so far, about: one per event
    prefilled: bool  # the prompt is computed, or the first token came
    timings: Mapping[str, Any] | None  # the engine's last timings object
    truncated: bool  # the engine shifted its context (only the native API tells)

    def feed(self, data: bytes) -> bytes | None:
        """``data`` is an event's data payload; the same or changed bytes, None to swallow it."""

    def wire(self, event: Event) -> bytes:
        """What the client gets for one event of the backend; its own bytes if nothing changed."""

    def ping(self) -> bytes:
        """A harmless event in the client's protocol."""

    def fail(self, error: bytes) -> bytes:
        """An error's JSON (the proxy's or the backend's) as the event that ends the stream."""

    def whole(self, status: int, body: bytes) -> bytes:
        """A whole answer (or, with an error's status, a refusal) of the backend as a JSON body."""


class Assembler(Protocol):
    """Puts a non-streaming answer together from stream events; equals the direct one.

    ``lossy``: all text was withheld from the stream (an unfinished tool call, only white space),
    though the direct answer shows it; ask again with ``replace(call, streamable=False)`` for it.
    """

    lossy: bool

    def feed(self, data: bytes) -> None:
        """One event's data payload (``[DONE]`` included)."""

    def error(self) -> bytes | None:
        """The backend's error object, when an error event came instead of an end."""

    def answer(self) -> bytes:
        """The JSON answer. Raises ``ValueError`` when the stream ended before its end event."""


class Dialect(Protocol):
    """One client API."""

    def parse(self, raw: bytes) -> Call:
        """Read a request; unknown fields are kept.

        Raises ``BadRequestError`` where the backend would refuse too, ``Unreadable`` where only
        the backend can read it.
        """

    def prompt(self, call: Call, namespace: bytes) -> Prompt:
        """The prefix chain: the fast hint, from bytes alone."""

    def upstream(self, call: Call, slot: int | None, *, fresh: bool = False) -> bytes:
        """The body to send: the client's bytes with the few injected fields spliced in.

        ``fresh``: with ``cache_prompt: false``, whatever the client said.
        """

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """For clients that stream.

        ``ping_id`` and ``created`` (unix seconds) are for pings sent before the backend's own
        values are known; a ping that used ``ping_id`` makes it the id of the whole answer.
        """

    def assembler(self, call: Call, /) -> Assembler:
        """For clients that do not, when ``call.streamable``."""

    def rendered(self, call: Call, /) -> tuple[str, Any]:
        """How to learn the exact tokens.

        ``("render", body)``, ``("text", str)``, ``("tokens", list)`` or ``("none", None)``.
        """
