"""Counting tokens exactly: by a local ``tokenizer.json`` where one is named, else by the backend.

Only asked for when a prefix's length matters (a restore, a prompt no slot's chain extends): the
hot path never waits for this.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = structlog.get_logger("slotkeeper.tokens")


class Renderer(Protocol):
    """The backend, as far as prompts are concerned."""

    async def render(self, body: Mapping[str, Any]) -> str:
        """The prompt text a chat request becomes."""

    async def tokenize(self, text: str) -> list[int]:
        """Tokens as the server will see them."""


class Counter:
    """Turns what a dialect says of its prompt into the tokens the backend will see."""

    def __init__(self, backend: Renderer, tokenizer: Path | None = None) -> None:
        """``tokenizer``: a tokenizer.json of the served model; checked against the backend once."""
        self._backend = backend
        self._local = Tokenizer.from_file(str(tokenizer)) if tokenizer else None
        self._trusted = False

    async def exact(self, how: tuple[str, Any]) -> array[int] | None:
        """Tokens for ``Dialect.rendered(call)``; None where there is no telling.

        Raises what the backend's ``render`` and ``tokenize`` raise.
        """
        kind, value = how
        if kind == "tokens":
            return array("i", value)
        if kind == "render":
            return await self._encode(await self._backend.render(value))
        if kind == "text":
            return await self._encode(value)
        return None

    async def length(self, text: str) -> int | None:
        """Tokens of a text by the local tokenizer; None without one, or if it proved wrong."""
        if self._local is None:
            return None
        (encoding,) = await self._local.async_encode_batch_fast([text], add_special_tokens=False)
        return len(encoding.ids)

    async def _encode(self, text: str) -> array[int]:
        if self._local is None:
            return array("i", await self._backend.tokenize(text))
        # encode_batch_fast frees the GIL; Tokenizer.encode holds it for a second per MB
        (encoding,) = await self._local.async_encode_batch_fast([text])
        tokens = array("i", encoding.ids)
        if not self._trusted:
            told = array("i", await self._backend.tokenize(text))
            if told != tokens:
                self._local = None
                log.warning(
                    "tokenizer.mismatch",
                    hint="backend.tokenizer is not this model's; the backend counts instead",
                )
                return told
            self._trusted = True
        return tokens
