"""What the scheduler, the keeper and the relay need of a model server.

Errors every method may raise: ``BackendUnreachableError`` (no connection, or it broke),
``BackendTimeoutError``, ``BackendRefusedError`` (an HTTP error; its status in ``.answer``),
``BackendBrokenError`` (an answer that makes no sense).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.core.records import Mode
from proxy.core.routing import Routing

# A request for a slot (None: of nobody's choice) is answered by the process of another.
Moved = Callable[[int | None, int], None]


@dataclass(frozen=True, slots=True)
class SlotView:
    """One row of ``GET /slots``; ``id_task`` and ``n_tokens`` None until the slot ran a task."""

    index: int
    n_ctx: int
    is_processing: bool
    id_task: int | None
    n_tokens: int | None


@dataclass(frozen=True, slots=True)
class StateIO:
    """What the backend says of a save or a restore: tokens, bytes, and its own seconds."""

    n_tokens: int
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Facts:
    """A backend as it introduces itself over HTTP (``/props``, ``/v1/models``, ``/lora-adapters``).

    ``instance`` identifies this very process (llama-server: its random media marker), ``""`` when
    it cannot be told. ``identity`` holds what goes into the fingerprint, already free of anything
    that differs between two starts of the same server. ``template``: the chat template's text,
    ``""`` when not told. ``routing``: set where slots are processes that save nothing. ``port``:
    where it listens, 0 where that does not matter.
    """

    kind: str
    instance: str
    total_slots: int
    n_ctx: int
    model: str
    model_path: str
    identity: Mapping[str, Any]
    template: str = ""
    routing: Routing | None = None
    port: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the probe proved. ``why`` and ``advice`` are sentences for the log and ``readyz``.

    ``layout`` is the parsed header of a probe state (``core.slotfile.layout``) as plain JSON
    values; ``fingerprint`` is set only when ``mode`` is exclusive.
    """

    mode: Mode
    why: str
    advice: str = ""
    fingerprint: str = ""
    layout: Mapping[str, Any] | None = None


class Single:
    """The half of a ``Backend`` that only one of several processes has more to say of."""

    lacking: frozenset[str] = frozenset()

    @property
    def absent(self) -> frozenset[int]:
        """See ``Backend``."""
        return frozenset()

    async def lacks(self) -> frozenset[str]:
        """See ``Backend``."""
        return self.lacking

    def primes(self, slot: int, body: bytes) -> bool:
        """See ``Backend``."""
        del slot, body
        return False

    def on_moved(self, tell: Moved) -> None:
        """See ``Backend``: there is no other process."""


class Upstream(Protocol):
    """An answer of the backend that has begun: status, end-to-end headers, body as it comes."""

    status: int
    headers: list[tuple[str, str]]

    async def read_some(self) -> bytes:
        """The next bytes of the body as they arrive, ``b""`` at its end.

        Safe to cancel: no byte is lost. Raises ``BackendUnreachableError`` when the connection
        breaks in mid-body.
        """

    async def read(self) -> bytes:
        """The whole body."""


class Backend(Protocol):
    """A model server that can be asked, driven (if ``Verdict.mode`` allows) and forwarded to."""

    def send(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes | None,
        *,
        slot: int | None = None,
    ) -> AbstractAsyncContextManager[Upstream]:
        """Forward a request. Leaving the context early closes the connection (cancels upstream).

        ``slot``: the one its lease names, None where the backend chooses. llama-server reads it
        from the body; to a backend of several processes it says which one is meant.
        """

    @property
    def absent(self) -> frozenset[int]:
        """Slots whose process did not answer when it was last asked; known without asking."""

    def primes(self, slot: int, body: bytes) -> bool:
        """Whether a chat's next turn would be hot after this one was computed once more.

        ``body`` as it went out. False where the generated answer would have to be the same.
        """

    def on_moved(self, tell: Moved) -> None:
        """``tell`` is called when a request goes to another process than that of its slot."""

    async def facts(self) -> Facts:
        """Ask who it is. Cheap enough for once a second."""

    async def lacks(self) -> frozenset[str]:
        """Paths that become chat requests here: it has them not, not in working order, or uncached.

        Cheap enough for each request. Raises as long as it cannot be told who it is.
        """

    async def instance(self) -> str:
        """Only the identity of the process (one ``GET /props``)."""

    async def slots(self) -> tuple[SlotView, ...]:
        """All slots, in order of index."""

    async def save(self, slot: int, name: str) -> StateIO:
        """Write the slot's state to ``name`` (bare file name) in the slot directory."""

    async def restore(self, slot: int, name: str) -> StateIO:
        """Load ``name`` into the slot. A 400 is ambiguous (DESIGN.md rule 5)."""

    async def erase(self, slot: int) -> None:
        """Forget the slot's content. Only ever immediately before a restore, or by the probe."""

    async def render(self, body: Mapping[str, Any]) -> str:
        """The prompt text a chat request becomes (``/apply-template``)."""

    async def tokenize(self, text: str) -> list[int]:
        """Tokens as the server will see them (special tokens added and parsed)."""

    async def close(self) -> None:
        """Close all connections."""
