"""Several servers as one backend: who gets what, and who is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.backends import pool as pool_module
from proxy.backends.base import Facts, Single
from proxy.backends.pool import Pool
from proxy.backends.transport import OWNER
from proxy.core.routing import Routing
from proxy.errors import BackendAbsentError, BackendRefusedError, BackendUnreachableError


class Server(Single):
    """One of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = "1"
        self.down = False
        self.breaks = False
        self.closed = False
        self.asked: list[str] = []
        self.served = 0
        self.wrong: Exception = BackendUnreachableError(f"{name} is gone")
        self.lacking = frozenset({name})

    def primes(self, slot: int, body: bytes) -> bool:
        """Only the second one does."""
        assert (slot, body) == (0, b"x")
        return self.name == "b"

    @asynccontextmanager
    async def send(self, *_: Any, slot: int | None = None) -> AsyncIterator[str]:
        """Tells who it is; ``slot`` is the pool's business."""
        assert slot is None
        self._answer("send")
        self.served += 1
        yield self.name
        if self.breaks:
            raise self.wrong

    async def facts(self) -> Facts:
        """Two slots."""
        self._answer("facts")
        identity = {"version": self.version}
        return Facts("some", "", 1, 0, "m", "", identity, routing=Routing(serial=True))

    async def instance(self) -> str:
        """Nothing to tell."""
        self._answer("instance")
        return ""

    async def close(self) -> None:
        """Closed."""
        self.closed = True

    def _answer(self, what: str) -> None:
        self.asked.append(what)
        if self.down:
            raise self.wrong


@pytest.fixture
def servers() -> list[Server]:
    """Three."""
    return [Server(name) for name in "abc"]


@pytest.fixture
def pool(servers: list[Server]) -> Pool:
    """Of them."""
    return Pool(servers, serial=False)  # type: ignore[arg-type]


def body(*texts: str) -> bytes:
    """A chat."""
    return orjson.dumps({"messages": [{"role": "user", "content": text} for text in texts]})


async def who(
    pool: Pool, data: bytes | None, slot: int | None = None, *, owned: bool = True
) -> Any:
    """Who answers."""
    headers = [(OWNER, "")] if owned else []
    async with pool.send("POST", "/x", headers, data, slot=slot) as answer:
        return answer


async def test_the_slot_says_which(pool: Pool) -> None:
    """Whatever is known of the conversation."""
    assert [await who(pool, body("q"), slot) for slot in (2, 0, 1)] == ["c", "a", "b"]


async def test_a_conversation_goes_back(pool: Pool) -> None:
    """New ones go to the least busy; known ones to their own, busy or not."""
    async with AsyncExitStack() as busy:
        places = [
            await busy.enter_async_context(pool.send("POST", "/x", [], body(text)))
            for text in ("q0", "q1", "q2", "q3")
        ]
        assert places == ["a", "b", "c", "a"]
        assert await who(pool, body("q1", "a", "r")) == "b"
        assert await who(pool, body("q3", "a", "r")) == "a"
    assert await who(pool, body("new")) == "a"


@pytest.mark.parametrize("data", [None, b'no JSON but "messages"', b'["messages"]', b"{}"])
async def test_what_is_no_chat(pool: Pool, data: bytes | None) -> None:
    """Goes to the least busy."""
    async with pool.send("POST", "/x", [], body("q")):
        assert await who(pool, data) == "b"


async def test_who_is_missing_is_left_out(pool: Pool, servers: list[Server]) -> None:
    """Until it is back; then it is asked who it is."""
    assert await who(pool, body("q")) == "a"
    servers[0].down = True
    assert await pool.instance() == ""
    assert pool.absent == {0}
    assert await who(pool, body("q", "a", "r")) == "b"
    assert await pool.lacks() == {"b"}
    servers[0].down = False
    servers[0].asked.clear()
    await pool.instance()
    assert pool.absent == frozenset()
    assert servers[0].asked == ["instance", "facts"]


