"""The rendering engines of a session, and the table at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from proxy.engine import Engine
from tests.clients.scripted import TEMPLATES, renderer

TABLE = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """One engine per named template."""
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        yield {name: stack.enter_context(renderer(folder, name)) for name in TEMPLATES}


@pytest.fixture
def table(pytestconfig: pytest.Config) -> list[str]:
    """Lines shown when all is over."""
    return pytestconfig.stash.setdefault(TABLE, [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the table."""
    lines = config.stash.get(TABLE, [])
    if lines:
        terminalreporter.section("how much of its last prompt a request extends")
        for line in lines:
            terminalreporter.write_line(line)
