"""A real Chromium over its DevTools protocol: a page, what it logged, what it asked for.

No driver program is needed: the protocol is JSON over one WebSocket, which aiohttp speaks.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import aiohttp
import orjson

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
_PATIENCE = 20.0  # seconds until a page that does not get there has failed
_UNTIL = """new Promise((done, failed) => {
  const end = Date.now() + %d;
  const look = () => {
    let found = false;
    try { found = (%s); } catch (error) { found = false; }
    if (found) done(true);
    else if (Date.now() > end) failed(new Error("never true"));
    else setTimeout(look, 20);
  };
  look();
})"""


def program() -> str | None:
    """The browser on this machine, None if there is none; ``CHROMIUM`` names another one."""
    named = os.environ.get("CHROMIUM")
    return next(filter(None, map(shutil.which, [named] if named else PROGRAMS)), None)


class Chromium:
    """A running browser with a profile of its own; ``endpoint`` is its WebSocket."""

    def __init__(self, executable: str) -> None:
        """Start it and wait until it says where it listens."""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [executable, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        own = {**os.environ, "TMPDIR": self._profile.name}  # it leaves folders behind
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=own)
        assert self._process.stderr
        self.endpoint = _endpoint(self._process.stderr)
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()

    def close(self) -> None:
        """End it; its profile goes with it."""
        self._process.terminate()
        self._process.wait(timeout=20)
        self._drain.join(timeout=20)
        assert self._process.stderr
        self._process.stderr.close()
        self._profile.cleanup()


def _endpoint(lines: IO[str]) -> str:
    for line in lines:
        if "DevTools listening on " in line:
            return line.split()[-1]
    raise RuntimeError("the browser ended before it listened")


class Page:
    """One tab with a storage of its own.

    ``console``: errors and warnings, violations of the content policy among them. ``requests``:
    every address it asked for.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """``socket``: to the browser; use ``tab``."""
        self.console: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_str(orjson.dumps(message).decode())
        return await asyncio.wait_for(self._answers[number], _PATIENCE)

    async def listen(self) -> None:
        """Sort what comes in; ends with the connection."""
        async for message in self._socket:
            told = orjson.loads(message.data)
            if "id" in told:
                self._answered(told)
            else:
                self._happened(told["method"], told["params"])

    def _answered(self, told: dict[str, Any]) -> None:
        answer = self._answers.pop(told["id"])
        if answer.done():
            return
        if "error" in told:
            answer.set_exception(RuntimeError(told["error"]["message"]))
        else:
            answer.set_result(told["result"])

    def _happened(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            told = details.get("exception", {}).get("description", details["text"])
            self.console.append(told)
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            self.console.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.console.append(params["entry"]["text"])

    async def attach(self) -> None:
        """Open the tab."""
        context = await self.call("Target.createBrowserContext", disposeOnDetach=True)
        target = await self.call("Target.createTarget", url="about:blank", **context)
        session = await self.call("Target.attachToTarget", flatten=True, **target)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Go there; use ``until`` to wait for what shall be seen."""
        await self.call("Page.navigate", url=url)

    async def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """A window of that width; a browser that prefers light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        try:
            await self.run(_UNTIL % (_PATIENCE * 700, condition))
        except AssertionError as error:
            seen = await self.run("document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"{condition}\n{self.console}\n{seen}") from error

    async def sees(self, text: str, where: str = "body") -> None:
        """Wait until a text is shown there."""
        await self.until(
            f"document.querySelector({_quoted(where)}).innerText.includes({_quoted(text)})"
        )

    async def click(self, label: str, where: str = "body") -> None:
        """Press the button of that name or text."""
        found = (
            f"[...document.querySelectorAll({_quoted(where + ' button')})].find((button) =>"
            f" (button.ariaLabel ?? button.innerText).trim() === {_quoted(label)})"
        )
        await self.until(f"{found} && !{found}.disabled")
        await self.run(f"{found}.click()")

    async def press(self, key: str, code: int) -> None:
        """A key of the keyboard, as its user presses it."""
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **(more if kind == "keyDown" else {}),
            )  # fmt: skip

    async def type(self, text: str) -> None:
        """Text into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path, *, top: float = 0, height: int = 1500) -> None:
        """That part of the page, in its full width, as a PNG file."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        height = min(height, size["height"] - top)
        shot = await self.call(
            "Page.captureScreenshot", captureBeyondViewport=True,
            clip={"x": 0, "y": top, "width": size["width"], "height": height, "scale": 1},
        )  # fmt: skip
        data = base64.b64decode(shot["data"])
        await asyncio.to_thread(path.write_bytes, data)


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


@asynccontextmanager
async def tab(browser: Chromium) -> AsyncIterator[Page]:
    """A new tab, closed at the end."""
    async with (
        aiohttp.ClientSession() as client,
        client.ws_connect(browser.endpoint, max_msg_size=0) as socket,
    ):
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        try:
            await page.attach()
            yield page
        finally:
            await socket.close()
            await listening
