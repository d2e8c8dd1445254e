"""FastFlowLM's driver on the emulator, without the rest of the proxy: each duty in one scene."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.backends import fastflowlm
from proxy.backends.fastflowlm import FastFlowLM
from proxy.backends.flm_work import CHAT
from proxy.backends.transport import OWNER
from proxy.errors import BadRequestError
from tests.emulators.fastflowlm import Answer, Emulator, Options

CKPT, HIST = "qwen3.5:4b", "qwen3-it:4b"
TOOLS = [
    {"type": "function", "function": {"name": "ls", "parameters": {"properties": {"path": {}}}}}
]
PNG = "data:image/png;base64,"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(fastflowlm, "CANCEL_SECONDS", 0.05)


@asynccontextmanager
async def driven(**options: Any) -> AsyncIterator[tuple[Emulator, FastFlowLM]]:
    """The emulator, and a driver that knows which model it was started with."""
    chosen = {"model": CKPT, **options}
    async with Emulator(Options(**chosen)) as emu:
        backend = FastFlowLM(emu.url, connect_timeout=2, silence_timeout=20, model=chosen["model"])
        try:
            yield emu, backend
        finally:
            await backend.close()


def user(text: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": text}


async def post(
    backend: FastFlowLM, body: dict[str, Any], *, owner: str = "", path: str = CHAT
) -> tuple[int, Any, dict[str, str]]:
    """Status, body (of a stream the bytes), headers."""
    headers = [("Content-Type", "application/json"), (OWNER, owner)]
    async with backend.send("POST", path, headers, orjson.dumps(body)) as upstream:
        raw = await upstream.read()
    told = {name.lower(): value for name, value in upstream.headers}
    return upstream.status, raw if body.get("stream") else orjson.loads(raw), told


async def say(backend: FastFlowLM, messages: list[Any], **more: Any) -> dict[str, Any]:
    """The answer's message."""
    status, body, _ = await post(backend, {"messages": messages, **more})
    assert status == 200, body
    message: dict[str, Any] = body["choices"][0]["message"]
    return {name: value for name, value in message.items() if name != "reasoning_content"}


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run until it holds."""
    while not condition():  # noqa: ASYNC110 - the emulator has no event for every change
        await asyncio.sleep(0)


async def turns(count: int) -> None:
    """Let the loop turn; what anybody wants to do happens meanwhile."""
    for _ in range(count):
        await asyncio.sleep(0)


def cancels(emu: Emulator) -> int:
    """How many requests were cancelled."""
    return len({r.body.get("request_id") for r in emu.records if r.path == "/api/cancel"})


# --- era B -----------------------------------------------------------------------------------


async def test_old_releases_answer_what_they_are_asked() -> None:
    """0.9.42 goes on from what it holds, whatever the client says was answered: never through us.

    Each request after the first would be a hit of its checksums though the answer differs.
    """
    async with driven(model=HIST, profile="0.9.42") as (emu, backend):
        first = [user("a"), await say(backend, [user("a")]), user("b")]
        await say(backend, first)
        assert emu.chats()[-1].layer1 == "hit"
        edited = [*first, {"role": "assistant", "content": "never said"}, user("c")]
        await say(backend, edited)
        assert (emu.chats()[-1].layer1, emu.chats()[-1].kept) == ("miss", 0)
        # and another conversation in between, which old releases do not even note
        await say(backend, [user("x")])
        answer = emu.chats()[-1].text
        assert answer
        await say(backend, [*edited, {"role": "assistant", "content": "Heard: c"}, user("d")])
        assert (emu.chats()[-1].layer1, emu.chats()[-1].kept) == ("miss", 0)


async def test_old_releases_get_all_tool_results() -> None:
    """Of two results one would be lost; one alone is a step like any other."""
    async with driven(model=HIST, profile="0.9.42") as (emu, backend):
        for calls in (1, 2):
            emu.answers.append(Answer("", calls=(("ls", '{"path": "/"}'),) * calls))
            opening = [user(f"list {calls}")]
            asked = await say(backend, opening, tools=TOOLS)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"file{n}"}
                for n, call in enumerate(asked["tool_calls"])
            ]
            await say(backend, [*opening, asked, *results], tools=TOOLS)
            assert emu.chats()[-1].layer1 == ("hit" if calls == 1 else "miss")


# --- images ----------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["0.9.45", "1.0.8"])
async def test_a_changed_image_is_seen(profile: str) -> None:
    """The same words about another image are not answered from the first one's state."""

    def about(data: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": PNG + data}}
        return user([{"type": "text", "text": "what?"}, image])

    async with driven(profile=profile) as (emu, backend):
        answer = await say(backend, [about("AAAA")])
        await say(backend, [about("AAAA"), answer, user("and?")])
        assert emu.chats()[-1].kept > 256
        again = await say(backend, [about("AAAA"), answer, user("and?")])
        await say(backend, [about("BBBB"), answer, user("and?"), again, user("more?")])
        assert emu.chats()[-1].kept == 0


# --- tools -----------------------------------------------------------------------------------


async def test_tools_that_no_model_sees() -> None:
    """They are not sent, so that they cannot spoil the cache."""
    async with driven(model="llama3.2:3b") as (emu, backend):
        answer = await say(backend, [user("a")], tools=TOOLS)
        renamed = [{"type": "function", "function": {"name": "other"}}]
        await say(backend, [user("a"), answer, user("b")], tools=renamed)
        last = emu.chats()[-1]
        assert (last.layer1, "tools" in last.body) == ("hit", False)
        assert last.kept == emu.chats()[0].prompt + emu.chats()[0].completion


async def test_tools_stay_with_their_conversation() -> None:
    """Where a conversation began with tools before the model was known, they go on."""
    async with driven(model="llama3.2:3b") as (emu, backend):
        backend._pinned = ""
        answer = await say(backend, [user("a")], tools=TOOLS)
        await say(backend, [user("a"), answer, user("b")], tools=TOOLS)
        assert [("tools" in chat.body, chat.layer1) for chat in emu.chats()] == [
            (True, "switch"), (True, "hit"),
        ]  # fmt: skip


async def test_calls_come_back_as_they_were_generated() -> None:
    """A model that goes on from its own text finds its tool calls in it again."""
    async with driven(model=HIST) as (emu, backend):
        emu.answers.append(Answer("", calls=(("ls", '{"path": "/", "a": 1}'),)))
        asked = await say(backend, [user("list")], tools=TOOLS)
        result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "x"}
        await say(backend, [user("list"), asked, result], tools=TOOLS)
        first, second = emu.chats()
        assert second.kept == first.prompt + first.completion


