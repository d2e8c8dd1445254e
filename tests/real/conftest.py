"""Models and engines for tests on the real llama.cpp server (xllamacpp)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.backends.llama_server import LlamaServer
from proxy.engine import Engine, EngineError, EngineOptions, bundled_model
from tests.real import tiny_gguf
from tests.real.proxies import ProxyProcess


class EngineHandle:
    """A running engine of a test: same port and slot folder across restarts."""

    def __init__(self, model: Path, folder: Path, options: EngineOptions) -> None:
        """``folder`` gets the log and, unless the options name another, the slot folder."""
        self.model = model
        self.log = folder / "engine.log"
        self.slot_dir = options.slot_save_path or folder / "slots"
        self.options = options
        self._engine = Engine(model, options, log=self.log)
        self._engine.wait_healthy()

    @property
    def url(self) -> str:
        """Base URL without a slash at the end."""
        return self._engine.url

    @property
    def port(self) -> int:
        """TCP port on 127.0.0.1."""
        return self._engine.port

    @property
    def pid(self) -> int:
        """Process id of the engine that runs now."""
        return self._engine.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._engine.exit_code

    def restart(self, model: Path | None = None, **changes: Any) -> None:
        """A clean stop (unless already dead) and a new process on the same port.

        ``changes`` are fields of ``EngineOptions`` that differ from now on. It blocks: where a
        client in the same event loop must see the old connections end, call it in a thread.
        """
        self.stop()
        self.model = model or self.model
        self.options = dataclasses.replace(self.options, **changes)
        self._engine = Engine(self.model, self.options, log=self.log, port=self._engine.port)
        self._engine.wait_healthy()

    def kill(self) -> None:
        """SIGKILL; gone when this returns."""
        self._engine.kill()

    def stop(self) -> int:
        """Clean stop; the exit code."""
        return self._engine.terminate()

    def wait_dead(self) -> int:
        """Block until it ended by itself; the exit code (negative: a signal)."""
        return self._engine.wait_dead()


@asynccontextmanager
async def driver(url: str) -> AsyncIterator[LlamaServer]:
    """The driver, closed at the end."""
    backend = LlamaServer(url, key=None, connect_timeout=2, silence_timeout=60)
    try:
        yield backend
    finally:
        await backend.close()


async def complete(
    backend: LlamaServer, tokens: Iterable[int], slot: int, **more: Any
) -> dict[str, Any]:
    """``POST /completion`` of these tokens, prefill only unless ``more`` says otherwise."""
    body = {"prompt": list(tokens), "n_predict": 0, "id_slot": slot, "temperature": 0, **more}
    headers = [("Content-Type", "application/json")]
    async with backend.send("POST", "/completion", headers, orjson.dumps(body)) as answer:
        raw = await answer.read()
    assert answer.status == 200, raw
    done: dict[str, Any] = orjson.loads(raw)
    return done


EngineFactory = Callable[..., EngineHandle]


def _start(model: Path, folder: Path, options: dict[str, Any]) -> EngineHandle:
    if "slot_save_path" not in options:
        slots = folder / "slots"
        slots.mkdir()
        options = {**options, "slot_save_path": slots}
    # An engine spins on its threads: two of them on two cores, each with two, crawl.
    return EngineHandle(model, folder, EngineOptions(**{"threads": 1, **options}))


@pytest.fixture(scope="session")
def smol_model() -> Path:
    """SmolLM2-135M-Instruct, a real model. Missing is a failure, never a skip."""
    try:
        return bundled_model()
    except EngineError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models of this session lie."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Path:
    """Full attention."""
    return tiny_gguf.build(tiny_folder / "tiny.gguf", "llama")


@pytest.fixture(scope="session")
def other_tiny_model(tiny_folder: Path) -> Path:
    """Full attention, the shape of ``tiny_model`` with other weights."""
    return tiny_gguf.build(tiny_folder / "other.gguf", "llama", seed=2)


@pytest.fixture(scope="session")
def swa_model(tiny_folder: Path) -> Path:
    """Sliding window of 64 tokens."""
    return tiny_gguf.build(tiny_folder / "swa.gguf", "gemma3")


@pytest.fixture(scope="session")
def hybrid_model(tiny_folder: Path) -> Path:
    """Convolution and attention layers."""
    return tiny_gguf.build(tiny_folder / "hybrid.gguf", "lfm2")


@pytest.fixture(scope="session")
def tools_model(tiny_folder: Path) -> Path:
    """Full attention, with a chat template that renders system text and tools."""
    path = tiny_folder / "tools.gguf"
    return tiny_gguf.build(path, "llama", chat_template=tiny_gguf.TOOLS_TEMPLATE)


@pytest.fixture(scope="session")
def big_context_model(tiny_folder: Path) -> Path:
    """Full attention, tools template, trained (so to speak) on 64k tokens."""
    path = tiny_folder / "big.gguf"
    return tiny_gguf.build(
        path, "llama", context_length=65536, chat_template=tiny_gguf.TOOLS_TEMPLATE
    )


@pytest.fixture(scope="session")
def smol(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """SmolLM2 with recommended flags, two slots of 8192 tokens, shared by the whole session.

    Tests leave it running and idle, and assume nothing about what its slots hold.
    """
    handle = _start(smol_model, tmp_path_factory.mktemp("smol"), {})
    yield handle
    handle.stop()


@pytest.fixture(scope="session")
def tools_engine(
    tools_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHandle]:
    """The tools model with recommended flags, two slots of 8192 tokens, shared like ``smol``."""
    handle = _start(tools_model, tmp_path_factory.mktemp("tools"), {})
    yield handle
    handle.stop()


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFactory]:
    """``engine(model, **fields of EngineOptions)``: engines of one test, stopped after it.

    They get a slot folder unless ``slot_save_path=None`` is said.
    """
    started: list[EngineHandle] = []

    def start(model: Path, **options: Any) -> EngineHandle:
        options.setdefault("context", 2048)
        started.append(_start(model, tmp_path_factory.mktemp("engine"), options))
        return started[-1]

    yield start
    for handle in started:
        if handle.exit_code is None:
            handle.stop()


ProxyFactory = Callable[..., ProxyProcess]


@pytest.fixture
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyFactory]:
    """``proxy(engine, mode=..., SETTING=...)``: proxies of one test, stopped after it."""
    started: list[ProxyProcess] = []

    def start(
        engine: EngineHandle, *, mode: str = "exclusive", store: bool = True, **settings: str
    ) -> ProxyProcess:
        made = ProxyProcess(
            engine.url,
            engine.slot_dir if store else None,
            tmp_path_factory.mktemp("proxy"),
            {f"SLOTKEEPER_{name}": value for name, value in settings.items()},
        )
        started.append(made)
        made.start(mode=mode)
        return made

    yield start
    for made in started:
        if made.process is not None:
            made.stop()
