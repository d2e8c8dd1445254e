"""The command line: parse, call one function, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from proxy import __version__

app = typer.Typer(
    name="slotkeeper",
    help="A caching reverse proxy for local LLM servers: no prompt is prefilled twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # they print local variables, and those hold keys
)


@app.command()
def serve(
    *,
    backend: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of the model server.")
    ] = None,
    slot_save_path: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The backend's --slot-save-path, as seen from here."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="A TOML file.")
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check the settings and exit.")
    ] = False,
) -> None:
    """Run the proxy. Flags win over SLOTKEEPER_* variables, those over the file."""
    # Only here, so that `version` and `--help` answer at once.
    from proxy.config import load  # noqa: PLC0415 - only when serving
    from proxy.errors import ConfigError  # noqa: PLC0415 - only when serving

    flags = {
        "backend.url": backend,
        "backend.slot_save_path": slot_save_path,
        "server.host": host,
        "server.port": port,
    }
    given = {setting: value for setting, value in flags.items() if value is not None}
    try:
        settings = load(config, given, os.environ)
    except ConfigError as error:
        count = len(error.problems)
        print(f"{count} problem{'s' * (count > 1)} in the configuration:", file=sys.stderr)
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    if check_config:
        print("configuration is valid")
        for warning in settings.warnings():
            print(f"warning: {warning}")
        return
    from proxy import service  # noqa: PLC0415 - only when serving

    raise typer.Exit(service.run(settings))


@app.command()
def version() -> None:
    """Print the version."""
    print(f"slotkeeper {__version__}")


def main() -> None:
    """Entry point of the ``slotkeeper`` command and of ``python -m proxy``."""
    app(prog_name="slotkeeper")
