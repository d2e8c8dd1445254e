"""The whole proxy before the emulated FastFlowLM: what is reused, what goes wrong, who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from proxy.backends import fastflowlm
from proxy.core.records import Mode
from tests.emulators.fastflowlm import Answer, Emulator, Options
from tests.emulators.fastflowlm.client import ask
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT, Proxy, until

CKPT, HIST = "qwen3.5:4b", "llama3.2:3b"
TURNS = 10
RELEASES = ["0.9.20", "0.9.42", "0.9.45", "1.0.6", "1.0.8"]
REPORTED: dict[str, Any] = {  # the body of the report that asked for all this (#486)
    "cache_prompt": True, "dry_allowed_length": 2, "dynatemp_range": 0, "max_tokens": 87,
    "min_p": 0.05, "repeat_last_n": 64, "repeat_penalty": 1.1, "samplers": "edkypmxt",
    "stream": False, "temperature": 0.8, "timings_per_token": True, "top_k": 40, "top_p": 0.95,
    "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 0.1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(fastflowlm, "CANCEL_SECONDS", 0.05)


@asynccontextmanager
async def emulated(serve: Serve, **options: Any) -> AsyncIterator[tuple[Emulator, Proxy]]:
    """The emulator and a proxy that found out by itself what it is."""
    settings = {n: options.pop(n) for n in ("keys", "ping_interval") if n in options}
    async with Emulator(Options(**{"model": CKPT, **options})) as emu:
        proxy = await serve(url=emu.url, slot_dir=None, **settings)
        assert (proxy.app.scheduler.mode, proxy.app.scheduler.total_slots) == (Mode.ROUTED, 1)
        yield emu, proxy
        await proxy.stop()


def user(text: str) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": text}


async def say(proxy: Proxy, messages: list[dict[str, Any]], **more: Any) -> Any:
    """The answer's message, whichever way it was asked for."""
    got = await proxy.ask(CHAT, {"messages": messages, **more})
    assert got.status == 200, got.raw
    if not more.get("stream"):
        return got.json["choices"][0]["message"]
    deltas = [e["choices"][0]["delta"] for e in got.events[:-1] if e["choices"]]
    return {"role": "assistant", "content": "".join(d.get("content", "") for d in deltas)}


