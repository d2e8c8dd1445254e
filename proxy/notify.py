"""Telling the service manager how the process is: systemd's notification protocol.

One datagram per message to the socket named in ``NOTIFY_SOCKET`` (sd_notify(3)). Where no manager
listens (a terminal, Docker, macOS, Windows) every call does nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Mapping

BEATS = 3  # pings within the watchdog's time, so that one that comes late is not the end


class Notifier:
    """Says ready, reloading, stopping, and that the event loop lives. Never raises.

    ``watchdog``: seconds the manager waits for a sign of life, 0 for ever.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """``environ`` is usually ``os.environ``."""
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog = _watchdog(environ) if self._address else 0.0

    def ready(self, status: str) -> None:
        """Requests are taken; after ``reloading``: that is over. ``status`` is for people."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """The configuration is being read again; ``ready`` must follow."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """No new requests; running answers end, slots are saved."""
        self._send("STOPPING=1", "STATUS=draining")

    async def beat(self) -> None:
        """Say again and again that the event loop lives; returns at once where nobody asks."""
        while self.watchdog:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / BEATS)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        family = getattr(socket, "AF_UNIX")  # noqa: B009 - not there on Windows
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)  # a manager that hangs must not hang the proxy
                channel.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            pass  # the manager went away: that is no reason to end, and there is nobody to tell


def _address(name: str) -> str:
    """The socket's address as the kernel takes it, ``""`` for none."""
    if sys.platform == "win32" or not name.startswith(("/", "@")):
        return ""
    return "\0" + name[1:] if name.startswith("@") else name


def _watchdog(environ: Mapping[str, str]) -> float:
    """Seconds; 0 where it is not asked for, or of another process (sd_watchdog_enabled(3))."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    text = environ.get("WATCHDOG_USEC", "")
    return int(text) / 1_000_000 if text.isascii() and text.isdigit() else 0.0
