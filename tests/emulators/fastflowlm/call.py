"""One request on its way through a handler: answering it, releasing the lock, losing the slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.emulators.fastflowlm.errors import Disconnected
from tests.emulators.fastflowlm.lane import CancelToken
from tests.emulators.fastflowlm.records import Record
from tests.emulators.fastflowlm.transport import Connection, Request, to_json, watching

if TYPE_CHECKING:
    from tests.emulators.fastflowlm.server import Emulator


@dataclass(slots=True)
class Call:
    """See the module."""

    emu: Emulator
    connection: Connection
    request: Request
    record: Record
    body: dict[str, Any]
    is_json: bool
    free: Callable[[], None]  # gives the connection's slot back, once
    token: CancelToken = field(default_factory=CancelToken)
    locked: bool = False
    failed: bool = False  # a write failed: nothing more reaches the client
    finished: bool = False

    async def release(self) -> None:
        """Give the lock on, if this call holds it."""
        if self.locked:
            self.locked = False
            await self.emu.npu.release()

    async def answer(self, value: Any, status: int | None = None) -> None:
        """The whole answer and the end of the connection; the lock goes first, cooldown included.

        On a connection that streams already nothing is written and nothing ends (1.5).
        """
        if self.connection.streaming:
            await self.release()
            await self.hang()
            return  # nothing can be written any more
        error = value.get("error") if isinstance(value, dict) else None
        if status is None:
            bad = isinstance(error, dict) and error.get("code") == 400
            status = 400 if bad else 200
        self.record.status = status
        if error:
            self.record.error = str(error.get("message") if isinstance(error, dict) else error)
        await self.release()
        kind = "application/json" if self.is_json or status != 404 else "multipart/form-data"
        with suppress(Disconnected):
            self._first_byte()
            await self.connection.respond(status, to_json(value), kind)
        self.free()
        self._end()
        await self.connection.close()

    async def event(self, data: bytes) -> None:
        """One chunk of a stream. A write that fails loses the slot, and cancels."""
        if self.failed:
            return
        try:
            self._first_byte()
            self.record.status = 200
            await self.connection.chunk(data)
        except Disconnected:
            self._lose()

    def _lose(self) -> None:
        self.failed = True
        self.token.cancel()
        if self.emu.options.leak:
            self.record.leaked = True
        else:
            self.free()

    async def end(self, last: bytes) -> None:
        """The last event, the end of the stream, and only then the lock."""
        await self.event(last)
        if not self.failed:
            try:
                await self.connection.end_stream()
                self.free()
            except Disconnected:
                self._lose()
        self._end()
        await self.connection.close()
        await self.release()

    async def hang(self) -> None:
        """Leave the client waiting, as long as it likes; its slot never comes back."""
        self.record.leaked = self.emu.options.leak
        self._end()
        await self.emu.linger(self.connection)

    async def clear_later(self) -> None:
        """What error paths do after the lock is free: another request may be hit by it."""
        await self.record.pause("before-clear")
        await self.emu.clock.sleep(self.emu.options.clear_window)
        if self.emu.engine is not None:
            with self.emu.engine.used(self.record):
                self.emu.engine.clear()
        self.emu.layer.reset()

    def _first_byte(self) -> None:
        if self.record.first_byte is None:
            self.record.first_byte = self.emu.clock.now

    def _end(self) -> None:
        if not self.finished:
            self.finished = True
            self.record.ended = self.emu.clock.now


async def wait_for_client(connection: Connection, stopping: asyncio.Event) -> None:
    """Until the client leaves or the emulator stops."""
    if not connection.watched:
        async with watching(connection, lambda: None):
            await wait_for_client(connection, stopping)
        return
    waits = [asyncio.create_task(event.wait()) for event in (connection.departed, stopping)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
