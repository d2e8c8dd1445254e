"""Who listens is told what changes, and never holds anything up."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from proxy.core.records import Reason
from proxy.errors import OverloadedError
from proxy.server import events
from proxy.server.events import Hub
from proxy.telemetry.history import Decision


class View:
    """What there is to tell, set by the test."""

    def __init__(self) -> None:
        self.now = 0
        self.mode = "exclusive"
        self.rows: list[dict[str, Any]] = []
        self.lines = 0

    def status(self) -> Mapping[str, Any]:
        """Its clock runs whenever one looks."""
        self.now += 1
        return {"now": self.now, "mode": self.mode}

    def slots(self) -> Sequence[Mapping[str, Any]]:
        """As set."""
        return self.rows

    def running(self) -> Sequence[Mapping[str, Any]]:
        """None."""
        return []

    def snapshots(self) -> Sequence[Mapping[str, Any]]:
        """One, whose value changes all the time."""
        self.now += 1
        return [{"id": "a", "value": self.now}]

    def requests(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """Two, the newest first."""
        return [{"request_id": "new"}, {"request_id": "old"}][:limit]

    def decided(self, decision: Decision) -> Mapping[str, Any]:
        """Its id."""
        return {"request_id": decision.request_id, "status": decision.status}

    def logs(self, limit: int, level: str = "debug", after: int = 0) -> Sequence[Mapping[str, Any]]:
        """As many lines as set."""
        del level
        return [{"seq": n} for n in range(after + 1, self.lines + 1)][-limit:]


def parsed(data: bytes | None) -> list[tuple[str, Any]]:
    """Kinds and data."""
    assert data is not None
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        kind, payload = block.split("\n")
        found.append((kind.removeprefix("event: "), orjson.loads(payload.removeprefix("data: "))))
    return found


def decision(name: str, status: int = 200, seq: int | None = None) -> Decision:
    """A finished request; those of one name are the same one."""
    seq = zlib.crc32(name.encode()) if seq is None else seq
    return Decision(name, 1.0, "/", Reason.COLD, status, 1.0, seq=seq)


@pytest.fixture
def view() -> View:
    """One with a line in its log."""
    made = View()
    made.lines = 1
    return made


async def test_everything_first(view: View) -> None:
    """All pages, then rows of both logs, the oldest first."""
    with Hub(view).listen() as listener:
        told = parsed(await listener.next())
    assert [kind for kind, _ in told] == [
        "status", "slots", "running", "snapshots", "request", "request", "log",
    ]  # fmt: skip
    assert [data["request_id"] for kind, data in told if kind == "request"] == ["old", "new"]
    assert told[1][1] == {"slots": []}


async def test_only_what_changed(view: View) -> None:
    """A clock and a value that fades are no news; a slot is, once."""
    hub = Hub(view)
    with hub.listen() as listener:
        parsed(await listener.next())
        for _ in range(4):
            hub.beat()
        while not listener._queue.empty():
            await listener.next()
        for _ in range(8):
            hub.beat()
        assert listener._queue.empty()
        view.rows = [{"index": 0}]
        for _ in range(8):
            hub.beat()
        assert parsed(await listener.next()) == [("slots", {"slots": [{"index": 0}]})]
        assert listener._queue.empty()
        view.mode = "forward"
        for _ in range(4):
            hub.beat()
        assert parsed(await listener.next()) == [
            ("status", {"now": view.now - 1, "mode": "forward"})
        ]


async def test_rows_of_the_logs(view: View) -> None:
    """Each row once, in order; one that was explained within the same beat as it is at last."""
    hub = Hub(view)
    hub.decided(decision("before"), True)
    with hub.listen() as listener:
        hub.beat()
        while not listener._queue.empty():
            await listener.next()
        view.lines = 3
        for name, status in (("a", 0), ("b", 200), ("a", 200)):
            hub.decided(decision(name, status), True)
        hub.beat()
        assert parsed(await listener.next()) == [
            ("request", {"request_id": "b", "status": 200}),
            ("request", {"request_id": "a", "status": 200}),
            ("log", {"seq": 2}),
            ("log", {"seq": 3}),
        ]


async def test_two_requests_of_one_id_are_two_rows(view: View) -> None:
    """A client may give all its requests the same id."""
    hub = Hub(view)
    with hub.listen() as listener:
        while not listener._queue.empty():
            await listener.next()
        for seq, status in ((1, 200), (2, 500)):
            hub.decided(decision("mine", status, seq), True)
        told = b"".join(hub._rows())
    rows = [data["status"] for kind, data in parsed(told) if kind == "request"]
    assert rows == [200, 500]


async def test_a_flood_is_cut(view: View) -> None:
    """Of very many rows in one beat the newest are told."""
    hub = Hub(view)
    with hub.listen() as listener:
        hub.beat()
        while not listener._queue.empty():
            await listener.next()
        view.lines = 1000
        for number in range(1000):
            hub.decided(decision(str(number)), True)
        hub.beat()
        told = parsed(await listener.next())
    assert len(told) == 2 * events.ROWS
    assert [data["seq"] for kind, data in told if kind == "log"][-1] == 1000
    assert [data["request_id"] for kind, data in told if kind == "request"][-1] == "999"


async def test_who_does_not_read_is_let_go(view: View) -> None:
    """Nothing is gathered for it beyond a bound, and it hears no more."""
    hub = Hub(view)
    with hub.listen() as slow, hub.listen() as quick:
        for number in range(events.DEPTH + 2):
            hub.decided(decision(str(number)), True)
            hub.beat()
            await quick.next()
        assert await slow.next() is None
        assert parsed(await quick.next())
        slow.tell(b"more")
        assert slow._queue.empty()


async def test_silence_is_broken(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment tells that the connection lives."""
    monkeypatch.setattr(events, "ALIVE", 0)
    with Hub(view).listen() as listener:
        await listener.next()
        assert (await listener.next() or b"").startswith(b":")


