"""Short ways to make the nouns that many tests need."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from proxy.core.costs import Costs
from proxy.core.placement import Need
from proxy.core.prefix import segment_chain
from proxy.core.records import Prompt, Snapshot
from proxy.core.slots import Content

SEED = b"s" * 16


def chat(*segments: str, tokens: Iterable[int] | None = None, seed: bytes = SEED) -> Prompt:
    """A prompt of these segments, tokenised if ``tokens`` are given."""
    parts = [segment.encode() for segment in segments]
    chain, ends = segment_chain(seed, parts)
    known = None if tokens is None else array("i", tokens)
    return Prompt(seed, chain, ends, sum(map(len, parts)), known)


def content(prompt: Prompt, n_tokens: int, *, used: float = 0.0, **other: object) -> Content:
    """A slot's content after ``prompt`` ran there and nothing was generated."""
    made = Content(prompt=prompt, n_tokens=n_tokens, n_prompt=n_tokens, used=used)
    return replace(made, **other)  # type: ignore[arg-type]


def snapshot(
    tokens: Sequence[int], name: str = "a", *, size: int = 0, used: float = 0.0
) -> Snapshot:
    """A snapshot of these tokens, all of which came from the prompt."""
    return Snapshot(
        id=name,
        fingerprint="f" * 32,
        seed=SEED,
        tokens=array("i", tokens),
        n_prompt=len(tokens),
        size=size or 1000 * len(tokens),
        checksum="0" * 64,
        created=used,
        last_used=used,
        save_seconds=0.1,
    )


def need(prompt: Prompt, **other: object) -> Need:
    """A request whose rendered prompt was looked at."""
    return replace(Need(prompt, exact=True), **other)  # type: ignore[arg-type]


def costs(per_token: float = 0.01) -> Costs:
    """A model that computes a token in ``per_token`` seconds and stores it in 1000 bytes."""
    made = Costs()
    for n in range(20):
        made.observe_prefill(0, 1000 + n, per_token * (1000 + n))
        made.observe_size(1000, 1_000_000)
        made.observe_restore(1_000_000, 0.01)
        made.observe_save(1_000_000, 0.02)
    return made
