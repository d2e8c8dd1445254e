"""``-f`` and ``--watch``: what comes, across restarts of the proxy, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from proxy.client import ApiError, Client, UnreachableError
from proxy.commands.common import console
from proxy.telemetry.lines import ODD

PAUSES = (0.25, 0.5, 1.0, 2.0, 5.0)  # seconds between tries; the last goes on
FAULT = 500  # a proxy that is starting or ending may answer so; what is below is an answer
SEEN = 4096  # rows that are known to have been printed; more than the proxy remembers

Event = tuple[str, Any]


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Ctrl-C is how one leaves what goes on and on: a good end."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit from None


def say(what: str) -> None:
    """On stderr, so that the rows alone go where they are sent."""
    console(stderr=True).print(f"slotkeeper: {what}", style=ODD)


def lasting(
    api: Client,
    missed: Callable[[], Iterable[Event]] = tuple,
    tell: Callable[[str], None] = say,
) -> Iterator[Event]:
    """Events without an end: where the connection breaks, ``tell`` hears of it, and it is remade.

    ``missed`` is asked after each break for what may have come meanwhile. Raises what
    ``Client.events`` raises when there is no connection to begin with, and when the proxy refuses.
    """
    lost: bool | None = None  # None: never connected
    tries = 0
    while True:
        try:
            stream = api.events()
            first = next(stream)
            if lost:
                caught_up = list(missed())
                tell("connected again")
                yield from caught_up
            lost, tries = False, 0
            yield first
            yield from stream
        except ApiError as error:
            passing = isinstance(error, UnreachableError) or (lost and error.status >= FAULT)
            if lost is None or not passing:
                raise
            if not lost:
                tell(f"{error.message}; trying again, until Ctrl-C")
            lost = True
        time.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
        tries += 1


def rows(
    api: Client,
    kind: str,
    remembered: Callable[[], list[Any]],
    version: Callable[[Any], Any],
    limit: int,
) -> Iterator[Any]:
    """The newest ``limit`` of the rows that are ``remembered`` (oldest first), then all that come.

    ``kind``: of the events that bring them. Each once, as ``version`` tells them apart.
    """
    there = remembered()
    seen = dict.fromkeys(map(version, there))
    yield from there[-limit:]
    for came, row in lasting(api, lambda: ((kind, one) for one in remembered())):
        if came != kind or version(row) in seen:
            continue
        seen[version(row)] = None
        if len(seen) > SEEN:
            del seen[next(iter(seen))]
        yield row
