"""Pictures of the page for the documents: ``python -m tests.dashboard.screenshots``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.dashboard.cdp import Chromium, Page, program, tab
from tests.dashboard.fake_api import FakeApi
from tests.dashboard.files import ROOT

WIDTHS = (360, 820, 1440)
FOLDER = ROOT / "docs" / "screenshots"
_PAINTED = "new Promise((done) => setTimeout(done, 400))"  # charts follow a change of width


async def take(page: Page, api: FakeApi, folder: Path) -> None:
    """Each width in light and dark; then one decision opened, and the charts."""
    await page.open(api.url)
    await page.until("document.querySelectorAll('.u-wrap').length === 6")
    for width in WIDTHS:
        for theme in ("light", "dark"):
            await page.look(width, dark=theme == "dark")
            await page.run(_PAINTED)
            await page.picture(folder / f"dashboard-{width}-{theme}.png")
    await page.look(820)
    await page.run("document.querySelector('[data-request=\"7f3a0002\"] button').click()")
    await page.until("document.querySelector('.why')")
    for name, height in (("requests", 760), ("charts", 700)):
        top = await page.run(f"document.getElementById('{name}').offsetTop - 16")
        await page.picture(folder / f"dashboard-{name}.png", top=top, height=height)


async def main(folder: Path) -> None:
    """All pictures into ``folder``."""
    executable = program()
    if executable is None:
        sys.exit("No Chromium was found; CHROMIUM may name one.")
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    browser = await asyncio.to_thread(Chromium, executable)
    try:
        async with FakeApi() as api, tab(browser) as page:
            await take(page, api, folder)
    finally:
        await asyncio.to_thread(browser.close)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
