"""The catalogue: which family, template, memory behaviour and speed a tag has (sections 2 to 3.4).

Families whose speed the page does not give borrow the row of the nearest size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Memory = Literal["CKPT", "CKPT-END", "HIST"]
Template = Literal["chatml-stock", "chatml", "llama3", "harmony", "gemma"]


@dataclass(frozen=True, slots=True)
class Speed:
    """``prefill(n) = a + b*n + c*n^2``; decode rates at 1k and 32k of context."""

    a: float
    b: float  # seconds per token
    c: float  # seconds per token^2
    tps_1k: float
    tps_32k: float

    def prefill(self, kept: int, new: int) -> float:
        """Seconds for ``new`` tokens behind ``kept``, without the constant part."""
        return self.b * new + self.c * ((kept + new) ** 2 - kept**2)

    def decode(self, context: int) -> float:
        """Seconds for one token at this length."""
        part = min(max((context - 1024) / (32768 - 1024), 0.0), 1.0)
        return (1 - part) / self.tps_1k + part / self.tps_32k


SPEEDS: dict[str, Speed] = {
    "0.8b": Speed(0.49, 0.541e-3, 4.0e-9, 39, 22),
    "4b": Speed(0.82, 1.841e-3, 10.7e-9, 15, 9.6),
    "9b": Speed(1.12, 2.430e-3, 10.0e-9, 9.3, 6.9),
    "llama3.2:1b": Speed(0.31, 0.277e-3, 17.6e-9, 64, 35),
    "llama3.2:3b": Speed(0.59, 0.705e-3, 38.8e-9, 26, 13.6),
    "llama3.1:8b": Speed(0.89, 1.553e-3, 60.7e-9, 12.8, 8.5),
    "gpt-oss:20b": Speed(3.11, 1.487e-3, 29.0e-9, 18, 12),
    "moe": Speed(9.5, 4.29e-3, 0.0, 12.4, 8.9),
}


@dataclass(frozen=True, slots=True)
class Family:
    """What all sizes of a model have in common."""

    name: str
    template: Template
    memory: Memory
    sizes: tuple[str, ...]
    speed: str
    tools: bool = False  # its template shows tools to the model
    thinks: bool | None = None  # None: it cannot; else the default
    trims: tuple[int, int] = (0, 0)  # with thinking, without
    think_in_prompt: bool = False  # the generation prompt opens the block
    vision: bool = False
    ids: bool = False  # tool calls carry the literal "generate_id()"
    flash: bool = False


FAMILIES: tuple[Family, ...] = (
    Family("deepseek-r1", "chatml", "CKPT", ("8b",), "llama3.1:8b", thinks=True),
    Family("deepseek-r1-0528", "chatml", "CKPT", ("8b",), "llama3.1:8b", thinks=True),
    Family("gemma3", "gemma", "HIST", ("1b", "4b"), "4b", vision=True),
    Family("gemma4-it", "gemma", "CKPT-END", ("e2b", "e4b"), "4b", True, thinks=False, vision=True),
    Family("gemma4e-flash", "gemma", "CKPT-END", ("e2b",), "0.8b", vision=True, flash=True),
    Family("gpt-oss", "harmony", "CKPT", ("20b",), "gpt-oss:20b", thinks=True),
    Family("lfm2", "chatml", "HIST", ("1.2b", "2.6b"), "llama3.2:1b"),
    Family("lfm2.5-it", "chatml", "HIST", ("1.2b",), "llama3.2:1b"),
    Family("lfm2.5-tk", "chatml", "CKPT", ("1.2b",), "llama3.2:1b", False, True, (2, 2), True),
    Family("llama3.1", "llama3", "HIST", ("8b",), "llama3.1:8b"),
    Family("llama3.2", "llama3", "HIST", ("1b", "3b"), "llama3.2:3b"),
    Family("medgemma", "gemma", "HIST", ("4b",), "4b", vision=True),
    Family("nanbeige4.1", "chatml", "CKPT", ("3b",), "llama3.2:3b", thinks=True, ids=True),
    Family("phi4-mini-it", "chatml", "HIST", ("4b",), "4b"),
    Family("qwen2.5-it", "chatml", "HIST", ("3b",), "llama3.2:3b"),
    Family("qwen2.5vl-it", "chatml", "HIST", ("3b",), "llama3.2:3b", vision=True),
    Family("qwen3", "chatml-stock", "CKPT", ("0.6b", "1.7b", "4b", "8b"), "4b", True, True, (0, 4),
           ids=True),
    Family("qwen3-it", "chatml", "HIST", ("4b",), "4b", True),
    Family("qwen3-tk", "chatml-stock", "CKPT", ("4b",), "4b", True, True, (2, 2), True, ids=True),
    Family("qwen3vl-it", "chatml", "HIST", ("4b",), "4b", True, vision=True),
    Family("qwen3vl-flash", "chatml", "HIST", ("4b",), "4b", vision=True, flash=True),
    Family("qwen3.5", "chatml", "CKPT", ("0.8b", "2b", "4b", "9b"), "4b", True, True, (2, 4),
           True, True),
    Family("qwen3.6-moe", "chatml", "CKPT", ("35b",), "moe", True, True, (2, 4), True, True),
    Family("translategemma", "gemma", "HIST", ("4b",), "4b"),
)  # fmt: skip

FALLBACK = "llama3.2:1b"  # what every unknown name becomes (all_models.hpp:82-85)
SMALL = {"qwen3": ("0.6b", "1.7b"), "qwen3.5": ("0.8b",)}  # their templates show no tools


@dataclass(frozen=True, slots=True)
class Model:
    """One tag of the catalogue."""

    tag: str
    family: Family
    size: str
    speed: Speed
    tools: bool
    thinks: bool | None
    context: int

    def memory(self, *, think: bool) -> Memory:
        """The behaviour now: gemma4 changes it with thinking."""
        return "CKPT" if self.family.memory == "CKPT-END" and think else self.family.memory

    def trim(self, *, think: bool) -> int:
        """Tokens of the generation prompt that are not in the checkpoint."""
        return self.family.trims[0 if think else 1]


def _model(family: Family, size: str) -> Model:
    tag = f"{family.name}:{size}"
    speed = SPEEDS.get(tag) or SPEEDS.get(size) or SPEEDS[family.speed]
    tools = family.tools and size not in SMALL.get(family.name, ())
    thinks = False if tag == "qwen3:0.6b" else family.thinks
    return Model(tag, family, size, speed, tools, thinks, 1024 if family.flash else 32768)


CATALOGUE: dict[str, Model] = {
    f"{family.name}:{size}": _model(family, size) for family in FAMILIES for size in family.sizes
}


def resolve(name: str) -> Model:
    """What a request's ``model`` loads: a tag, a family's first size, or the fallback."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    for family in FAMILIES:
        if family.name == name:
            return CATALOGUE[f"{name}:{family.sizes[0]}"]
    return CATALOGUE[FALLBACK]


def load_seconds(model: Model) -> float:
    """The 500 ms sleep and the load itself: 46 s were reported for a 9b (section 2)."""
    number = float("".join(c for c in model.size if c.isdigit() or c == "."))
    return 0.5 + min(46.0, 5.0 * number)
