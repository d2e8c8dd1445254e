"""Every kind of request through the real proxy to the real engine."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from tests.real.conftest import EngineFactory, EngineHandle, ProxyFactory
from tests.real.proxies import ProxyProcess, Reply, ask
from tests.real.test_conversations import SLACK, prose

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # noqa: E501


@pytest.fixture(scope="module")
def front(
    tools_engine: EngineHandle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    """One proxy before the tools engine for the whole module."""
    made = ProxyProcess(tools_engine.url, tools_engine.slot_dir, tmp_path_factory.mktemp("front"))
    made.start()
    yield made
    assert made.stop() == 0


def turn(front: ProxyProcess, messages: list[dict[str, Any]], **more: Any) -> Reply:
    """A turn of a conversation with a tool."""
    return front.chat(messages, tools=[TOOL], **more)


def test_a_conversation_with_tool_calls_is_cached_like_any_other(front: ProxyProcess) -> None:
    """The tool is in the prompt, and every later turn computes only what is new."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": prose(200, 1)},
        {"role": "user", "content": "How is the weather in Rome?"},
    ]
    rendered = ask(front.url, "/apply-template", {"messages": messages, "tools": [TOOL]}).body
    assert "get_weather" in rendered["prompt"]
    before = turn(front, messages, tool_choice="required", max_tokens=60)
    message = before.body["choices"][0]["message"]
    calls = message.get("tool_calls") or [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
        }
    ]
    for step in range(3):
        messages += [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": f"Sunny, {20 + step} C"},
        ]
        after = turn(front, messages)
        assert after.reason == "slot-hit"
        assert after.computed <= after.prompt - before.prompt + SLACK
        before = after


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": "Hi"}]])
def test_odd_contents_get_what_the_backend_gives(
    front: ProxyProcess, tools_engine: EngineHandle, content: Any
) -> None:
    """``content: null``, empty and part lists: the same status and text as direct."""
    body = {
        "messages": [{"role": "assistant", "content": content}, {"role": "user", "content": "Go"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    direct = ask(tools_engine.url, "/v1/chat/completions", body)
    proxied = ask(front.url, "/v1/chat/completions", body)
    assert proxied.status == direct.status
    if direct.status == 200:
        assert proxied.text == direct.text
    else:
        assert proxied.body == direct.body


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": PIXEL}}],
            }
        ],
    ],
)
def test_images_and_empty_messages_are_answered_as_the_backend_would(
    front: ProxyProcess, tools_engine: EngineHandle, messages: list[Any]
) -> None:
    """A model without eyes refuses an image in the backend's own words."""
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    direct = ask(tools_engine.url, "/v1/chat/completions", body)
    proxied = ask(front.url, "/v1/chat/completions", body)
    assert proxied.status == direct.status
    if direct.status != 200:
        assert proxied.body == direct.body


def test_a_system_prompt_of_100_kb_is_computed_once(
    engine: EngineFactory, proxy: ProxyFactory, big_context_model: Any
) -> None:
    """25 thousand tokens: the next turn and the next conversation compute only their own."""
    server = engine(big_context_model, context=40960)
    front = proxy(server)
    words = enumerate(prose(12_000, 3).split())
    rules = " ".join(f"{word} {i % 10}," if i % 2 else word for i, word in words)
    assert len(rules) >= 100_000
    system = {"role": "system", "content": rules}
    hello = {"role": "user", "content": "Hello"}
    first = front.chat([system, hello])
    second = front.chat([system, hello, {"role": "assistant", "content": first.text}, hello])
    assert first.prompt >= 25_000
    assert second.computed <= second.prompt - first.prompt + SLACK
    other = front.chat([system, {"role": "user", "content": "Something else entirely"}])
    assert other.computed <= 64
    print(f"100 kB: {[(r.reason, r.prompt, r.computed) for r in (first, second, other)]}")


def test_id_slot_goes_to_that_slot_and_out_of_range_is_refused(front: ProxyProcess) -> None:
    """The engine would wrap the number around."""
    hello = [{"role": "user", "content": "Which slot is this?"}]
    for slot in (1, 0):
        reply = front.chat(hello, id_slot=slot)
        assert f"slot={slot}" in reply.headers["x-slotkeeper"]
    refused = ask(front.url, "/v1/chat/completions", {"messages": hello, "id_slot": 2})
    assert refused.status == 400
    assert refused.body["error"]["source"] == "slotkeeper"


def test_cache_prompt_false_computes_everything(front: ProxyProcess) -> None:
    """As the engine does."""
    hello = [{"role": "user", "content": prose(50, 4)}]
    front.chat(hello)
    assert front.chat(hello, cache_prompt=False).cached == 0


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_prompt_arrays_give_lists_and_n_gives_choices(front: ProxyProcess, path: str) -> None:
    """Requests that cannot name one slot take all, and answer like direct."""
    body = {"prompt": ["One two", "A b c"], "n_predict": 3, "max_tokens": 3, "temperature": 0}
    reply = ask(front.url, path, body)
    assert reply.status == 200
    assert reply.reason == "wide"
    answers = reply.body if isinstance(reply.body, list) else reply.body["choices"]
    assert len(answers) == 2


