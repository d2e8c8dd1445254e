"""``/completion``, llama-server's own API (``/completions`` is an alias of it)."""

from __future__ import annotations

from proxy.core.assemble import NativeAnswer
from proxy.dialects.stream import NativeFilter
from proxy.dialects.text import TextDialect


class LlamaCompletion(TextDialect):
    """Text in, the native object out."""

    answers = NativeAnswer
    events = NativeFilter
