"""``/v1/responses``, OpenAI's newer API (Codex speaks it), where the backend has only chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.base import Call, EventFilter
from proxy.dialects.responses_answer import ResponsesFilter
from proxy.dialects.responses_request import convert, namespaces
from proxy.dialects.retelling import Translated


class Responses(Translated):
    """Items in, items out. Nothing is stored, whatever ``store`` says."""

    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Translated``."""
        return convert(given)

    def filter(self, call: Call, ping_id: str = "", created: int = 0) -> EventFilter:
        """See ``Dialect``."""
        given = call.extra["given"]
        return ResponsesFilter(
            ping_id=ping_id,
            created=created,
            model=call.model,
            given=given,
            namespaces=namespaces(given),
        )
