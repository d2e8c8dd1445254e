"""What a changed configuration means to a running proxy: what takes effect, what needs a restart.

Pure: ``service.py`` reads the file, ``App.reload`` hands the values on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel

from proxy.config import Config

LIVE = frozenset(
    {f"server.{name}" for name in ("keys", "admin_key", "allowed_hosts", "max_queue")}
    | {f"server.{name}" for name in ("queue_timeout", "ping_interval", "drain_timeout")}
    | {f"server.{name}" for name in ("log_format", "log_level")}
    | {f"cache.{name}" for name in ("max_bytes", "keep_free", "max_files", "max_age", "policy")}
    | {f"cache.{name}" for name in ("idle_seconds", "daily_write")}
    | {"normalise.rules"}
)
"""Settings that are only compared with or counted against. All others are where something was
opened or built for them: an address, a folder, a connection, the remembered conversations."""


class Changes(NamedTuple):
    """Names of settings that differ, in the order of the configuration."""

    live: tuple[str, ...]
    restart: tuple[str, ...]


def changes(old: Config, new: Config) -> Changes:
    """What ``new`` changes about ``old``."""
    names = tuple(_different(old, new))
    return Changes(
        live=tuple(name for name in names if name in LIVE),
        restart=tuple(name for name in names if name not in LIVE),
    )


def effective(old: Config, new: Config) -> Config:
    """``old`` with the live settings of ``new``: what a running proxy works by after a reload."""
    sections: dict[str, BaseModel] = {}
    for section, part in old:
        newer = getattr(new, section)
        names = (name for name, _ in part if f"{section}.{name}" in LIVE)
        sections[section] = part.model_copy(update={name: getattr(newer, name) for name in names})
    return old.model_copy(update=sections)


def _different(old: Config, new: Config) -> Iterator[str]:
    for section, part in old:
        newer = getattr(new, section)
        for name, value in part:
            if getattr(newer, name) != value:
                yield f"{section}.{name}"
