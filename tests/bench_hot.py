"""Event-loop time of what every 150 kB request costs before it is sent."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from proxy.core.normalise import switched_on
from proxy.core.normalise.book import Book
from proxy.core.placement import Need
from proxy.core.queue import Engine, Kind, Waiting, next_up
from proxy.core.slots import Slot
from proxy.core.template import Traits
from proxy.dialects import DIALECTS
from proxy.server.normaliser import Normaliser, Nowhere
from proxy.telemetry.metrics import Metrics
from tests.traffic import WORDS, system_text, tools
from tests.unit.factories import content, costs, snapshot

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SYSTEM_SIZE, TURNS, RESIDENTS = 75_000, 60, 200
REQUESTS, REPEATS = 30, 7
Body = dict[str, Any]


class Served:
    """A template that renders everything."""

    model = "bench"
    adapters = False
    traits = Traits(mid_system=False, two_systems=True)


def conversation(turn: int, *, clock: str = "", spaced: bool = False) -> Body:
    """A chat of ``TURNS`` + ``turn`` rounds of tool use; ``spaced``: as the client respells it."""
    said = f"Current time is {clock}.\n" if clock else ""
    messages: list[Body] = [
        {"role": "system", "content": said + system_text("bench", SYSTEM_SIZE)},
        {"role": "user", "content": "Begin."},
    ]
    for number in range(TURNS + turn):
        arguments = f'{{"path": "{number}.py", "limit": 1.0}}'
        if spaced:
            arguments = f'{{"limit":1,"path":"{number}.py"}}'
        call = {"name": "Read", "arguments": arguments}
        asked = {"id": f"call_{number:026d}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": [asked]})
        result = {"role": "tool", "tool_call_id": asked["id"], "content": WORDS * 6}
        messages.append(result)
    named = [
        {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}}
        for t in tools(tuple(f"tool_{n}" for n in range(14)))
    ]
    return {"messages": messages, "tools": named, "max_tokens": 1}


def agent(turn: int) -> Body:
    """The like in Claude Code's own API: marks that move, a billing block, a system message."""
    messages: list[Body] = [
        {"role": "user", "content": "Begin."},
        {"role": "system", "content": "# Environment\n" + WORDS * 100},
    ]
    for number in range(TURNS + turn):
        use = {"type": "tool_use", "id": f"t{number}", "name": "tool_0", "input": {"path": "a"}}
        messages.append({"role": "assistant", "content": [use]})
        back = {"type": "tool_result", "tool_use_id": f"t{number}", "content": WORDS * 6}
        messages.append({"role": "user", "content": [back]})
    messages[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
    billing = f"x-anthropic-billing-header: cc_version=2.1.332.5b4; cch={turn:05x};"
    system = [billing, system_text("agent", SYSTEM_SIZE)]
    return {
        "system": [{"type": "text", "text": text} for text in system],
        "messages": messages,
        "tools": tools(tuple(f"tool_{n}" for n in range(14))),
        "max_tokens": 1,
    }


CASES: dict[str, tuple[str, Callable[[int], Body]]] = {
    "nothing to change": (CHAT, conversation),
    "a clock in the system text": (CHAT, lambda n: conversation(n, clock=f"14:{n:02}:07")),
    "respelt arguments": (CHAT, lambda n: conversation(n, spaced=n > 0)),
    "Claude-shaped": (MESSAGES, agent),
}


Spent = list[list[float]]  # per turn after the first, milliseconds of each repetition


def measured() -> Iterator[tuple[str, int, Spent, Spent]]:
    """Per case: bytes of the last request, and what each turn took, in each repetition.

    First the time of normalise, chain and lookup; then with parsing before and splicing after them.
    A turn does the same work in every repetition: what the fastest did not need, the machine took.
    """
    for name, (path, body) in CASES.items():
        runs = [_conversation(path, body) for _ in range(REPEATS)]
        inner, spent = (
            [list(turn) for turn in zip(*run, strict=True)] for run in zip(*runs, strict=True)
        )
        yield name, len(orjson.dumps(body(REQUESTS - 1))), inner, spent


def _conversation(path: str, body: Callable[[int], Body]) -> tuple[list[float], list[float]]:
    """Milliseconds of each turn after the first, with nothing remembered but other people's."""
    known = costs()
    states = tuple((snapshot(range(1000 * k), f"s{k}"), 1000 * k) for k in range(1, 5))
    book, dialect = Book(256, 1 << 28), DIALECTS[path]
    on = switched_on("safe", ())
    normaliser = Normaliser(
        book, Nowhere(), Metrics(), time.time, served=Served(), on=on, shadow=False
    )
    for other in range(RESIDENTS):
        filler = {"messages": [{"role": "user", "content": f"{other} {WORDS}"}]}
        call = DIALECTS[CHAT].parse(orjson.dumps(filler))
        normaliser.prepare(call, {}, b"n", keep=True, off=False)
    inner: list[float] = []
    spent: list[float] = []
    gc.collect()
    gc.freeze()  # as the service does once it is up
    for turn in range(REQUESTS):
        raw = orjson.dumps(body(turn))
        started = time.perf_counter()
        call = dialect.parse(raw)
        parsed = time.perf_counter()
        ready = normaliser.prepare(call, {}, b"n", keep=True, off=False)
        prompt = dialect.prompt(ready.call, b"n")
        slots = [Slot(0, content=content(prompt, 30_000)), Slot(1), Slot(2), Slot(3)]
        state = Engine(slots, 4, permits=0, wide=False, large=False, typical=1.0)
        waiting = Waiting(Need(prompt, exact=True), Kind.NARROW, 0.0)
        assert next_up([waiting], state, known, 1.0, lambda _: states)
        inner.append((time.perf_counter() - parsed) * 1000)
        dialect.upstream(ready.call, 0)
        spent.append((time.perf_counter() - started) * 1000)
        said = conversation(turn + 1)["messages"][-2]  # as the model spelt it
        normaliser.answered(ready, orjson.dumps(said), 9)
    gc.unfreeze()
    return inner[1:], spent[1:]
