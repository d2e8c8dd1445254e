"""Reports about FastFlowLM, before its emulator: what the server gets, and what is said of it."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from proxy.backends import fastflowlm
from proxy.backends.flm_advice import Hint
from proxy.core import hold
from tests.emulators.fastflowlm import Answer, Emulator, Hold
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT, Proxy, until
from tests.integration.test_fastflowlm import emulated, user

CKPT, HIST = "qwen3.5:4b", "llama3.2:3b"
DOCS = Path(__file__).parents[2] / "docs" / "fastflowlm.md"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(hold, "TURN_SECONDS", 0.0)


def session(messages: int) -> list[dict[str, Any]]:
    """A coding agent's, of so many messages; the last is the user's."""
    said = [{"role": "system", "content": "You are a coding agent. " * 40}]
    for turn in range((messages - 2) // 2):
        said += [user(f"Step {turn}"), {"role": "assistant", "content": f"Done {turn}."}]
    return [*said, user("And now?")]


def one_shot(number: int, **more: Any) -> dict[str, Any]:
    """One of many questions behind the same long instructions."""
    instructions = {"role": "system", "content": "You classify mails. " * 200}
    return {"messages": [instructions, user(f"Mail {number}")], **more}


async def given_up(proxy: Proxy, body: dict[str, Any], at: Hold) -> bytes:
    """What a client hears first, while the server is ``at`` its prefill; then it goes."""
    async with proxy.client.post(f"{proxy.url}{CHAT}", json=body) as answer:
        assert answer.status == 200
        await at.reached.wait()
        return await answer.content.readany()


async def test_51_the_same_again_after_a_time_out(serve: Serve) -> None:
    """ROCm/FastFlowLM#733: 146 messages, the identical request again while it still prefills.

    It gets the running prefill's answer. The server is asked once and never told to cancel, and
    the client hears something before its time-out.
    """
    async with emulated(serve, model=CKPT, ping_interval=0.01) as (emu, proxy):
        emu.answers.append(Answer("Here it is."))
        body = {"messages": session(146), "stream": True}
        assert len(body["messages"]) == 146  # type: ignore[arg-type]
        at = emu.hold("prefill")
        heard = await given_up(proxy, body, at)
        assert heard.startswith(b"data: {")
        await until(lambda: not proxy.app.scheduler._running)
        again = asyncio.create_task(proxy.ask(CHAT, body))
        await until(lambda: len(proxy.app.scheduler._running) == 1)
        at.release.set()
        got = await again
        deltas = [event["choices"][0]["delta"] for event in got.events[:-1] if event["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas).strip() == "Here it is."
        assert [record.path for record in emu.records if record.body] == [CHAT]


async def test_52_many_questions_with_one_beginning(serve: Serve, log: io.StringIO) -> None:
    """ROCm/FastFlowLM#737: nothing of a shared beginning is reused. It cannot be, and that is said.

    They are let in one by one, so none is refused; each is reported as computed whole; the log and
    the docs say why.
    """
    async with emulated(serve, model=CKPT, q_len=1) as (emu, proxy):
        got = await asyncio.gather(*(proxy.ask(CHAT, one_shot(n)) for n in range(6)))
        assert [answer.status for answer in got] == [200] * 6
        assert sorted(_newest(emu)) == [f"Mail {n}" for n in range(6)]
        assert {chat.kept for chat in emu.chats()} == {0}
        assert not any(record.race for record in emu.records)
        told = [answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in got]
        assert told == [0] * 6
        assert {answer.reason for answer in got} == {"cold"}
    assert log.getvalue().count(str(Hint.SINGLE)) == 1
    assert "| a system prompt shared by two conversations | the same |" in DOCS.read_text()


@pytest.mark.parametrize("model", [CKPT, HIST])
async def test_53_no_kv_cache_in_server_mode(serve: Serve, log: io.StringIO, model: str) -> None:
    """ROCm/FastFlowLM#486: two-message chats with ``cache_prompt`` reuse nothing, and nobody says.

    The field stays here. Each answer tells what was reused, by header and by usage, whatever the
    release tells; the third message makes it a hit; why two do not is said in log and docs.
    """
    for profile in ("0.9.45", "1.0.8"):
        async with emulated(serve, model=model, profile=profile) as (emu, proxy):
            for n in range(2):
                got = await proxy.ask(CHAT, one_shot(n, cache_prompt=True))
                assert (got.reason, _cached(got.json)) == ("cold", 0)
            reply = got.json["choices"][0]["message"]
            body = one_shot(1, cache_prompt=True)
            body["messages"] += [reply, user("Why?")]
            got = await proxy.ask(CHAT, body)
            (before, chat) = emu.chats()[-2:]
            held = before.prompt + (before.completion if model == HIST else 0)
            assert (got.reason, _cached(got.json), chat.kept) == ("slot-hit", held, held)
            assert f"reused={held}; prompt={chat.prompt}" in got.said
            assert not any("cache_prompt" in record.body for record in emu.records)
    assert log.getvalue().count(str(Hint.SINGLE)) == 2  # once for each server
    assert "more than two messages" in DOCS.read_text()


def _newest(emu: Emulator) -> list[str]:
    return [chat.body["messages"][-1]["content"] for chat in emu.chats()]


def _cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
