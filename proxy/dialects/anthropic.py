"""``/v1/messages``, Anthropic's API: a chat request in other words.

The ``Call`` holds the chat form, so everything after ``parse`` is what it is for chat, and a
conversation is the same one whichever API it comes through.
"""

from __future__ import annotations

from dataclasses import replace

import orjson

from proxy.dialects import body as bodies
from proxy.dialects.anthropic_answer import MessagesFilter
from proxy.dialects.anthropic_request import convert
from proxy.dialects.base import Call, EventFilter
from proxy.dialects.openai_chat import OpenAIChat

CHAT = "/v1/chat/completions"


class Messages(OpenAIChat):
    """Converted in, converted out."""

    def parse(self, raw: bytes) -> Call:
        """See ``Dialect``."""
        body = convert(bodies.read(raw))
        return replace(self.call(orjson.dumps(body), body), path=CHAT)

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        messages = call.body["messages"]
        last = messages[-1] if messages else {}
        # The engine repeats it in an unstreamed answer, and such a request is never streamed for us
        prefill = last["content"] if last.get("role") == "assistant" else ""
        return MessagesFilter(ping_id=ping_id, created=created, model=call.model, prefill=prefill)