async def direct(url: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    """The same without the proxy."""
    got = await ask(url, CHAT, {"messages": messages, **more})
    if not more.get("stream"):
        return got.json["choices"][0]["message"]
    return {"role": "assistant", "content": got.text}


def best(emu: Emulator) -> list[int]:
    """What each chat could reuse by the rules: all of the last prompt, or with its answer."""
    chats = emu.chats()
    if emu.profile.cache == "none":
        return [0] * len(chats)
    whole = chats[0].model == HIST or emu.profile.cache == "delta"
    past = [chat.prompt + (chat.completion if whole else 0) for chat in chats[:-1]]
    return [0, *past]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", [CKPT, HIST])
@pytest.mark.parametrize("profile", RELEASES)
async def test_ten_turns(serve: Serve, profile: str, model: str, stream: bool) -> None:
    """Every turn reuses what the rules allow, and what the answer says of it is true."""
    async with emulated(serve, model=model, profile=profile) as (emu, proxy):
        messages = [{"role": "system", "content": "word " * 400}]
        for turn in range(TURNS):
            messages.append(user(f"Question {turn}"))
            messages.append(await say(proxy, messages, stream=stream, model="gpt-4o"))
        chats = emu.chats()
        assert len(chats) == TURNS
        assert [chat.kept for chat in chats] == best(emu)
        told = (await proxy.page("api/requests"))["requests"]
        assert sorted(row["reused"] for row in told) == sorted(chat.kept for chat in chats)
        assert emu.counters["loads"] == 0
        through = emu.prefill_seconds
        share, allowed = (
            sum(reused) / sum(chat.prompt for chat in chats)
            for reused in ([chat.kept for chat in chats], best(emu))
        )
    async with Emulator(Options(model=model, profile=profile)) as bare:
        messages = [{"role": "system", "content": "word " * 400}]
        for turn in range(TURNS):
            messages.append(user(f"Question {turn}"))
            messages.append(await direct(bare.url, messages, stream=stream))
        print(f"{profile} {model} stream={stream}: {share:.1%} of the prompt tokens reused, allowed"
              f" {allowed:.1%}; prefill {through:.1f} s through the proxy, "
              f"{bare.prefill_seconds:.1f} s for a client that makes no mistake")  # fmt: skip
        if profile != "0.9.42" or stream:
            assert through == pytest.approx(bare.prefill_seconds)
        else:
            assert through < bare.prefill_seconds  # there, only streams are cached


async def test_an_answer_without_text_is_asked_for_once(serve: Serve) -> None:
    """Its only token opened a thought: nothing was kept back that a second prefill would show."""
    async with emulated(serve, model="qwen3:4b") as (emu, proxy):
        message = await say(proxy, [user("Yes or no?")], max_tokens=1)
        assert not message["content"]
        assert [chat.text for chat in emu.chats()] == ["<think>"]


async def test_questions_leave_connections_for_the_rest(serve: Serve) -> None:
    """However many ask at once while it computes: all are answered, none is refused."""
    async with emulated(serve) as (emu, proxy):
        at = emu.hold("prefill")
        asking = asyncio.create_task(say(proxy, [user("Hello")]))
        await at.reached.wait()
        looks = (proxy.ask("/v1/models", method="GET") for _ in range(40))
        assert {got.status for got in await asyncio.gather(*looks)} == {200}
        at.release.set()
        await asking
        assert emu.counters["refused"] == 0


async def test_the_reported_body(serve: Serve) -> None:
    """The classifier of the report: llama.cpp's fields, nothing streamed, and the cache is used."""
    async with emulated(serve) as (emu, proxy):
        messages = [{"role": "system", "content": "You classify. " * 50}, user("a")]
        messages.append(await say(proxy, messages, **REPORTED))
        await say(proxy, [*messages, user("b")], **REPORTED)
        first, second = emu.chats()
        assert (second.kept, second.prefilled < first.prefilled) == (first.prompt, True)
        known = {"messages", "stream", "max_tokens", "request_id", "think", "reasoning_effort",
                 "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty",
                 "repetition_penalty"}  # fmt: skip
        assert set(second.body) == known
        assert (second.body["repetition_penalty"], second.body["max_tokens"]) == (1.1, 87)


async def test_claude_codes_api(serve: Serve) -> None:
    """``/v1/messages``, which the server does not have, with reuse and a tool call."""
    async with emulated(serve) as (emu, proxy):
        emu.answers += [Answer("", calls=(("ls", '{"path": "/"}'), ("ls", '{"path": "/b"}')))]
        tool = {"name": "ls", "input_schema": {"type": "object"}}
        body = {"model": "claude", "max_tokens": 500, "tools": [tool], "system": "S"}
        messages: list[Any] = [user("list")]
        got = (await proxy.ask("/v1/messages", {**body, "messages": messages})).json
        calls = [block for block in got["content"] if block["type"] == "tool_use"]
        assert [call["input"] for call in calls] == [{"path": "/"}, {"path": "/b"}]
        assert len({call["id"] for call in calls}) == 2
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "x"} for call in calls
        ]
        messages += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
        got = (await proxy.ask("/v1/messages", {**body, "messages": messages})).json
        assert got["usage"]["cache_read_input_tokens"] == emu.chats()[0].prompt


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "status"), [("error", 500), ("load", 502), ("drop", 502), ("hang", 504)]
)
async def test_errors_are_errors(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, fault: Any, status: int, stream: bool
) -> None:
    """What comes with 200 or not at all gets its status, and the next request is served."""
    monkeypatch.setattr(fastflowlm, "STUCK_SECONDS", 0.05)
    async with emulated(serve) as (emu, proxy):
        emu.fault(fault, after=2)
        got = await proxy.ask(CHAT, {"messages": [user("a")], "stream": stream})
        if stream and fault in {"drop", "hang"}:
            assert got.events[-1]["error"]["code"] == status
        else:
            assert (got.status, got.json["error"]["code"]) == (status, status)
        assert (await say(proxy, [user("b")]))["content"].endswith("b")


@pytest.mark.parametrize("stream", [True, False])
async def test_too_long(serve: Serve, stream: bool) -> None:
    """A prompt that does not fit is refused with 400, whatever is tried."""
    async with emulated(serve, ctx_len=512) as (_, proxy):
        got = await proxy.ask(CHAT, {"messages": [user("word " * 600)], "stream": stream})
        assert (got.status, got.json["error"]["type"]) == (400, "exceed_context_size_error")
        await say(proxy, [user("b")])


