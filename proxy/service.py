"""The life of the process: start, serve until a signal, drain, exit status.

The first SIGINT or SIGTERM drains (running answers end, unsaved slots are saved); a second one
ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from proxy.app import App
from proxy.store.snapshots import StoreError
from proxy.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from proxy.config import Config

log = structlog.get_logger("slotkeeper.service")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAILED, INTERRUPTED = 1, 130


def run(config: Config, on_ready: Callable[[str], None] | None = None) -> int:
    """Serve until a signal; the exit status. ``on_ready`` gets the URL once requests are taken."""
    logs.setup(config.server.log_level, config.server.log_format)
    for warning in config.warnings():
        log.warning("config", warning=warning)
    try:
        return _runner()(_serve(config, on_ready))
    except (StoreError, OSError) as error:
        sys.stderr.write(f"slotkeeper: {error}\n")
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


async def _serve(config: Config, on_ready: Callable[[str], None] | None) -> int:
    stop = asyncio.Event()
    _on_signal(stop)
    app = App(config)
    try:
        url = await _first(app.start(), stop)
        if url is None:
            return 0
        gc.freeze()  # what lives as long as the process is not looked through again
        log.info("listening", url=url, backend=config.backend.url, mode=str(app.scheduler.mode))
        if on_ready is not None:
            on_ready(url)
        await stop.wait()
        log.info("draining", why="signal")
    finally:
        await app.stop()
    log.info("stopped")
    return 0


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
