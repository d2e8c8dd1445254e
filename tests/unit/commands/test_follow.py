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
    """Once connected, the first time too, before what comes anew."""
    with FakeApi(events=[EVENT]) as api:
        stream = follow.lasting(Client(api.url), lambda: [("missed", 1)], silent)
        assert [next(stream) for _ in range(4)] == [("missed", 1), EVENT] * 2
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


@pytest.mark.parametrize(
    ("lasted", "made"),
    [(0.0, [0.25, 0.5, 1.0, 2.0, 5.0, 5.0]), (follow.STEADY, [0.25] * 6)],
)
def test_connections_that_end_at_once(
    pauses: list[float], lasted: float, made: list[float]
) -> None:
    """They are made less and less often, as if there were none; a steady one starts anew."""
    now = iter(n * lasted for n in range(99))
    with FakeApi(events=[EVENT]) as api:
        stream = follow.lasting(Client(api.url), tell=silent, clock=lambda: next(now))
        assert [next(stream) for _ in range(7)] == [EVENT] * 7
    assert pauses == made


def numbered(*numbers: int) -> list[Any]:
    """Rows of these numbers."""
    return [{"seq": number} for number in numbers]


def followed(
    monkeypatch: pytest.MonkeyPatch, streamed: list[Any], *remembered: list[Any] | ApiError
) -> list[int]:
    """What is printed when these rows are streamed, and these are remembered, at each question."""
    answers = iter(remembered)

    def events(_: Any, missed: Any) -> Any:
        yield from missed()
        yield from (("n", row) for row in streamed)

    def ask() -> list[Any]:
        answer = next(answers)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    monkeypatch.setattr(follow, "lasting", events)
    nobody: Any = None
    told = follow.rows(nobody, "n", ask, lambda row: row["seq"], 5)
    return [row["seq"] for row in told]


def test_what_came_before_the_first_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """More may come between the two than a new listener is told."""
    told = followed(monkeypatch, numbered(4, 5), numbered(1), numbered(1, 2, 3, 4))
    assert told == [1, 2, 3, 4, 5]


def test_a_gap_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy tells the newest of a flood; a row told again, or a first one, is no gap."""
    rows = numbered(2, 3, 2, 4, 9, 10)
    there = numbered(1)
    told = followed(monkeypatch, rows, there, there, numbered(5, 6, 7, 8, 9))
    assert told == list(range(1, 11))


def test_a_gap_that_cannot_be_filled_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next row it is asked again."""
    fault = UnreachableError("gone")
    told = followed(monkeypatch, numbered(1, 5, 6), [], [], fault, numbered(2, 3, 4, 5, 6))
    assert told == [1, 5, 2, 3, 4, 6]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was told long ago it is forgotten that it was."""
    monkeypatch.setattr(follow, "SEEN", 2)
    one, two, three = ({"n": number} for number in (1, 2, 3))

    def events(*_: Any) -> Any:
        rows = [("n", row) for row in (one, two, three, three, one)]
        return iter([*rows[:3], ("other", 9), *rows[3:]])

    monkeypatch.setattr(follow, "lasting", events)
    nobody: Any = None
    told = follow.rows(nobody, "n", list, lambda row: row["n"], 5)
    assert list(told) == [one, two, three, one]
