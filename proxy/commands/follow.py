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
STEADY = 10.0  # seconds a connection lasts before its end is the first of a row
SEEN = 4096  # rows that are known to have been printed; more than the proxy remembers

MISSED = ""  # the kind of no event: rows that may have been missed

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
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Event]:
    """Events without an end: where the connection breaks, ``tell`` hears of it, and it is remade.

    ``missed`` is asked once connected, the first time too, for what may have come meanwhile.
    ``clock`` gives seconds. Raises what ``Client.events`` raises when there is no connection to
    begin with, and when the proxy refuses.
    """
    lost: bool | None = None  # None: never connected
    tries, began = 0, 0.0
    while True:
        try:
            stream = api.events()
            first = next(stream)
            began = clock()
            caught_up = list(missed())
            if lost:
                tell("connected again")
            lost = False
            yield from caught_up
            yield first
            yield from stream
        except ApiError as error:
            passing = isinstance(error, UnreachableError) or (lost and error.status >= FAULT)
            if lost is None or not passing:
                raise
            if not lost:
                tries = tries if clock() - began < STEADY else 0
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
    newest = 0  # of the numbers of this connection's rows
    for came, found in lasting(api, lambda: [(MISSED, remembered())]):
        if came == MISSED:
            newest, fresh = 0, found  # a proxy that was started again counts anew
        elif came == kind:
            number = found.get("seq", 0)
            between = _between(newest, number, remembered)
            fresh = [*(between or ()), found]
            newest = newest if between is None else max(newest, number)
        else:
            continue
        for row in fresh:
            mark = version(row)
            if mark in seen:
                continue
            seen[mark] = None
            if len(seen) > SEEN:
                del seen[next(iter(seen))]
            yield row


def _between(newest: int, number: int, remembered: Callable[[], list[Any]]) -> list[Any] | None:
    """Of very many at once the proxy tells the newest alone; the others are asked for.

    None: that failed, and is to be tried again.
    """
    if not newest or number <= newest + 1:
        return []
    try:
        return remembered()
    except ApiError:
        return None
