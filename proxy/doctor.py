"""``slotkeeper doctor``: is everything right, and if not, what is to be done.

It works without a running proxy. Where one runs, the server's slots are the proxy's: they are not
touched, and the proxy's own verdict is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from proxy.backends import launch
from proxy.backends.choose import UNDRIVEN, build
from proxy.backends.probe import OTHER_FOLDER
from proxy.checks import engine, machine
from proxy.checks.finding import Finding, Level
from proxy.core.records import Mode
from proxy.errors import SlotkeeperError
from proxy.proof import recorded

if TYPE_CHECKING:
    from proxy.backends.base import Backend, Facts, SlotView
    from proxy.config import Config

SILENCE = 300.0  # seconds: a prompt of some hundred tokens on a slow machine
NOT_TRIED = "not tried; `slotkeeper doctor --probe` does, and empties one or two idle slots"
UNKNOWN_CLASS = "class not known; `slotkeeper doctor --probe` finds out"
EARLIER = "a proxy found out earlier, of this very process of the server"
DRIVEN = Finding(
    "proxy",
    Level.WARNING,
    "a running proxy has this slot folder, so the slots are its own",
    "Name its address with --url, and it is asked.",
)


@dataclass(frozen=True, slots=True)
class Report:
    """``launch``: the line that starts llama-server as it should be, ``""`` for other servers."""

    findings: tuple[Finding, ...]
    launch: str

    @property
    def good(self) -> bool:
        """Nothing is a problem."""
        return all(finding.level is not Level.PROBLEM for finding in self.findings)


async def examine(
    config: Config,
    ready: Mapping[str, Any] | None,
    *,
    probe: bool,
    at: str = "",
    step: Callable[[str], None] = lambda _: None,
) -> Report:
    """Look at everything.

    Args:
        config: the proxy's settings.
        ready: what a running proxy says of itself (``api/status``, or ``readyz`` for those who
            may see no more); None when none runs.
        probe: also try out what costs the content of one or two idle slots and some seconds.
        at: where that proxy runs, or was looked for; ``""``: at the address of ``config``.
        step: is told what is being done.
    """
    step("looking at this machine")
    found = await asyncio.to_thread(_machine, config, ready, at, probe)
    if stranger := await asyncio.to_thread(machine.no_model_server, config):
        return Report((*found, stranger), "")
    if at and ready is None:
        found.append(Finding("proxy", Level.WARNING, f"no slotkeeper answers at {at}"))
    if ready is not None and (other := _elsewhere(config, ready)) is not None:
        found.append(other)
        ready = None  # it has nothing to say of this server
    step("asking the model server")
    backend = build(
        config.backend.kind,
        *config.backend.urls,
        key=config.backend.key.get_secret_value() or None,
        connect_timeout=config.backend.connect_timeout,
        silence_timeout=config.backend.silence_timeout or SILENCE,
        shared_npu=config.backend.shared_npu,
    )
    try:
        facts, introduction = await engine.introduced(backend, config.backend.url)
        found.append(introduction)
        trip = None
        if facts is not None:
            more, trip = await _server(config, backend, facts, ready, probe=probe, step=step)
            found += more
    finally:
        await backend.close()
    driven = config.backend.kind in {"auto", "llama_server"}
    if facts is None or facts.kind not in UNDRIVEN:
        return Report(tuple(found), _launch(config, facts, trip) if driven else "")
    return Report(tuple(found), "")


def _machine(
    config: Config,
    ready: Mapping[str, Any] | None,
    at: str,
    probe: bool,  # noqa: FBT001 - positional for to_thread
) -> list[Finding]:
    server = config.server
    found: list[Finding | None] = [machine.versions(), *machine.settings(config)]
    at = at or f"{server.host}:{server.port}"
    found.append(
        Finding("address", Level.OK, f"a proxy is running at {at}")
        if ready
        else machine.address(server.host, server.port)
    )
    found.append(machine.open_files(server.max_queue))
    folder = config.slot_dir
    if folder is not None:
        slots = machine.slot_folder(folder)
        found.append(slots)
        if slots.level is not Level.PROBLEM:
            found += machine.store(config)
            found += [machine.disk_speed(folder)] if probe else []
    found.append(machine.tokenizer(config.backend.tokenizer))
    return [finding for finding in found if finding is not None]


async def _server(
    config: Config,
    backend: Backend,
    facts: Facts,
    ready: Mapping[str, Any] | None,
    *,
    probe: bool,
    step: Callable[[str], None],
) -> tuple[list[Finding], engine.Trip | None]:
    """The mode, and what leads to it."""
    if facts.kind in UNDRIVEN:
        reached = Mode.ROUTED if facts.routing else Mode.FORWARD
        return [Finding("mode", Level.NOTE, f"{reached}: {UNDRIVEN[facts.kind]}")], None
    if ready is not None:
        return [*_told(ready, probe=probe), *_folders(config, ready)], None
    if await asyncio.to_thread(machine.driven, config.store_dir):
        return [DRIVEN, Finding("mode", Level.NOTE, "not tried")], None
    idle, found = await engine.idle_slots(backend)
    folder = config.slot_dir if config.cache.enabled else None
    if folder is None:
        why = "no slot folder is named, or cache.enabled is false"
        return [found, engine.said(Mode.FORWARD, why)], None
    if not idle or machine.slot_folder(folder).level is Level.PROBLEM:
        return [found, Finding("mode", Level.NOTE, "not tried")], None
    try:
        same = await engine.same_folder(backend, idle, folder)
        if same.level is Level.PROBLEM:
            return [found, same, engine.said(Mode.FORWARD, "states cannot be saved here")], None
        if not probe:
            return [found, same, *await _remembered(config, facts)], None
        return await _tried(backend, facts, idle, folder, [found, same], step)
    except SlotkeeperError as error:
        text = f"the server failed underneath: {error.message}"
        return [found, Finding("mode", Level.PROBLEM, text, "Look into its log.")], None


async def _remembered(config: Config, facts: Facts) -> list[Finding]:
    """What the store's record says of this server; else that trying it would tell."""
    store = config.store_dir
    known = await asyncio.to_thread(recorded, store, facts) if store else None
    if known is None:
        untried = Finding("mode", Level.NOTE, NOT_TRIED)
        return [untried, Finding(engine.MEMORY, Level.NOTE, UNKNOWN_CLASS)]
    said = engine.said(known.mode, f"{known.why} ({EARLIER})")
    return [said, engine.memory(known.mode, known.why)]


