"""Stop strings, which FastFlowLM does not read (fastflowlm.md 1.5). Pure."""

from __future__ import annotations

from typing import Any

from proxy.errors import BadRequestError


def strings(body: dict[str, Any]) -> tuple[str, ...]:
    """What a request names in ``stop``. Raises ``BadRequestError`` for what is no text."""
    asked = body.get("stop")
    found = [asked] if isinstance(asked, str) else asked or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise BadRequestError("'stop' must be a text or a list of texts.")
    return tuple(text for text in found if text)


class Stopper:
    """Lets text through up to the first stop string, whatever the pieces it comes in.

    An end that may be the beginning of one is held back until that is known.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """``stops``: none of them empty."""
        self._stops = stops
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What may be shown now; nothing any more after a hit."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.hit, self._held = True, ""
            return text[: min(places)]
        kept = max(_overlap(text, stop) for stop in self._stops)
        shown = len(text) - kept
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
