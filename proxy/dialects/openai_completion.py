"""``/v1/completions``, OpenAI's legacy API."""

from __future__ import annotations

from proxy.core.assemble import TextAnswer
from proxy.dialects.stream import TextFilter
from proxy.dialects.text import TextDialect


class OpenAICompletion(TextDialect):
    """Text in, a ``text_completion`` out."""

    answers = TextAnswer
    events = TextFilter
