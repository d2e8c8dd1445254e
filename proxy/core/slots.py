"""The slot table: what each slot of the backend is doing and what it is believed to hold.

Rules of this file. 1: every change of a slot's state happens here, by one of the transitions
below. 2: nothing here awaits, logs or reads a clock, so a read and the change it justifies can
never be separated. 3: a belief is replaced only by something observed (`observe` in DESIGN.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.core.records import Reuse

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from proxy.core.records import Prompt, Snapshot


class SlotState(StrEnum):
    """What a slot is doing."""

    FREE = "free"
    LEASED = "leased"
    SAVING = "saving"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True)
class Content:
    """What a slot is believed to hold, in tokens.

    ``prompt`` is the request that last ran there; ``n_prompt`` tokens of the ``n_tokens`` came
    from it, the rest was generated. ``tokens`` are leading tokens known for certain (from a state
    file's header or an exact count), None when nobody had to know. ``n_saved`` leading tokens are
    on disk. ``storable``: False when the KV is no function of the tokens, the client forbade
    storing (DESIGN.md rule 8, 9) or the owner had the conversation forgotten; ``tainted``: for the
    first reason, which its reuse inherits.
    ``used`` is the caller's clock in seconds.

    ``reuse``: how much of it a prompt must extend. ``held``: until then the slot is kept for its
    conversation (`core.hold`). ``sent``: the request that went out, which would bring it back if it
    were displaced; None where that is of no use.
    """

    prompt: Prompt
    n_tokens: int
    n_prompt: int
    used: float
    tokens: array[int] | None = None
    n_saved: int = 0
    storable: bool = True
    tainted: bool = False
    reuse: Reuse = Reuse.PREFIX
    held: float = 0.0
    sent: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Slot:
    """One row. ``content`` None: unknown or empty. ``since``: when the state began."""

    index: int
    state: SlotState = SlotState.FREE
    content: Content | None = None
    since: float = 0.0
    n_expected: int = 0  # prompt tokens still to compute when the lease began


class SlotTable:
    """Rows by index; a transition that is not allowed is a bug and raises ``ValueError``."""

    def __init__(self, total: int = 0) -> None:
        """All slots free, contents unknown."""
        self._rows = [Slot(index) for index in range(total)]

    def __iter__(self) -> Iterator[Slot]:
        """Rows in order of index."""
        return iter(self._rows)

    def __len__(self) -> int:
        """How many slots the backend has."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Slot:
        """One row."""
        return self._rows[index]

    def __repr__(self) -> str:
        """Answers the operator's question in one line."""
        return f"<SlotTable [{' | '.join(f'{s.index} {s.state}' for s in self._rows)}]>"

    def begin(self, index: int, state: SlotState, now: float, n_expected: int = 0) -> None:
        """A free slot starts to be leased, saved or restored."""
        row = self._rows[index]
        if row.state is not SlotState.FREE or state is SlotState.FREE:
            msg = f"slot {index} is {row.state}, cannot become {state}"
            raise ValueError(msg)
        self._rows[index] = replace(row, state=state, since=now, n_expected=n_expected)

    def become(self, index: int, state: SlotState, now: float) -> None:
        """A busy slot goes on to its next step (restored, now leased) without becoming free."""
        row = self._rows[index]
        if SlotState.FREE in (row.state, state):
            msg = f"slot {index} is {row.state}, cannot go on as {state}"
            raise ValueError(msg)
        self._rows[index] = replace(row, state=state, since=now)

    def end(self, index: int, now: float) -> None:
        """A busy slot becomes free; its content stays as last set."""
        row = self._rows[index]
        if row.state is SlotState.FREE:
            msg = f"slot {index} is already free"
            raise ValueError(msg)
        self._rows[index] = replace(row, state=SlotState.FREE, since=now, n_expected=0)

    def hold(self, index: int, content: Content | None) -> None:
        """Set what the slot is now known to hold; None when that is not known."""
        self._rows[index] = replace(self._rows[index], content=content)

    def forget(self) -> None:
        """The backend restarted: every content is unknown, states stay until their owners end."""
        self._rows = [replace(row, content=None) for row in self._rows]

    def unsave(self, conversation: str) -> None:
        """A conversation is forgotten: what slots hold of it is never saved, and nothing is."""
        for row in self._rows:
            content = row.content
            if content is not None and conversation and content.prompt.conversation == conversation:
                self.hold(row.index, replace(content, storable=False, n_saved=0))

    def all_free(self) -> bool:
        """Nothing runs anywhere."""
        return all(row.state is SlotState.FREE for row in self._rows)


def restored(snapshot: Snapshot, prompt: Prompt, now: float) -> Content:
    """What a slot holds right after ``snapshot`` was restored into it for ``prompt``.

    The chain is left empty: a restored state answers only to tokens until a request ran on it.
    """
    return Content(
        prompt=replace(prompt, chain=(), ends=(), tokens=snapshot.tokens),
        n_tokens=snapshot.n_tokens,
        n_prompt=snapshot.n_prompt,
        used=now,
        tokens=snapshot.tokens,
        n_saved=snapshot.n_tokens,
    )
