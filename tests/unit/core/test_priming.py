"""Which displaced conversation is computed again, when, and for whom that is broken off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core import priming
from proxy.core.priming import IDLE_SECONDS, breaks_off, due, to_keep, worth
from proxy.core.slots import Content
from tests.unit.factories import chat, content, costs

COSTS = costs()  # 0.01 s per token
NOW = 1000.0


def talk(name: str, n_tokens: int = 5000, *, used: float = NOW, side: bool = False) -> Content:
    """A conversation as a slot held it."""
    prompt = replace(chat(name), side=side)
    return content(prompt, n_tokens, used=used, sent=b"{}", storable=False)


def test_what_is_remembered() -> None:
    """The dearer of two; the newer of one; nothing that is cheap or cannot be sent again."""
    big, small = talk("big", 9000), talk("small", 1000)
    assert to_keep(None, big, COSTS, NOW) is big
    assert to_keep(big, small, COSTS, NOW) is big
    assert to_keep(small, big, COSTS, NOW) is big
    grown = replace(talk("big", 100), prompt=chat("big", "a", "b"), n_tokens=9500)
    assert to_keep(big, grown, COSTS, NOW) is grown
    assert to_keep(big, talk("tiny", 100), COSTS, NOW) is big
    assert to_keep(None, replace(big, sent=None), COSTS, NOW) is None


@pytest.mark.parametrize(
    ("holds", "idle", "want"),
    [
        (None, IDLE_SECONDS, True),
        (None, IDLE_SECONDS - 1, False),
        (talk("title", 300, side=True), IDLE_SECONDS, True),
        (talk("long side", 5000, side=True), IDLE_SECONDS, True),  # hardly ever wanted again
        (talk("other"), IDLE_SECONDS, False),  # as likely to go on
        (talk("other", 800), IDLE_SECONDS, True),
    ],
)
def test_when(holds: Content | None, idle: float, want: bool) -> None:
    """After a pause, over what is worth less."""
    assert due(talk("mine", used=NOW - 60), holds, COSTS, NOW, NOW - idle) is want


def test_an_empty_slot_is_worth_nothing() -> None:
    """And a conversation the less the longer ago it was used."""
    assert worth(None, COSTS, NOW) == 0
    assert worth(talk("a", used=0.0), COSTS, NOW) < worth(talk("a"), COSTS, NOW)


def test_for_whom_it_is_broken_off() -> None:
    """For any other request, unless it is nearly done; its own conversation waits for it."""
    gone = talk("mine")  # 50 s
    assert not breaks_off(gone, chat("mine", "a", "q"), COSTS, 0.0)
    assert breaks_off(gone, chat("other"), COSTS, 10.0)
    assert breaks_off(gone, replace(chat("mine", "a", "q"), side=True), COSTS, 10.0)
    nearly = 50.0 - priming.LET_RUN_SECONDS + 0.5
    assert not breaks_off(gone, chat("other"), COSTS, nearly)
