"""The proxy's own API in front of the real engine: what it shows while it works, what it does.

About proxy.server.running, dry_run, warm and actions; shapes are tested in tests/integration.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from tests.real.conftest import EngineHandle, ProxyFactory
from tests.real.proxies import ProxyProcess, Reply, ask
from tests.real.test_conversations import prose

JSON = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"


def act(front: ProxyProcess, name: str, body: Any = None) -> Reply:
    """An action."""
    return ask(front.url, f"/_slotkeeper/api/{name}", body or {}, JSON)


def watched(front: ProxyProcess, running: Future[Reply]) -> list[dict[str, Any]]:
    """The row of the one request under way, as often as it can be seen until its answer."""
    seen = []
    while not wait([running], timeout=0.1).done:
        seen += front.admin("api/running")["running"]
    return seen


def test_a_prefill_is_seen_on_its_way(smol: EngineHandle, proxy: ProxyFactory) -> None:
    """What is processed grows up to the prompt's length, which the engine tells."""
    front = proxy(smol)
    messages = [{"role": "system", "content": prose(600, 71)}, {"role": "user", "content": "Go."}]
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(front.chat, messages)
        rows = [row for row in watched(front, reply) if row["state"] == "prefill"]
    steps = [row["processed"] for row in rows if row["processed"] is not None]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 2
    assert {row["prompt"] for row in rows if row["processed"] is not None} == {
        reply.result().prompt
    }
    assert steps[-1] <= reply.result().prompt
    assert front.admin("api/running")["running"] == []


def test_warm_then_explain(smol: EngineHandle, proxy: ProxyFactory) -> None:
    """A warmed prompt is on disk, explained as held, and reused by who asks first."""
    front = proxy(smol)
    messages = [{"role": "user", "content": prose(250, 72)}]
    request = {"messages": messages, "temperature": 0}
    told = act(front, "warm", {"path": CHAT, "request": request})
    assert told.status == 200, told.body
    assert told.body["computed"] > 250
    stored = {row["id"] for row in front.admin("api/snapshots")["snapshots"]}
    assert told.body["snapshot"] in stored
    found = act(front, "explain", {"path": CHAT, "request": request}).body
    assert found["prompt_tokens"] == told.body["prompt"]
    assert found["prefix"]["tokens"] >= told.body["prompt"] - 1
    assert found["choice"]["reason"] in {"slot-hit", "restored"}
    assert front.chat(messages).cached >= told.body["prompt"] - 1


def test_paused_resumed_drained(smol: EngineHandle, proxy: ProxyFactory) -> None:
    """Paused requests are forwarded; resumed ones cached; drained, the process ends well."""
    front = proxy(smol)
    messages = [{"role": "user", "content": "Name a river."}]
    assert act(front, "pause").body == {"paused": True}
    assert front.chat(messages).reason == "forward"
    assert act(front, "resume").body == {"paused": False}
    front.wait("exclusive")
    assert front.chat(messages).reason in {"cold", "slot-hit", "restored"}
    assert act(front, "drain").body == {"draining": True}
    assert front.process is not None
    assert front.process.wait(60) == 0
    front.process = None
    assert '"event":"stopped"' in front.log
