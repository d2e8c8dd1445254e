"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.core.assemble import ChatAnswer
from proxy.core.conversation import has_media, segments
from proxy.core.prefix import seed, segment_chain
from proxy.core.records import Prompt
from proxy.dialects import body as bodies
from proxy.dialects.base import Assembler, Call, EventFilter
from proxy.dialects.stream import ChatFilter
from proxy.errors import BadRequestError

# What a template may render beside the messages, and what only changes the prompt's end.
_TEMPLATE = (
    "chat_template_kwargs", "json_schema", "parallel_tool_calls", "reasoning_effort",
    "response_format", "tool_choice", "tools",
)  # fmt: skip
_NONE = len(orjson.dumps([None] * len(_TEMPLATE)))  # bytes of a head that renders nothing
_END = ("add_generation_prompt", "continue_final_message")


class OpenAIChat:
    """Messages in, a ``chat.completion`` out."""

    def parse(self, raw: bytes) -> Call:
        """See ``Dialect``."""
        return self.call(raw, bodies.read(raw))

    def call(self, raw: bytes, body: dict[str, Any]) -> Call:
        """``parse`` of a body that was read already."""
        if "messages" not in body:
            raise BadRequestError("'messages' is required.")
        messages = body["messages"]
        if not isinstance(messages, list):
            raise BadRequestError("'messages' must be a list.")
        media, streamable = has_media(messages), not _continues(body)
        return bodies.call(
            raw,
            body,
            several=False,
            streamable=streamable,
            known=not media,
            chat=True,
            media=media,
        )

    def prompt(self, call: Call, namespace: bytes) -> Prompt:
        """See ``Dialect``. The first segment is what the template renders beside the messages.

        Where that is nothing it has no size: short prompts would seem to share it.
        """
        body = call.body
        head = orjson.dumps([body.get(name) for name in _TEMPLATE])
        adapters = bodies.adapters(call)
        prompt_seed = seed(namespace, adapters)
        chain, ends = segment_chain(prompt_seed, [head, *segments(body["messages"])])
        ends = tuple([max(0, end - _NONE) for end in ends])
        return Prompt(prompt_seed, chain, ends, ends[-1], adapters=adapters)

    def upstream(self, call: Call, slot: int | None, *, fresh: bool = False) -> bytes:
        """See ``Dialect``."""
        return bodies.upstream(call, slot, fresh=fresh, usage=True)

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        own = bodies.own_progress(call)
        return ChatFilter(own_progress=own, ping_id=ping_id, created=created, model=call.model)

    def assembler(self, _call: Call, /) -> Assembler:
        """See ``Dialect``."""
        return ChatAnswer()

    def rendered(self, call: Call, /) -> tuple[str, Any]:
        """See ``Dialect``. The body has only what ``/apply-template`` needs: it refuses more."""
        return ("none", None) if call.extra["media"] else ("render", self.shown(call))

    def shown(self, call: Call) -> dict[str, Any]:
        """The fields a template may render."""
        names = ("messages", *_TEMPLATE, *_END)
        return {name: call.body[name] for name in names if name in call.body}


def generated(payloads: Sequence[bytes]) -> bytes | None:
    """The assistant message in what the backend sent: all data of a stream, or one whole body.

    JSON as the engine shows it unstreamed; None when the answer did not run to its end.
    """
    answer = ChatAnswer()
    try:
        if len(payloads) == 1:
            whole = payloads[0]
        else:
            for data in payloads:
                answer.feed(data)
            whole = answer.answer()
        message = orjson.loads(whole)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return orjson.dumps(message) if isinstance(message, dict) else None


def _continues(body: dict[str, Any]) -> bool:
    """The answer begins with the client's last message, which is in no event of the stream."""
    messages = body["messages"]
    last = messages[-1] if messages else None
    assistant = isinstance(last, dict) and last.get("role") == "assistant"
    return assistant or bool(body.get("continue_final_message"))
