"""The field ``prompt`` of ``/completion`` and ``/v1/completions``: text, tokens or several."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Any, ClassVar

import orjson

from proxy.core.assemble import NativeAnswer, TextAnswer
from proxy.core.prefix import text_chain
from proxy.core.records import Prompt
from proxy.dialects import body as bodies
from proxy.dialects.base import Assembler, Call, EventFilter
from proxy.dialects.stream import NativeFilter, TextFilter
from proxy.errors import BadRequestError


class TextDialect:
    """What the two APIs share; they differ in the shape of their answers."""

    answers: ClassVar[type[NativeAnswer | TextAnswer]]
    events: ClassVar[type[NativeFilter | TextFilter]]

    def parse(self, raw: bytes) -> Call:
        """See ``Dialect``. One prompt in a list is one prompt; a list with a number in it, too."""
        body = bodies.read(raw)
        if "prompt" not in body:
            raise BadRequestError("'prompt' is required.")
        prompts = _split(body["prompt"])
        source = _source(prompts[0]) if len(prompts) == 1 else ("none", None)
        several, known = len(prompts) > 1, source[0] != "none"
        return bodies.call(raw, body, several=several, streamable=True, known=known, source=source)

    def prompt(self, call: Call, namespace: bytes) -> Prompt:
        """See ``Dialect``. The chain goes over the text, or over the tokens as int32."""
        kind, source = call.extra["source"]
        seed = bodies.prompt_seed(call, namespace)
        if kind == "text":
            data: bytes = source.encode()
        elif kind == "tokens":
            data = source.tobytes()
        else:
            data = orjson.dumps(call.body["prompt"])
        chain, ends = text_chain(seed, data)
        tokens = source if kind == "tokens" else None
        return Prompt(seed, chain, ends, len(data), tokens, adapters=bodies.adapters(call))

    def upstream(self, call: Call, slot: int | None, *, fresh: bool = False) -> bytes:
        """See ``Dialect``."""
        return bodies.upstream(call, slot, fresh=fresh)

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        own = bodies.own_progress(call)
        return self.events(own_progress=own, ping_id=ping_id, created=created, model=call.model)

    def assembler(self, _call: Call, /) -> Assembler:
        """See ``Dialect``."""
        return self.answers()

    def rendered(self, call: Call, /) -> tuple[str, Any]:
        """See ``Dialect``."""
        kind, source = call.extra["source"]
        return (kind, source.tolist()) if kind == "tokens" else (kind, source)


def _split(prompt: Any) -> list[Any]:
    """The prompts in ``prompt``. Raises ``BadRequestError`` where the engine refuses."""
    several = isinstance(prompt, list) and not any(map(_is_token, prompt))
    prompts: list[Any] = prompt if several else [prompt]
    if not prompts:
        raise BadRequestError("'prompt' must not be empty.")
    for one in prompts:
        pieces = one if isinstance(one, list) else ()
        if not isinstance(one, str | list | dict) or not all(map(_is_piece, pieces)):
            raise BadRequestError(
                "'prompt' must be a string, a list of tokens, a list of tokens and strings, "
                "an object with a prompt string, or a list of these."
            )
    return prompts


def _source(prompt: Any) -> tuple[str, Any]:
    """How to learn the tokens of one prompt.

    There is no way for mixed lists, objects (media) and numbers the engine wraps around.
    """
    if isinstance(prompt, str):
        return "text", prompt
    if isinstance(prompt, list) and all(map(_is_token, prompt)):
        with suppress(OverflowError):
            return "tokens", array("i", prompt)
    return "none", None


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_piece(value: Any) -> bool:
    return isinstance(value, str) or _is_token(value)
