"""Learning a template's traits from a backend that may fail at any point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.backends.base import Facts
from proxy.core.template import SAMPLES, Traits
from proxy.errors import (
    BackendBrokenError,
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnreachableError,
    SlotkeeperError,
)
from proxy.traits import Served


@dataclass
class Template:
    """Renders contents one after the other; ``errors`` by name of the sample."""

    instance: str = "one"
    text: str = ""
    head: str = ""
    errors: dict[str, SlotkeeperError] = field(default_factory=dict)
    down: bool = False
    asked: int = 0

    async def facts(self) -> Facts:
        """Who it is."""
        if self.down:
            raise BackendUnreachableError("no connection")
        return Facts("llama-server", self.instance, 1, 4096, "m", "", {}, self.text)

    async def render(self, body: Mapping[str, Any]) -> str:
        """The contents."""
        self.asked += 1
        name = next(name for name, sample in SAMPLES.items() if sample is body)
        if name in self.errors:
            raise self.errors[name]
        return self.head + "".join(message["content"] for message in body["messages"])


def clock() -> float:
    """Always the same time."""
    return 7.0


def _refused(status: int) -> BackendRefusedError:
    return BackendRefusedError("no", answer=status)


async def test_learns_all() -> None:
    """Every sample is rendered once, and the template's text is looked at."""
    backend = Template(text="Today 2026-10-09", head="Today 2026-10-09")
    learned = await Served(clock).learn(backend)
    assert backend.asked == len(SAMPLES)
    assert (learned.mid_system, learned.renders_tools, learned.writes_date) == (True, False, False)
    backend.text = ""
    assert (await Served(clock).learn(backend)).writes_date


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_is_an_answer(status: int) -> None:
    """A template that raises cannot do it."""
    backend = Template(errors={"mid_system": _refused(status)})
    learned = await Served(clock).learn(backend)
    assert (learned.mid_system, learned.two_systems) == (False, True)


@pytest.mark.parametrize(
    "error",
    [
        _refused(503),
        _refused(401),
        BackendUnreachableError("gone"),
        BackendTimeoutError("slow"),
        BackendBrokenError("odd"),
    ],
)
async def test_a_failure_is_no_answer(error: SlotkeeperError) -> None:
    """Nothing is learned from a backend that fails half-way; the next call asks again."""
    backend, learner = Template(errors={"mid_system": error}), Served(clock)
    assert await learner.learn(backend) == Traits()
    backend.errors.clear()
    assert (await learner.learn(backend)).mid_system is True


async def test_an_absent_backend() -> None:
    """No connection: nothing is known, nothing is raised."""
    backend, learner = Template(down=True), Served(clock)
    assert await learner.learn(backend) == Traits()
    assert backend.asked == 0


async def test_once_per_process() -> None:
    """The same process is not asked again, another one is."""
    backend, learner = Template(), Served(clock)
    first = await learner.learn(backend)
    assert await learner.learn(backend) is first
    assert backend.asked == len(SAMPLES)
    backend.instance, backend.errors = "two", {"two_systems": _refused(400)}
    assert (await learner.learn(backend)).two_systems is False


async def test_a_nameless_process_is_always_asked() -> None:
    """Without an instance nobody can tell whether it is still the same one."""
    backend, learner = Template(instance=""), Served(clock)
    assert await learner.learn(backend) == await learner.learn(backend)
    assert backend.asked == 2 * len(SAMPLES)


async def test_a_server_that_renders_nothing_is_asked_again() -> None:
    """A template that refuses every sample teaches nothing worth remembering."""
    backend = Template(errors=dict.fromkeys(SAMPLES, _refused(400)))
    learner = Served(clock)
    assert await learner.learn(backend) == Traits()
    assert await learner.learn(backend) == Traits()
    assert backend.asked == 2 * len(SAMPLES)


async def test_what_is_known_outlives_a_failure() -> None:
    """A backend that cannot be asked now is taken for the one that was; a new one is noticed."""
    backend, learner = Template(), Served(clock)
    first = await learner.learn(backend)
    backend.down = True
    assert await learner.learn(backend) is first
    assert (learner.model, learner.restarted) == ("m", 0.0)
    backend.down, backend.instance = False, "two"
    await learner.learn(backend)
    assert learner.restarted == 7.0
