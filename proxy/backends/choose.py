"""Which server is behind an address: found by asking it, never by its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypedDict

import orjson
import structlog

from proxy.backends.base import Backend, Facts, Moved, SlotView, StateIO, Upstream
from proxy.backends.fastflowlm import FastFlowLM
from proxy.backends.flm_lane import Lane
from proxy.backends.flm_scribe import Scribe
from proxy.backends.llama_server import LlamaServer
from proxy.backends.openai_compatible import OpenAICompatible
from proxy.backends.pool import Pool
from proxy.backends.transport import Headers, Transport
from proxy.errors import (
    BackendBrokenError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)

log = structlog.get_logger("slotkeeper.backend")

ANSWER_SECONDS = 60.0
LLAMA, FLM, OTHER = "llama_server", "fastflowlm", "openai_compatible"
# It may be a llama-server that loads its model, or wants a key: asked again at the next contact.
NOT_NOW = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
# Why nothing is saved there, by ``Facts.kind``.
UNDRIVEN: Mapping[str, str] = {
    "fastflowlm": "FastFlowLM keeps one conversation itself; it can neither be saved nor restored",
    "openai-compatible": "this server has no slots that could be pinned, saved or restored",
}


def build(
    kind: str,
    *urls: str,
    key: str | None,
    connect_timeout: float,
    silence_timeout: float,
    shared_npu: bool = True,
    tokenizer: Path | None = None,
    learned: Callable[[], Path | None] = lambda: None,
) -> Backend:
    """The driver of that ``kind``; of ``"auto"`` one that finds out. Timeouts in seconds.

    ``shared_npu``: several FastFlowLM at ``urls`` have one NPU between them. ``tokenizer``: the
    model's tokenizer.json, where the server cannot count. ``learned``: the file that keeps what a
    driver learns of models, as long as there is one.
    """
    times = _Times(connect_timeout=connect_timeout, silence_timeout=silence_timeout)
    lane, scribe = Lane() if shared_npu else None, Scribe(learned)
    several = len(urls) > 1
    one: dict[str, Callable[[str], Backend]] = {
        FLM: lambda url: FastFlowLM(url, lane=lane, tokenizer=tokenizer, scribe=scribe, **times),
        OTHER: lambda url: OpenAICompatible(url, key=key, **times),
    }
    if not several:
        one[LLAMA] = lambda url: LlamaServer(url, key=key, **times)

    def made(name: str) -> Backend:
        drivers = [one[name](url) for url in urls]
        return Pool(drivers, serial=shared_npu) if several else drivers[0]

    if kind in one:
        return made(kind)
    headers = [("Authorization", f"Bearer {key}")] if key else []
    asking = [Transport(url, **times) for url in urls]
    return Chosen({name: made(name) for name in one}, asking, headers)


class _Times(TypedDict):
    """What every driver is given, in seconds."""

    connect_timeout: float
    silence_timeout: float


async def recognise(transport: Transport, headers: Headers) -> str:
    """``LLAMA``, ``FLM`` or ``OTHER``; ``""`` while it cannot be told.

    Raises what a backend raises that is not there.
    """
    status, props = await _ask(transport, "/props", headers)
    if isinstance(props, dict) and "default_generation_settings" in props:
        return LLAMA
    if status in NOT_NOW or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ""
    _, npu = await _ask(transport, "/api/npu/status", headers)
    return FLM if isinstance(npu, dict) and "npu_available" in npu else OTHER


async def _ask(transport: Transport, path: str, headers: Headers) -> tuple[int, Any]:
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            transport.send("GET", path, headers, None) as answer,
        ):
            raw = await answer.read()
    except TimeoutError as error:
        raise BackendTimeoutError(f"{path} was not answered in time") from error
    try:
        return answer.status, orjson.loads(raw) if answer.status == HTTPStatus.OK else None
    except orjson.JSONDecodeError:
        return answer.status, None


class Chosen:
    """A ``Backend`` (see base.py) that finds out at first contact which driver it needs."""

    def __init__(
        self, drivers: Mapping[str, Backend], transports: Sequence[Transport], headers: Headers
    ) -> None:
        """``transports`` and ``headers`` (a key) are for asking; the first that answers counts."""
        self._drivers = drivers
        self._transports = transports
        self._headers = headers
        self._driver: Backend | None = None

    async def driver(self) -> Backend:
        """The driver; llama-server's, for now, while it cannot be told."""
        if self._driver is None:
            kind = await self._kind()
            driver = self._drivers.get(kind or LLAMA)
            if driver is None and not kind:
                msg = "which kind of servers these are cannot be told: one fails or wants a key"
                raise BackendBrokenError(msg, hint="see its log, or set backend.kind, backend.key")
            if driver is None:
                msg = "several servers are named in backend.url, and this one is a llama-server"
                raise BackendBrokenError(msg, hint="name one llama-server, and no other")
            if not kind:
                return driver
            log.info("backend.recognised", kind=kind)
            self._driver = driver
        return self._driver

    async def _kind(self) -> str:
        unreachable: SlotkeeperError = BackendUnreachableError("no address is named")
        for transport in self._transports:
            try:
                return await recognise(transport, self._headers)
            except (BackendUnreachableError, BackendTimeoutError) as error:
                unreachable = error
        raise unreachable

    @property
    def absent(self) -> frozenset[int]:
        """See ``Backend``."""
        return self._driver.absent if self._driver else frozenset()

    def primes(self, slot: int, body: bytes) -> bool:
        """See ``Backend``."""
        return self._driver is not None and self._driver.primes(slot, body)

    def on_moved(self, tell: Moved) -> None:
        """See ``Backend``."""
        for driver in self._drivers.values():
            driver.on_moved(tell)

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        *,
        slot: int | None = None,
    ) -> AbstractAsyncContextManager[Upstream]:
        """See ``Backend``."""
        if self._driver is not None:
            return self._driver.send(method, target, headers, body, slot=slot)
        return self._first(method, target, headers, body, slot)

    @asynccontextmanager
    async def _first(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        slot: int | None,
    ) -> AsyncIterator[Upstream]:
        driver = await self.driver()
        async with driver.send(method, target, headers, body, slot=slot) as upstream:
            yield upstream

    async def facts(self) -> Facts:
        """See ``Backend``."""
        return await (await self.driver()).facts()

    async def lacks(self) -> frozenset[str]:
        """See ``Backend``."""
        return await (await self.driver()).lacks()

    async def instance(self) -> str:
        """See ``Backend``."""
        return await (await self.driver()).instance()

    async def slots(self) -> tuple[SlotView, ...]:
        """See ``Backend``."""
        return await (await self.driver()).slots()

    async def save(self, slot: int, name: str) -> StateIO:
        """See ``Backend``."""
        return await (await self.driver()).save(slot, name)

    async def restore(self, slot: int, name: str) -> StateIO:
        """See ``Backend``."""
        return await (await self.driver()).restore(slot, name)

    async def erase(self, slot: int) -> None:
        """See ``Backend``."""
        await (await self.driver()).erase(slot)

    async def render(self, body: Mapping[str, Any]) -> str:
        """See ``Backend``."""
        return await (await self.driver()).render(body)

    async def tokenize(self, text: str) -> list[int]:
        """See ``Backend``."""
        return await (await self.driver()).tokenize(text)

    async def close(self) -> None:
        """Close all connections."""
        for driver in self._drivers.values():
            await driver.close()
        for transport in self._transports:
            await transport.close()
