"""A browser for all tests, and for each a tab that must stay quiet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest

from tests.dashboard.cdp import Chromium, Page, program, tab
from tests.dashboard.fake_api import FakeApi


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """A running Chromium."""
    executable = program()
    if executable is None:
        pytest.skip("no Chromium on this machine (Debian's package chromium, or set CHROMIUM)")
    running = Chromium(executable)
    yield running
    running.close()


@pytest.fixture
async def loud(browser: Chromium) -> AsyncIterator[Page]:
    """A tab in which errors are expected: those the browser logs for a refused request."""
    async with tab(browser) as page:
        await page.look(1280)
        yield page


@pytest.fixture
async def page(loud: Page, api: FakeApi) -> AsyncIterator[Page]:
    """A tab in which nothing may be logged, and no other origin asked.

    It is judged while ``api`` is still there: a page tries again when its stream ends.
    """
    del api
    yield loud
    assert loud.console == []
    ours = urlsplit(loud.requests[0]).netloc
    assert {urlsplit(url).netloc for url in loud.requests if not url.startswith("data:")} == {ours}


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    """The API of a busy proxy."""
    async with FakeApi() as fake:
        yield fake
