"""Reports on what happens between sockets: silence, streams, side requests, slots, cancelling.

About proxy.server and proxy.scheduler; rows 28, 41 to 43, 56 to 60, 65 to 71 of bug-reports.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import orjson
import pytest

from proxy.config import Server
from proxy.core.records import Mode
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import LONG, Answer, Proxy, chat, event, posts, whole
from tests.integration.raw import chunked, raw_server
from tests.reports.kit import CHAT, MESSAGES
from tests.unit.core.normalise.kit import Message, assistant, system, user

APIS = [CHAT, MESSAGES]
PATIENCE = 120  # seconds the least patient measured client waits for headers (clients.md 5)
HEADER = "x-anthropic-billing-header: cc_version=2.1.188.4f3; cc_entrypoint=cli; cch="


def asked(fake: FakeLlamaServer) -> list[Any]:
    """The chat requests the backend got, parsed."""
    return [one.json for one in fake.seen(CHAT) if one.target == CHAT]


def reused(answer: Answer) -> int:
    """Tokens that needed no computing."""
    count: int = answer.json["timings"]["cache_n"]
    return count


def computed(answer: Answer) -> int:
    """Tokens that did."""
    count: int = answer.json["timings"]["prompt_n"]
    return count


async def first_kind(answer: Any) -> bytes:
    """The next event of a stream as it is, as soon as it is there."""
    raw: bytes = await answer.content.readuntil(b"\n\n")
    return raw


@pytest.mark.parametrize("api", APIS)
async def test_1_ggml_org_llama_cpp_20623(proxy: Proxy, fake: FakeLlamaServer, api: str) -> None:
    """Over the wire as well: another ``cch``, the same bytes, and everything is reused."""
    answers = []
    for cch in ("fa690;", "0d9aa;"):
        blocks = [{"type": "text", "text": HEADER + cch}, {"type": "text", "text": LONG}]
        history = [user("Hi.")] if api == MESSAGES else [system(blocks), user("Hi.")]
        body = {"messages": history, "system": blocks, "max_tokens": 4}
        if api == CHAT:
            del body["system"]
        answers.append(await proxy.ask(api, body))
    first, second = asked(fake)
    assert first["messages"] == second["messages"] == [system(LONG), user("Hi.")]
    assert answers[1].reason == "slot-hit"


async def test_46_home_assistant_core_133687(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Two commands, a minute apart: only the command and the note on the time are computed."""
    prompts = [
        f"Current time is {time}. Today's date is 2026-10-09.\nYou are a voice assistant.\n{LONG}"
        for time in ("15:09:20", "15:10:05")
    ]
    first = await proxy.ask(CHAT, {"messages": [system(prompts[0]), user("Light!")]})
    second = await proxy.ask(CHAT, {"messages": [system(prompts[1]), user("What time is it?")]})
    sent = asked(fake)[-1]["messages"]
    assert sent[0] == system(prompts[0])
    assert "Current time is 15:10:05" in sent[1]["content"]
    assert computed(first) > 300
    assert computed(second) < 60


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("silent", "at"),
    [
        pytest.param("/apply-template", "headers", id="60 before it is sent"),
        pytest.param(CHAT, "headers", id="28 Kilo-Org/kilocode#1681"),
        pytest.param(CHAT, "progress", id="60 earendil-works/pi#5089"),
    ],
)
async def test_a_long_prefill_is_not_silent(
    serve: Serve, fake: FakeLlamaServer, api: str, silent: str, at: Any
) -> None:
    """Headers and events come while nothing is generated; the answer that follows is whole."""
    proxy = await serve(ping_interval=0.005)
    stall = fake.fail("stall", on=silent, at=at)
    async with proxy.open(api, chat(LONG, stream=True)) as answer:
        assert answer.status == 200
        early = [await first_kind(answer) for _ in range(3)]
        assert not stall.release.is_set()
        stall.release.set()
        rest = await whole(answer)
    assert all(b"data: " in one for one in early), "events count for every client, comments do not"
    assert (b"[DONE]" if api == CHAT else b"message_stop") in rest.raw
    assert Server.model_fields["ping_interval"].default * 2 < PATIENCE


@pytest.mark.parametrize("api", APIS)
async def test_42_github_copilot_cli_4720(proxy: Proxy, api: str) -> None:
    """Without any hint of the client's the real count of cached tokens is in the answer."""
    answers = [await proxy.ask(api, chat(LONG)) for _ in range(2)]
    usages = [one.json["usage"] for one in answers]
    if api == MESSAGES:
        cached = [usage["cache_read_input_tokens"] for usage in usages]
    else:
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert cached[1] > 300
    assert f"reused={cached[1]};" in answers[1].said


