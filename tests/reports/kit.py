"""What a report is here: a client's requests, one after the other, and what must become of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from proxy.core.explain import Why, first_difference
from proxy.core.normalise import Result
from proxy.core.template import Traits
from proxy.dialects import DIALECTS
from tests.unit.core.normalise.kit import Desk, Message

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """A request, and what the model answered to it."""

    body: Body
    said: Message | None = None


@dataclass(frozen=True)
class Trigger:
    """The requests that the report is about.

    ``rules``: switches beside the mode ``safe``. ``told``: what the newest message must say in the
    end.
    """

    row: int
    report: str
    turns: Sequence[Turn]
    client: str = ""
    rules: Sequence[str] = ()
    traits: Traits = field(default_factory=Traits)
    api: str = CHAT
    told: Sequence[str] = ()


@dataclass(frozen=True)
class Explained:
    """A report nothing can be done about: the client's own bytes go on, and it is said why.

    ``sentence``: as ``quoted`` gives it. ``advice``: a part of it.
    """

    trigger: Trigger
    sentence: str
    advice: str


def named(triggers: Sequence[Trigger]) -> list[Any]:
    """As parameters, row and report for a name."""
    return [pytest.param(one, id=f"{one.row} {one.report}") for one in triggers]


def played(trigger: Trigger, mode: str = "safe") -> list[Result]:
    """What the proxy makes of each request."""
    desk = Desk(trigger.rules, mode, trigger.client, trigger.traits)
    made = []
    for turn in trigger.turns:
        made.append(arrives(desk, turn.body, trigger.api))
        if turn.said is not None:
            desk.hear(made[-1], turn.said)
    return made


def arrives(desk: Desk, body: Body, api: str = CHAT) -> Result:
    """One request, through its own API."""
    return desk.raw(DIALECTS[api].parse(orjson.dumps(body)).raw)


def holds(trigger: Trigger, made: Sequence[Result]) -> list[bool]:
    """For each request but the first, whether it extends the one before."""
    return [
        extends(one, other, turn.said)
        for turn, one, other in zip(trigger.turns, made, made[1:], strict=False)
    ]


def extends(before: Result, after: Result, said: Message | None = None) -> bool:
    """What was sent and what was generated is the beginning of what is sent now.

    Of what was sent, every byte; of what was generated, every value. Nothing else a template could
    render may differ.
    """
    old, new = orjson.loads(before.raw), orjson.loads(after.raw)
    sent, now = old.pop("messages"), new.pop("messages")
    repeated = [orjson.dumps(one) for one in now[: len(sent)]]
    return (
        [orjson.dumps(one) for one in sent] == repeated
        and (said is None or now[len(sent)] == said)
        and orjson.dumps(old) == orjson.dumps(new)
    )


def why(before: Result, after: Result, traits: Traits | None = None) -> Why | None:
    """The explanation of the second request, would it have been cold."""
    return first_difference(before.after, after.after, traits or Traits())


def last(made: Result) -> str:
    """The text of the newest message that is sent."""
    content = orjson.loads(made.raw)["messages"][-1]["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
