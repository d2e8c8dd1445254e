"""Learning what the served model's chat template does, by asking the backend to render samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from proxy.backends.base import Facts
from proxy.core.template import SAMPLES, Traits, traits
from proxy.errors import BackendRefusedError, SlotkeeperError

# What a template that raises is answered with: 400, and 500 by older builds of llama-server.
REFUSED_BY_TEMPLATE = {HTTPStatus.BAD_REQUEST, HTTPStatus.INTERNAL_SERVER_ERROR}


class Renderer(Protocol):
    """The backend, as far as its chat template is concerned."""

    async def facts(self) -> Facts:
        """Who it is, its template's text included."""

    async def render(self, body: Mapping[str, Any]) -> str:
        """The prompt text a chat request becomes."""


class Served:
    """What the backend serves now. Learned once per process of it: its flags have a say."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing is known yet. ``clock`` gives unix seconds."""
        self._clock = clock
        self._instance = ""
        self.model = ""
        self.adapters = True  # it has LoRA adapters, or may have
        self.traits = Traits()
        self.restarted = 0.0  # when another process was first seen in place of the one before

    async def learn(self, backend: Renderer) -> Traits:
        """Ask who it is and render all samples, unless this very process was asked before.

        Never raises for a failing backend: what was known stays, and the next call tries again.
        """
        try:
            facts = await backend.facts()
            if facts.instance and facts.instance == self._instance:
                return self.traits
            rendered = {name: await _render(backend, body) for name, body in SAMPLES.items()}
        except SlotkeeperError:
            return self.traits
        self.adapters = bool(facts.identity.get("lora", True))
        self.model, self.traits = facts.model, traits(rendered, facts.template or None)
        if self.traits != Traits():
            self.restarted = self._clock() if self._instance else self.restarted
            self._instance = facts.instance
        return self.traits


async def _render(backend: Renderer, body: Mapping[str, Any]) -> str | None:
    """None where the template refuses; a backend that fails for another reason raises."""
    try:
        return await backend.render(body)
    except BackendRefusedError as error:
        if error.answer in REFUSED_BY_TEMPLATE:
            return None
        raise
