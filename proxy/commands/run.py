"""``slotkeeper serve`` and ``demo``: commands that run until they are stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from proxy import __version__
from proxy.commands.common import (
    USAGE,
    BackendUrl,
    ConfigFile,
    SlotFolder,
    console,
    fail,
    settings,
)
from proxy.commands.settings import report
from proxy.config import Config, load


def serve(
    *,
    backend: BackendUrl = None,
    slot_save_path: SlotFolder = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    config: ConfigFile = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check the settings and exit.")
    ] = False,
) -> None:
    """Run the proxy. Flags win over SLOTKEEPER_* variables, those over the file."""
    flags = {
        "backend.url": backend,
        "backend.slot_save_path": slot_save_path,
        "server.host": host,
        "server.port": port,
    }
    given = {setting: value for setting, value in flags.items() if value is not None}
    found = settings(config, given)
    if check_config:
        report(found)
        return
    # Only here: aiohttp and what comes with it take half a second.
    from proxy import service  # noqa: PLC0415 - only when serving
    from proxy.checks import machine  # noqa: PLC0415

    if machine.taken(found.server.host, found.server.port):  # before anything is opened
        fail(f"port {found.server.port} is taken: try --port")
    if stranger := machine.no_model_server(found):
        fail(stranger.text, stranger.todo, USAGE)
    greet = greeter(found)
    if greet is not None and found.store_dir is not None:
        console(stderr=True).print(service.TRYING)
    raise typer.Exit(service.run(found, greet, lambda: reread(config, given)))


def reread(path: Path | None, given: Mapping[str, object]) -> Config:
    """The configuration as it is now, the flags of the start unchanged. Raises ``ConfigError``."""
    return load(path, given, os.environ)


def greeter(config: Config) -> Callable[[str], None] | None:
    """Tells somebody at a terminal what runs where; elsewhere the log line has to do."""
    if not sys.stderr.isatty():
        return None
    return lambda url: console(stderr=True).print(banner(config, url))


def banner(config: Config, url: str) -> str:
    """What runs where, in four lines."""
    store = config.store_dir
    return f"""
  slotkeeper  {__version__}  {url}   (the address for clients)
  dashboard   {url}/_slotkeeper/
  backend     {config.backend.url}
  store       {store or "none: nothing is saved; see `slotkeeper doctor`"}
"""


def demo() -> None:
    """The proxy before a small llama.cpp server of its own, ready to be tried."""
    from proxy import demo as own  # noqa: PLC0415 - only when it is asked for

    raise typer.Exit(own.main())