async def test_a_broken_connection_counts_at_once(pool: Pool, servers: list[Server]) -> None:
    """Nobody else is sent there before it was looked at again."""
    servers[0].breaks = True
    with pytest.raises(BackendUnreachableError):
        await who(pool, body("q"))
    assert pool.absent == {0}
    assert await who(pool, None) == "b"
    await pool.instance()
    assert pool.absent == frozenset()


def refused() -> BackendUnreachableError:
    """Nobody took the connection."""
    return BackendAbsentError("refused")


async def test_a_dead_one_is_replaced(pool: Pool, servers: list[Server]) -> None:
    """Before it answered: by one that is free, and of those the one that was used least lately."""
    assert [await who(pool, body(f"q{slot}"), slot) for slot in (2, 1, 0)] == ["c", "b", "a"]
    servers[0].down, servers[0].wrong = True, refused()
    moved: list[tuple[int | None, int]] = []
    pool.on_moved(lambda slot, to: moved.append((slot, to)))
    async with pool.send("POST", "/x", [], body("other"), slot=2):
        assert await who(pool, body("q"), 0) == "b"
    assert await who(pool, body("q"), 0) == "c"
    assert (pool.absent, pool.moved, moved) == ({0}, 2, [(0, 1), (0, 2)])


async def test_once_is_enough(pool: Pool, servers: list[Server]) -> None:
    """The second one is dead, too: so it is told, and the third is not asked."""
    servers[0].down = servers[1].down = True
    servers[0].wrong = refused()
    with pytest.raises(BackendUnreachableError, match="b is gone"):
        await who(pool, body("q"), 0)
    assert (servers[2].asked, pool.absent) == ([], {0, 1})
    assert await who(pool, body("q"), 0) == "c"


async def test_what_is_sent_once_only(pool: Pool, servers: list[Server]) -> None:
    """A post that may have been taken, what the proxy does for a slot.

    And an answer that began, and whatever fails because all is being closed.
    """
    servers[0].down = True
    await pool.instance()
    servers[1].down = servers[2].down = True
    pool = Pool(servers, serial=False)  # type: ignore[arg-type]
    with pytest.raises(BackendUnreachableError):
        await who(pool, None)
    servers[1].down = servers[2].down = False
    await pool.instance()
    for wrong in (servers[0].wrong, refused()):
        servers[0].wrong = wrong
        with pytest.raises(BackendUnreachableError):
            await who(pool, body("q"), 0, owned=False)
    servers[0].down, servers[0].breaks = False, True
    with pytest.raises(BackendUnreachableError):
        await who(pool, body("q"), 0)
    servers[0].down = True
    servers[1].down = False
    await pool.close()
    with pytest.raises(BackendUnreachableError):
        await who(pool, body("q"), 0)
    assert pool.moved == 0


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_no_slot_is_named(pool: Pool, servers: list[Server], method: str) -> None:
    """A question may be asked again; a post only where the connection was never taken."""
    servers[0].down = True
    if method == "POST":
        servers[0].wrong = refused()
    async with pool.send(method, "/x", [], None) as answer:
        assert answer == "b"
    assert pool.moved == 1


class Fragile(Server):
    """It dies of each request."""

    @asynccontextmanager
    async def send(self, *_: Any, slot: int | None = None) -> AsyncIterator[str]:
        """Taken, and never answered."""
        del slot
        self._answer("send")
        self.down = True
        raise self.wrong
        yield


@pytest.mark.parametrize("sent", [b'{"messages":[],"id_slot":SLOT}', b"no JSON"])
async def test_a_request_that_kills(sent: bytes) -> None:
    """It is handed on once, and never again: however often it comes, each costs one at most."""
    servers = [Fragile(name) for name in "abcde"]
    pool = Pool(servers, serial=False)  # type: ignore[arg-type]
    dead = []
    for slot in (0, 2, 3):
        with pytest.raises(BackendUnreachableError):
            await who(pool, sent.replace(b"SLOT", b"%d" % slot), slot)
        dead.append("".join(server.name for server in servers if server.down))
    assert (dead, pool.moved) == (["ab", "abc", "abcd"], 1)
    assert servers[4].asked == ["instance"]


