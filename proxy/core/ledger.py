"""The ledger: per conversation, what came from the client, what went to the backend in its place.

Messages are compared and kept as canonical JSON: ``orjson.dumps`` of the parsed message. Pure data;
``normalise/book.py`` finds a request's conversation, ``store/ledger.py`` keeps them on disk.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One message of the last request.

    ``came``: as the client sent it, after the rules that need no ledger. ``went``: as the backend
    got it, without ``note`` (the same object as ``came`` when nothing changed). ``note``: text put
    behind it, ``""`` for none. ``key``: what is equal for messages that mean the same
    (``core/conversation.py``).
    """

    came: bytes
    went: bytes
    key: bytes
    note: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the backend generated when the conversation had ``at`` messages: the JSON message."""

    at: int
    message: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, as of its last request.

    ``namespace``: digest of API key and model; nothing crosses it. ``client``: the recognised
    client program, ``""`` for none. ``head``: how many leading lines are system messages.
    ``tools``: tool definitions (canonical JSON) in the order they went out; ``order``: every tool
    ever seen, in first-seen order, as (name, canonical JSON as first sent). ``settings``: canonical
    JSON of what else a template may render (``chat_template_kwargs`` ...). ``answers``: the last
    few, newest last. ``prompt_n``: tokens of its last prompt by the engine's own count, None when
    never told. ``used``: unix seconds of its last request. ``title``: at most 60 characters of the
    first user text, for the owner's eyes only.
    """

    id: str
    namespace: bytes
    client: str = ""
    lines: tuple[Line, ...] = ()
    head: int = 0
    tools: tuple[bytes, ...] = ()
    order: tuple[tuple[str, bytes], ...] = ()
    settings: bytes = b"{}"
    answers: tuple[Answer, ...] = ()
    prompt_n: int | None = None
    used: float = 0.0
    title: str = ""

    @property
    def size(self) -> int:
        """Bytes of its texts (of the short ones, characters); a shared one counts once."""
        held = {id(data): data for data in self.tools}
        size = len(self.settings) + len(self.title)
        for name, data in self.order:
            held[id(data)] = data
            size += len(name)
        for line in self.lines:
            size += len(line.came) + len(line.note)
            size += 0 if line.went is line.came else len(line.went)
        for answer in self.answers:
            size += len(answer.message)
        return size + sum(map(len, held.values()))
