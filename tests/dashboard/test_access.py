"""The page for those who cannot see it or use no mouse: axe-core's rules, in both themes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.dashboard.cdp import Page
from tests.dashboard.fake_api import FakeApi
from tests.dashboard.files import AXE
from tests.dashboard.test_page import opened

FOUND = """axe.run().then(({ violations }) => violations.map(
  ({ id, impact, nodes }) => [impact, id, nodes.slice(0, 3).map((node) => node.html)]
))"""


async def audit(page: Page) -> list[Any]:
    """What axe-core finds wrong."""
    await page.run(await asyncio.to_thread(AXE.read_text, encoding="utf-8"))
    found: list[Any] = await page.run(FOUND)
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
async def test_nothing_is_found(page: Page, api: FakeApi, width: int, dark: bool) -> None:
    """axe-core finds nothing at all on a busy page with a decision and a question open."""
    await page.look(width, dark=dark)
    await opened(page, api)
    await page.until("document.querySelectorAll('.charts canvas').length === 6")
    await page.run("document.querySelector('[data-request=\"7f3a0002\"] button').click()")
    await page.run("document.querySelector('[data-snapshot] td.actions button:last-child').click()")
    await page.until("document.querySelector('.why') && document.querySelector('.confirm')")
    assert await audit(page) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_nothing_is_found_when_all_is_empty(page: Page, api: FakeApi, dark: bool) -> None:
    """Nor on a page that has nothing to show and is disconnected."""
    api.state["status"] |= {"mode": "forward", "store": None, "advice": "Do this."}
    for name in ("slots", "running", "requests", "snapshots", "conversations", "logs"):
        api.state[name] = []
    await page.look(820, dark=dark)
    await opened(page, api)
    assert await audit(page) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_nothing_is_found_in_the_form(loud: Page, dark: bool) -> None:
    """Nor in the form for the key."""
    await loud.look(360, dark=dark)
    async with FakeApi("secret") as locked:
        await loud.open(locked.url)
        await loud.sees("Admin key")
        assert await audit(loud) == []


async def test_something_would_be_found(page: Page, api: FakeApi) -> None:
    """A button without a name is found, so the tests above prove something."""
    await opened(page, api)
    await page.run("document.querySelector('main').append(document.createElement('button'))")
    assert "button-name" in [rule for _, rule, _ in await audit(page)]


async def test_changes_are_read_out(page: Page, api: FakeApi) -> None:
    """The state of the connection and what an action did are announced, politely."""
    await opened(page, api)
    said = "[...document.querySelectorAll('[role=status]')].map((one) => one.innerText).join('|')"
    await page.until(f"{said}.startsWith('Connected.')")
    await page.click("Pause caching")
    await page.until(f"{said}.includes('Caching is paused.')")
    api.hang_up()
    await page.until(f"{said}.startsWith('Disconnected')")


async def test_nothing_moves_for_those_who_asked(page: Page, api: FakeApi) -> None:
    """With reduced motion, nothing is animated."""
    calm = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    await page.call("Emulation.setEmulatedMedia", features=calm)
    await opened(page, api)
    moving = (
        "[...document.querySelectorAll('*')].filter((one) =>"
        " parseFloat(getComputedStyle(one).transitionDuration) > 0).length"
    )
    assert await page.run(moving) == 0
