"""The promise: no conversation is prefilled twice. Real engine, real proxy, real restarts.

Each test prints its figures; ``pytest -s tests/real/test_conversations.py`` shows them.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import EngineFactory, EngineHandle, ProxyFactory
from tests.real.proxies import ProxyProcess, Reply, ask

WORDS = [
    "river",
    "stone",
    "lamp",
    "window",
    "garden",
    "copper",
    "silent",
    "morning",
    "bridge",
    "paper",
    "winter",
    "captain",
    "orange",
    "mountain",
    "letter",
    "coffee",
    "engine",
    "harbour",
    "violin",
    "meadow",
    "pocket",
    "thunder",
    "candle",
    "market",
    "silver",
]
IDLE = 3.0  # seconds until an idle slot is saved, by default
SLACK = 16  # tokens: the end of a turn is tokenised anew with what follows it


def prose(words: int, seed: int) -> str:
    """Text that no other seed shares beyond chance."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


@dataclass
class Conversation:
    """A client that keeps its history and appends."""

    system: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": self.system}]

    def turn(self, proxy: ProxyProcess, text: str, **more: Any) -> Reply:
        """Say something, keep the answer."""
        self.messages.append({"role": "user", "content": text})
        reply = proxy.chat(self.messages, **more)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.replies.append(reply)
        return reply

    @property
    def grown(self) -> int:
        """Tokens the last prompt has more than the one before."""
        return self.replies[-1].prompt - self.replies[-2].prompt


def settle(proxy: ProxyProcess) -> int:
    """Wait until the idle saves are done; tokens the policy left unsaved, at worst in one slot."""
    deadline, quiet_since, saves = time.monotonic() + 60, time.monotonic(), -1.0
    while time.monotonic() < deadline and time.monotonic() - quiet_since < IDLE + 3:
        count = proxy.metric("save_seconds_count")
        if count != saves:
            saves, quiet_since = count, time.monotonic()
        time.sleep(0.2)
    return unsaved(proxy)


