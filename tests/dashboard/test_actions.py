"""What can be done from the page, and who may do it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.dashboard import sample
from tests.dashboard.cdp import Page
from tests.dashboard.fake_api import FakeApi
from tests.dashboard.test_page import LIVE, opened

KEY = "correct horse"
SNAPSHOT = sample.snapshots()[0]["id"]
TALK = sample.conversations()[0]["id"]


@pytest.fixture
async def locked() -> AsyncIterator[FakeApi]:
    """An API that asks for a key."""
    async with FakeApi(KEY) as fake:
        yield fake


async def test_pause_and_resume(page: Page, api: FakeApi) -> None:
    """Caching is paused and resumed by one button, and the banner says so."""
    await opened(page, api)
    await page.click("Pause caching")
    await page.sees("Caching is paused: requests are forwarded plainly", "#banner")
    await page.click("Resume caching")
    await page.sees("Caching in full", "#banner")
    await page.sees("Caching is resumed.", "#notice")
    assert api.calls == [("POST", "pause", {}), ("POST", "resume", {})]


async def test_pin_and_unpin(page: Page, api: FakeApi) -> None:
    """A snapshot is pinned by its button, which then unpins."""
    await opened(page, api)
    row = f"[data-snapshot='{SNAPSHOT}']"
    await page.click(f"Pin {sample.TITLES[0]}", row)
    await page.sees("Unpin", row)
    await page.click(f"Unpin {sample.TITLES[0]}", row)
    await page.until(f'!document.querySelector("{row} .tag")')
    pinned = [body["pinned"] for _, _, body in api.calls]
    assert pinned == [True, False]


async def test_delete_asks_first(page: Page, api: FakeApi) -> None:
    """A snapshot goes only after the second button; Escape and "Keep" keep it."""
    await opened(page, api)
    row = f"[data-snapshot='{SNAPSHOT}']"
    delete = f"Delete {sample.TITLES[0]}"
    await page.click(delete, row)
    await page.sees("Delete 620 MiB?", row)
    await page.until("document.activeElement.innerText === 'Keep'")
    await page.press("Escape", 27)
    await page.until(f'!document.querySelector("{row} .confirm")')
    await page.until(f"document.activeElement.ariaLabel === '{delete}'")
    await page.click(delete, row)
    await page.click("Keep", row)
    assert api.calls == []
    await page.click(delete, row)
    await page.click("Delete", f"{row} .confirm")
    await page.until(f'!document.querySelector("{row}")')
    assert api.calls == [("DELETE", f"snapshots/{SNAPSHOT}", {})]
    await page.sees("Snapshot deleted.", "#notice")
    await page.until("document.activeElement.id === 'snapshots-title'")


async def test_forget(page: Page, api: FakeApi) -> None:
    """A conversation is forgotten after a question."""
    await opened(page, api)
    row = f"[data-conversation='{TALK}']"
    await page.click(f"Forget {sample.TITLES[0]}", row)
    await page.click("Forget", f"{row} .confirm")
    await page.until(f'!document.querySelector("{row}")')
    assert api.calls == [("POST", f"conversations/{TALK}/forget", {})]


async def test_a_refusal_is_told(loud: Page, api: FakeApi) -> None:
    """What the proxy refuses is said with its hint, and the row stays."""
    await opened(loud, api)
    api.fails[f"api/snapshots/{SNAPSHOT}"] = 500
    row = f"[data-snapshot='{SNAPSHOT}']"
    await loud.click(f"Delete {sample.TITLES[0]}", row)
    await loud.click("Delete", f"{row} .confirm")
    await loud.sees("It went wrong. Try again.", "#notice.bad")
    assert await loud.run(f'document.querySelector("{row}") !== null')


async def test_the_key_is_asked_for(loud: Page, locked: FakeApi) -> None:
    """A wrong key is refused, the right one opens the page; it is kept in the tab, nowhere else."""
    await loud.open(locked.url)
    await loud.sees("The admin key is needed here", "#key-form")
    await loud.until("document.activeElement.id === 'key'")
    await loud.type("battery staple")
    await loud.press("Enter", 13)
    await loud.sees("This key was not accepted", "#key-form")
    await loud.type(KEY)
    await loud.press("Enter", 13)
    await loud.until(LIVE)
    await loud.sees("92 %", "#figure-reused")
    assert KEY not in await loud.run(
        "location.href + document.cookie + JSON.stringify(localStorage)"
    )
    assert not [url for url in loud.requests if "horse" in url]
    assert all("401" in line for line in loud.console)


async def test_the_key_outlives_a_reload(loud: Page, locked: FakeApi) -> None:
    """A reload does not ask again; a key that stopped being right does."""
    await loud.open(locked.url)
    await loud.sees("Admin key", "#key-form")
    await loud.type(KEY)
    await loud.press("Enter", 13)
    await loud.until(LIVE)
    await loud.open(locked.url)
    await loud.until(LIVE)
    locked.key = "another"
    await loud.click("Pause caching")
    await loud.sees("This key was not accepted", "#key-form")
    assert locked.calls == []
