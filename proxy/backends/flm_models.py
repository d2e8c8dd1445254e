"""What FastFlowLM's model families have in common, by tag (fastflowlm.md 1.5, 3.3). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Memory(StrEnum):
    """What of a conversation its model can go on from (fastflowlm.md 3.3)."""

    PROMPT = "CKPT"  # the prompt; the answer comes from the client's text
    ANSWER = "CKPT-END"  # prompt and answer, which must come back as it was
    HISTORY = "HIST"  # the same, to the last token
    SYSTEM = "flash"  # one turn only; the system prompt is kept
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class Family:
    """All sizes of a model.

    ``tools``: its template shows tools to the model; None: not known. ``thinks``: whether it does
    unasked, None where there is nothing to switch. ``thinking``: its memory while it thinks, where
    that differs. ``blind``: sizes that are shown no tools all the same. ``sampling``: where it
    differs from the server's usual defaults.
    """

    memory: Memory
    tools: bool | None = False
    thinks: bool | None = None
    thinking: Memory | None = None
    blind: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


_CKPT, _HIST = Memory.PROMPT, Memory.HISTORY
_QWEN35 = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}
_UNKNOWN = Family(Memory.UNKNOWN, tools=None)
# By the name before the colon, or its beginning where a star ends it; the longest one counts.
FAMILIES: Mapping[str, Family] = {
    "deepseek-r1*": Family(_CKPT, thinks=True),
    "gemma3*": Family(_HIST),
    "gemma4*": Family(Memory.ANSWER, tools=True, thinks=False, thinking=_CKPT),
    "gemma4e-flash": Family(Memory.SYSTEM),
    "gpt-oss*": Family(_CKPT, thinks=True),
    "lfm2*": Family(_HIST),
    "lfm2.5-tk": Family(_CKPT, thinks=True),
    "llama3*": Family(_HIST),
    "medgemma*": Family(_HIST),
    "nanbeige*": Family(_CKPT, thinks=True),
    "phi4*": Family(_HIST),
    "qwen2*": Family(_HIST),
    "qwen3": Family(_CKPT, tools=True, thinks=True, blind=("0.6b", "1.7b")),
    "qwen3-it": Family(_HIST, tools=True),
    "qwen3-tk": Family(_CKPT, tools=True, thinks=True),
    "qwen3.5": Family(_CKPT, tools=True, thinks=True, blind=("0.8b",), sampling=_QWEN35),
    "qwen3.5-omni*": Family(_CKPT, tools=None, thinks=True),
    "qwen3.6-moe*": Family(_CKPT, tools=True, thinks=True),
    "qwen3vl*": Family(_HIST, tools=True),
    "qwen3vl-flash": Family(Memory.SYSTEM),
    "translategemma*": Family(_HIST),
}


def family(tag: str) -> Family:
    """The family of a tag; for an unknown one nothing is claimed."""
    name = tag.partition(":")[0]
    if name in FAMILIES:
        return FAMILIES[name]
    starts = [key for key in FAMILIES if key.endswith("*") and name.startswith(key[:-1])]
    return FAMILIES[max(starts, key=len)] if starts else _UNKNOWN


def memory(tag: str, *, think: bool) -> Memory:
    """How this model remembers; gemma4 does it in another way while it thinks."""
    known = family(tag)
    return known.thinking if think and known.thinking is not None else known.memory


def primes(tag: str, *, think: bool) -> bool:
    """Whether prefilling a conversation's last prompt again makes its next turn a hit (5.18)."""
    return memory(tag, think=think) is Memory.PROMPT


def goes_on_from_answer(tag: str, *, think: bool) -> bool:
    """Whether an answer must come back as it was generated."""
    return memory(tag, think=think) in {Memory.HISTORY, Memory.ANSWER}


def ignores_tools(tag: str) -> bool:
    """Its template is known to show none: they only gate the cache (1.5)."""
    known = family(tag)
    return known.tools is False or tag.partition(":")[2] in known.blind