async def test_a_lost_checkpoint_is_no_error(serve: Serve) -> None:
    """#744: after a text completion the checksums promise what the engine has forgotten."""
    async with emulated(serve) as (emu, proxy):
        messages = [user("a"), await say(proxy, [user("a")])]
        done = {"prompt": "x", "stream": True}
        assert (await ask(emu.url, "/v1/completions", done)).status == 200  # past the proxy
        await say(proxy, [*messages, user("b")])
        assert [r.status for r in emu.records if r.path == CHAT] == [200, 400, 200]
        assert emu.counters["loads"] == 0


async def test_full_context_is_told(serve: Serve) -> None:
    """An answer that ends because the context is full says ``length``."""
    async with emulated(serve, ctx_len=512) as (emu, proxy):
        emu.answers.append(Answer("word " * 600))
        got = await proxy.ask(CHAT, {"messages": [user("a")]})
        assert got.json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_who_leaves_costs_nothing_but_his_answer(serve: Serve, at: Any) -> None:
    """Twenty clients that leave: cancelled, read to the end, no slot lost, nobody disturbed."""
    async with emulated(serve) as (emu, proxy):
        for number in range(20):
            hold = emu.hold(at, after=0 if at == "prefill" else 2)
            stream = bool(number % 2)
            body = {"messages": [user(f"{number}")], "stream": stream}
            asking = asyncio.create_task(proxy.ask(CHAT, body))
            await hold.reached.wait()
            asking.cancel()
            following = asyncio.create_task(say(proxy, [user("next")]))
            await until(lambda n=number: cancels(emu) > n)  # type: ignore[misc]
            hold.release.set()
            assert (await following)["content"].endswith("next")
            cancelled = [r for r in emu.chats() if r.finish == "cancel"]
            assert len(cancelled) == number + 1
        await emu.settled()
        assert (emu.counters["leaked"], emu.active, emu.npu.poisoned) == (0, 0, False)
        assert not any(record.race or record.disconnected for record in emu.records)


def cancels(emu: Emulator) -> int:
    """How many requests were cancelled."""
    names = {r.body.get("request_id") for r in emu.records if r.path == "/api/cancel"}
    return len(names)


async def test_the_same_again_after_a_cancel(serve: Serve) -> None:
    """A client that left comes back with the identical conversation, which would be a crash."""
    async with emulated(serve) as (emu, proxy):
        messages = [user("a"), await say(proxy, [user("a")]), user("b")]
        hold = emu.hold("decode", after=2)
        asking = asyncio.create_task(proxy.ask(CHAT, {"messages": messages, "stream": True}))
        await hold.reached.wait()
        asking.cancel()
        await until(lambda: cancels(emu) == 1)
        hold.release.set()
        assert (await say(proxy, messages))["content"].endswith("b")
        assert not emu.crashed
        # and once more, now that nothing was cancelled: no detour
        count = len(emu.chats())
        await say(proxy, messages)
        assert len(emu.chats()) == count + 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("late", [True, False])
async def test_a_client_that_gives_up_and_asks_again(
    serve: Serve, late: bool, stream: bool
) -> None:
    """The loop of #733: one prefill, and an answer, whether the retry comes before or after it."""
    async with emulated(serve) as (emu, proxy):
        messages = [user("a")]
        body = {"messages": messages, "stream": stream}
        hold = emu.hold("prefill")
        for _ in range(2):
            asking = asyncio.create_task(proxy.ask(CHAT, body))
            await hold.reached.wait()
            await until(lambda: len(proxy.app.scheduler._running) == 1)
            asking.cancel()
            await until(lambda: len(proxy.app.scheduler._running) == 0)
        if late:
            hold.release.set()
            await until(lambda: not emu.npu.busy)
        again = asyncio.create_task(say(proxy, messages, stream=stream))
        await until(lambda: late or len(proxy.app.scheduler._running) == 1)
        hold.release.set()
        assert (await again)["content"].endswith("a")
        assert (len(emu.chats()), cancels(emu)) == (1, 0)
        await say(proxy, messages, stream=stream)  # and what was told once is not told again
        assert len(emu.chats()) == 2


