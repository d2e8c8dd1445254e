"""``/infill``: code before and after a gap; the engine builds the prompt from its own markers."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.assemble import NativeAnswer
from proxy.core.prefix import text_chain
from proxy.core.records import Prompt
from proxy.dialects import body as bodies
from proxy.dialects.base import Assembler, Call, EventFilter
from proxy.dialects.stream import NativeFilter

# The order in which the engine lays them out (files of context first, llama.cpp's default layout).
_PARTS = ("input_extra", "input_prefix", "input_suffix", "prompt")


class Infill:
    """Never stored: there is no way to learn the tokens, so no snapshot could be found again."""

    def parse(self, raw: bytes) -> Call:
        """See ``Dialect``. Missing and wrong fields are the backend's to refuse."""
        body = bodies.read(raw)
        return bodies.call(raw, body, several=False, streamable=True, known=False)

    def prompt(self, call: Call, namespace: bytes) -> Prompt:
        """See ``Dialect``."""
        seed = bodies.prompt_seed(call, namespace)
        data = b"".join(orjson.dumps(call.body.get(part)) for part in _PARTS)
        chain, ends = text_chain(seed, data)
        return Prompt(seed, chain, ends, len(data), adapters=bodies.adapters(call))

    def upstream(self, call: Call, slot: int | None, *, fresh: bool = False) -> bytes:
        """See ``Dialect``."""
        return bodies.upstream(call, slot, fresh=fresh)

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        own = bodies.own_progress(call)
        return NativeFilter(own_progress=own, ping_id=ping_id, created=created, model=call.model)

    def assembler(self, _call: Call, /) -> Assembler:
        """See ``Dialect``."""
        return NativeAnswer()

    def rendered(self, _call: Call, /) -> tuple[str, Any]:
        """See ``Dialect``."""
        return "none", None
