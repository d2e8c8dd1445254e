"""``proxy.commands.follow``: what comes is told across restarts of the proxy."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.client import ApiError, Client, UnreachableError
from proxy.commands import follow
from tests.unit.commands.fake_api import FakeApi, refusal

EVENT = ("status", {"ready": True})


def silent(_: str) -> None:
    """Nobody hears of it."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between two tries; none is made."""
    made: list[float] = []
    monkeypatch.setattr("proxy.commands.follow.time.sleep", made.append)
    return made


def test_it_tries_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less and less often, up to every five seconds, until the proxy is there again."""
    pauses: list[float] = []
    told: list[str] = []
    with FakeApi(events=[EVENT]) as api:
        stream = follow.lasting(Client(api.url), tell=told.append)
        assert next(stream) == EVENT
    again = FakeApi(events=[EVENT], port=api.server.server_port)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            again.__enter__()

    monkeypatch.setattr("proxy.commands.follow.time.sleep", sleep)
    try:
        assert next(stream) == EVENT
    finally:
        again.__exit__()
    assert pauses == [0.25, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0]
    assert [line.rpartition("; ")[2] for line in told] == [
        "trying again, until Ctrl-C",
        "connected again",
    ]


def test_what_was_missed_comes_first(pauses: list[float]) -> None:
    """After a break, before what comes anew."""
    with FakeApi(events=[EVENT]) as api:
        stream = follow.lasting(Client(api.url), lambda: [("missed", 1)], silent)
        assert [next(stream) for _ in range(3)] == [EVENT, ("missed", 1), EVENT]
    assert pauses == [0.25]


def test_a_refusal_is_an_answer(pauses: list[float]) -> None:
    """A fault of a proxy that starts passes; another key does not."""
    with FakeApi(events=[EVENT]) as api:
        stream = follow.lasting(Client(api.url), tell=silent)
        next(stream)
        api.events = []
        answers = iter([(503, refusal("Too many.")), (401, refusal("The admin key."))])
        api.answers["GET api/events"] = lambda: next(answers)
        with pytest.raises(ApiError, match="The admin key"):
            next(stream)
    assert pauses == [0.25, 0.5]


def test_a_fault_to_begin_with_is_told() -> None:
    """Nobody waits for a proxy that never answered."""
    with (
        FakeApi({"GET api/events": (503, refusal("Too many."))}) as api,
        pytest.raises(ApiError, match="Too many"),
    ):
        next(follow.lasting(Client(api.url)))
    with pytest.raises(UnreachableError):
        next(follow.lasting(Client(api.url)))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was told long ago it is forgotten that it was."""
    monkeypatch.setattr(follow, "SEEN", 2)

    def events(*_: Any) -> Any:
        return iter([("n", 1), ("n", 2), ("n", 3), ("other", 9), ("n", 3), ("n", 1)])

    monkeypatch.setattr(follow, "lasting", events)
    nobody: Any = None
    assert list(follow.rows(nobody, "n", list, lambda row: row, 5)) == [1, 2, 3, 1]
