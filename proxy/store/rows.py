"""A snapshot's catalogue row: all but the tokens, which the state file itself holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.records import Snapshot
from proxy.store.files import FINGERPRINT, ID

_FIELDS = {
    "fingerprint": str,
    "seed": str,
    "n_prompt": int,
    "size": int,
    "checksum": str,
    "created": float,
    "last_used": float,
    "save_seconds": float,
    "restores": int,
    "conversation": str,
    "pinned": bool,
}
_LATER = {"conversation": "", "pinned": False}  # fields that rows of older versions lack


def to_row(snapshot: Snapshot) -> dict[str, Any]:
    """Plain JSON values."""
    row = {name: getattr(snapshot, name) for name in _FIELDS}
    return {**row, "seed": snapshot.seed.hex()}


def from_row(key: str, row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The fields of a ``Snapshot`` but id and tokens; None for a row this program did not write.

    Folder and file name come from a row: both have the one pattern that leads nowhere else.
    """
    row = None if row is None else {**_LATER, **row}
    if row is None or row.keys() != _FIELDS.keys() or not ID.fullmatch(key):
        return None
    if any(type(row[name]) is not kind for name, kind in _FIELDS.items()):
        return None
    if not FINGERPRINT.fullmatch(row["fingerprint"]):
        return None
    try:
        return {**row, "seed": bytes.fromhex(row["seed"])}
    except ValueError:
        return None
