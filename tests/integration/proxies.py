"""The whole proxy in this process, in front of a fake, and short ways to talk to it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from pydantic import BaseModel

from proxy.app import App
from proxy.config import Backend, Cache, Config, Server
from proxy.core.records import Mode
from tests.integration.fake_faults import Seen
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.listening import killed

CHAT = "/v1/chat/completions"
DONE = b"[DONE]"
LONG = " ".join(f"word{i}" for i in range(300))


def settings(url: str, slot_dir: Path | None, **changes: Any) -> Config:
    """A configuration for tests; ``changes`` by name, whatever their section.

    Those of ``[normalise]``, which shares names with others, as ``normalise={...}``.
    """
    given = {
        "url": url,
        "slot_save_path": str(slot_dir or ""),
        "port": 0,
        "keep_free": 0,
        "idle_seconds": 0,
        "drain_timeout": 0.01,
        "ping_interval": 3600,
        **changes,
    }
    sections: dict[str, type[BaseModel]] = {"server": Server, "backend": Backend, "cache": Cache}
    found = {
        name: {key: value for key, value in given.items() if key in model.model_fields}
        for name, model in sections.items()
    }
    return Config.model_validate({**found, "normalise": given.get("normalise", {})})


@dataclass
class Answer:
    """What a client got, to the last byte; ``raw`` is cut short where the connection broke."""

    status: int
    headers: dict[str, str]
    raw: bytes
    broken: bool = False

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, parsed; ``[DONE]`` as it is, an unfinished one left out."""
        whole = self.raw.split(b"\n\n")[:-1]
        lines = [event.removeprefix(b"data: ") for event in whole]
        return [line if line == DONE else orjson.loads(line) for line in lines]

    @property
    def said(self) -> str:
        """``X-Slotkeeper``."""
        return self.headers["x-slotkeeper"]

    @property
    def reason(self) -> str:
        """Its first word."""
        return self.said.partition(";")[0]


@dataclass
class Proxy:
    """A running proxy. Its keeper looks at the backend only when a test calls ``look``."""

    app: App
    url: str
    client: aiohttp.ClientSession
    stopped: bool = False

    @asynccontextmanager
    async def open(
        self, target: str = CHAT, body: Any = None, *, method: str = "POST", **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose answer has begun. ``body``: bytes, or anything as JSON."""
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        async with self.client.request(method, self.url + target, data=data, **more) as answer:
            yield answer

    async def ask(self, target: str = CHAT, body: Any = None, **more: Any) -> Answer:
        """A request and its whole answer."""
        async with self.open(target, body, **more) as answer:
            return await whole(answer)

    async def chat(self, text: str, **more: Any) -> Answer:
        """One user message, an answer of at most 4 tokens."""
        return await self.ask(CHAT, chat(text, **more))

    async def page(self, name: str) -> Any:
        """One of its own pages."""
        return (await self.ask(f"/_slotkeeper/{name}", method="GET")).json

    def metric(self, name: str) -> float:
        """The value of a series, labels included in ``name``."""
        text = self.app.metrics.render()[0].decode()
        found = re.search(rf"^slotkeeper_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no series {name}"
        return float(found[1])

    async def look(self, mode: Mode | None = None) -> None:
        """What the keeper does once a second; afterwards the mode must be ``mode``."""
        await self.app.keeper.step()
        assert mode in (None, self.app.scheduler.mode), self.app.keeper.verdict

    async def quiet(self) -> None:
        """Until no lease is held and nothing settles."""
        await self.app.scheduler.quiet()

    def queued(self) -> int:
        """How many requests wait for a slot."""
        return len(self.app.scheduler._queue)

    def tokens(self) -> list[int | None]:
        """What each slot is believed to hold."""
        table = self.app.scheduler.table
        return [row.content.n_tokens if row.content else None for row in table]

    async def stop(self) -> None:
        """As after a signal; once."""
        if not self.stopped:
            self.stopped = True
            await self.app.stop()

    async def kill(self) -> None:
        """As kill -9 leaves things: nothing is drained, nothing saved."""
        self.stopped = True
        for task in self.app._tasks:
            task.cancel()
        await asyncio.wait(self.app._tasks)
        self.app._tasks.clear()
        assert self.app._runner is not None
        await killed(self.app._runner)
        await self._lose_unwritten()
        await self.app.backend.close()
        if self.app.store is not None:
            await self.app.store.close()

    async def _lose_unwritten(self) -> None:
        """What waits to be written to the ledger never is."""
        writer = self.app._written
        if writer is not None:
            writer._changed.clear()
            writer._gone.clear()
            await writer.close()
        await self.app.ledger.close()


async def whole(answer: aiohttp.ClientResponse) -> Answer:
    """Read on to the end, or to where the connection breaks."""
    raw = bytearray()
    broken = False
    try:
        async for chunk in answer.content.iter_any():
            raw += chunk
    except aiohttp.ClientPayloadError:
        broken = True
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return Answer(answer.status, headers, bytes(raw), broken)


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A chat request of one user message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def posts(fake: FakeLlamaServer) -> list[Seen]:
    """What the fake was asked to do, in order; not the looks at it that come at any time."""
    return [one for one in fake.requests if one.method == "POST"]


async def event(answer: aiohttp.ClientResponse) -> Any:
    """The next event of a stream, as soon as it is there."""
    raw = await answer.content.readuntil(b"\n\n")
    data = raw.removeprefix(b"data: ").strip()
    return data if data == DONE else orjson.loads(data)


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run until it holds; what can be awaited should be."""
    while not condition():  # noqa: ASYNC110 - the proxy has no event for every change
        await asyncio.sleep(0)


async def settled(count: Callable[[], int]) -> int:
    """The value of a counter once nothing moves it any more, however often the loop turns."""
    last, still = count(), 0
    while still < 2000:
        await asyncio.sleep(0)
        now = count()
        last, still = now, still + 1 if now == last else 0
    return last
