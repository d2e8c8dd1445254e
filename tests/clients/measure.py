"""How much of a conversation's last prompt its next request extends, in llama.cpp's rendering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN = "<|im_start|>assistant\n"  # the generation prompt of the named templates
QUOTED = 60  # characters
START = 100  # characters of the first text that tell conversations of one client apart


@dataclass(frozen=True, slots=True)
class Step:
    """A request beside the one before it in its conversation.

    ``at``: its place among the client's. ``share``: of the previous prompt, without the generation
    prompt, what this one begins with. ``held``: the same of previous prompt and answer, which is
    what a slot holds by then. ``around``, ``before``, ``after``: the text in front of the first
    difference from what the slot holds, the old and the new text behind it.
    """

    at: int
    share: float
    held: float
    around: str
    before: str
    after: str

    @property
    def quote(self) -> str:
        """The first difference."""
        return f"after {self.around!r}: {self.before!r} -> {self.after!r}"


def steps(
    bodies: Sequence[Mapping[str, Any]], prompts: Sequence[str], answers: Sequence[str]
) -> list[Step]:
    """Every request after the first of its conversation; ``answers`` as rendered behind it."""
    last: dict[tuple[bool, str], tuple[str, str]] = {}
    found = []
    for at, (body, prompt, answer) in enumerate(zip(bodies, prompts, answers, strict=True)):
        key = conversation(body)
        if key in last:
            found.append(_step(at, *last[key], prompt))
        last[key] = prompt, answer
    return found


def conversation(body: Mapping[str, Any]) -> tuple[bool, str]:
    """Which of a client's conversations: side requests have no tools or another system text.

    Only the start of that text counts, so a client that changes the rest of it, or its tools,
    breaks its conversation and does not hide it by "opening another".
    """
    first = body.get("system") or body["messages"][0]["content"]
    if isinstance(first, list):
        texts = [part.get("text", "") for part in first]
        first = "".join(text for text in texts if not text.startswith("x-anthropic-"))
    return bool(body.get("tools")), first[:START]


def _step(at: int, previous: str, answer: str, prompt: str) -> Step:
    held = previous + answer
    same = common(held, prompt)
    asked = len(previous.removesuffix(BEGIN))
    return Step(
        at,
        min(same, asked) / asked,
        same / len(held),
        held[:same][-QUOTED:],
        held[same:][:QUOTED],
        prompt[same:][:QUOTED],
    )


def common(one: str, two: str) -> int:
    """Length of the common prefix in characters."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == two[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def percent(shares: Sequence[float]) -> str:
    """Least and mean, in percent, never rounded up to a hundred."""
    figures = (min(shares), sum(shares) / len(shares))
    return " / ".join(f"{int(share * 10_000) / 100:6.2f}" for share in figures)