async def test_bounded_and_closed(view: View) -> None:
    """So many and no more; after the end none, and those there were hear of it."""
    hub = Hub(view)
    open_ones = [hub.listen() for _ in range(events.LISTENERS)]
    listeners = [one.__enter__() for one in open_ones]
    with pytest.raises(OverloadedError), hub.listen():
        pass
    hub.close()
    assert [await one.next() for one in listeners] == [None] * events.LISTENERS
    for one in open_ones:
        one.__exit__(None, None, None)
    with pytest.raises(OverloadedError), hub.listen():
        pass


async def test_a_fault_ends_no_live_page(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page that cannot be made is a line in the log; the next beat tells again."""
    monkeypatch.setattr(events, "BEAT", 0.0)
    hub = Hub(view)
    faults = [RuntimeError("canary")]

    def running() -> Sequence[Mapping[str, Any]]:
        if faults:
            raise faults.pop()
        return [{"request_id": "r"}]

    with hub.listen() as listener, capture_logs() as logged:
        await listener.next()
        monkeypatch.setattr(view, "running", running)
        beating = asyncio.create_task(hub.run())
        told = parsed(await listener.next())
        beating.cancel()
        await asyncio.wait({beating})
    assert ("running", {"running": [{"request_id": "r"}]}) in told
    assert [(line["event"], line["error"]) for line in logged] == [("events.fault", "RuntimeError")]


async def test_nothing_is_gathered_while_nobody_listens(view: View) -> None:
    """The next listener begins with everything anyway."""
    hub = Hub(view)
    hub.decided(decision("a"), True)
    assert hub._decided == {}
    with hub.listen():
        hub.decided(decision("a"), True)
        assert [one.request_id for one in hub._decided.values()] == ["a"]
    with hub.listen() as listener:
        assert hub._decided == {}
        hub.beat()
        await listener.next()
