"""Live settings: which parts go by them, and how they are handed new ones.

What is live is said in ``proxy.reload``; this is the other half, called by ``App.reload``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.core.normalise import switched_on
from proxy.core.retention import Limits
from proxy.server.gate import GateRules
from proxy.transfer import Budget

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.curator import Curator
    from proxy.keeper import Saver
    from proxy.scheduler import Scheduler
    from proxy.server.chat import Chat
    from proxy.server.events import Hub
    from proxy.server.normaliser import Normaliser
    from proxy.transfer import Transfer


def room(config: Config, slot_dir: Path) -> tuple[Limits, Budget]:
    """What snapshots may take. Raises ``OSError`` when ``slot_dir`` cannot be looked at."""
    cache = config.cache
    most = cache.limit(shutil.disk_usage(slot_dir).free)
    limits = Limits(most, cache.max_files, cache.max_age, cache.policy)
    return limits, Budget(keep_free=cache.keep_free, daily=cache.daily_write)


def rules(config: Config, *, public: Iterable[str] = ()) -> GateRules:
    """What the gate goes by; ``public``: pages that want no key."""
    server = config.server
    return GateRules(
        host=server.host,
        allowed_hosts=server.allowed_hosts,
        keys=tuple(key.get_secret_value() for key in server.keys),
        admin_key=server.admin_key.get_secret_value(),
        max_body=server.max_body,
        open=frozenset(public),
    )


@dataclass(slots=True)
class Live:
    """The parts of one proxy that go by live settings; None: there is no such part (yet)."""

    rules: GateRules
    scheduler: Scheduler
    transfer: Transfer | None = None
    curator: Curator | None = None
    saver: Saver | None = None
    chat: Chat | None = None
    normaliser: Normaliser | None = None
    hub: Hub | None = None

    def reload(self, config: Config) -> None:
        """Go by ``config`` from now on.

        Raises ``OSError``, before anything is changed, when the slot directory cannot be looked at.
        """
        found = None
        if self.transfer is not None and config.slot_dir is not None:
            found = room(config, config.slot_dir)
        before, self.rules = self.rules, rules(config, public=self.rules.open)
        if self.hub is not None and before.admin_key != self.rules.admin_key:
            self.hub.dismiss()  # whoever was let in by the old one
        self.scheduler.max_queue = config.server.max_queue
        self.scheduler.queue_timeout = config.server.queue_timeout
        if self.transfer is not None and found is not None:
            self.transfer.limits, self.transfer.budget = found
            if self.curator is not None:
                limits, budget = found
                self.curator.place = replace(self.curator.place, limits=limits, budget=budget)
        if self.saver is not None:
            self.saver.idle_seconds = config.cache.idle_seconds
        if self.chat is not None:
            self.chat.ping_interval = config.server.ping_interval
        if self.normaliser is not None:
            self.normaliser.on = switched_on(config.normalise.mode, config.normalise.rules)
