"""Connections to one backend: opened, kept for a while, and one opened ahead of its request.

HTTP is aiohttp's own, its protocol and its parser, without the session above them: a session and a
connection made on the way cost 1 ms of each first token (issue 2; ``tests.bench overhead``).
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from aiohappyeyeballs import start_connection
from aiohttp.client_proto import ResponseHandler

from proxy.errors import BackendAbsentError, SlotkeeperError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohappyeyeballs import AddrInfoType
    from yarl import URL

# llama-server closes an idle connection after 5 s. Dropping ours well before leaves no moment in
# which a POST meets a dying connection and nobody knows whether it was processed, so a POST is
# never sent twice.
KEEPALIVE_SECONDS = 3.0
# A name's next address is tried beside one that stays silent (RFC 8305): aiohttp's own helper does
# it, on any event loop; uvloop's ``create_connection`` cannot.
STAGGER_SECONDS = 0.25
NAME_SECONDS = 10.0  # what a name stands for is asked again after that

Connection = ResponseHandler


class Connections:
    """To one address; all of them belong to one event loop."""

    def __init__(self, url: URL, *, connect_timeout: float, ahead: bool) -> None:
        """``connect_timeout`` in seconds; ``ahead``: have one ready for who comes next."""
        self._host, self._port = url.host or "", url.port or 0
        self._secure = url.scheme == "https"
        self._tls: ssl.SSLContext | None = None
        self._timeout = connect_timeout
        self._ahead = ahead
        self._addresses = _numeric(self._host, self._port)
        self._fresh = math.inf if self._addresses else 0.0  # until then they hold
        self._idle: dict[Connection, asyncio.TimerHandle] = {}  # the newest last
        self._opening: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self) -> Connection:
        """One that nobody else uses. Raises ``BackendAbsentError``."""
        while self._idle:
            connection, expiry = self._idle.popitem()
            expiry.cancel()
            if connection.is_connected() and not connection.should_close:
                return connection
            connection.close()
        return await self._open()

    def give(self, connection: Connection, *, keep: bool) -> None:
        """Its request is over. ``keep``: it may serve again, if its answer came to its end."""
        transport = connection.transport
        unsent = transport is not None and transport.get_write_buffer_size() > 0
        if keep and transport and not (unsent or connection.should_close or self._closed):
            self._rest(connection)
            return
        if unsent:  # the rest of a large body: nobody waits for its answer
            connection.abort()
        connection.close()
        if self._ahead and not (self._idle or self._opening or self._closed):
            self._opening = asyncio.get_running_loop().create_task(self._open_ahead())

    async def close(self) -> None:
        """Close those that rest; one that is in use is its user's to end."""
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening
        for connection in list(self._idle):
            self._expire(connection)

    def _rest(self, connection: Connection) -> None:
        later = asyncio.get_running_loop().call_later
        self._idle[connection] = later(KEEPALIVE_SECONDS, self._expire, connection)

    def _expire(self, connection: Connection) -> None:
        self._idle.pop(connection).cancel()
        connection.close()

    async def _open_ahead(self) -> None:
        try:
            with suppress(SlotkeeperError):  # whoever needs one will be told
                self._rest(await self._open())
        finally:
            self._opening = None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)  # reads many files
        try:
            async with asyncio.timeout(self._timeout):
                made = await start_connection(
                    await self._resolved(), happy_eyeballs_delay=STAGGER_SECONDS, loop=loop
                )
                _, connection = await loop.create_connection(
                    partial(ResponseHandler, loop),
                    sock=made,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
        except TimeoutError as error:
            raise BackendAbsentError(
                "the backend did not accept the connection in time", hint="is its address right?"
            ) from error
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "that is no name"
            raise BackendAbsentError(
                f"no connection to the backend: {why or 'refused'}",
                hint="is it running, and is its address right?",
            ) from error
        return connection

    async def _resolved(self) -> Sequence[AddrInfoType]:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._fresh:
            self._addresses = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
            self._fresh = loop.time() + NAME_SECONDS
        return self._addresses


def _numeric(host: str, port: int) -> Sequence[AddrInfoType]:
    """What ``getaddrinfo`` tells of an address; nothing of a name, which may take seconds."""
    with suppress(OSError, UnicodeError):
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return []
