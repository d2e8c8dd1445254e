"""Conversations go back to the server that knows them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core import sticky
from proxy.core.sticky import Sticky, landmarks

SYSTEM = {"role": "system", "content": "s"}


def talk(*texts: str) -> list[dict[str, Any]]:
    """A conversation under a shared system prompt."""
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[n % 2], "content": t} for n, t in enumerate(texts))]


def test_a_conversation_is_found_by_its_beginning() -> None:
    """However it goes on; the longest known beginning counts."""
    found = Sticky()
    found.put(landmarks(talk("q")), 1)
    assert found.find(landmarks(talk("q", "a", "r"))) == 1
    assert found.find(landmarks(talk("q"))) == 1
    found.put(landmarks(talk("q", "a", "r")), 2)
    assert found.find(landmarks(talk("q", "a", "r", "b", "t"))) == 2
    assert found.find(landmarks(talk("q", "other"))) == 2  # the last to have seen the beginning


def test_a_shared_system_prompt_draws_nobody() -> None:
    """Another conversation of the same client may go elsewhere."""
    found = Sticky()
    found.put(landmarks(talk("q")), 1)
    assert found.find(landmarks(talk("r"))) is None
    assert landmarks([SYSTEM]) == ()


def test_a_single_part_is_its_string() -> None:
    """As templates render it."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    assert landmarks(parts) == landmarks([{"role": "user", "content": "q"}])


@pytest.mark.parametrize("messages", [None, {}, "text", 3])
def test_no_messages(messages: object) -> None:
    """Nothing to go by."""
    assert landmarks(messages) == ()
    assert Sticky().find(()) is None


def test_it_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was put longest ago, when there is too much."""
    monkeypatch.setattr(sticky, "MOST_MARKS", 2)
    found = Sticky()
    for n, text in enumerate(("a", "b")):
        found.put(landmarks(talk(text)), n)
    found.put(landmarks(talk("a")), 0)
    found.put(landmarks(talk("c")), 2)
    places = [found.find(landmarks(talk(text))) for text in ("a", "b", "c")]
    assert places == [0, None, 2]