async def test_what_kills_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is forgotten."""
    monkeypatch.setattr(pool_module, "MOST_FATAL", 1)
    servers = [Server(name) for name in "ab"]
    pool = Pool(servers, serial=False)  # type: ignore[arg-type]
    servers[0].down = True
    assert [await who(pool, body(text), 0) for text in ("q", "r", "q")] == ["b", "b", "b"]
    with pytest.raises(BackendUnreachableError):
        await who(pool, body("q"), 0)


async def test_a_look_comes_before_a_taken_one_is_handed_on(
    pool: Pool, servers: list[Server]
) -> None:
    """Whoever is dead, too, is not asked; if all are, it is told."""
    servers[0].down = servers[1].down = True
    assert await who(pool, body("q"), 0) == "c"
    assert (servers[1].asked, pool.absent) == (["instance"], {0, 1})
    servers[2].down = True
    with pytest.raises(BackendUnreachableError, match="a is gone"):
        await who(pool, body("r"), 0)
    assert (servers[2].served, pool.absent, pool.moved) == (1, {0, 1, 2}, 1)


async def test_who_is_silent_gets_nothing(
    pool: Pool, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not say in time that it is there."""
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 0.0)

    async def silent() -> str:
        await asyncio.Event().wait()
        return ""

    servers[0].down = True
    for server in servers[1:]:
        monkeypatch.setattr(server, "instance", silent)
    with pytest.raises(BackendUnreachableError, match="a is gone"):
        await who(pool, body("q"), 0)
    assert [server.served for server in servers] == [0, 0, 0]


async def test_a_conversation_stays_where_it_was_moved(pool: Pool, servers: list[Server]) -> None:
    """Also when the server it was for is back."""
    servers[0].down, servers[0].wrong = True, refused()
    assert await who(pool, body("q")) == "b"
    servers[0].down = False
    await pool.instance()
    assert pool.absent == frozenset()
    assert await who(pool, body("q", "a", "r")) == "b"


async def test_what_a_request_finds_outlives_an_older_look(
    pool: Pool, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who answered a look and died before its end is absent until the next one."""
    asked, gate = asyncio.Event(), asyncio.Event()
    here = servers[1].instance

    async def slow() -> str:
        asked.set()
        await gate.wait()
        return await here()

    monkeypatch.setattr(servers[1], "instance", slow)
    look = asyncio.create_task(pool.instance())
    await asked.wait()
    assert servers[0].asked == ["instance"]
    servers[0].breaks = True
    with pytest.raises(BackendUnreachableError):
        await who(pool, body("q"), 0)
    gate.set()
    await look
    assert pool.absent == {0}
    await pool.instance()
    assert pool.absent == frozenset()


async def test_none_is_there(pool: Pool, servers: list[Server]) -> None:
    """The first one's error is told, and requests are tried all the same."""
    for server in servers:
        server.down = True
    with pytest.raises(BackendUnreachableError, match="a is gone"):
        await pool.instance()
    with pytest.raises(BackendUnreachableError, match="a is gone"):
        await pool.facts()
    servers[1].down = False
    with pytest.raises(BackendUnreachableError):
        await who(pool, None)
    assert await pool.instance() == ""
    assert await who(pool, None) == "b"


async def test_a_bug_is_no_missing_server(pool: Pool, servers: list[Server]) -> None:
    """What is no answer of a server is raised."""
    servers[2].down, servers[2].wrong = True, RuntimeError("bug")
    with pytest.raises(RuntimeError):
        await pool.instance()


async def test_facts(pool: Pool, servers: list[Server], caplog: pytest.LogCaptureFixture) -> None:
    """As many slots as all have; what shares what computes is the user's to say."""
    servers[1].version = "2"
    found = await pool.facts()
    assert found.total_slots == 3
    assert found.routing is not None
    assert not found.routing.serial
    servers[0].down = True
    assert (await pool.facts()).total_slots == 3


async def test_everything_else(pool: Pool, servers: list[Server]) -> None:
    """Each has its own say; no slot can be driven; all are closed."""
    assert [pool.primes(slot, b"x") for slot in range(3)] == [False, True, False]
    with pytest.raises(BackendRefusedError, match="a pool of servers cannot"):
        await pool.slots()
    await pool.close()
    assert all(server.closed for server in servers)
