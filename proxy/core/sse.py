"""Server-sent events without IO: bytes in, whole events out, every byte accounted for.

The raw bytes of the events, joined, are the bytes that were fed (less an unfinished rest), so a
relay can pass on what it does not touch verbatim. Line ends are LF, CRLF or CR, as in the
WHATWG specification of event streams.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LIMIT = 64 * 1024 * 1024
_EOL = re.compile(rb"\r\n|\n|\r")
# A line end and the blank line after it; a CRLF must not pass for two line ends.
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_END_MAX = 4


@dataclass(slots=True)
class Event:
    """One event of a stream.

    ``data``: its data lines joined by LF. ``raw``: its bytes as they came, including the blank
    line that ends it. ``comment_only``: it has no data line (a comment, a stray blank line), so
    no client will see an event.
    """

    data: bytes
    raw: bytes
    comment_only: bool


class Parser:
    """Cuts a byte stream into events, however the stream is cut into chunks."""

    def __init__(self, limit: int = _LIMIT) -> None:
        """``limit``: bytes one event may have, its framing included."""
        self._limit = limit
        self._rest = bytearray()
        self._crs = False  # the stream has CRs: the plain search for LF LF will not do
        self._open_cr = False  # the last event ended in a CR whose LF may still come
        self._lead = b""  # that LF: goes before the next event's raw bytes

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished event remain."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that ``chunk`` completes.

        Raises ``ValueError`` when one event is larger than the limit.
        """
        if not chunk:
            return []
        if self._open_cr and chunk.startswith(b"\n"):
            self._lead, chunk = b"\n", chunk[1:]
        self._open_cr = False
        self._crs = self._crs or b"\r" in chunk
        buffer: bytes | bytearray = chunk
        searched = 0
        if self._rest:
            searched = max(0, len(self._rest) + 1 - _END_MAX)
            self._rest += chunk
            buffer = self._rest
        events: list[Event] = []
        start = 0
        while (
            start < len(buffer) and (end := self._find_end(buffer, start, max(start, searched))) > 0
        ):
            events.append(self._cut(bytes(buffer[start:end])))
            start = end
        if start or buffer is chunk:
            self._rest = bytearray(buffer[start:])
        if len(self._rest) > self._limit:
            self._too_large()
        # Emitted at once, not held back: a stream with bare CRs would else lag by one event.
        self._open_cr = bool(events) and not self._rest and chunk.endswith(b"\r")
        return events

    def _find_end(self, buffer: bytes | bytearray, start: int, searched: int) -> int:
        """Where the event that begins at ``start`` ends; -1 when it is unfinished."""
        if not self._crs:
            if buffer.startswith(b"\n", start):
                return start + 1
            found = buffer.find(b"\n\n", searched)
            return found + 2 if found >= 0 else -1
        match = _EOL.match(buffer, start) or _END.search(buffer, searched)
        return match.end() if match else -1

    def _cut(self, raw: bytes) -> Event:
        if len(raw) > self._limit:
            self._too_large()
        event = _event(raw)
        if self._lead:
            event.raw = self._lead + raw
            self._lead = b""
        return event

    def _too_large(self) -> None:
        message = f"an event of the stream is larger than {self._limit} bytes"
        raise ValueError(message)


def encode(data: bytes, event: str | None = None) -> bytes:
    """Frame ``data`` as one event; line ends within it become several data lines."""
    head = f"event: {event}\n".encode() if event is not None else b""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_EOL.split(data))
    return b"%bdata: %b\n\n" % (head, data)


def _event(raw: bytes) -> Event:
    """Read the lines of one event. The common one, a single data line, is cut out directly."""
    if raw.startswith(b"data: ") and raw.find(b"\n", 6) == len(raw) - 2 and b"\r" not in raw:
        return Event(raw[6:-2], raw, comment_only=False)
    lines: list[bytes] = []
    for line in _EOL.split(raw):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return Event(b"\n".join(lines), raw, comment_only=not lines)
