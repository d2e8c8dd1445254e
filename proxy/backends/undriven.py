"""What a backend says that has no slots to drive: every such wish is refused."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Never

from proxy.backends.base import Single, SlotView, StateIO
from proxy.errors import BackendRefusedError


class Undriven(Single):
    """The half of a ``Backend`` (see base.py) that only llama-server has."""

    name = "this server"  # as errors call it

    def _refuse(self, what: str) -> Never:
        raise BackendRefusedError(f"{self.name} cannot {what}", answer=HTTPStatus.NOT_IMPLEMENTED)

    async def slots(self) -> tuple[SlotView, ...]:
        """Refused."""
        self._refuse("show its slots")

    async def save(self, slot: int, name: str) -> StateIO:  # noqa: ARG002 - the protocol's
        """Refused."""
        self._refuse("save a slot")

    async def restore(self, slot: int, name: str) -> StateIO:  # noqa: ARG002 - the protocol's
        """Refused."""
        self._refuse("restore a slot")

    async def erase(self, slot: int) -> None:  # noqa: ARG002 - the protocol's
        """Refused."""
        self._refuse("erase a slot")

    async def render(self, body: Mapping[str, Any]) -> str:  # noqa: ARG002 - the protocol's
        """Refused."""
        self._refuse("render a prompt")

    async def tokenize(self, text: str) -> list[int]:  # noqa: ARG002 - the protocol's
        """Refused."""
        self._refuse("tokenize a text")
