"""``/v1/messages``, Anthropic's API: a chat request in other words.

The ``Call`` holds the chat form, so everything after ``parse`` is what it is for chat, and a
conversation is the same one whichever API it comes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import orjson

from proxy.core.splice import elements, members
from proxy.dialects import body as bodies
from proxy.dialects.anthropic_answer import MessagesFilter
from proxy.dialects.anthropic_request import convert
from proxy.dialects.base import Call, EventFilter, Unreadable
from proxy.dialects.openai_chat import OpenAIChat

CHAT = "/v1/chat/completions"
LONG_NUMBER = b"0" * 16  # digits that may not survive being parsed and written
ZEROS = bytes.maketrans(b"123456789", b"000000000")


class Messages(OpenAIChat):
    """Converted in, converted out."""

    def parse(self, raw: bytes) -> Call:
        """See ``Dialect``."""
        given = bodies.read(raw)
        try:
            body = convert(given, inputs(raw) if _long(raw) else {})
            return replace(self.call(orjson.dumps(body), body), path=CHAT)
        except orjson.JSONEncodeError as error:  # nested deeper than can be written again
            raise Unreadable(str(error)) from error

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        messages = call.body["messages"]
        last = messages[-1] if messages else {}
        # The engine repeats it in an unstreamed answer, and such a request is never streamed for us
        prefill = last["content"] if last.get("role") == "assistant" else ""
        return MessagesFilter(ping_id=ping_id, created=created, model=call.model, prefill=prefill)


def inputs(raw: bytes) -> Mapping[tuple[int, int], bytes]:
    """By message and block, the input of each tool call whose long numbers are to be kept."""
    found: dict[tuple[int, int], bytes] = {}
    for number, message in enumerate(elements(dict(members(raw)).get("messages", b"[]"))):
        content = dict(members(message)).get("content", b"")
        for place, block in enumerate(elements(content) if content.startswith(b"[") else ()):
            spelt = dict(members(block)).get("input", b"")
            if _long(spelt):
                found[number, place] = spelt
    return found


def _long(raw: bytes) -> bool:
    """Whether there is a long number in it; a regular expression would take ten times as long."""
    return LONG_NUMBER in raw.translate(ZEROS)
