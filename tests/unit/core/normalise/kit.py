"""A client and its ledger, in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from proxy.core.ledger import Conversation
from proxy.core.normalise import Result, answered, normalise, switched_on
from proxy.core.normalise.base import Context
from proxy.core.normalise.book import Book
from proxy.core.template import Traits

Message = dict[str, Any]


def user(text: Any, **more: Any) -> Message:
    """A person's message."""
    return {"role": "user", "content": text, **more}


def system(text: Any) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def assistant(text: Any = "", *calls: Message, **more: Any) -> Message:
    """A model's message."""
    asked = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": text, **more, **asked}


def call(name: str, arguments: str, call_id: str = "c1") -> Message:
    """One tool call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, call_id: str = "c1") -> Message:
    """What a tool answered."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def tool(name: str, **more: Any) -> Message:
    """A definition."""
    function = {"name": name, "description": f"does {name}", "parameters": {"type": "object"}}
    return {"type": "function", "function": {**function, **more}}


@dataclass
class Desk:
    """One proxy's ledger, and the requests that come in, one after the other."""

    rules: Sequence[str] = ()
    mode: str = "safe"
    client: str = ""
    traits: Traits = field(default_factory=Traits)
    today: str = ""
    book: Book = field(default_factory=lambda: Book(64, 1 << 24))
    count: int = 0

    def ask(self, *messages: Message, key: str = "key", keep: bool = True, **more: Any) -> Result:
        """One request; ``keep``: the ledger remembers it."""
        body = {"messages": list(messages), **more}
        return self.raw(orjson.dumps(body), key=key, keep=keep)

    def raw(self, raw: bytes, *, key: str = "key", keep: bool = True) -> Result:
        """The same, as bytes."""
        self.count += 1
        context = Context(switched_on(self.mode, self.rules), self.client, self.traits, self.today)
        origin = Conversation(
            id=f"conversation {self.count}",
            namespace=key.encode().ljust(16),
            client=self.client,
            used=float(self.count),
        )
        made = normalise(raw, orjson.loads(raw), self.book, context, origin)
        if keep:
            self.book.keep(made.after)
        return made

    def hear(self, made: Result, message: Message, prompt_n: int | None = 100) -> None:
        """The backend answered."""
        row = self.book.get(made.after.id)
        assert row is not None
        self.book.keep(answered(replace(row), orjson.dumps(message), prompt_n))


def sent(made: Result) -> list[Message]:
    """The messages the backend gets."""
    found: list[Message] = orjson.loads(made.raw)["messages"]
    return found


def rules(made: Result) -> list[str]:
    """Names of the rules that did something, each once."""
    return list(dict.fromkeys(change.rule for change in made.changes))
