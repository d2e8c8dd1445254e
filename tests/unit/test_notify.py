"""What systemd is told, on a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.notify import BEATS, Notifier

posix = pytest.mark.skipif(sys.platform == "win32", reason="no datagram sockets by name there")


class Manager:
    """The receiving end."""

    def __init__(self, address: str) -> None:
        """``address`` as the kernel takes it."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(10)

    def told(self) -> list[str]:
        """The lines of the next message."""
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A short name for a socket: long ones are refused by the kernel."""
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "s")


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    """Listens at ``address``."""
    one = Manager(address)
    yield one
    one.socket.close()


@posix
def test_the_life_of_a_service(manager: Manager, address: str) -> None:
    """Each message is one datagram in systemd's words; a reload carries the clock it asks for."""
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.ready("listening on http://127.0.0.1:1")
    notifier.reloading()
    notifier.ready("reloaded")
    notifier.stopping()
    assert manager.told() == ["READY=1", "STATUS=listening on http://127.0.0.1:1"]
    word, clock = manager.told()
    assert word == "RELOADING=1"
    assert int(clock.removeprefix("MONOTONIC_USEC=")) > 0
    assert manager.told() == ["READY=1", "STATUS=reloaded"]
    assert manager.told() == ["STOPPING=1", "STATUS=draining"]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")
def test_an_abstract_name(address: str) -> None:
    """A name that begins with @ is one of Linux's abstract ones."""
    del address
    name = f"slotkeeper-test-{os.getpid()}"
    one = Manager(f"\0{name}")
    Notifier({"NOTIFY_SOCKET": f"@{name}"}).stopping()
    assert one.told()[0] == "STOPPING=1"
    one.socket.close()


@posix
async def test_the_watchdog_is_fed(manager: Manager, address: str) -> None:
    """The event loop says that it lives, several times within the time that was set."""
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environ)
    assert notifier.watchdog == 0.03
    assert BEATS >= 2
    beating = asyncio.create_task(notifier.beat())
    for _ in range(3):
        assert await asyncio.to_thread(manager.told) == ["WATCHDOG=1"]
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)


@posix
@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "30000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "²"},
        {"WATCHDOG_USEC": "0"},
    ],
)
async def test_no_watchdog(manager: Manager, address: str, environ: dict[str, str]) -> None:
    """Where none is set, or another process's, or nonsense, nothing is sent and nothing waits."""
    notifier = Notifier({"NOTIFY_SOCKET": address, **environ})
    assert notifier.watchdog == 0
    await notifier.beat()
    notifier.stopping()
    assert manager.told()[0] == "STOPPING=1"


@pytest.mark.parametrize("name", ["", "relative/name", "vsock:2:1234", "/nowhere/at/all"])
async def test_nobody_listens(name: str) -> None:
    """Without a manager, or with one that cannot be reached, nothing is raised."""
    notifier = Notifier({"NOTIFY_SOCKET": name} if name else {})
    notifier.ready("x")
    notifier.reloading()
    notifier.stopping()
    await notifier.beat()


def test_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket is even opened there."""

    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(socket, "socket", refuse)
    notifier = Notifier({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1000000"})
    notifier.ready("x")
    assert notifier.watchdog == 0


@posix
def test_a_manager_that_hangs(manager: Manager, address: str) -> None:
    """A full queue loses the message; the proxy goes on."""
    notifier = Notifier({"NOTIFY_SOCKET": address})
    for _ in range(2000):
        notifier.ready("x" * 1000)
    assert manager.told()[0] == "READY=1"
