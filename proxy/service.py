"""The life of the process: start, serve until a signal, reload, drain, exit status.

The first SIGINT or SIGTERM drains (running answers end, unsaved slots are saved); a second one
ends at once. SIGHUP reads the configuration again, where there are such signals. A service
manager is told all of it (``notify.py``).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from proxy import words
from proxy.app import App
from proxy.core.records import Mode
from proxy.errors import ConfigError
from proxy.keeper import DRAIN_TOKENS
from proxy.notify import Notifier
from proxy.reload import changes, effective
from proxy.store.snapshots import StoreBusyError, StoreError
from proxy.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from proxy.config import Config

log = structlog.get_logger("slotkeeper.service")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not there on Windows
FAILED, INTERRUPTED = 1, 130
TRYING = "trying out what the slots of the model server can do: takes 10 s or more ..."


def run(
    config: Config,
    on_ready: Callable[[str], None] | None = None,
    load: Callable[[], Config] | None = None,
) -> int:
    """Serve until a signal; the exit status.

    Args:
        config: what to serve with.
        on_ready: gets the URL once requests are taken.
        load: reads the configuration again at SIGHUP, raising ``ConfigError``; None: SIGHUP ends
            the process as it always does.
    """
    logs.setup(config.server.log_level, config.server.log_format)
    for warning in config.warnings():
        log.warning("config", warning=warning)
    try:
        return _runner()(_serve(config, on_ready, load))
    except StoreError as error:
        where = config.store_dir or config.ledger_dir(os.environ, Path.home())
        todo = "This folder cannot be used: see `slotkeeper doctor`."
        if isinstance(error, StoreBusyError):
            todo = "Stop the other one: one proxy for each llama-server and folder."
        sys.stderr.write(f"slotkeeper: {where}: {error.strerror or error}\n  {todo}\n")
        return FAILED
    except OSError as error:
        taken = f"port {config.server.port} is taken: try --port"
        told = taken if error.errno == errno.EADDRINUSE else error
        sys.stderr.write(f"slotkeeper: {told}\n")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _runner() -> Callable[..., int]:
    """``asyncio.run``, or that of the optional uvloop."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.run
    runner: Callable[..., int] = uvloop.run
    return runner


async def _serve(
    config: Config,
    on_ready: Callable[[str], None] | None,
    load: Callable[[], Config] | None,
) -> int:
    stop = asyncio.Event()
    _on_signal(stop)
    manager = Notifier(os.environ)
    app = App(config)
    app.on_drain = stop.set
    beating = asyncio.create_task(manager.beat(), name="watchdog")
    reloading: asyncio.Task[None] | None = None
    reloader = Reloader(app, config, load, manager) if load is not None else None
    if reloader is not None and HANGUP is not None:
        _on_hangup(HANGUP, reloader, stop)
    try:
        url = await _first(app.start(), stop)
        if url is None:
            return 0
        gc.freeze()  # what lives as long as the process is not looked through again
        loop, _, _ = type(asyncio.get_running_loop()).__module__.partition(".")
        told = {"backend": config.backend.url, "mode": str(app.scheduler.mode), "loop": loop}
        log.info("listening", url=url, **told)
        manager.ready(f"listening on {url}")
        if reloader is not None:  # not before: it says ready, too
            reloading = asyncio.create_task(reloader.run(), name="reload")
        if on_ready is not None:
            on_ready(url)
        await stop.wait()
        log.info("draining")
    finally:
        await _cancel(reloading)
        manager.stopping()
        await app.stop()
        await _cancel(beating)  # not before: a long drain is no sign of death
    log.info("stopped", **_saved(app))
    return 0


def _saved(app: App) -> dict[str, str]:
    """What the end kept of the slots, where they are this proxy's."""
    if app.scheduler.mode is not Mode.EXCLUSIVE:
        return {}
    held = [slot.content for slot in app.scheduler.table if slot.content is not None]
    kept = [one for one in held if one.n_tokens - one.n_saved <= DRAIN_TOKENS]
    of = "" if len(kept) == len(held) else f" of {len(held)}"
    return {"what": f"{words.many(len(kept), 'slot')}{of} saved"}


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


class Reloader:
    """Takes over a changed configuration, as far as that is possible without a restart."""

    def __init__(
        self, app: App, config: Config, load: Callable[[], Config], manager: Notifier
    ) -> None:
        """``config``: what ``app`` was built with."""
        self._app = app
        self._config = config
        self._load = load
        self._manager = manager
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Reload soon; asked again meanwhile, once more."""
        self._asked.set()

    async def run(self) -> None:
        """Reload whenever asked to, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._manager.reloading()
            status = await self._reload()
            self._manager.ready(status)

    async def _reload(self) -> str:
        """One reload, what became of it in a few words. A bad configuration changes nothing."""
        try:
            new = await asyncio.to_thread(self._load)
            found, config = changes(self._config, new), effective(self._config, new)
            self._app.reload(config)
        except ConfigError as error:
            return _refused(error)
        except Exception as error:  # whatever it was, the proxy goes on
            log.exception("reload.fault", error=type(error).__name__)
            return "reload failed: see the log"
        logs.setup(config.server.log_level, config.server.log_format)
        for warning in config.warnings():
            if warning not in self._config.warnings():
                log.warning("config", warning=warning)
        self._config = config
        log.info("reloaded", changed=list(found.live), needs_restart=list(found.restart))
        return "reloaded" + ("; some changes need a restart" if found.restart else "")


def _refused(error: ConfigError) -> str:
    for problem in error.problems:
        log.error("reload.problem", problem=problem)
    log.error("reload.refused", why="the old configuration stays")
    return "reload refused: see the log; the old configuration stays"


async def _first(start: Coroutine[Any, Any, str], stop: asyncio.Event) -> str | None:
    """The URL, or None when a signal came first (a silent backend can take a while)."""
    loop = asyncio.get_running_loop()
    starting, stopping = loop.create_task(start), loop.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return await starting
    starting.cancel()
    await asyncio.wait({starting})
    return None


def _on_signal(stop: asyncio.Event) -> None:
    """First signal: stop. Second: the default, which ends the process."""
    loop = asyncio.get_running_loop()

    def first(number: int) -> None:
        del number
        stop.set()
        for each in SIGNALS:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in SIGNALS:
        try:
            loop.add_signal_handler(number, first, number)
        except NotImplementedError:  # Windows: no add_signal_handler
            signal.signal(number, lambda n, _frame: loop.call_soon_threadsafe(first, n))


def _on_hangup(number: signal.Signals, reloader: Reloader, stop: asyncio.Event) -> None:
    """SIGHUP reloads, but when it came because the terminal was closed it is the end."""
    terminal = sys.stderr.isatty()

    def hangup() -> None:
        if terminal and not sys.stderr.isatty():
            stop.set()
        else:
            reloader.ask()

    asyncio.get_running_loop().add_signal_handler(number, hangup)
