"""The nouns of "why was it cold": a cause, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cold(StrEnum):
    """Why a request reused less than its conversation's last prompt: the metric label ``cause``."""

    SYSTEM = "system"  # the system text is another one
    TOOL_MOVED = "tool-moved"  # the same tools in another order
    TOOL_ADDED = "tool-added"  # a tool more, or tools where there were none
    TOOL_REMOVED = "tool-removed"  # a tool less, or none where there were some
    TOOL_CHANGED = "tool-changed"  # a tool's description or parameters
    SETTINGS = "settings"  # template arguments, reasoning effort, tool choice, response format
    HISTORY = "history"  # the client rewrote, removed or inserted an older message
    TRIMMED = "trimmed"  # the oldest messages are gone
    REASONING = "reasoning"  # the client dropped or changed the model's reasoning
    TEMPLATE = "template"  # the chat template renders the same messages differently
    DATE = "date"  # the date the chat template writes rolled over
    RESTARTED = "restarted"  # the backend restarted and no snapshot held the conversation
    DISPLACED = "displaced"  # no slot and no snapshot held the conversation any more
    EVICTED = "evicted"  # the same, and its snapshot had been removed to make room
    FORWARD = "forward"  # mode forward: the backend chooses
    UNKNOWN = "unknown"  # nothing differs and no slot was lost


@dataclass(frozen=True, slots=True)
class Why:
    """One explanation.

    ``sentence``: no text of the prompt in it but names of tools and settings, fit for the log.
    ``before`` and ``after``: at most 60 characters of either side around the difference, for
    memory and the owner's eyes only. ``advice``: what could be done.
    """

    cause: Cold
    sentence: str
    before: str = ""
    after: str = ""
    advice: str = ""


def quoted(why: Why) -> str:
    """The sentence with both sides; never for the structured log."""
    if not (why.before or why.after):
        return why.sentence
    before, after = (f"`{side}`" if side else "nothing" for side in (why.before, why.after))
    return f"{why.sentence}: {before} → {after}"


def told(why: Why) -> dict[str, str]:
    """For the decision log: all of it, and the sentence with both sides."""
    fields = {name: getattr(why, name) for name in ("sentence", "before", "after", "advice")}
    return {"cause": str(why.cause), **fields, "text": quoted(why)}
