"""When a cold answer is explained, and from what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from proxy.core.ledger import Conversation, Line
from proxy.core.placement import Option
from proxy.core.queue import Kind, Lease
from proxy.core.records import Mode, Prompt, Reason
from proxy.core.template import Traits
from proxy.core.why import Why
from proxy.dialects import DIALECTS
from proxy.server.explainer import TAIL_TOKENS, Explainer
from proxy.server.normaliser import Turn
from proxy.telemetry.history import Decision, History
from proxy.telemetry.metrics import Metrics

CALL = DIALECTS["/v1/chat/completions"].parse(b'{"messages":[]}')
NOON = 1_790_000_000.0
DAY = 86_400.0


def row(*texts: str, prompt_n: int | None = 100, used: float = NOON) -> Conversation:
    """A conversation of these user messages."""
    lines = tuple(
        Line(raw, raw, text.encode())
        for text in texts
        for raw in [b'{"role":"user","content":"%b"}' % text.encode()]
    )
    return Conversation("c", b"n", lines=lines, prompt_n=prompt_n, used=used)


@dataclass
class Exchange:
    """What the explainer reads of one."""

    turn: Turn | None
    lease: Lease | None
    call: Any = CALL
    request_id: str = "r"
    seq: int = 1


@dataclass
class Bench:
    """Everything it asks, and it."""

    mode: Mode = Mode.EXCLUSIVE
    traits: Traits = field(default_factory=Traits)
    restarted: float = 0.0
    evicted: tuple[str, ...] = ()
    unknown: bool = False
    expected: int = 0
    prompts: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Builds it."""
        self.metrics, self.history = Metrics(), History()
        self.history.add(Decision("r", 0.0, "/", Reason.COLD, 200, 1.0))
        me = cast("Any", self)
        self.explainer = Explainer(
            me, me, me, me, self.metrics, self.history, lambda name: name in self.evicted
        )

    def body(self, conversation: Conversation) -> Mapping[str, Any]:
        """As the normaliser."""
        return {"n": len(conversation.lines)}

    def known(self, conversation: str) -> bool:
        """As the normaliser."""
        return not self.unknown

    async def render(self, body: Mapping[str, Any]) -> str:
        """As the backend."""
        return self.prompts.get(body["n"], "same" * body["n"])

    def look(
        self,
        before: Conversation | None,
        now: Conversation | None,
        cache_n: int | None = 0,
        reason: Reason = Reason.COLD,
        call: Any = CALL,
        *,
        rested: bool = False,
    ) -> Why | None:
        """After an answer of ``cache_n`` reused tokens."""
        option = Option(slot=0, reason=reason, hit=self.expected, n_tokens=9)
        prompt = Prompt(seed=b"", chain=(), ends=(), size=0)
        lease = Lease(option, Kind.NARROW, prompt, reason, queued=0.0, started=0.0)
        if cache_n is not None:
            lease.observed(cache_n, 120)
        turn = Turn(CALL, row=now, before=before, rested=rested)
        return self.explainer.look(cast("Any", Exchange(turn, lease, call)))

    async def cause(self, before: Conversation, now: Conversation, **more: Any) -> str:
        """What the closer look found."""
        assert self.look(before, now, **more) is None
        await asyncio.wait(self.explainer._tasks._tasks)
        (decision,) = self.history.recent(1)
        assert decision.cold is not None
        return str(decision.cold["cause"])


def test_what_differs_is_told_at_once() -> None:
    """The messages differ: no need to ask anybody."""
    bench = Bench()
    why = bench.look(row("one", "two"), row("one", "other", "three"))
    assert why is not None
    assert why.sentence == "history was rewritten at message 2 (user)"
    assert b'slotkeeper_cold_total{cause="history"} 1.0' in bench.metrics.render()[0]


def test_rules_that_were_off_are_named() -> None:
    """No advice to switch on what this very request switched off."""
    why = Bench().look(row("one", "two"), row("one", "other"), rested=True)
    assert why is not None
    assert "X-Slotkeeper-Normalise" in why.advice


def test_what_is_not_remembered_is_not_quoted() -> None:
    """The client asked for it, or the owner had it forgotten."""
    found = [
        Bench(unknown=unknown).look(row("one", "two"), row("one", "other", "three"))
        for unknown in (False, True)
    ]
    assert [bool(why and why.before and why.after) for why in found] == [True, False]


