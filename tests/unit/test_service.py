"""Start and end of the service; signals to a real process: tests/integration/test_process.py."""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from proxy import service
from proxy.config import Config, Server
from proxy.store.snapshots import StoreBusyError

CONFIG = Config()


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Logging and signals as before."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    handlers = [signal.getsignal(number) for number in service.SIGNALS]
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before
    for number, handler in zip(service.SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


class FakeApp:
    """Starts with an error, or at once; notes that it was stopped."""

    error: BaseException | None = None
    stopped = 0

    def __init__(self, config: Config) -> None:
        self.scheduler = service

    async def start(self) -> str:
        """As the test says."""
        if self.error is not None:
            raise self.error
        return "http://127.0.0.1:1"

    async def stop(self) -> None:
        """Counted."""
        type(self).stopped += 1


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> type[FakeApp]:
    """What the service starts."""

    class Mine(FakeApp):
        pass

    monkeypatch.setattr(service, "App", Mine)
    monkeypatch.setattr(service, "mode", "forward", raising=False)
    return Mine


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (StoreBusyError(errno.EAGAIN, "another proxy has it"), 1, "another proxy has it"),
        (OSError(errno.EADDRINUSE, "address in use"), 1, "address in use"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_does_not_start(
    app: type[FakeApp],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    told: str,
) -> None:
    """One line says why, no traceback; what was opened is closed again."""
    app.error = error
    assert service.run(CONFIG) == status
    shown = capsys.readouterr().err
    assert told in shown
    assert "Traceback" not in shown
    assert app.stopped == 1


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
def test_ready_then_stopped(app: type[FakeApp]) -> None:
    """The URL is told once requests are taken; a signal then ends it with status 0."""
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        os.kill(os.getpid(), signal.SIGTERM)

    assert service.run(CONFIG, ready) == 0
    assert urls == ["http://127.0.0.1:1"]
    assert app.stopped == 1


def test_where_loops_take_no_signal_handlers(
    app: type[FakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows the plain handler wakes the loop, and the second signal is the default one."""

    def refuse(*_: Any) -> None:
        raise NotImplementedError

    def ready(_url: str) -> None:
        loop = asyncio.get_running_loop()
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        loop.call_soon(handler, signal.SIGINT, None)

    for name in ("add_signal_handler", "remove_signal_handler"):
        monkeypatch.setattr(asyncio.AbstractEventLoop, name, refuse)
        monkeypatch.setattr(asyncio.SelectorEventLoop, name, refuse, raising=False)
    monkeypatch.setattr(service, "_runner", lambda: asyncio.run)
    assert service.run(CONFIG, ready) == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_odd_settings_are_told(app: type[FakeApp], capsys: pytest.CaptureFixture[str]) -> None:
    """What is allowed and probably not meant is logged before anything starts."""
    app.error = OSError(errno.EADDRINUSE, "address in use")
    service.run(Config(server=Server(host="0.0.0.0", log_format="json")))
    assert "set server.keys" in capsys.readouterr().err


def test_the_optional_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvloop is used where it is installed, and not missed where it is not."""

    class Loop:
        run = staticmethod(lambda main: 5)

    monkeypatch.setattr(importlib, "import_module", lambda name: Loop)
    assert service._runner() is Loop.run

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert service._runner() is asyncio.run
