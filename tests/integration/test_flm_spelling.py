"""Loops of tool calls on models that go on from their own text, however they write arguments.

FastFlowLM tells arguments sorted and without blanks; a model finds its answer again only if they
come back as it wrote them (fastflowlm.md 3.3). Beside each run, the same without the proxy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.backends import fastflowlm
from proxy.core import hold
from tests.emulators.fastflowlm import Answer, Emulator, Options, Record
from tests.emulators.fastflowlm.client import ask
from tests.emulators.fastflowlm.engine import Engine
from tests.emulators.fastflowlm.tokens import tokenizer_json
from tests.integration.conftest import Serve
from tests.integration.proxies import CHAT

STEPS = 12
LONG = "word " * 4000
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {"type": "object", "properties": {"path": {}, "limit": {}, "from": {}}},
        },
    }
]
SPELLINGS: dict[str, Callable[[int], str]] = {
    "spaced, as the schema": lambda n: f'{{"path": "src/{n}.py", "limit": {n}, "from": [1, {n}]}}',
    "compact, sorted": lambda n: f'{{"from":[1,{n}],"limit":{n},"path":"src/{n}.py"}}',
    "spaced, sorted": lambda n: f'{{"from": [1, {n}], "limit": {n}, "path": "src/{n}.py"}}',
    "compact, as the schema": lambda n: f'{{"path":"src/{n}.py","limit":{n},"from":[1,{n}]}}',
    "any order": lambda n: f'{{"limit":{n}, "path":"src/{n}.py", "from":[1,{n}]}}',
}
Ask = Callable[[list[Any]], Awaitable[dict[str, Any]]]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as emulated time is."""
    monkeypatch.setattr(fastflowlm, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(hold, "TURN_SECONDS", 0.0)


def model_that_writes(spelling: str) -> Callable[[Record, Engine], Answer]:
    """A call per answer, its arguments written like that; like each in turn, if there is a plus."""
    turns = spelling.split(" + ")

    def script(record: Record, _engine: Engine) -> Answer:
        step = sum(message["role"] == "assistant" for message in record.body["messages"])
        written = SPELLINGS[turns[step % len(turns)]](step)
        return Answer(f"Step {step}.", calls=(("read", written),))

    return script


async def loop(
    say: Ask, writes: Callable[[dict[str, Any]], dict[str, Any]], asked: str = LONG
) -> None:
    """A turn of many steps. ``writes``: what its client makes of a call before it comes back."""
    messages: list[Any] = [{"role": "user", "content": asked}]
    for _ in range(STEPS):
        message = await say(messages)
        (call,) = message["tool_calls"]
        messages.append({**message, "tool_calls": [writes(call)]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "seen"})


def reformatted(call: dict[str, Any]) -> dict[str, Any]:
    """As a client in Python writes what it has parsed."""
    arguments = orjson.loads(call["function"]["arguments"])
    text = orjson.dumps(arguments, option=orjson.OPT_INDENT_2).decode()
    return {**call, "function": {**call["function"], "arguments": text}}


async def through(
    serve: Serve,
    emu: Emulator,
    writes: Callable[[dict[str, Any]], dict[str, Any]],
    tokenizer: str = "",
    asked: str = LONG,
) -> None:
    """The loop before the proxy."""
    proxy = await serve(url=emu.url, slot_dir=None, tokenizer=tokenizer)

    async def say(messages: list[Any]) -> dict[str, Any]:
        got = await proxy.ask(CHAT, {"messages": messages, "tools": TOOLS})
        assert got.status == 200, got.raw
        return got.json["choices"][0]["message"]  # type: ignore[no-any-return]

    await loop(say, writes, asked)
    await proxy.stop()


async def direct(emu: Emulator) -> None:
    """The loop without it."""

    async def say(messages: list[Any]) -> dict[str, Any]:
        got = await ask(emu.url, CHAT, {"messages": messages, "tools": TOOLS})
        return got.json["choices"][0]["message"]  # type: ignore[no-any-return]

    await loop(say, dict)


def missed(emu: Emulator) -> list[int]:
    """Which steps of a loop found nothing; the first never can."""
    return [n for n, chat in enumerate(emu.chats()) if n and not chat.kept]


@pytest.mark.parametrize("writes", [dict, reformatted])
@pytest.mark.parametrize(
    ("spelling", "misses"),
    [
        ("spaced, as the schema", 0),
        ("compact, sorted", 1),
        ("spaced, sorted", 2),
        ("compact, as the schema", 3),
        ("any order", STEPS - 1),
    ],
)
@pytest.mark.parametrize("model", ["qwen3-it:4b", "gemma4-it:e4b", "llama3.2:3b"])
async def test_a_loop(
    serve: Serve,
    model: str,
    spelling: str,
    misses: int,
    writes: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """A few misses at the start and then none, and never more than that beyond no proxy at all."""
    async with Emulator(Options(model=model)) as emu, Emulator(Options(model=model)) as bare:
        emu.script = bare.script = model_that_writes(spelling)
        await through(serve, emu, writes)
        await direct(bare)
        print(f"{model}, {spelling}: {emu.prefill_seconds:.0f} s of prefill through the proxy "
              f"({len(missed(emu))} misses), {bare.prefill_seconds:.0f} s without "
              f"({len(missed(bare))})")  # fmt: skip
        assert missed(emu) == [*range(1, misses + 1)]
        first = sum(chat.prefill_seconds for chat in emu.chats()[1 : misses + 1])
        assert emu.prefill_seconds <= bare.prefill_seconds * 1.01 + first * (spelling[0] == "c")


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The emulated model's own."""
    named = tmp_path / "tokenizer.json"
    named.write_text(tokenizer_json())
    return str(named)


@pytest.mark.parametrize(
    ("spelling", "misses"),
    [
        ("spaced, as the schema", []),
        ("compact, sorted", []),
        ("compact, sorted + spaced, as the schema", []),
        ("spaced, as the schema + compact, sorted + compact, sorted", []),
        ("spaced, sorted", [1]),
        ("compact, as the schema", [1]),
        ("any order", [*range(1, STEPS)]),
    ],
)
async def test_a_tokenizer_tells_the_blanks(
    serve: Serve, tokenizer: str, spelling: str, misses: list[int]
) -> None:
    """From the first answer on, whatever it is mixed with; only the order of keys is learned."""
    async with Emulator(Options(model="qwen3-it:4b")) as emu:
        emu.script = model_that_writes(spelling)
        await through(serve, emu, dict, tokenizer)
        assert missed(emu) == misses


@pytest.mark.parametrize("mixed", [
    "compact, sorted + spaced, as the schema",
    "spaced, as the schema + compact, sorted",
    "compact, sorted + compact, sorted + spaced, sorted",
    "any order + compact, sorted + spaced, as the schema",
    "compact, as the schema + spaced, sorted + compact, sorted",
])  # fmt: skip
async def test_a_model_that_mixes_them(serve: Serve, tokenizer: str, mixed: str) -> None:
    """Is found no more seldom than without the proxy, a few tries apart the first time ever.

    Three at most, one for each spelling that is not the server's own.
    """
    figures = []
    for number, known in enumerate(("", "", tokenizer)):  # with the tokenizer in the end
        async with (
            Emulator(Options(model="qwen3-it:4b")) as emu,
            Emulator(Options(model="qwen3-it:4b")) as bare,
        ):
            emu.script = bare.script = model_that_writes(mixed)
            await through(serve, emu, dict, known, f"{number} {LONG}")
            await direct(bare)
            figures.append((len(missed(emu)), len(missed(bare))))
    print(f"{mixed}: misses through the proxy and without, {figures}")
    (first, without), *later = figures
    assert first <= without + 3
    assert all(found <= without for found, _ in later)


@pytest.mark.parametrize("model", ["qwen3-it:4b", "qwen3.5:4b"])
async def test_a_proxy_that_is_restarted(serve: Serve, model: str) -> None:
    """In the middle of a loop: the next one writes all calls as they went out, and finds them.

    Though the client names no model, and no answer has told the new proxy which is loaded.
    """
    async with Emulator(Options(model=model)) as emu:
        emu.script = model_that_writes("spaced, as the schema")
        messages: list[Any] = [{"role": "user", "content": LONG}]
        for _ in range(3):
            proxy = await serve(url=emu.url, slot_dir=None)
            for _ in range(2):
                got = await proxy.ask(CHAT, {"messages": messages, "tools": TOOLS, "model": "gpt"})
                message = got.json["choices"][0]["message"]
                (call,) = message["tool_calls"]
                messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "-"}]
            await proxy.stop()
        assert missed(emu) == []


async def test_a_model_that_does_not_mind(serve: Serve) -> None:
    """One that goes on from the prompt gets arguments as they were told, and always hits."""
    async with Emulator(Options(model="qwen3.5:4b")) as emu:
        emu.script = model_that_writes("spaced, as the schema")
        await through(serve, emu, dict)
        assert missed(emu) == []
        (call,) = emu.chats()[-1].body["messages"][1]["tool_calls"]
        assert call["function"]["arguments"] == SPELLINGS["compact, sorted"](0)