def test_n_2_streams_both_choices(front: ProxyProcess) -> None:
    """Nothing of either is lost."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 2,
        "max_tokens": 3,
        "stream": True,
        "temperature": 0,
    }
    raw = ask(front.url, "/v1/chat/completions", body).body.decode()
    events = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    finished = {c["index"] for e in events for c in e["choices"] if c["finish_reason"]}
    assert finished == {0, 1}
    assert raw.rstrip().endswith("data: [DONE]")
    assert "prompt_progress" not in raw


def test_do_not_store_is_obeyed(
    engine: EngineFactory, proxy: ProxyFactory, tiny_model: Any
) -> None:
    """Neither while idle nor at the drain."""
    server = engine(tiny_model)
    front = proxy(server, CACHE__IDLE_SECONDS="0")
    body = {"messages": [{"role": "user", "content": prose(300, 5)}], "max_tokens": 2}
    ask(front.url, "/v1/chat/completions", body, {"X-Slotkeeper-No-Store": "1"})
    assert [r["storable"] for r in front.admin("api/slots")["slots"] if r["tokens"]] == [False]
    assert front.stop() == 0
    assert not [p for p in server.slot_dir.glob("slotkeeper/*/*.kv") if p.name != "probe.kv"]


async def test_a_client_that_leaves_stops_the_engine_and_the_retry_finds_the_rest(
    engine: EngineFactory, proxy: ProxyFactory, smol_model: Any
) -> None:
    """Cancelled within a batch; what was computed is not computed again."""
    server = engine(smol_model, context=4096)
    front = proxy(server)
    messages = [{"role": "user", "content": prose(900, 6)}]
    body = {"messages": messages, "max_tokens": 4}
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    payload = orjson.dumps(body)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload
    )
    await writer.drain()

    await asyncio.to_thread(engine_is, server, lambda busy: busy and busy[0] >= 256)
    writer.close()
    await asyncio.to_thread(engine_is, server, lambda busy: not busy)
    await asyncio.to_thread(settled, front)
    retry = await asyncio.to_thread(front.chat, messages)
    assert retry.cached >= 256
    assert not reader.at_eof() or retry.status == 200


def engine_is(server: EngineHandle, wanted: Callable[[list[int]], Any]) -> None:
    """Wait until the tokens processed in busy slots are as wanted."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        slots = ask(server.url, "/slots").body
        if wanted([s["n_prompt_tokens_processed"] for s in slots if s["is_processing"]]):
            return
        time.sleep(0.02)
    raise AssertionError(slots)


def settled(front: ProxyProcess) -> None:
    """Wait until the proxy knows what the interrupted slot holds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        rows = front.admin("api/slots")["slots"]
        if all(row["state"] == "free" for row in rows) and any(row["tokens"] for row in rows):
            return
        time.sleep(0.05)
    raise AssertionError(front.admin("api/slots"))


def test_what_computes_nothing_passes_as_it_is(
    front: ProxyProcess, tools_engine: EngineHandle
) -> None:
    """Byte for byte, with the backend's own status."""
    for path, body in (
        ("/health", None),
        ("/v1/models", None),
        ("/tokenize", {"content": "Hello world"}),
        ("/nothing-here", None),
    ):
        direct, proxied = ask(tools_engine.url, path, body), ask(front.url, path, body)
        assert (proxied.status, proxied.body) == (direct.status, direct.body)
        assert proxied.reason == "pass"


def test_what_changes_slots_behind_our_back_needs_the_admin_key(front: ProxyProcess) -> None:
    """Refused with a hint, not forwarded."""
    refused = ask(front.url, "/slots/0?action=erase", {})
    assert refused.status == 403
    assert "admin_key" in refused.body["error"]["hint"]


def test_a_websocket_upgrade_is_refused(front: ProxyProcess) -> None:
    """501, in words."""
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.sendall(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 501 ")


@pytest.mark.parametrize("kind", ["swa_model", "hybrid_model"])
def test_models_whose_states_are_not_plain_are_only_forwarded_to(
    engine: EngineFactory, proxy: ProxyFactory, request: pytest.FixtureRequest, kind: str
) -> None:
    """Sliding window and hybrid: right answers, the reason said, nothing saved."""
    server = engine(request.getfixturevalue(kind))
    front = proxy(server, mode="forward")
    reply = front.chat([{"role": "user", "content": "Hi"}])
    assert reply.reason == "forward"
    assert "sliding-window or hybrid" in front.admin("readyz")["why"]
    assert front.admin("api/snapshots") == {"snapshots": []}


def test_default_flags_mean_forward_and_four_at_once(
    engine: EngineFactory, proxy: ProxyFactory, tiny_model: Any
) -> None:
    """The RAM cache is on: no pin ever, and never slower than without a proxy."""
    server = engine(tiny_model, defaults=True, context=8192)
    front = proxy(server, mode="forward")
    ready = front.admin("readyz")
    assert "--cache-ram 0" in ready["advice"]
    body = {
        "messages": [{"role": "user", "content": "Count"}],
        "max_tokens": 400,
        "ignore_eos": True,
    }
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ask, front.url, "/v1/chat/completions", body) for _ in range(4)]
        most = 0
        while not all(job.done() for job in jobs):
            slots = ask(server.url, "/slots").body
            most = max(most, sum(slot["is_processing"] for slot in slots))
        assert [job.result().status for job in jobs] == [200] * 4
    assert most == 4


def test_without_a_slot_directory_requests_are_forwarded(
    tools_engine: EngineHandle, proxy: ProxyFactory
) -> None:
    """And the log says what to do."""
    front = proxy(tools_engine, mode="forward", store=False)
    assert front.chat([{"role": "user", "content": "Hi"}]).reason == "forward"
    assert "--slot-save-path" in front.log
