"""The composition root: the only place that builds the parts and wires them together."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from proxy import __version__, live
from proxy.backends.base import Verdict
from proxy.backends.choose import UNDRIVEN, build
from proxy.core.normalise import switched_on
from proxy.core.normalise.book import Book
from proxy.core.records import Mode
from proxy.curator import Curator, Place
from proxy.effects import Nothing
from proxy.keeper import Keeper, Saver
from proxy.priming import Primer
from proxy.proof import Proof
from proxy.scheduler import Scheduler
from proxy.server import admin, envelope, routes
from proxy.server.actions import Actions, Powers
from proxy.server.chat import Chat
from proxy.server.connections import HeaderDeadline
from proxy.server.count import Count
from proxy.server.dry_run import DryRun
from proxy.server.events import Hub
from proxy.server.explainer import Explainer
from proxy.server.gate import check
from proxy.server.normaliser import Normaliser, Nowhere
from proxy.server.pages import Pages
from proxy.server.passthrough import Passthrough
from proxy.server.record import Recorder
from proxy.server.sampler import Sampler
from proxy.server.status import About
from proxy.server.view import Sources, View
from proxy.server.warm import Warm
from proxy.store import files
from proxy.store.files import StoreError
from proxy.store.ledger import LedgerStore, LedgerWriter
from proxy.store.snapshots import SnapshotStore
from proxy.telemetry.history import History
from proxy.telemetry.logs import Ring
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.series import Series
from proxy.tokens import Counter
from proxy.traits import Served
from proxy.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from proxy.backends.base import Backend, Facts
    from proxy.config import Config

    Prober = Callable[[Facts], Awaitable[Verdict | None]]

log = structlog.get_logger("slotkeeper.app")

KEEPER, EVENTS = "keeper", "events"
HISTORY = "history.json"
LEARNED = "models.json"  # beside the ledger
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
        self.ring = Ring()
        self.series = Series()
        self.on_drain: Callable[[], None] = lambda: None  # its owner wants the process to end
        self.backend = self._build_backend(config)
        self.store = self._build_store(config)
        self.transfer, self.curator, prober = self._build_cache(config)
        self.scheduler = Scheduler(
            self.backend,
            self.transfer or Nothing(),
            self.metrics,
            clock,
            max_queue=server.max_queue,
            queue_timeout=server.queue_timeout,
        )
        self._saver: Saver | None = None
        if self.transfer is not None:
            self._saver = Saver(
                self.scheduler,
                self.transfer,
                clock,
                idle_seconds=cache.idle_seconds,
                prewarm=cache.prewarm,
            )
        self._live = live.Live(
            live.rules(config), self.scheduler, self.transfer, self.curator, self._saver
        )
        self.served = Served(clock)
        primer = None
        if cache.prewarm:
            primer = Primer(self.scheduler, self.backend, self.metrics, clock)
        self.keeper = Keeper(
            self.backend, self.scheduler, self._saver, self.metrics, self._known(prober), primer
        )
        self.sampler = Sampler(self.series, self.metrics, clock, self.curator)
        self.history.listen(self.sampler.decided)
        self._hub: Hub | None = None
        self.ledger = LedgerStore(config.ledger_dir(os.environ, Path.home()))
        self._written: LedgerWriter | None = None  # conversations are kept on disk
        self._book = Book(config.normalise.max_conversations, config.normalise.max_bytes)
        self._deadline = HeaderDeadline(server.header_timeout)
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _build_cache(self, config: Config) -> tuple[Transfer | None, Curator | None, Prober]:
        """What moves states to disk and back, what tends them, and who proves the backend."""
        if self.store is None or config.slot_dir is None or config.store_dir is None:
            return None, None, _unproven
        limits, budget = live.room(config, config.slot_dir)
        transfer = Transfer(self.backend, self.store, self.metrics, time.time, limits, budget)
        place = Place(config.store_dir, limits, budget)
        curator = Curator(self.store, transfer, self.metrics, time.time, place)
        return transfer, curator, Proof(self.backend, self.store, config.slot_dir)

    def _known(self, prober: Prober) -> Prober:
        """``prober``, and before it a look at what this backend serves."""

        async def judged(facts: Facts) -> Verdict | None:
            if facts.kind in UNDRIVEN:
                mode = Mode.ROUTED if facts.routing is not None else Mode.FORWARD
                return Verdict(mode, UNDRIVEN[facts.kind])
            await self.served.learn(self.backend)
            return await prober(facts)

        return judged

    def _build_backend(self, config: Config) -> Backend:
        backend = config.backend
        return build(
            backend.kind,
            *backend.urls,
            key=backend.key.get_secret_value() or None,
            connect_timeout=backend.connect_timeout,
            silence_timeout=backend.silence_timeout,
            shared_npu=backend.shared_npu,
            tokenizer=_tokenizer(config),
            learned=lambda: self._beside_ledger(LEARNED),
        )

    @staticmethod
    def _build_store(config: Config) -> SnapshotStore | None:
        if config.slot_dir is None or config.store_dir is None:
            return None
        shared = files.shared(config.slot_dir)
        return SnapshotStore(config.slot_dir, config.store_dir, shared=shared)

    def _web(self) -> web.Application:
        server = self._config.server
        passthrough = Passthrough(self.scheduler, self.backend, body_timeout=server.body_timeout)
        recorder = Recorder(self.metrics, self.history, time.time)
        normaliser = self._normaliser()
        counter = Counter(self.backend, _tokenizer(self._config))
        chat = Chat(
            self.scheduler,
            self.backend,
            counter,
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
        pages = Pages()
        self._live.rules = live.rules(self._config, public=pages.paths)
        self._live.chat, self._live.normaliser = chat, normaliser
        app = web.Application(client_max_size=server.max_body, middlewares=[recorder.observe])
        envelope.install(app, self._deadline.heard, lambda one: check(one, self._live.rules))
        count = Count(self.backend, passthrough, counter, recorder.density)
        view = self._view(normaliser, recorder)
        self._hub = self._live.hub = Hub(view)
        self.history.listen(self._hub.decided)
        dry_run = self._dry_run(counter, normaliser)
        actions = Actions(self._powers(view, dry_run, self._warm(chat, recorder), passthrough))
        own = admin.routes(view, actions, self._hub, pages)
        app.add_routes(routes.table(chat, count, passthrough, own))
        return app

    def _view(self, normaliser: Normaliser, recorder: Recorder) -> View:
        sources = Sources(
            self.scheduler,
            self.keeper,
            self.history,
            self.metrics,
            recorder,
            normaliser,
            self.series,
            self.ring,
            self.transfer,
            self.curator,
            self._written,
        )
        urls = ", ".join(self._config.backend.urls)
        hide, slots = self._config.server.hide_titles, self._config.slot_dir
        folder = str(slots.absolute()) if slots is not None else ""
        return View(sources, About(__version__, urls, time.time(), hide, folder), time.time)

    def _dry_run(self, counter: Counter, normaliser: Normaliser) -> DryRun:
        return DryRun(
            self.scheduler,
            self.backend,
            counter,
            normaliser,
            lambda: self.served.traits,
            self.transfer.matches if self.transfer else lambda _: (),
            time.time,
        )

    def _warm(self, chat: Chat, recorder: Recorder) -> Warm:
        save = self._saver.save if self._saver else None
        return Warm(chat, recorder, self.scheduler, self.transfer, save)

    def _powers(self, view: View, dry_run: DryRun, warm: Warm, passthrough: Passthrough) -> Powers:
        return Powers(
            forget=view.forget,
            store=self.curator,
            switch=self.keeper,
            drain=self._drain,
            explain=dry_run.explain,
            warm=warm.run,
            body=passthrough.body,
        )

    def _drain(self) -> None:
        """No new requests; whoever runs the process ends it by ``stop``."""
        self.scheduler.draining = True
        self.on_drain()

    def _normaliser(self) -> Normaliser:
        settings = self._config.normalise
        normaliser = Normaliser(
            self._book,
            self._written or Nowhere(),
            self.metrics,
            time.time,
            served=self.served,
            on=switched_on(settings.mode, settings.rules),
            shadow=settings.mode == "shadow",
            paused=lambda: self.keeper.paused,
        )
        normaliser.reuses = lambda: self.scheduler.board.reuses
        return normaliser

    async def start(self) -> str:
        """Open the store, look at the backend, listen. Gives the URL.

        Raises ``StoreBusyError`` when another proxy has the store, ``OSError`` when the address
        cannot be had.
        """
        self.ring.attach()
        if self.store is not None:
            report = await self.store.open()
            log.info(
                "store.opened",
                snapshots=len(report.snapshots),
                dropped=report.dropped,
                swept=report.swept,
            )
        await self._remember()
        await self.sampler.open(self._history_file())
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
        self._tasks.append(loop.create_task(self.sampler.run(), name="sampler"))
        if self._hub is not None:
            self._tasks.append(loop.create_task(self._hub.run(), name=EVENTS))
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
        log.info("ledger.opened", conversations=len(self._book), dropped=self.ledger.dropped)

    def _history_file(self) -> Path | None:
        """Beside what this process alone has locked; None: the charts begin anew."""
        if self.store is not None and self._config.store_dir is not None:
            return self._config.store_dir / HISTORY
        return self._beside_ledger(HISTORY)

    def _beside_ledger(self, name: str) -> Path | None:
        """None: another process may have the folder, so nothing is kept there."""
        ledger = self._config.ledger_dir(os.environ, Path.home())
        return ledger / name if self._written is not None else None

    def reload(self, config: Config) -> None:
        """Go by ``config`` from now on; it differs only in live settings (``proxy.reload``).

        Raises ``OSError``, before anything is changed, when the slot directory cannot be looked at.
        """
        self._live.reload(config)
        self._config = config

    async def stop(self) -> None:
        """Let answers end, save what is unsaved, close everything."""
        self.keeper.stop()
        telling = [task for task in self._tasks if task.get_name() == EVENTS]
        await _end(task for task in self._tasks if task not in telling)
        await self.keeper.drain(self._config.server.drain_timeout)
        await _end(telling)  # not before: who watches sees the drain
        self._tasks.clear()
        if self._hub is not None:
            self._hub.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.sampler.close()
        await self.backend.close()  # what it learned is kept while the ledger is still ours
        if self._written is not None:
            await self._written.close()
        await self.ledger.close()
        if self.store is not None:
            await self.store.close()
        self.ring.detach()


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel them, but for the keeper's, which ends by itself; one that failed stops nothing."""
    for task in tasks:
        if task.get_name() != KEEPER:
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background.fault", task=task.get_name(), error=type(error).__name__)


def _tokenizer(config: Config) -> Path | None:
    named = config.backend.tokenizer
    return Path(named).expanduser() if named else None


async def _unproven(facts: Facts) -> Verdict:
    del facts
    return Verdict(Mode.FORWARD, *NO_DIRECTORY)