TASKS = [
    "Generate a concise, 3-5 word title with an emoji summarizing the chat history.",
    "Generate 1-3 broad tags categorizing the main themes of the chat history.",
    "Suggest 3-5 relevant follow-up questions or prompts in the user's voice.",
]


async def with_tasks(proxy: Proxy, fake: FakeLlamaServer) -> tuple[list[Answer], list[list[int]]]:
    """Three turns of a chat, each followed by its side requests; and the slots of each turn."""
    history: list[Message] = [user(LONG)]
    answers, slots = [], []
    for turn in range(3):
        seen = len(asked(fake))
        answers.append(await proxy.ask(CHAT, {"messages": history, "max_tokens": 4}))
        history += [answers[-1].json["choices"][0]["message"], user(f"Question {turn}?")]
        shown = f"<chat_history>\nUSER: {LONG}\n</chat_history>"
        for task in TASKS:
            await proxy.chat(f"### Task:\n{task}\n### Chat History:\n{shown}")
        slots.append([one["id_slot"] for one in asked(fake)[seen:]])
    return answers, slots


async def test_43_the_chat_is_not_read_again(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Title, tags and follow-ups after each answer: of the chat only what is new is computed."""
    answers, _ = await with_tasks(proxy, fake)
    assert computed(answers[0]) > 300
    assert all(computed(one) < 40 for one in answers[1:])


async def test_43_open_webui_6677(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """They share one slot among them and leave the chat's slot alone."""
    _, slots = await with_tasks(proxy, fake)
    assert {main for main, *_ in slots}.isdisjoint({one for _, *side in slots for one in side})


async def test_56_ggml_org_llama_cpp_22756(serve: Serve, fake: FakeLlamaServer) -> None:
    """Five agents on four slots, in turn: after the first round each finds what it had."""
    await fake.restart(n_slots=4)
    proxy = await serve()
    agents: list[list[Message]] = [[user(f"agent-{n} {LONG}")] for n in range(5)]
    for turn in range(4):
        for history in agents:
            answer = await proxy.ask(CHAT, {"messages": history, "max_tokens": 4})
            assert (computed(answer) > 300) == (turn == 0)
            history += [answer.json["choices"][0]["message"], user(f"Go on, {turn}.")]
            await proxy.look()


OFF, ON = ({"lora": [{"id": 0, "scale": scale}]} for scale in (0.0, 1.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(OFF, ON, id="58 ggml-org/llama.cpp#30129"),
        pytest.param(ON, OFF, id="58 ggml-org/llama.cpp#26207"),
        pytest.param(ON, {}, id="58 the default set"),
    ],
)
@pytest.mark.parametrize("ram_cache", [True, False])
async def test_another_adapter_set(
    serve: Serve, fake: FakeLlamaServer, ram_cache: bool, one: Any, other: Any
) -> None:
    """KV of another adapter set is never answered from: the engine itself looks at tokens only.

    It empties a slot where the request names another set, but takes no notice where it names none
    (llama-server.md 1.12), and its RAM cache never does: then the request must bring its own care.
    """
    fake.lora = [{"id": 0, "path": "/adapters/one.gguf", "scale": 1.0}]
    await fake.restart(ram_cache=ram_cache)
    proxy = await serve()
    assert proxy.app.scheduler.mode is (Mode.FORWARD if ram_cache else Mode.EXCLUSIVE)
    fake.requests.clear()
    for text, fields in (("same", one), ("other", one), ("same", other)):
        await proxy.chat(f"{text} {LONG}", **fields)
    assert not fake.seen("restore")
    first, third = fake.seen(CHAT)[0], fake.seen(CHAT)[-1]
    assert third.json.get("lora") == other.get("lora")
    uncached = third.json.get("cache_prompt") is False
    elsewhere = third.slot != first.slot or fake.requests[-2].target.endswith("action=erase")
    emptied = "lora" in other or elsewhere
    assert uncached or (emptied and not ram_cache)


@pytest.mark.parametrize("stream", [False, True])
async def test_59_ggml_org_llama_cpp_22997(
    proxy: Proxy, fake: FakeLlamaServer, stream: bool
) -> None:
    """A client that gives up in mid-prefill: what was computed is there for its retry."""
    stalls = [fake.fail("stall", on=CHAT, at="progress") for _ in range(3)]
    task = asyncio.create_task(proxy.chat(LONG, stream=stream))
    for stall in stalls[:2]:
        await stall.hit.wait()
        stall.release.set()
    await stalls[2].hit.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await fake.until(lambda: fake.seen(CHAT)[0].cancelled)
    await proxy.quiet()
    again = await proxy.chat(LONG)
    assert reused(again) == 2 * fake.engine.batch
    assert computed(again) == again.json["usage"]["prompt_tokens"] - reused(again)
    assert [one["messages"] for one in asked(fake)] == [chat(LONG)["messages"]] * 2


async def test_65_anbeeld_beellama_105(proxy: Proxy) -> None:
    """A new session under a system prompt that is on disk computes its own messages only."""
    await proxy.ask(CHAT, {"messages": [system(LONG), user("One.")], "max_tokens": 4})
    await proxy.look()
    for word in ("x", "y"):
        await proxy.chat(f"{word} {LONG}")
    new = await proxy.ask(CHAT, {"messages": [system(LONG), user("Two.")], "max_tokens": 4})
    assert reused(new) > 300
    assert computed(new) < 20
    other = await proxy.ask(
        CHAT, {"messages": [system(f"My {LONG}"), user("Two.")], "max_tokens": 4}
    )
    assert reused(other) < 10


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("early", [False, True])
async def test_66_mostlygeek_llama_swap_236(
    serve: Serve, fake: FakeLlamaServer, api: str, early: bool
) -> None:
    """A stream's headers forbid nginx to hold it back, whether a ping sent them or the backend."""
    proxy = await serve(ping_interval=0.005 if early else 3600)
    stall = fake.fail("stall", on="/apply-template") if early else None
    async with proxy.open(api, chat("hello", stream=True)) as answer:
        await first_kind(answer)
        if stall:
            stall.release.set()
        got = await whole(answer)
    assert got.headers["x-accel-buffering"] == "no"
    assert "no-cache" in got.headers["cache-control"]
    assert "content-length" not in got.headers


CHUNK = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One event of a recorded stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % orjson.dumps({**CHUNK, "choices": [choice]})


def piece(**function: str) -> dict[str, Any]:
    """A delta with a part of a tool call."""
    begin = {"id": "call_1", "type": "function"} if "name" in function else {}
    return {"tool_calls": [{"index": 0, **begin, "function": function}]}


CALLED = [
    chunk({"role": "assistant", "content": None}),
    chunk(piece(name="get_weather", arguments="")),
    chunk(piece(arguments='{"city": ')),
    chunk(piece(arguments='"Oslo"}')),
    chunk({}, "tool_calls"),
    b"data: [DONE]\n\n",
]
THOUGHT = [
    chunk({"role": "assistant", "content": None}),
    chunk({"reasoning_content": "Let me see."}),
    chunk({"content": "Yes.", "x_unknown": {"kept": [1.0]}}),
    chunk({}, "stop"),
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(CALLED, id="67 Nayjest/lm-proxy#90"),
        pytest.param(THOUGHT, id="71 crashr/llama-stream#4"),
    ],
)
async def test_every_field_of_a_delta_arrives(serve: Serve, events: list[bytes]) -> None:
    """Tool calls, reasoning and fields no proxy knows: byte for byte."""
    async with raw_server([chunked(*events)]) as raw:
        proxy = await serve(url=raw.url, slot_dir=None)
        got = await proxy.chat("hello", stream=True)
    assert got.raw == b"".join(events)


