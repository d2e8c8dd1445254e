"""What the commands share: options, exit status, how they print and how they fail."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import orjson
import typer
from rich.console import Console, RenderableType

from proxy.client import ApiError, Client, UnreachableError
from proxy.config import Config, load
from proxy.errors import ConfigError

PROBLEM, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130
_WIDE = 1000  # columns where no terminal sets a limit: nothing is cut in a file or a pipe

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="SLOTKEEPER_URL",
        help="The proxy's address; else that of the configuration.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        envvar="SLOTKEEPER_ADMIN_KEY",
        help="The proxy's admin key; others on this machine may see it here, not in the variable.",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="A TOML file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
BackendUrl = Annotated[
    str | None, typer.Option("--backend", metavar="URL", help="Address of the model server.")
]
SlotFolder = Annotated[
    str | None,
    typer.Option(
        "--slot-save-path",
        metavar="DIR",
        help="The backend's --slot-save-path, as seen from here.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]


def console(*, stderr: bool = False) -> Console:
    """Where to print: coloured on a terminal unless ``NO_COLOR`` is set, else plain and uncut."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _WIDE,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not stream.isatty(),
    )


def show(answer: Any, as_json: bool, draw: Callable[[], RenderableType]) -> None:  # noqa: FBT001 - it is the user's flag
    """Print an answer, as JSON or drawn."""
    if as_json:
        print_json(answer)
    else:
        console().print(draw())


def print_json(value: Any, *, line: bool = False) -> None:
    """``line``: on one line, for a stream of them."""
    option = orjson.OPT_NON_STR_KEYS | (0 if line else orjson.OPT_INDENT_2)
    sys.stdout.write(orjson.dumps(value, default=str, option=option).decode() + "\n")
    sys.stdout.flush()


def fail(what: str, todo: str = "", status: int = PROBLEM) -> NoReturn:
    """Say on stderr what happened and what to do, and end."""
    out = console(stderr=True)
    out.print(f"slotkeeper: {what}", style="red")
    if todo:
        out.print(f"  {todo}")
    raise typer.Exit(status)


def settings(path: Path | None, given: dict[str, Any] | None = None) -> Config:
    """The configuration; ends with every problem on stderr when there is one."""
    try:
        return load(path, given or {}, os.environ)
    except ConfigError as error:
        count = len(error.problems)
        fail(f"{count} problem{'s' * (count > 1)} in the configuration:\n{error}", "", USAGE)


@contextmanager
def talking(url: str | None, key: str | None, config: Path | None) -> Iterator[Client]:
    """A client of the proxy; what it says is no becomes a message and an exit status.

    The configuration's key goes only to the configuration's address.
    """
    if url is None:
        found = settings(config)
        url = own_url(found)
        key = key or found.server.admin_key.get_secret_value()
    try:
        client = Client(url, key or "")
    except ValueError as error:
        fail(f"--url or --key: {error}", "", USAGE)
    try:
        yield client
    except UnreachableError as error:
        fail(error.message, error.hint, UNREACHABLE)
    except ApiError as error:
        fail(error.message, error.hint)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """A command that talks to a running proxy: its first parameter becomes the options for that."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    where = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in (("url", Url), ("key", Key), ("config", ConfigFile))
    ]

    @functools.wraps(command)
    def asked(*, url: str | None, key: str | None, config: Path | None, **given: Any) -> None:
        with talking(url, key, config) as api:
            command(api, **given)

    parameters = [*own, *where]
    vars(asked)["__signature__"] = inspect.Signature(parameters)
    asked.__annotations__ = {one.name: one.annotation for one in parameters}
    return asked


def own_url(config: Config) -> str:
    """Where a proxy with this configuration is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)  # noqa: S104 - asked for, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def one_of(kind: str, given: str, known: list[str]) -> str:
    """The id that ``given`` is or begins."""
    if not given:  # an empty variable in a script is no choice, however few there are
        fail(f"no {kind} is named", "", USAGE)
    found = [given] if given in known else [one for one in known if one.startswith(given)]
    if len(found) == 1:
        return found[0]
    if found:
        fail(f"{len(found)} {kind}s begin with {given}", "Give more of its id.")
    fail(f"no {kind} is, or begins with, {given}")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on a terminal that something takes its time."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield
        return
    with out.status(what):
        yield


def sure(question: str, yes: bool) -> None:  # noqa: FBT001 - it is the user's flag
    """Ask before what cannot be undone; ends unless the answer is yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("nothing was done", "Say --yes to do it without being asked.", USAGE)
    try:
        agreed = typer.confirm(question)
    except typer.Abort:
        raise typer.Exit(INTERRUPTED) from None
    if not agreed:
        console().print("nothing was done")
        raise typer.Exit(PROBLEM)
