"""The page as the real proxy serves it, in front of the fake llama-server."""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from proxy.app import App
from proxy.server.gate import OWN
from proxy.telemetry import logs
from tests.dashboard.cdp import Page
from tests.dashboard.files import CSP
from tests.dashboard.test_page import LIVE
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import LONG, Proxy, chat, settings

KEY = "correct-horse-battery"
Start = Callable[..., Awaitable[Proxy]]


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Logging as the command sets it up: the page shows it."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.setup("info", "json", io.StringIO())
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeLlamaServer]:
    """The backend."""
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o700)
    async with FakeLlamaServer(folder) as server:
        yield server


@pytest.fixture
async def start(
    fake: FakeLlamaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Starts the proxy; settings by name. Its keeper looks when a test says so."""
    started: list[Proxy] = []

    async def never() -> None:
        """The keeper's loop."""

    async with aiohttp.ClientSession() as client:

        async def begin(**changes: Any) -> Proxy:
            app = App(settings(fake.url, tmp_path / "slots", **changes))
            monkeypatch.setattr(app.keeper, "run", never)
            started.append(Proxy(app, "", client))
            started[-1].url = await app.start()
            return started[-1]

        yield begin
        fake.go.set()
        for proxy in started:
            await proxy.stop()


async def opened(page: Page, proxy: Proxy) -> None:
    """The page is there and follows the events."""
    await page.open(f"{proxy.url}{OWN}/")
    await page.until(LIVE)


async def test_it_is_served_with_a_strict_policy(start: Start) -> None:
    """The page needs no key and may run nothing but its own files."""
    proxy = await start(admin_key=KEY)
    answer = await proxy.ask(f"{OWN}/", method="GET")
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == CSP
    assert (await proxy.ask(f"{OWN}/app.js", method="GET")).status == 200
    assert (await proxy.ask(f"{OWN}/api/status", method="GET")).status == 401


async def test_a_request_is_followed(page: Page, start: Start, fake: FakeLlamaServer) -> None:
    """What runs is shown while it runs; finished, it is a row, and the figures have it."""
    proxy = await start()
    await opened(page, proxy)
    await page.sees("No requests yet", "#requests")
    await page.sees("Caching in full", "#banner")
    fake.go.clear()
    async with proxy.open(body=chat(LONG, stream=True)) as answer:
        await page.until("document.querySelectorAll('#running li').length === 1")
        fake.go.set()
        await answer.read()
    await page.until("document.querySelectorAll('#requests tbody tr').length === 1")
    await page.sees("Nothing is running", "#running")
    await page.sees("0 %", "#figure-reused")
    await proxy.chat(LONG)
    await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
    await page.sees("slot-hit", "#requests tbody tr")
    await page.until("!document.querySelector('#figure-reused dd').innerText.startsWith('0 %')")
    await page.run("document.querySelector('#requests tbody button').click()")
    await page.sees("Whole answer", ".why")
    await page.sees("request", ".log")


async def test_snapshots_and_conversations(page: Page, start: Start) -> None:
    """A saved conversation is on the page; it can be pinned, deleted and forgotten for good."""
    proxy = await start()
    await proxy.chat(LONG)
    await proxy.quiet()
    await proxy.look()
    await opened(page, proxy)
    row = "#snapshots tbody tr"
    await page.until(f"document.querySelectorAll('{row}').length === 1")
    await page.run(f"document.querySelector('{row} button').click()")
    await page.sees("pinned", row)
    await page.run(f"document.querySelector('{row} td.actions button:last-child').click()")
    await page.click("Delete", f"{row} .confirm")
    await page.sees("Nothing saved yet", "#snapshots")
    assert (await proxy.page("api/snapshots"))["snapshots"] == []
    row = "#conversations tbody tr"
    await page.run(f"document.querySelector('{row} button').click()")
    await page.click("Forget", f"{row} .confirm")
    await page.sees("No conversations yet", "#conversations")
    assert (await proxy.page("api/conversations"))["conversations"] == []


async def test_pause_and_resume(page: Page, start: Start) -> None:
    """The button really pauses caching, and resumes it."""
    proxy = await start()
    await opened(page, proxy)
    await page.click("Pause caching")
    await page.sees("Caching is paused", "#banner")
    assert (await proxy.page("api/status"))["paused"]
    await proxy.chat("hello")
    await page.sees("forward", "#requests tbody tr")
    await page.click("Resume caching")
    await page.until("!document.querySelector('#banner').innerText.includes('paused')")
    assert not (await proxy.page("api/status"))["paused"]


async def test_charts_have_what_happened(page: Page, start: Start) -> None:
    """A minute's request is in the charts."""
    proxy = await start()
    await proxy.chat(LONG)
    await opened(page, proxy)
    await page.until("document.querySelectorAll('.charts canvas').length === 6")
    await page.sees("1 in all", "#charts")


async def test_the_key(loud: Page, start: Start) -> None:
    """With a key configured, the page asks for it and then follows the events."""
    proxy = await start(admin_key=KEY)
    await loud.open(f"{proxy.url}{OWN}")
    await loud.sees("The admin key is needed here", "#key-form")
    await loud.type(KEY)
    await loud.press("Enter", 13)
    await loud.until(LIVE)
    await loud.sees("Caching in full", "#banner")
    assert all("401" in line for line in loud.console)


async def test_the_backend_goes_away(page: Page, start: Start, fake: FakeLlamaServer) -> None:
    """A dead backend is said in words, and a new one takes that back."""
    proxy = await start()
    await opened(page, proxy)
    await fake.die()
    await proxy.look()
    await page.sees("does not answer", "#banner")
    await fake.start()
    await proxy.look()
    await page.sees("Caching in full", "#banner")