async def test_a_fault_in_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loses nothing of what is known of the server: its answer has ended well."""

    async def broken(_texts: object) -> list[int]:
        raise RuntimeError("a bug")

    async with driven(model=HIST) as (emu, backend):
        monkeypatch.setattr(backend._window, "counts", broken)
        emu.answers.append(Answer("", calls=(("ls", '{"path": "/", "a": 1}'),)))
        await say(backend, [user("list")], tools=TOOLS)
        await until(lambda: not backend._running)
        assert backend._scribe.faults == 1
        assert backend._memory.last is not None
        assert backend._memory.cancelled is None


# --- stop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_stop(stream: bool) -> None:
    """The server does not read it: the text is cut here, the rest cancelled."""
    async with driven() as (emu, backend):
        emu.answers.append(Answer("one two END three " + "more " * 200))
        body = {"messages": [user("a")], "stop": ["END"], "stream": stream}
        status, answer, _ = await post(backend, body)
        assert status == 200
        if stream:
            events = [orjson.loads(e[6:]) for e in answer.split(b"\n\n")[:-2]]
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
            finish = events[-1]["choices"][0]["finish_reason"]
        else:
            text = answer["choices"][0]["message"]["content"]
            finish = answer["choices"][0]["finish_reason"]
        assert (text.strip(), finish) == ("one two", "stop")


# --- what was left ---------------------------------------------------------------------------


async def leave(emu: Emulator, backend: FastFlowLM, body: dict[str, Any]) -> Any:
    """A streaming client that goes in the middle of its answer; the hold is still on."""
    hold = emu.hold("decode", after=3)
    asking = asyncio.create_task(post(backend, {**body, "stream": True}))
    await hold.reached.wait()
    await until(lambda: any(one.job.status for one in backend._running.values()))
    await turns(20)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return hold


async def test_an_answer_that_is_worth_its_end() -> None:
    """With tools a cancel would cost the prefix: a short rest is generated, the next turn hits."""
    async with driven() as (emu, backend):
        messages = [user("word " * 4000)]
        answer = await say(backend, messages, tools=TOOLS)
        turn = [*messages, answer, user("b")]
        hold = await leave(emu, backend, {"messages": turn, "tools": TOOLS})
        await turns(500)
        assert cancels(emu) == 0
        hold.release.set()
        await until(lambda: not backend._running)
        await say(backend, [*turn, {"role": "assistant", "content": "x"}, user("c")], tools=TOOLS)
        chats = emu.chats()
        assert (chats[1].finish, chats[2].kept) == ("stop", chats[1].prompt)


@pytest.mark.parametrize(("model", "tools"), [(CKPT, False), (HIST, True)])
async def test_an_answer_that_is_not(model: str, tools: bool) -> None:
    """Where the end saves nothing it is cancelled at once."""
    async with driven(model=model) as (emu, backend):
        more = {"tools": TOOLS} if tools else {}
        await say(backend, [user("word " * 4000)], **more)
        hold = await leave(emu, backend, {"messages": [user("word " * 4000), user("b")], **more})
        await until(lambda: cancels(emu) == 1)
        hold.release.set()
        await until(lambda: not backend._running)
        assert emu.chats()[-1].finish == "cancel"


async def test_patience_ends_when_another_comes() -> None:
    """Whoever else wants the server evicts that conversation anyway."""
    async with driven() as (emu, backend):
        messages = [user("word " * 4000)]
        await say(backend, messages, tools=TOOLS)
        hold = await leave(emu, backend, {"messages": messages, "tools": TOOLS})
        other = asyncio.create_task(say(backend, [user("other")]))
        await until(lambda: cancels(emu) == 1)
        hold.release.set()
        assert (await other)["content"].endswith("other")


@pytest.mark.parametrize("same", [True, False])
async def test_an_answer_never_reaches_another_key(same: bool) -> None:
    """A retry gets the answer its client left, and nobody else does."""
    async with driven() as (emu, backend):
        hold = emu.hold("prefill")
        body = {"messages": [user("secret")], "user": "u1"}
        asking = asyncio.create_task(post(backend, body, owner="k1"))
        await hold.reached.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        retry = {**body, "user": "u2"}  # not sent on, so no other request
        again = asyncio.create_task(post(backend, retry, owner="k1" if same else "k2"))
        await until(lambda: same or cancels(emu) == 1)
        hold.release.set()
        status, answer, _ = await again
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "\n\nHeard: secret")
        assert len(emu.chats()) == (1 if same else 2)


async def test_a_closing_driver_leaves_nothing_that_crashes() -> None:
    """After a cancel the next proxy may send the identical conversation."""
    async with driven() as (emu, backend):
        turn = [user("a"), await say(backend, [user("a")]), user("b")]
        hold = await leave(emu, backend, {"messages": turn})
        await until(lambda: cancels(emu) == 1)
        hold.release.set()
        await backend.close()
        fresh = FastFlowLM(emu.url, connect_timeout=2, silence_timeout=20)
        await say(fresh, turn)
        await fresh.close()
        assert not emu.crashed


# --- the context -----------------------------------------------------------------------------


async def test_too_long_is_refused_here() -> None:
    """An attempt would cost the whole context; this way the next shorter one finds it."""
    async with driven(ctx_len=512) as (emu, backend):
        answer = await say(backend, [user("a " * 100)])
        sent = len(emu.records)
        paste = [user("a " * 100), answer, user("word " * 900)]
        status, body, _ = await post(backend, {"messages": paste})
        error = body["error"]
        assert (status, error["code"], error["source"]) == (
            400, "context_length_exceeded", "slotkeeper",
        )  # fmt: skip
        assert (error["n_ctx"], error["n_prompt_tokens"] > 900) == (512, True)
        assert len(emu.records) == sent
        await say(backend, [user("a " * 100), answer, user("short")])
        assert emu.chats()[-1].kept == emu.chats()[0].prompt


async def test_other_apis_take_the_context() -> None:
    """After a text completion nothing is believed of it; embeddings leave it alone."""
    async with driven(embed=True) as (emu, backend):
        answer = await say(backend, [user("a")])
        vectors = {"model": "embed", "input": "x"}
        assert (await post(backend, vectors, path="/v1/embeddings"))[0] == 200
        assert backend._memory.last is not None
        await say(backend, [user("a"), answer, user("b")])
        assert emu.chats()[-1].kept
        assert (await post(backend, {"prompt": "x"}, path="/v1/completions"))[0] == 200
        assert backend._memory.last is None


async def test_what_is_not_heeded_is_said() -> None:
    """A header names the fields that ask for what the server does not do."""
    async with driven() as (_, backend):
        body = {"messages": [user("a")], "seed": 7, "response_format": {"type": "json_object"}}
        for stream in (True, False):
            _, _, headers = await post(backend, {**body, "stream": stream})
            assert headers["x-slotkeeper-ignored"] == "response_format, seed"
        _, _, headers = await post(backend, {"messages": [user("a")]})
        assert "x-slotkeeper-ignored" not in headers


@pytest.mark.parametrize(
    ("model", "body", "want"),
    [
        (CKPT, {"messages": [user("a")]}, True),
        (HIST, {"messages": [user("a")]}, False),
        ("gemma4-it:e4b", {"messages": [user("a")]}, False),
        ("gemma4-it:e4b", {"messages": [user("a")], "think": True}, True),
        (CKPT, {"messages": []}, False),
    ],
)
async def test_primes(model: str, body: dict[str, Any], want: bool) -> None:
    """Computing a prompt once more helps where the prompt is what the model goes on from."""
    async with driven(model=model) as (_, backend):
        assert backend.primes(0, orjson.dumps(body)) is want


async def test_old_releases_are_not_primed() -> None:
    """They go on from prompt and answer."""
    async with driven(profile="0.9.42") as (_, backend):
        await backend.facts()
        assert not backend.primes(0, orjson.dumps({"messages": [user("a")]}))


@pytest.mark.parametrize("raw", [b"", b"--b--", b'{"model": "w"}'])
async def test_forms_without_their_fields(raw: bytes) -> None:
    """A transcription without a model or a file is undefined behaviour there."""
    async with driven(asr=True) as (emu, backend):
        with pytest.raises(BadRequestError):
            async with backend.send("POST", "/v1/audio/transcriptions", [], raw):
                pass
        assert not any(r.path.endswith("transcriptions") for r in emu.records)