@pytest.mark.parametrize(
    ("before", "now", "cache_n"),
    [
        (None, row("one"), 0),
        (row("one", prompt_n=None), row("other"), 0),
        (row("one"), None, 0),
        (row("one"), row("other"), None),
        (row("one"), row("other"), 100 - TAIL_TOKENS),
        (row("one"), row("other"), 110),
        (row("one", prompt_n=TAIL_TOKENS), row("other"), 0),
    ],
)
def test_not_cold(before: Conversation | None, now: Conversation | None, cache_n: int) -> None:
    """New, never counted, not known, not told, or all but the prompt's end was reused."""
    bench = Bench()
    assert bench.look(before, now, cache_n) is None
    assert len(bench.explainer._tasks) == 0


def test_without_turn_or_lease() -> None:
    """No chat, or refused before it had a slot."""
    bench = Bench()
    assert bench.explainer.look(cast("Any", Exchange(None, None))) is None
    turn = Turn(CALL, row=row("one"), before=row("other"))
    assert bench.explainer.look(cast("Any", Exchange(turn, None))) is None


def test_a_client_that_wants_no_cache() -> None:
    """It got what it asked for."""
    call = replace(CALL, cache=False)
    assert Bench().look(row("one"), row("other"), call=call) is None


@pytest.mark.parametrize(
    ("bench", "more", "cause"),
    [
        ({}, {}, "displaced"),
        ({"evicted": ("c",)}, {}, "evicted"),
        ({"evicted": ("another",)}, {}, "displaced"),
        ({"evicted": ("c",), "expected": 90}, {}, "unknown"),
        ({"expected": 100}, {}, "unknown"),
        ({"mode": Mode.FORWARD}, {}, "forward"),
        ({"restarted": NOON + 1}, {}, "restarted"),
        ({"restarted": NOON - 1}, {}, "displaced"),
        ({}, {"reason": Reason.PINNED}, "unknown"),
        ({}, {"reason": Reason.WIDE}, "unknown"),
        ({}, {"cache_n": 100 - TAIL_TOKENS - 1}, "displaced"),
        ({"prompts": {1: "<a>one", 2: "<b>one two"}}, {}, "template"),
    ],
)
async def test_a_closer_look(bench: dict[str, Any], more: dict[str, Any], cause: str) -> None:
    """The messages extend: it was the template, or the slot."""
    assert await Bench(**bench).cause(row("one"), row("one", "two"), **more) == cause


@pytest.mark.parametrize(
    ("writes_date", "later", "settings", "cause"),
    [
        (True, DAY, b"{}", "date"),
        (True, 0.0, b"{}", "displaced"),
        (False, DAY, b"{}", "displaced"),
        (True, DAY, b'{"chat_template_kwargs":{"date_string":"21 Sep 2026"}}', "displaced"),
    ],
)
async def test_the_date(writes_date: bool, later: float, settings: bytes, cause: str) -> None:
    """A template that writes the day by itself, and another day; unless a date was given."""
    bench = Bench(traits=Traits(writes_date=writes_date))
    before, now = row("one"), row("one", "two", used=NOON + later)
    found = await bench.cause(replace(before, settings=settings), replace(now, settings=settings))
    assert found == cause


async def test_the_cause_goes_to_its_own_row() -> None:
    """Another conversation's request of the same id came meanwhile: it quotes nothing of this."""
    bench = Bench()
    bench.history.add(Decision("r", 1.0, "/", Reason.COLD, 200, 1.0, conversation="other"))
    assert bench.look(row("one"), row("one", "two")) is None
    await asyncio.wait(bench.explainer._tasks._tasks)
    assert [one.cold is not None for one in bench.history.recent(2)] == [False, True]


async def test_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither look ever raises; what is known of the slot is told."""

    def boom(*_: Any) -> None:
        raise ValueError("secret")

    bench = Bench()
    monkeypatch.setattr(bench, "body", boom)
    assert await bench.cause(row("one"), row("one", "two")) == "displaced"
    monkeypatch.setattr("proxy.server.explainer.first_difference", boom)
    assert bench.look(row("one"), row("other")) is None
    assert b'slotkeeper_faults_total{where="explain"} 2.0' in bench.metrics.render()[0]