async def test_67_and_for_clients_that_do_not_stream(serve: Serve) -> None:
    """The tool call is whole, and the finish reason says so, in either API."""
    async with raw_server([chunked(*CALLED)]) as raw:
        proxy = await serve(url=raw.url, slot_dir=None)
        choice = (await proxy.chat("hello")).json["choices"][0]
        message = (await proxy.ask(MESSAGES, chat("hello"))).json
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": function}
    ]
    assert message["stop_reason"] == "tool_use"
    block = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Oslo"}}
    assert message["content"] == [block]


async def test_68_nicedreamzapp_claude_code_local_39(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Also where the request was repaired, the first word is there before the second is made."""
    history = [user("Hi."), assistant("Hello."), user("Why?")]
    for minute in (31, 32):
        stall = fake.fail("stall", on=CHAT, at="stream")
        body = {"messages": [system(f"The time is 14:{minute}."), *history], "stream": True}
        async with proxy.open(CHAT, body) as answer:
            while not (await event(answer))["choices"][0]["delta"].get("content"):
                assert not stall.release.is_set()
            assert stall.hit.is_set()
            stall.release.set()
            await whole(answer)
        history += [assistant("Because."), user("And?")]
    assert asked(fake)[-1]["messages"][0] == system("The time is 14:31.")


async def test_71_two_clients(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """One long stream holds up nobody else."""
    stall = fake.fail("stall", on=CHAT, at="stream")
    async with proxy.open(CHAT, chat("long", stream=True)) as answer:
        await event(answer)
        await stall.hit.wait()
        for number in range(3):
            assert (await proxy.chat(f"short {number}")).status == 200
        assert not stall.release.is_set()
        stall.release.set()
        await whole(answer)
    assert len(posts(fake)) > 4