def noticed(proxy: ProxyProcess, restarts: float) -> None:
    """Wait until the proxy saw the restart and proved the backend anew; before, it looks ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and proxy.metric("backend_restarts_total") == restarts:
        time.sleep(0.05)
    proxy.wait()


def unsaved(proxy: ProxyProcess) -> int:
    """Tokens that would be lost with the backend, at worst in one slot."""
    rows = proxy.admin("api/slots")["slots"]
    return max((row["tokens"] or 0) - (row["saved_tokens"] or 0) for row in rows)


def allowed(proxy: ProxyProcess, talks: list[Conversation]) -> int:
    """Tokens that may be recomputed: what the policy leaves unsaved, and a tail's new tokenisation.

    A displaced slot's tail stays unsaved where computing it again is quicker than saving it, which
    depends on the disk and on what else the machine does. The learned costs lag behind: 3 times.
    """
    saves = max(1.0, proxy.metric("save_seconds_count"))
    save = proxy.metric("save_seconds_sum") / saves
    timings = [talk.replies[0].body["timings"] for talk in talks]
    per_token = min(t["prompt_ms"] / t["prompt_n"] for t in timings) / 1000
    return SLACK + int(3 * save / per_token)


def rounds(proxy: ProxyProcess, talks: list[Conversation], n: int, first: int) -> list[int]:
    """Every conversation speaks once per round; tokens recomputed beyond what is new."""
    over = []
    for turn in range(first, first + n):
        for talk in talks:
            talk.turn(proxy, f"Turn {turn}: {prose(20, turn)}", max_tokens=24)
            if len(talk.replies) > 1:
                over.append(talk.replies[-1].computed - talk.grown)
                reply = talk.replies[-1]
                print(
                    f"  turn {turn}: {reply.reason:9} prompt={reply.prompt} "
                    f"computed={reply.computed} new={talk.grown}"
                )
    return over


def store_bytes(slot_dir: Path) -> int:
    """Bytes of all snapshots."""
    return sum(p.stat().st_size for p in slot_dir.glob("slotkeeper/*/*.kv") if p.name != "probe.kv")


def final_bytes(proxy: ProxyProcess, talks: list[Conversation]) -> float:
    """What the last states of these conversations must take, by the stored bytes per token."""
    rows = proxy.admin("api/snapshots")["snapshots"]
    per_token = sum(r["bytes"] for r in rows) / sum(r["tokens"] for r in rows)
    generated = [t.replies[-1].body["timings"]["predicted_n"] - 1 for t in talks]
    tokens = sum(t.replies[-1].prompt + g for t, g in zip(talks, generated, strict=True))
    return float(per_token * tokens)


@pytest.fixture
def talks() -> list[Conversation]:
    """Three conversations of more than 1,500 tokens."""
    return [Conversation(prose(1600, seed)) for seed in range(3)]


@pytest.mark.timeout(400)
def test_three_conversations_share_two_slots_and_survive_every_restart(
    engine: EngineFactory, proxy: ProxyFactory, smol_model: Path, talks: list[Conversation]
) -> None:
    """After the first round only what is new is computed: across slots, restarts, kill -9."""
    server = engine(smol_model, context=8192)
    keeper = proxy(server)
    rounds(keeper, talks, 1, 1)
    assert min(talk.replies[0].prompt for talk in talks) >= 1500
    over = rounds(keeper, talks, 3, 2)
    settle(keeper)
    print(
        f"4 rounds: worst recomputed beyond new {max(over)} tokens; "
        f"written {keeper.metric('save_bytes_total') / 1e6:.0f} MB in "
        f"{keeper.metric('save_seconds_count'):.0f} saves, "
        f"{keeper.metric('save_seconds_sum'):.2f} s"
    )
    print(f"allowed: {allowed(keeper, talks)}")
    assert max(over) <= allowed(keeper, talks)
    ratio = store_bytes(server.slot_dir) / final_bytes(keeper, talks)
    print(f"store / final states = {ratio:.3f}")
    assert ratio <= 1.1

    limit = allowed(keeper, talks)
    for turn, what in enumerate(("proxy", "backend", "both"), start=5):
        left = settle(keeper) if what == "backend" else 0
        restarts = keeper.metric("backend_restarts_total")
        print(f"clean restart of {what} (unsaved before: {left} tokens)")
        if what != "backend":
            assert keeper.stop() == 0
        if what != "proxy":
            server.restart()
        if what != "backend":
            keeper.start()
        else:
            noticed(keeper, restarts)
        over = rounds(keeper, talks, 1, turn)
        assert max(over) <= left + limit
    killed(server, keeper, talks, limit)


def killed(
    server: EngineHandle, keeper: ProxyProcess, talks: list[Conversation], limit: int
) -> None:
    """Only what the save policy had left unsaved may be recomputed."""
    settle(keeper)
    talks[0].turn(keeper, "One more.", max_tokens=24)
    left = unsaved(keeper)
    print(f"kill -9 of the backend (unsaved: {left} tokens)")
    restarts = keeper.metric("backend_restarts_total")
    server.kill()
    server.restart()
    noticed(keeper, restarts)
    over = rounds(keeper, talks, 1, 9)
    print(f"  recomputed beyond new: {over}")
    assert max(over) <= left + limit


def test_a_new_conversation_under_a_known_system_prompt_computes_only_its_tail(
    engine: EngineFactory, proxy: ProxyFactory, smol_model: Path
) -> None:
    """Also after both were restarted."""
    server = engine(smol_model, context=4096)
    keeper = proxy(server)
    system = prose(600, 7)
    first = Conversation(system)
    first.turn(keeper, "Hello there, what can you do?")
    assert keeper.stop() == 0
    server.restart()
    keeper.start()
    other = Conversation(system)
    reply = other.turn(keeper, "A different question: name a colour.")
    shared = ask_tokens(keeper, [{"role": "system", "content": system}])
    tail = reply.prompt - shared
    print(f"prompt={reply.prompt} computed={reply.computed} tail={tail} ({reply.reason})")
    assert reply.computed <= tail + SLACK


def ask_tokens(proxy: ProxyProcess, messages: list[dict[str, Any]]) -> int:
    """How many tokens these messages render to."""
    body = {"messages": messages, "add_generation_prompt": False}
    prompt = ask(proxy.url, "/apply-template", body).body["prompt"]
    tokens: list[int] = ask(proxy.url, "/tokenize", {"content": prompt, "add_special": True}).body[
        "tokens"
    ]
    return len(tokens)
