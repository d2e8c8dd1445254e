"""The fake API, and the command line asking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner, Result

from proxy.cli import app
from tests.unit.commands.fake_api import FakeApi

Run = Callable[..., Result]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """It listens."""
    with FakeApi() as started:
        yield started


@pytest.fixture
def run(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("cache", "ls")`` against the fake; ``input`` is what is typed."""
    monkeypatch.setenv("SLOTKEEPER_URL", api.url)
    monkeypatch.delenv("SLOTKEEPER_ADMIN_KEY", raising=False)

    def invoke(*words: str, input: str | None = None) -> Result:  # noqa: A002 - as it has it
        return CliRunner().invoke(app, list(words), input)

    return invoke
