"""What the emulator answers: shapes, counts, tools, errors; and the parts it is made of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulators.fastflowlm import Answer, Emulator, Options, acceptance, resolve
from tests.emulators.fastflowlm.acceptance import CKPT, HIST, Ask
from tests.emulators.fastflowlm.cache import checksum
from tests.emulators.fastflowlm.client import ask
from tests.emulators.fastflowlm.normalise import normalise
from tests.emulators.fastflowlm.tokens import encode

CHAT = "/v1/chat/completions"
SAY: dict[str, Any] = {
    "model": CKPT,
    "stream": True,
    "messages": [{"role": "user", "content": "Hello"}],
}
PLAIN = {**SAY, "stream": False}


async def test_stream_on_the_wire() -> None:
    """Headers of a connection that lives, on one that dies; an event per chunk, a role in each."""
    async with Emulator(Options(model=CKPT)) as emu:
        reply = await ask(emu.url, CHAT, SAY)
        assert reply.headers["connection"] == "keep-alive"
        assert reply.complete
        assert all(c.startswith(b"data: ") and c.endswith(b"\n\n") for c in reply.chunks)
        assert reply.chunks[-1] == b"data: [DONE]\n\n"
        assert {delta["role"] for delta in reply.deltas[:-1]} == {"assistant"}
        assert reply.deltas[-1] == {"content": None}
        assert reply.text.startswith("\n\n")  # what stands behind </think>
        assert {"role": "assistant", "content": ""} in reply.deltas
        record = emu.records[-1]
        assert record.first_byte == pytest.approx(record.started + record.prefill_seconds)
        assert len(record.text) > len(reply.text)


@pytest.mark.parametrize(("tag", "seconds"), acceptance.PREFILL_SECONDS.items())
def test_prefill_curve(tag: str, seconds: tuple[float, float]) -> None:
    """The cost of 8k and 32k tokens is the one of the benchmark tables, within the fit's error."""
    speed = resolve("qwen3.6-moe:35b" if tag.startswith("qwen3.6") else tag).speed
    for count, want in zip((8192, 32768), seconds, strict=True):
        assert speed.a + speed.prefill(0, count) == pytest.approx(want, rel=0.034)


async def test_prefill_is_done_in_chunks() -> None:
    """The constant is paid once, and the whole costs what it costs at once."""
    async with Emulator(Options(model=CKPT, prefill_chunk_len=512)) as emu:
        await ask(emu.url, CHAT, {**SAY, "messages": [{"role": "user", "content": "word " * 3000}]})
        record = emu.records[-1]
        speed = resolve(CKPT).speed
        assert record.prefilled > 3000
        assert record.prefill_seconds == pytest.approx(speed.a + speed.prefill(0, record.prefilled))


async def test_errors_inside_200() -> None:
    """Null is a type error, which goes out with HTTP 200; null content is none."""
    async with Emulator(Options(model=CKPT)) as emu:
        for name in ("temperature", "max_tokens", "stream", "model", "think"):
            reply = await ask(emu.url, CHAT, {**PLAIN, name: None})
            assert (reply.status, reply.json["error"]["code"]) == (200, 500)
            assert "type_error.302" in reply.json["error"]["message"]
        silent = {"role": "assistant", "content": None}
        reply = await ask(emu.url, CHAT, {**PLAIN, "messages": [*PLAIN["messages"], silent]})
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        emu.fault("error")
        assert (await ask(emu.url, CHAT, SAY)).json == {"error": "emulated exception"}
        emu.fault("load")
        reply = await ask(emu.url, CHAT, SAY)
        assert reply.json == {"error": f"Failed to load {CKPT} model!"}


async def test_sampling_is_sticky() -> None:
    """What one request sets, the next one has, until the model is loaded again."""
    async with Emulator(Options(model=CKPT)) as emu:
        await ask(emu.url, CHAT, {**PLAIN, "temperature": 0.1, "min_p": 0.05})
        await ask(emu.url, CHAT, PLAIN)
        state = (await ask(emu.url, "/__emu/state")).json
        assert (state["sampling"]["temperature"], state["sampling"]["min_p"]) == (0.1, 0)
        await ask(emu.url, CHAT, {**PLAIN, "model": HIST})
        assert (await ask(emu.url, "/__emu/state")).json["sampling"]["temperature"] == 0.8


@pytest.mark.parametrize("name", ["qwen3.5", "gpt-4o"])
async def test_names_that_reload(name: str) -> None:
    """A name without a size, or an unknown one, loads a model with every request."""
    async with Emulator() as emu:
        for _ in range(3):
            reply = await ask(emu.url, CHAT, {**PLAIN, "model": name})
            assert reply.json["model"] == name
        assert [r.loaded for r in emu.records] == [True, True, True]
        assert emu.current_tag == resolve(name).tag
        assert emu.clock.now > 3 * 0.5


async def test_ends_of_an_answer() -> None:
    """Length is told in streams only; a full context always claims to have stopped."""
    async with Emulator(Options(model=CKPT, ctx_len=512)) as emu:
        short = await ask(emu.url, CHAT, {**SAY, "max_tokens": 2})
        assert (short.finish, short.usage["completion_tokens"]) == ("length", 2)
        plain = await ask(emu.url, CHAT, {**PLAIN, "max_tokens": 2})
        assert plain.json["choices"][0]["finish_reason"] == "stop"
        emu.answers.append(Answer("word " * 600))
        full = await ask(emu.url, CHAT, SAY)
        assert full.finish == "stop"
        assert full.usage["active_kv_tokens"] == full.usage["max_kv_token_capacity"] == 512


