"""Proving a backend once per process of it: a verdict already reached is read from disk.

An instance that cannot be told from the next one (a pinned media marker) is proved at every start
of the proxy: a wrong mode could cost an answer, a probe costs a second.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import orjson

from proxy.backends.base import Verdict
from proxy.backends.probe import probe
from proxy.core.records import Mode
from proxy.store.catalogue import peek
from proxy.store.shelf import CATALOGUE

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.backends.base import Backend, Facts
    from proxy.store.snapshots import SnapshotStore

KIND = "verdict"
# What is said where nothing was proved.
PAUSED = Verdict(
    Mode.FORWARD,
    "caching was paused by hand: requests go through as they come",
    "resume it: slotkeeper resume, or the button on the dashboard",
)
BEING_TRIED = Verdict(Mode.FORWARD, "the backend is being tried out, which takes a few seconds")
ABSENT = "start it, or wait until it has loaded its model; Slotkeeper notices by itself"


class Proof:
    """Says what may be done to a backend."""

    def __init__(self, backend: Backend, store: SnapshotStore, slot_dir: Path) -> None:
        """``slot_dir``: the backend's slot directory as this process sees it."""
        self._backend = backend
        self._store = store
        self._slot_dir = slot_dir

    async def __call__(self, facts: Facts) -> Verdict | None:
        """The verdict; probes, on idle slots used least recently, when there is none yet.

        None: no slot is idle, so it cannot be known now. A verdict that forbids is not kept: it
        may have come from this proxy's own settings.

        Raises what the backend raises when it goes away in the middle.
        """
        key = _key(facts)
        if facts.instance:
            row = await self._store.get(KIND, key)
            known = _from_row(row) if row else None
            if known is not None:
                return known
        views = await self._backend.slots()
        idle = sorted((v for v in views if not v.is_processing), key=lambda v: v.id_task or -1)
        if not idle:
            return None
        slots = tuple(view.index for view in idle[:2])
        files = self._store.probe_files
        verdict = await probe(
            self._backend, slot_dir=self._slot_dir, slots=slots, facts=facts, files=files
        )
        if facts.instance and verdict.mode is Mode.EXCLUSIVE:
            await self._store.put(KIND, key, _as_row(verdict))
        return verdict


def recorded(store: Path, facts: Facts) -> Verdict | None:
    """What a proxy that does not run now proved of this very process; ``store`` is only read."""
    if not facts.instance:
        return None
    row = peek(store / CATALOGUE, KIND, _key(facts))
    return _from_row(row) if row else None


def _key(facts: Facts) -> str:
    """LoRA adapters can be changed in a running server, and with them what its states are."""
    identity = orjson.dumps(facts.identity, option=orjson.OPT_SORT_KEYS, default=dict)
    return f"{facts.instance}-{blake2b(identity, digest_size=8).hexdigest()}"


def _as_row(verdict: Verdict) -> dict[str, object]:
    return {
        "mode": str(verdict.mode),
        "why": verdict.why,
        "advice": verdict.advice,
        "fingerprint": verdict.fingerprint,
        "layout": dict(verdict.layout) if verdict.layout is not None else None,
    }


def _from_row(row: dict[str, object]) -> Verdict | None:
    """None when the row is not one of ours."""
    try:
        layout = row.get("layout")
        return Verdict(
            mode=Mode(str(row["mode"])),
            why=str(row["why"]),
            advice=str(row["advice"]),
            fingerprint=str(row["fingerprint"]),
            layout=layout if isinstance(layout, dict) else None,
        )
    except (KeyError, ValueError):
        return None