async def test_a_retry_with_another_key(serve: Serve) -> None:
    """Nobody gets an answer that another key asked for, also where keys end at the proxy."""
    async with emulated(serve, keys=["k1", "k2"]) as (emu, proxy):
        hold = emu.hold("prefill")
        body = {"messages": [user("a")]}
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        asking = asyncio.create_task(proxy.ask(CHAT, body, headers=first))
        await hold.reached.wait()
        asking.cancel()
        other = asyncio.create_task(proxy.ask(CHAT, body, headers=second))
        await until(lambda: cancels(emu) == 1)
        hold.release.set()
        assert (await other).status == 200
        assert [chat.finish for chat in emu.chats()] == ["cancel", "stop"]


async def test_who_is_waited_for_holds_nobody_up(serve: Serve) -> None:
    """What was left in its prefill is cancelled when another request is waiting already."""
    async with emulated(serve) as (emu, proxy):
        proxy.app.scheduler.forward(0)  # as before the backend was looked at: no limit
        hold = emu.hold("prefill")
        asking = asyncio.create_task(proxy.ask(CHAT, {"messages": [user("a")]}))
        await hold.reached.wait()
        following = asyncio.create_task(say(proxy, [user("b")]))
        await until(lambda: proxy.app.scheduler.board._permits == 2)
        asking.cancel()
        await until(lambda: cancels(emu) == 1)
        hold.release.set()
        assert (await following)["content"].endswith("b")
        assert not any(record.race for record in emu.records)


async def test_who_does_not_come_back(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer nobody claims is cancelled after a while."""
    monkeypatch.setattr(fastflowlm, "CLAIM_SECONDS", 0.01)
    async with emulated(serve) as (emu, proxy):
        hold, later = emu.hold("prefill"), emu.hold("decode", after=2)
        body = {"messages": [user("a")], "stream": True}
        asking = asyncio.create_task(proxy.ask(CHAT, body))
        await hold.reached.wait()
        asking.cancel()
        await proxy.quiet()
        hold.release.set()
        await later.reached.wait()
        await until(lambda: cancels(emu) == 1)
        later.release.set()
        await until(lambda: not emu.npu.busy)
        assert (emu.records[-1].path, emu.chats()[0].finish) == ("/api/cancel", "cancel")


async def test_one_at_a_time(serve: Serve) -> None:
    """Chats, completions and embeddings that come at once never meet at the server."""
    async with emulated(serve, embed=True) as (emu, proxy):
        asked = [
            proxy.ask(CHAT, {"messages": [user("a")]}),
            proxy.ask("/v1/completions", {"prompt": "x"}),
            proxy.ask("/api/embeddings", {"model": "e", "input": "x"}),
            proxy.ask("/v1/messages", {"max_tokens": 9, "messages": [user("c")]}),
        ]
        got = await asyncio.gather(*asked)
        assert [answer.status for answer in got] == [200] * 4
        spans = sorted((r.started, r.ended or 0.0) for r in emu.records if r.path in COMPUTING)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert not any(record.race for record in emu.records)


COMPUTING = {CHAT, "/v1/completions", "/api/embeddings"}


async def test_a_server_that_comes_later(serve: Serve) -> None:
    """A backend that is down at first is asked who it is when it is there."""
    async with Emulator(Options(model=CKPT)) as emu:
        await emu.stop()
        proxy = await serve(url=emu.url, slot_dir=None)
        assert (await proxy.chat("a")).status == 502
        emu.boot()
        await emu.start()
        await say(proxy, [user("a")])
        await proxy.look(Mode.ROUTED)
        assert "FastFlowLM" in proxy.app.keeper.verdict.why
        await proxy.stop()


async def test_closing_lets_go_of_nothing(serve: Serve) -> None:
    """At the end of the proxy a running answer is cancelled and read to its end."""
    async with emulated(serve) as (emu, proxy):
        hold = emu.hold("decode", after=2)
        asking = asyncio.create_task(proxy.ask(CHAT, {"messages": [user("a")], "stream": True}))
        await hold.reached.wait()
        stopping = asyncio.create_task(proxy.stop())
        await until(lambda: cancels(emu) == 1)
        hold.release.set()
        await stopping
        await asyncio.gather(asking, return_exceptions=True)
        await emu.settled()
        assert emu.counters["leaked"] == 0
