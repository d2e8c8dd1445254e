"""The composition root: the only place that builds the parts and wires them together."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from proxy.backends.base import Verdict
from proxy.backends.choose import UNDRIVEN, build
from proxy.core.normalise import switched_on
from proxy.core.normalise.book import Book
from proxy.core.records import Mode
from proxy.core.retention import Limits
from proxy.effects import Nothing
from proxy.keeper import Keeper, Saver
from proxy.proof import Proof
from proxy.scheduler import Scheduler
from proxy.server import envelope, routes
from proxy.server.chat import Chat
from proxy.server.connections import HeaderDeadline
from proxy.server.count import Count
from proxy.server.explainer import Explainer
from proxy.server.gate import GateRules, gate
from proxy.server.normaliser import Normaliser, Nowhere
from proxy.server.passthrough import Passthrough
from proxy.server.record import Recorder
from proxy.server.view import View
from proxy.store.files import StoreError
from proxy.store.ledger import LedgerStore, LedgerWriter
from proxy.store.snapshots import SnapshotStore
from proxy.telemetry.history import History
from proxy.telemetry.metrics import Metrics
from proxy.tokens import Counter
from proxy.traits import Served
from proxy.transfer import Budget, Transfer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.backends.base import Facts
    from proxy.config import Config

log = structlog.get_logger("slotkeeper.app")

KEEPER = "keeper"
CLIENT_KEEPALIVE = 30.0  # aiohttp's own default is an hour (style-and-reliability.md 0.3)
NO_DIRECTORY = (
    "no slot directory is named, or caching is off, so nothing can be saved or restored",
    "start llama-server with --slot-save-path DIR and slotkeeper with --slot-save-path DIR",
)


class App:
    """One proxy in front of one backend."""

    def __init__(self, config: Config) -> None:
        """Builds the parts; nothing is opened before ``start``."""
        clock = time.time
        server, cache = config.server, config.cache
        self._config = config
        self.metrics = Metrics()
        self.history = History()
        key = config.backend.key.get_secret_value()
        self.backend = build(
            config.backend.kind,
            config.backend.url,
            key=key or None,
            connect_timeout=config.backend.connect_timeout,
            silence_timeout=config.backend.silence_timeout,
        )
        self.store = self._build_store(config)
        self.transfer: Transfer | None = None
        prober: Callable[[Facts], Awaitable[Verdict | None]] = _unproven
        if self.store is not None and config.slot_dir is not None:
            limits = Limits(
                cache.limit(_free(config.slot_dir)), cache.max_files, cache.max_age, cache.policy
            )
            budget = Budget(keep_free=cache.keep_free, daily=cache.daily_write)
            self.transfer = Transfer(self.backend, self.store, self.metrics, clock, limits, budget)
            prober = Proof(self.backend, self.store, config.slot_dir)
        self.scheduler = Scheduler(
            self.backend,
            self.transfer or Nothing(),
            self.metrics,
            clock,
            max_queue=server.max_queue,
            queue_timeout=server.queue_timeout,
        )
        saver = None
        if self.transfer is not None:
            saver = Saver(
                self.scheduler,
                self.transfer,
                clock,
                idle_seconds=cache.idle_seconds,
                prewarm=cache.prewarm,
            )
        self.served = Served(clock)
        self.keeper = Keeper(self.backend, self.scheduler, saver, self.metrics, self._known(prober))
        self.ledger = LedgerStore(config.ledger_dir(os.environ, Path.home()))
        self._written: LedgerWriter | None = None  # conversations are kept on disk
        self._book = Book(config.normalise.max_conversations, config.normalise.max_bytes)
        self._deadline = HeaderDeadline(server.header_timeout)
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _known(
        self, prober: Callable[[Facts], Awaitable[Verdict | None]]
    ) -> Callable[[Facts], Awaitable[Verdict | None]]:
        """``prober``, and before it a look at what this backend serves."""

        async def judged(facts: Facts) -> Verdict | None:
            if facts.kind in UNDRIVEN:
                return Verdict(Mode.FORWARD, UNDRIVEN[facts.kind])
            await self.served.learn(self.backend)
            return await prober(facts)

        return judged

    @staticmethod
    def _build_store(config: Config) -> SnapshotStore | None:
        if config.slot_dir is None or config.store_dir is None:
            return None
        return SnapshotStore(config.slot_dir, config.store_dir)

    def _web(self) -> web.Application:
        server = self._config.server
        tokenizer = self._config.backend.tokenizer
        passthrough = Passthrough(self.scheduler, self.backend, body_timeout=server.body_timeout)
        recorder = Recorder(self.metrics, self.history, time.time)
        normaliser = self._normaliser()
        chat = Chat(
            self.scheduler,
            self.backend,
            Counter(self.backend, Path(tokenizer).expanduser() if tokenizer else None),
            normaliser,
            Explainer(
                normaliser,
                self.scheduler,
                self.backend,
                self.served,
                self.metrics,
                self.history,
                self.transfer.evicted if self.transfer else lambda _: False,
            ),
            passthrough,
            recorder,
            ping_interval=server.ping_interval,
        )
        view = View(
            self.scheduler,
            self.keeper,
            self.transfer,
            self.history,
            self.metrics,
            normaliser,
            self._written,
        )
        rules = GateRules(
            host=server.host,
            allowed_hosts=server.allowed_hosts,
            keys=tuple(key.get_secret_value() for key in server.keys),
            admin_key=server.admin_key.get_secret_value(),
            max_body=server.max_body,
        )
        app = web.Application(
            client_max_size=server.max_body, middlewares=[self._deadline.heard, gate(rules)]
        )
        envelope.install(app)
        app.middlewares.insert(0, recorder.observe)
        app.add_routes(routes.table(chat, Count(self.backend, passthrough), passthrough, view))
        return app

    def _normaliser(self) -> Normaliser:
        settings = self._config.normalise
        return Normaliser(
            self._book,
            self._written or Nowhere(),
            self.metrics,
            time.time,
            served=self.served,
            on=switched_on(settings.mode, settings.rules),
            shadow=settings.mode == "shadow",
        )

    async def start(self) -> str:
        """Open the store, look at the backend, listen. Gives the URL.

        Raises ``StoreBusyError`` when another proxy has the store, ``OSError`` when the address
        cannot be had.
        """
        if self.store is not None:
            report = await self.store.open()
            log.info(
                "store.opened",
                snapshots=len(report.snapshots),
                dropped=report.dropped,
                swept=report.swept,
            )
        await self._remember()
        await self.served.learn(self.backend)
        server = self._config.server
        self._runner = web.AppRunner(
            self._web(),
            handler_cancellation=True,
            keepalive_timeout=CLIENT_KEEPALIVE,
            access_log=None,
            shutdown_timeout=0.5,
            lingering_time=2.0,  # for what is left of a refused body
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, server.host, server.port)
        await site.start()
        await self.keeper.step()  # requests that come meanwhile wait for its verdict
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self.keeper.run(), name=KEEPER))
        if self._runner.server is not None:
            watch = self._deadline.watch(self._runner.server)
            self._tasks.append(loop.create_task(watch, name="header-deadline"))
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def _remember(self) -> None:
        """The conversations of the last run; what cannot be kept on disk is kept in memory."""
        if self._config.normalise.mode == "off":
            return
        try:
            rows = await self.ledger.open()
        except (StoreError, OSError) as error:
            log.warning("ledger.unkept", why=str(error) or type(error).__name__)
            return
        self._written = LedgerWriter(self.ledger, self.metrics)
        for row in reversed(rows):
            try:
                gone = self._book.keep(row)
            except Exception as error:  # noqa: BLE001 - a damaged row may not stop the proxy
                log.warning("ledger.row-dropped", error=type(error).__name__)
                gone = [row.id]
            for one in gone:
                self._written.gone(one)
        self.metrics.conversations.set(len(self._book))
        log.info("ledger.opened", conversations=len(self._book), dropped=self.ledger.dropped)

    async def stop(self) -> None:
        """Let answers end, save what is unsaved, close everything."""
        self.keeper.stop()
        for task in self._tasks:
            if task.get_name() != KEEPER:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        await self.keeper.drain(self._config.server.drain_timeout)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._written is not None:
            await self._written.close()
        await self.ledger.close()
        if self.store is not None:
            await self.store.close()
        await self.backend.close()


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free


async def _unproven(facts: Facts) -> Verdict:
    del facts
    return Verdict(Mode.FORWARD, *NO_DIRECTORY)
