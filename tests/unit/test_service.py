"""Start, reload and end of the service; a real process: tests/integration/test_process.py."""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from pydantic import SecretStr

from proxy import service
from proxy.config import Backend, Config, Server
from proxy.core.records import Mode
from proxy.errors import ConfigError
from proxy.store.snapshots import StoreBusyError, StoreError

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
    broken: Exception | None = None  # what a reload raises
    stopped = 0
    reloads: list[Config]

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

    def reload(self, config: Config) -> None:
        """Noted, or as the test says."""
        if self.broken is not None:
            raise self.broken
        self.reloads.append(config)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> type[FakeApp]:
    """What the service starts."""

    class Mine(FakeApp):
        reloads: list[Config] = []  # noqa: RUF012 - one class per test

    monkeypatch.setattr(service, "App", Mine)
    monkeypatch.setattr(service, "mode", "forward", raising=False)
    return Mine


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (StoreBusyError(errno.EAGAIN, "another proxy has it"), 1, "ledger: another proxy has it\n"),
        (StoreBusyError("it is taken"), 1, "ledger: it is taken\n  Stop the other one"),
        (StoreError("it is broken"), 1, "ledger: it is broken\n  This folder cannot be used"),
        (OSError(errno.EADDRINUSE, "address in use"), 1, "port 8088 is taken: try --port"),
        (OSError(errno.EACCES, "not allowed"), 1, "not allowed"),
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


@pytest.mark.parametrize(
    ("mode", "tokens", "said"),
    [
        (Mode.EXCLUSIVE, [(900, 900), (700, 690), None], {"what": "2 slots saved"}),
        (Mode.EXCLUSIVE, [(900, 0), (700, 690)], {"what": "1 slot of 2 saved"}),
        (Mode.EXCLUSIVE, [], {"what": "0 slots saved"}),
        (Mode.FORWARD, [(900, 900)], {}),
    ],
)
def test_the_end_says_what_was_saved(
    mode: Mode, tokens: list[tuple[int, int] | None], said: dict[str, str]
) -> None:
    """Of the slots that held something; nothing where they are not the proxy's."""
    held = [SimpleNamespace(n_tokens=one[0], n_saved=one[1]) if one else None for one in tokens]
    table = [SimpleNamespace(content=one) for one in held]
    app: Any = SimpleNamespace(scheduler=SimpleNamespace(mode=mode, table=table))
    assert service._saved(app) == said


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


needs_hangup = pytest.mark.skipif(sys.platform == "win32", reason="no SIGHUP there")
Serve = Callable[..., list[str]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serves, hangs up as soon as it is ready, ends it after the reload; what a manager heard."""
    address = str(tmp_path / "s")
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    manager.settimeout(10)
    monkeypatch.setenv("NOTIFY_SOCKET", address)

    def hear() -> str:
        return manager.recv(4096).decode()

    async def reloaded() -> None:
        while not (await asyncio.to_thread(hear)).startswith("RELOADING=1"):
            pass
        heard.append(await asyncio.to_thread(hear))
        os.kill(os.getpid(), signal.SIGTERM)

    def ready(_url: str) -> None:
        waiting.append(asyncio.get_running_loop().create_task(reloaded()))
        os.kill(os.getpid(), signal.SIGHUP)

    heard: list[str] = []
    waiting: list[asyncio.Task[None]] = []

    def run(load: Callable[[], Config], config: Config = CONFIG) -> list[str]:
        assert service.run(config, ready, load) == 0
        return [*heard, hear()]

    yield run
    manager.close()


@needs_hangup
def test_reload(app: type[FakeApp], serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGHUP reads the configuration again; the app gets the live part, the rest is named."""
    backend = Backend(kind="llama_server")
    live = Server(max_queue=3, log_level="debug", log_format="json")
    new = Config(backend=backend, server=live.model_copy(update={"port": 9}))
    old = Config(backend=backend, server=Server(log_format="json"))
    heard = serve(lambda: new, old)
    assert heard == [
        "READY=1\nSTATUS=reloaded; some changes need a restart",
        "STOPPING=1\nSTATUS=draining",
    ]
    assert app.reloads == [Config(backend=backend, server=live)]
    shown = capsys.readouterr().err
    assert '"changed":["server.max_queue","server.log_level"]' in shown
    assert shown.count("slot_save_path") == 1, "what was odd before is not told again"
    assert '"needs_restart":["server.port"]' in shown
    assert logging.getLogger().level == logging.DEBUG


@needs_hangup
def test_a_reload_may_be_odd_too(
    app: type[FakeApp], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is newly allowed and probably not meant is told."""
    key = SecretStr("k")
    serve(lambda: Config(server=Server(keys=(key,), admin_key=key)))
    assert "every client is an admin" in capsys.readouterr().err


@needs_hangup
def test_a_bad_configuration_changes_nothing(
    app: type[FakeApp], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old one stays, every problem is logged, the manager hears of it, it goes on."""

    def load() -> Config:
        raise ConfigError(["c.toml:3: server.port: wrong", "c.toml:4: server.host: worse"])

    heard = serve(load)
    assert heard[0].startswith("READY=1\nSTATUS=reload refused")
    assert app.reloads == []
    shown = capsys.readouterr().err
    for words in ("c.toml:3: server.port: wrong", "c.toml:4: server.host: worse", "old conf"):
        assert words in shown
    assert "Traceback" not in shown


@needs_hangup
def test_a_fault_in_a_reload(
    app: type[FakeApp], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever goes wrong while reloading, the proxy goes on."""
    app.broken = RuntimeError("the secret")
    assert serve(lambda: CONFIG)[0] == "READY=1\nSTATUS=reload failed: see the log"
    shown = capsys.readouterr().err
    assert "reload.fault" in shown
    assert "the secret" not in shown


@needs_hangup
def test_asked_before_it_is_ready(
    app: type[FakeApp], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGHUP during the start is neither the end nor a false ready: it reloads afterwards."""

    async def start(_: FakeApp) -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert app.reloads == []
        return "http://127.0.0.1:1"

    monkeypatch.setattr(app, "start", start)
    assert serve(lambda: CONFIG)[0] == "READY=1\nSTATUS=reloaded"
    assert app.reloads


@needs_hangup
def test_without_a_way_to_load(app: type[FakeApp]) -> None:
    """Where nothing can be read again, SIGHUP is left as it was."""
    before = signal.getsignal(signal.SIGHUP)
    seen: list[Any] = []

    def ready(_url: str) -> None:
        seen.append(signal.getsignal(signal.SIGHUP))
        os.kill(os.getpid(), signal.SIGTERM)

    assert service.run(CONFIG, ready) == 0
    assert seen == [before]


@needs_hangup
def test_a_closed_terminal(app: type[FakeApp], monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP of a terminal that is gone ends it: nobody could any more."""
    terminal = [True]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal[0], raising=False)

    def ready(_url: str) -> None:
        terminal[0] = False
        os.kill(os.getpid(), signal.SIGHUP)

    assert service.run(CONFIG, ready, lambda: CONFIG) == 0
    assert app.reloads == []
    assert app.stopped == 1


def test_where_there_is_no_hangup(app: type[FakeApp], monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows it serves all the same, and nothing reloads."""

    def ready(_url: str) -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)

    monkeypatch.setattr(service, "HANGUP", None)
    assert service.run(CONFIG, ready, lambda: CONFIG) == 0
    assert app.reloads == []
