"""The figures: through the proxy beside direct, in one run, on the real engine.

``python -m tests.bench overhead`` first token on a hot slot: proxy, direct twice, bare relays
``python -m tests.bench forward``  default llama-server flags: equal answers, no foreign canary
``python -m tests.bench chain``    event-loop time of parse, normalise, chain and lookup, 150 kB
"""

from __future__ import annotations

import http.client
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from proxy.engine import Engine, EngineOptions, bundled_model
from tests.bench_hot import measured
from tests.bench_relay import KINDS, yardstick
from tests.real.proxies import ProxyProcess, ask
from tests.real.test_conversations import prose

CHAT = "/v1/chat/completions"
TOLERANCE = 0.4  # how far the engine itself moves log-probability gaps (DESIGN.md)


@dataclass
class Rig:
    """An engine and a proxy before it."""

    engine: Engine
    proxy: ProxyProcess


@contextmanager
def rig(*, mode: str = "exclusive", **options: Any) -> Iterator[Rig]:
    """Both running on SmolLM2, stopped at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slots = folder / "slots"
        slots.mkdir(mode=0o700)
        chosen = EngineOptions(slot_save_path=slots, **options)
        engine = Engine(bundled_model(), chosen, log=folder / "engine.log")
        engine.wait_healthy()
        proxy = ProxyProcess(engine.url, slots, folder)
        try:
            proxy.start(mode=mode)
            yield Rig(engine, proxy)
        finally:
            if proxy.process is not None:
                proxy.stop()
            engine.terminate()


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def first_token(
    connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]
) -> float:
    """Milliseconds from sending to the first event that carries text.

    The connection is kept where the server keeps it, as client libraries do; llama-server ends it
    with every stream, which ``Connection: close`` only says beforehand.
    """
    started = time.perf_counter()
    connection.request("POST", CHAT, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    took = 0.0
    while line := answer.readline():
        if not took and line.startswith(b"data: {") and b'"content":"' in line:
            took = (time.perf_counter() - started) * 1000
    assert took, "no text came"
    return took


def percentile(values: list[float], share: float) -> float:
    """By linear interpolation."""
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def overhead(n: int = 200, threads: int = 1) -> None:
    """In one run, in a changing order: direct twice, proxy, and two relays that decide nothing.

    One engine thread: with as many as there are cores the engine spins on all of them, and what
    is measured is how the scheduler of the machine divides them between engine, proxy and client.
    The relays tell what a hop, Python and aiohttp cost on this machine, whatever is done there.
    """
    with rig(context=4096, threads=threads) as both, ExitStack() as stack:
        messages = [{"role": "user", "content": prose(700, 1)}]
        request = {"messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
        body = orjson.dumps(request)
        pinned = orjson.dumps({**request, "id_slot": 0})
        slot = ask(both.proxy.url, CHAT, {**request, "stream": False}).headers["x-slotkeeper"]
        assert "slot=0" in slot
        here, there = both.engine.port, both.proxy.port
        ports = {"direct": here, "proxy": there, "control": here}
        ports |= {kind: stack.enter_context(yardstick(kind, here)) for kind in KINDS}
        arms: dict[str, Callable[[], float]] = {
            name: partial(
                first_token,
                http.client.HTTPConnection("127.0.0.1", port, timeout=60),
                body if name == "proxy" else pinned,
                {"Connection": "close"} if port == here else {},
            )
            for name, port in ports.items()
        }
        for arm in arms.values():
            for _ in range(5):
                arm()
        times: dict[str, list[float]] = {name: [] for name in arms}
        order, chance = list(arms), random.Random(n)
        for _ in range(n):
            chance.shuffle(order)
            for name in order:
                times[name].append(arms[name]())
        for name, values in times.items():
            gaps = [a - b for a, b in zip(values, times["direct"], strict=True)]
            own, beside = (
                f"p50 {percentile(x, 0.5):6.2f} ms, p99 {percentile(x, 0.99):6.2f} ms"
                for x in (values, gaps)
            )
            say(f"{name:9} {own}; - direct: {beside}  (n={n})")


def differs(direct: dict[str, Any], proxied: dict[str, Any]) -> str:
    """``equal``, ``tolerated`` (a near tie went the other way), or ``beyond``."""
    ours, theirs = (a["choices"][0]["logprobs"]["content"] for a in (proxied, direct))
    for mine, other in zip(ours, theirs, strict=False):
        if mine["id"] != other["id"]:
            known = {row["id"]: row["logprob"] for row in other["top_logprobs"]}
            gap = other["logprob"] - known.get(mine["id"], -99.0)
            return "tolerated" if gap <= TOLERANCE else "beyond"
    return "equal" if len(ours) == len(theirs) else "beyond"


def forward(n: int = 100, parallel: int = 200) -> None:
    """Default flags: four unified slots, RAM cache on."""
    with rig(mode="forward", defaults=True, context=8192) as both:
        say(f"mode: {both.proxy.admin('readyz')}")
        counts = {"equal": 0, "tolerated": 0, "beyond": 0}
        texts = 0
        for i in range(n):
            messages = [{"role": "user", "content": f"{prose(30, i)}. What is word {i % 7}?"}]
            plain = {"messages": messages, "max_tokens": 12, "temperature": 0}
            asked = {**plain, "logprobs": True, "top_logprobs": 8}
            direct = ask(both.engine.url, CHAT, asked).body
            proxied = ask(both.proxy.url, CHAT, asked).body
            counts[differs(direct, proxied)] += 1
            texts += ask(both.proxy.url, CHAT, plain).body["choices"] == [
                {k: v for k, v in c.items() if k != "logprobs"} for c in proxied["choices"]
            ]
        say(f"{n} one at a time against direct: {counts}; re-assembled = unstreamed: {texts}/{n}")
        for name, url in (("direct", both.engine.url), ("proxy", both.proxy.url)):
            say(f"{parallel} from 4 clients, {name}: {canaries(url, both.engine.url, parallel)}")


def canaries(url: str, engine: str, n: int) -> dict[str, int]:
    """Answers with a foreign canary, with their own, unlike a second asking; the most at once."""
    names = [f"{WORD[i % 20]}{1000 + i * 37}" for i in range(n)]
    asked = [
        {
            "messages": [{"role": "user", "content": f"Repeat this code exactly: {name}"}],
            "max_tokens": 16,
            "temperature": 0,
        }
        for name in names
    ]
    most = 0
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ask, url, CHAT, body) for body in asked]
        while not all(job.done() for job in jobs):
            most = max(most, sum(s["is_processing"] for s in ask(engine, "/slots").body))
            time.sleep(0.05)
    answers = [job.result().text for job in jobs]
    foreign = sum(
        any(other in text for j, other in enumerate(names) if j != i)
        for i, text in enumerate(answers)
    )
    with ThreadPoolExecutor(4) as pool:
        again = [reply.text for reply in pool.map(lambda b: ask(engine, CHAT, b), asked)]
    own = sum(name in text for name, text in zip(names, answers, strict=True))
    unlike = sum(a != b for a, b in zip(answers, again, strict=True))
    return {"foreign": foreign, "own": own, "unlike direct": unlike, "at once": most}


WORD = [f"code{letter}" for letter in "ABCDEFGHIJKLMNOPQRST"]


def chain() -> None:
    """Event-loop time of what every 150 kB request costs before it is sent, in ms."""
    for name, size, inner, whole in measured():
        say(
            f"{name}, {size / 1000:.0f} kB: normalise + chain + lookup: {_spread(inner)};"
            f" with parse and splice: {_spread(whole)}"
        )


def _spread(turns: list[list[float]]) -> str:
    """Of the turns, each at its fastest; and of all of them, with what the machine added."""
    best, every = [min(turn) for turn in turns], [spent for turn in turns for spent in turn]
    return (
        f"p50 {percentile(best, 0.5):.2f}, dearest turn {max(best):.2f}"
        f" (all {len(every)} repetitions: p50 {percentile(every, 0.5):.2f},"
        f" p95 {percentile(every, 0.95):.2f}, max {max(every):.2f})"
    )


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all."""
    every = {"overhead": overhead, "forward": forward, "chain": chain}
    for name in names or list(every):
        say(f"== {name}")
        every[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
