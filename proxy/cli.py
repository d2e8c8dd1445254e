"""The command line: which command is which function of ``proxy/commands``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from proxy import __version__
from proxy.commands import act, cache, doctor, explain, read, run, settings

EPILOG = "Exit status: 0 fine, 1 problem found, 2 wrong usage, 3 the proxy cannot be reached."

app = typer.Typer(
    name="slotkeeper",
    help="A caching reverse proxy for local LLM servers: no prompt is prefilled twice.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # they print local variables, and those hold keys
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version  # its callback has ended the command


@app.command()
def version() -> None:
    """Print the version."""
    print(f"slotkeeper {__version__}")


_COMMANDS: Mapping[str, Callable[..., None]] = {
    "serve": run.serve,
    "demo": run.demo,
    "doctor": doctor.doctor,
    "check-config": settings.check_config,
    "status": read.status,
    "slots": read.slots,
    "conversations": read.conversations,
    "requests": read.requests,
    "logs": read.logs,
    "explain": explain.explain,
    "warm": act.warm,
    "forget": act.forget,
    "pause": act.pause,
    "resume": act.resume,
    "drain": act.drain,
}
_CACHE: Mapping[str, Callable[..., None]] = {
    "ls": cache.ls,
    "show": cache.show_one,
    "verify": cache.verify,
    "prune": cache.prune,
    "pin": cache.pin,
    "rm": cache.rm,
}
_CONFIG: Mapping[str, Callable[..., None]] = {
    "show": settings.show_config,
    "schema": settings.schema,
}


def _fill(group: typer.Typer, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    for name, command in commands.items():
        group.command(name)(command)
    return group


_fill(app, _COMMANDS)
app.add_typer(
    _fill(typer.Typer(help="The snapshots on disk.", no_args_is_help=True), _CACHE), name="cache"
)
app.add_typer(
    _fill(typer.Typer(help="The settings.", no_args_is_help=True), _CONFIG), name="config"
)


def main() -> None:
    """Entry point of the ``slotkeeper`` command and of ``python -m proxy``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a title the terminal has no letters for
            stream.reconfigure(errors="replace")
    app(prog_name="slotkeeper")
