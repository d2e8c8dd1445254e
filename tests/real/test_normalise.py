"""Normalisation before the real engine: what a client that mangles its history costs.

About proxy.server.normaliser and proxy.core.normalise on a template that renders system and tools.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.integration.mangler import MESSAGES, Mangler, says
from tests.real.conftest import EngineHandle, ProxyFactory
from tests.real.proxies import ProxyProcess, Reply, ask

pytestmark = pytest.mark.real

OFF = {"X-Slotkeeper-Normalise": "off"}
SLACK = 32  # tokens
TURNS = 6
RESTART = 4  # the proxy is restarted before this turn
CHAT = "/v1/chat/completions"
TEXT = "The lamp in the hall is on and the door to the garden is closed. " * 20


def figures(reply: Reply) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were computed, by the engine's own count."""
    assert reply.status == 200, reply.body
    if "timings" in reply.body:
        return reply.prompt, reply.computed
    usage = reply.body["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["input_tokens"]


def talked(proxy: ProxyProcess, name: str, headers: dict[str, str] | None = None) -> list[int]:
    """Tokens computed beyond those that are new, for each turn but the first."""
    talk = Mangler(system=f"You are {name}. {TEXT}")
    found: list[tuple[int, int]] = []
    for turn in range(TURNS):
        if turn == RESTART:
            proxy.stop()
            proxy.start()
        talk.user(f"Question {turn} of {name}: look at the file, please. {TEXT[:200]}")
        api = MESSAGES if turn % 3 == 2 else CHAT
        body = talk.body(api, max_tokens=6, temperature=0, id_slot=-1)
        reply = ask(proxy.url, api, body, headers)
        found.append(figures(reply))
        message: dict[str, Any]
        if api == CHAT:
            message = reply.body["choices"][0]["message"]
        else:
            message = {"content": "".join(b.get("text", "") for b in reply.body["content"])}
        # A random model never calls a tool by itself: the client says it did.
        call = says(turn, tool=True)["tool_calls"]
        talk.heard({"role": "assistant", "content": message["content"] or "", "tool_calls": call})
        talk.result(f'{{"line": {turn}, "text": "{TEXT[:100]}"}}', f"call{turn}")
    return [computed - (now - before) for (before, _), (now, computed) in pairwise(found)]


def test_a_client_that_mangles(tools_engine: EngineHandle, proxy: ProxyFactory) -> None:
    """Trimmed, re-spaced, re-ordered, restarted in between: a turn computes what is new in it."""
    started = proxy(tools_engine)
    with_proxy = talked(started, "Ada")
    without = talked(started, "Bob", OFF)
    print(f"tokens beyond the new ones, per turn: normalised {with_proxy}, off {without}")
    assert max(with_proxy) <= SLACK
    assert min(without) > SLACK, "else this client breaks nothing"


def home(time: str, question: str) -> dict[str, Any]:
    """What Home Assistant sends; a new conversation each time."""
    system = f"Current time is {time}. Today's date is 2026-10-09.\n"
    system += f"You are a voice assistant for Home Assistant.\n{TEXT}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0}


def test_a_clock_in_the_first_line(tools_engine: EngineHandle, proxy: ProxyFactory) -> None:
    """The prefix is reused across one-shot conversations and a restart, and is not without us."""
    started = proxy(tools_engine)
    whole = ask(started.url, CHAT, home("14:02:07", "Is the lamp on?"))
    warm = ask(started.url, CHAT, home("14:03:11", "Is the door closed?"))
    started.stop()
    started.start()
    later = ask(started.url, CHAT, home("14:05:30", "What time is it?"))
    off = ask(started.url, CHAT, home("15:06:40", "Is it late?"), OFF)
    print([(reply.cached, reply.prompt) for reply in (whole, warm, later, off)])
    for reply in (warm, later):
        assert reply.cached > whole.prompt - SLACK
    assert off.cached < SLACK
