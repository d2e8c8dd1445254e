"""A coding agent's traffic over ``/v1/messages`` on the real engine: what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.real.conftest import EngineFactory, ProxyFactory
from tests.traffic import session

pytestmark = pytest.mark.real

TURNS = 10
SLACK = 32  # tokens
TAIL = 256  # of a sub-agent, computed again in less time than one save takes (about 70 here)
HELPERS = ("helper-0-0ed", "helper-1-1ed")


@dataclass
class Turn:
    """One answer's own figures, in tokens."""

    who: str
    prompt: int
    computed: int


def run(url: str) -> list[Turn]:
    """The whole session, one request after the other, with the vendor's own client."""
    found: list[Turn] = []
    with anthropic.Anthropic(base_url=url, api_key="k") as client:
        for who, body, heard in session(TURNS):
            known = {name: body.pop(name) for name in ("model", "max_tokens", "messages")}
            with client.messages.stream(**known, extra_body=body) as stream:
                answer = stream.get_final_message()
            usage = answer.usage
            cached = usage.cache_read_input_tokens or 0
            found.append(Turn(who, cached + usage.input_tokens, usage.input_tokens))
            heard("".join(block.text for block in answer.content if block.type == "text"))
    return found


def beyond(turns: list[Turn], who: str = "main") -> list[int]:
    """Tokens computed beyond those that are new, per request of one conversation but its first."""
    mine = [turn for turn in turns if turn.who == who]
    return [turn.computed - (turn.prompt - before.prompt) for before, turn in pairwise(mine)]


def table(name: str, turns: list[Turn]) -> str:
    """One line of figures."""
    total, most = sum(turn.computed for turn in turns), max(beyond(turns))
    prompts = sum(turn.prompt for turn in turns)
    return f"{name}: computed {total} of {prompts} prompt tokens; beyond new, at most: {most}"


def test_main_turns_recompute_nothing(
    tools_model: Path, engine: EngineFactory, proxy: ProxyFactory
) -> None:
    """With two sub-agents and titles on two slots, no conversation is computed twice."""
    front = proxy(engine(tools_model, context=8192))
    with_proxy = run(front.url)
    usual: dict[str, Any] = {"similarity": 0.1, "ram_cache": 8192}
    print(table("through slotkeeper", with_proxy))
    most = {who: max(beyond(with_proxy, who)) for who in ("main", *HELPERS)}
    print(most, "saves:", front.metric("save_seconds_count"))
    print(table("direct, RAM cache on", run(engine(tools_model, context=8192, **usual).url)))
    print(
        table("direct, RAM cache off", run(engine(tools_model, context=8192, similarity=0.1).url))
    )
    assert most.pop("main") <= SLACK
    assert max(most.values()) <= TAIL
