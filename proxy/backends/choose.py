"""Which server is behind an address: found by asking it, never by its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Any

import orjson
import structlog

from proxy.backends.base import Backend, Facts, SlotView, StateIO, Upstream
from proxy.backends.fastflowlm import FastFlowLM
from proxy.backends.llama_server import LlamaServer
from proxy.backends.openai_compatible import OpenAICompatible
from proxy.backends.transport import Headers, Transport
from proxy.errors import BackendTimeoutError

log = structlog.get_logger("slotkeeper.backend")

ANSWER_SECONDS = 60.0
LLAMA, FLM, OTHER = "llama_server", "fastflowlm", "openai_compatible"
# It may be a llama-server that loads its model, or wants a key: asked again at the next contact.
NOT_NOW = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
# Why nothing is pinned or saved there, by ``Facts.kind``.
UNDRIVEN: Mapping[str, str] = {
    "fastflowlm": "FastFlowLM keeps one conversation itself; it can neither be saved nor restored",
    "openai-compatible": "this server has no slots that could be pinned, saved or restored",
}


def build(
    kind: str, url: str, *, key: str | None, connect_timeout: float, silence_timeout: float
) -> Backend:
    """The driver of that ``kind``; of ``"auto"`` one that finds out. Timeouts in seconds."""
    times = {"connect_timeout": connect_timeout, "silence_timeout": silence_timeout}
    drivers: dict[str, Callable[[], Backend]] = {
        LLAMA: lambda: LlamaServer(url, key=key, **times),
        FLM: lambda: FastFlowLM(url, **times),
        OTHER: lambda: OpenAICompatible(url, key=key, **times),
    }
    if kind in drivers:
        return drivers[kind]()
    headers = [("Authorization", f"Bearer {key}")] if key else []
    asking = Transport(url, connect_timeout=connect_timeout, silence_timeout=silence_timeout)
    return Chosen({name: made() for name, made in drivers.items()}, asking, headers)


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
        self, drivers: Mapping[str, Backend], transport: Transport, headers: Headers
    ) -> None:
        """``transport`` and ``headers`` (a key) are for asking."""
        self._drivers = drivers
        self._transport = transport
        self._headers = headers
        self._driver: Backend | None = None

    async def driver(self) -> Backend:
        """The driver; llama-server's, for now, while it cannot be told."""
        if self._driver is None:
            kind = await recognise(self._transport, self._headers)
            if not kind:
                return self._drivers[LLAMA]
            log.info("backend.recognised", kind=kind)
            self._driver = self._drivers[kind]
        return self._driver

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
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
        body: bytes | AsyncIterator[bytes] | None,
        slot: int | None,
    ) -> AsyncIterator[Upstream]:
        driver = await self.driver()
        async with driver.send(method, target, headers, body, slot=slot) as upstream:
            yield upstream

    async def facts(self) -> Facts:
        """See ``Backend``."""
        return await (await self.driver()).facts()

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
        await self._transport.close()