def _elsewhere(config: Config, ready: Mapping[str, Any]) -> Finding | None:
    """A running proxy that serves another model server than the one that is looked at."""
    served = str((ready.get("backend") or {}).get("url") or "")
    if not served or _places(served) == _places(config.backend.url):
        return None
    text = f"the running proxy serves {served}, not {config.backend.url}"
    words = ["slotkeeper", "doctor", "--backend", served.replace(", ", ",")]
    folder = str((ready.get("store") or {}).get("slot_dir") or "")
    words += ["--slot-save-path", folder] if folder else []
    return Finding("proxy", Level.WARNING, text, f"`{launch.spelled(words)}` looks at that one.")


def _places(urls: str) -> list[str]:
    """Addresses that can be compared."""
    each = (url.strip().rstrip("/") for url in urls.split(","))
    return [url.replace("//localhost", "//127.0.0.1", 1) for url in each]


def _folders(config: Config, ready: Mapping[str, Any]) -> list[Finding]:
    """Whether the running proxy goes by the same slot folder, and the server by the proxy's."""
    told, here = (ready.get("store") or {}).get("slot_dir"), config.slot_dir
    todo = "Give llama-server and slotkeeper the same --slot-save-path."
    if ready.get("why") == OTHER_FOLDER:
        text = f"the server saves to another folder than the running proxy's, {told}"
        return [Finding("same folder", Level.PROBLEM, text, todo)]
    if not told or here is None:
        return []
    if Path(told).resolve() == here.resolve():
        return [Finding("same folder", Level.OK, f"the running proxy's slot folder is {told}")]
    text = f"the running proxy's slot folder is {told}, not {here.absolute()}"
    return [Finding("same folder", Level.PROBLEM, text, todo)]


def _told(ready: Mapping[str, Any], *, probe: bool) -> list[Finding]:
    """What the running proxy found out, for whom the slots are."""
    reached, why = str(ready.get("mode")), str(ready.get("why"))
    found = [engine.said(reached, why), engine.memory(reached, why)]
    if not ready.get("ready"):
        found.append(Finding("proxy", Level.PROBLEM, "the running proxy is not ready"))
    store = ready.get("store") or {}
    if store.get("advice"):
        text = f"the last state was not saved: {store['refused']}"
        found.append(Finding("saving", Level.WARNING, text, str(store["advice"])))
    if probe:
        text = "not tried: the slots are the running proxy's, which has tried them itself"
        found.append(Finding("round trip", Level.NOTE, text, "Stop the proxy to try it from here."))
    return found


async def _tried(
    backend: Backend,
    facts: Facts,
    idle: list[SlotView],
    folder: Path,
    found: list[Finding],
    step: Callable[[str], None],
) -> tuple[list[Finding], engine.Trip | None]:
    """The proof, and where it holds a state's journey."""
    step("trying out what may be done to it")
    verdict, findings = await engine.mode(backend, facts, idle, folder)
    found = [*found, *findings]
    if verdict.mode is not Mode.EXCLUSIVE:
        return found, None
    step("computing, saving and restoring a prompt")
    trip = await engine.round_trip(backend, facts, idle[0].index, folder)
    return [*found, *engine.travelled(trip)], trip


def _launch(config: Config, facts: Facts | None, trip: engine.Trip | None) -> str:
    """The llama-server line to use."""
    small = trip is not None and engine.good_batch(trip) < engine.BATCHES[-1]
    return launch.line(
        facts,
        config.slot_dir,
        port=urlsplit(config.backend.urls[0]).port or 0,
        batch=engine.good_batch(trip) if trip is not None and small else 0,
    )