@pytest.mark.parametrize(
    ("profile", "model", "index", "identity"),
    [
        ("0.9.45", CKPT, [0, 1, 2, 3], "call_1000"),
        ("0.9.45", "qwen3:4b", [0, 1, 2, 3], "generate_id()"),
        ("1.0.8", CKPT, [0, 1, 0, 1], "call_1000"),
    ],
)
async def test_tool_calls(profile: str, model: str, index: list[int], identity: str) -> None:
    """Indices count for the life of the process before era E; ids repeat."""
    calls = (("read", '{"b": 1, "a": 2}'), ("write", "{}"))
    options = Options(model=model, profile=profile)
    async with Emulator(options, wall=lambda: 1000.5) as emu:
        seen = []
        for _ in range(2):
            emu.answers.append(Answer("Well.", calls=calls))
            body = {**SAY, "model": model, **Ask("u1", tools=("read", "write")).body()}
            reply = await ask(emu.url, CHAT, body)
            assert reply.finish == "tool_calls"
            seen += [d["tool_calls"][0] for d in reply.deltas if "tool_calls" in d]
        assert [call["index"] for call in seen] == index
        assert {call["id"] for call in seen} == {identity}


async def test_modern_tools() -> None:
    """Era E: tools buffer the stream, a choice changes prompt and tools, rules are enforced."""
    async with Emulator(Options(model=CKPT, profile="1.0.8")) as emu:
        body = {**SAY, **Ask("u1", tools=("read", "write")).body()}
        emu.answers.append(Answer("one two three four"))
        reply = await ask(emu.url, CHAT, body)
        assert [d["content"] for d in reply.deltas if d.get("content")] == [
            "\n\none two three four"
        ]
        record = emu.records[-1]
        assert record.first_byte == pytest.approx(
            record.started + record.prefill_seconds + record.decode_seconds
        )
        shorter = emu.records[-1].prompt
        emu.answers.append(Answer("no call"))
        reply = await ask(emu.url, CHAT, {**body, "tool_choice": "required"})
        assert (reply.status, reply.json["error"]["code"]) == (200, 500)
        assert emu.records[-1].prompt > shorter
        assert emu.engine is not None
        assert not emu.engine.history
        await ask(emu.url, CHAT, {**body, "tool_choice": "none"})
        assert emu.records[-1].prompt < shorter
        twice = {**body, "tools": [acceptance.TOOLS["read"]] * 2}
        assert (await ask(emu.url, CHAT, twice)).status == 400


async def test_plain_shape() -> None:
    """qwen3.5 leaves its thinking in the content before era E."""
    for profile, thought in (("0.9.45", None), ("1.0.8", "Hm.\n")):
        async with Emulator(Options(model=CKPT, profile=profile)) as emu:
            reply = (await ask(emu.url, CHAT, PLAIN)).json
            message = reply["choices"][0]["message"]
            assert message.get("reasoning_content") == thought
            assert message["content"].startswith("\n\n" if thought else "<think>Hm.\n</think>\n\n")
            assert (reply["id"], reply["service_tier"]) == ("fastflowlm-chat-completion", "default")


async def test_other_endpoints() -> None:
    """The shapes of the rest; what is off is answered with null."""
    async with Emulator(Options(model=CKPT)) as emu:
        listed = (await ask(emu.url, "/v1/models")).json
        assert list(listed) == ["data", "object"]
        assert list(listed["data"][0]) == ["created", "id", "object", "owned_by"]
        assert (await ask(emu.url, "/api/ps")).json["models"][0]["name"] == CKPT
        status = (await ask(emu.url, "/api/npu/status")).json
        assert status["message"] == "NPU is available"
        embed = {"model": "embed-gemma:300m", "input": ["a", "bc"]}
        assert (await ask(emu.url, "/v1/embeddings", embed)).body == b"null"
        sound = await ask(emu.url, "/v1/audio/transcriptions", b"--x", kind="multipart/form-data")
        assert sound.body == b"null"
        generated = await ask(emu.url, "/api/generate", {"model": CKPT, "prompt": "Hello"})
        assert len(generated.events[-1]["context"]) == emu.as_json()["history"]
        text = (await ask(emu.url, "/v1/completions", {"model": CKPT, "prompt": "Hello"})).json
        assert text["object"] == "text_completion"
        assert "Hello" in text["choices"][0]["text"]
    async with Emulator(Options(embed=True)) as emu:
        vectors = (await ask(emu.url, "/v1/embeddings", embed)).json
        assert [len(entry["embedding"]) for entry in vectors["data"]] == [768, 768]


def test_normaliser() -> None:
    """Questions merge without a separator, reasoning goes, images move, strangers are dropped."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "system", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "name": "n"},
        {"role": "user", "content": [picture, {"type": "video"}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": None, "reasoning_content": "x", "thinking": "y"},
        {"role": "developer", "content": "e"},
    ]
    assert normalise(messages) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "cd", "name": "n", "images": ["AAAA"]},
        {"role": "assistant", "content": ""},
        {"role": "developer", "content": "e"},
    ]


@given(st.binary(max_size=64))
def test_checksum_is_additive(data: bytes) -> None:
    """Words of eight bytes may change places unnoticed; a tail is summed bytewise."""
    padded = data + bytes(-len(data) % 8)
    assert checksum(padded + b"\x05\x06") == (checksum(b"\x01" + bytes(7) + padded) + 10) % 2**64
    swapped = padded[8:] + padded[:8]
    assert checksum(swapped) == checksum(padded)


@given(st.text())
def test_tokens_are_the_text(text: str) -> None:
    """No character is lost, and encoding is canonical."""
    assert "".join(encode(text)) == text
