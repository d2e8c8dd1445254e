"""Anthropic's API on the real engine, asked by the real clients.

The ``anthropic`` client for ``/v1/messages``, the ``openai`` client for chat: streaming and not,
with tools and images, and both as one conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest

from proxy.dialects import DIALECTS
from proxy.engine import EngineOptions
from tests.real import tiny_gguf
from tests.real.conftest import EngineHandle
from tests.real.proxies import ProxyProcess, ask
from tests.real.test_conversations import SLACK, prose

pytestmark = pytest.mark.real

MESSAGES = "/v1/messages"
COLD = {"temperature": 0}
HELLO: list[Any] = [{"role": "user", "content": "Say hello to Bob."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # noqa: E501 - one picture


@pytest.fixture(scope="module")
def front(smol: EngineHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy before SmolLM2 for the whole module."""
    made = ProxyProcess(smol.url, smol.slot_dir, tmp_path_factory.mktemp("front"))
    made.start()
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def calling(
    smol_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineHandle, ProxyProcess]]:
    """SmolLM2 behind a template that renders tools, and a proxy before it."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "template.jinja").write_text(tiny_gguf.TOOLS_TEMPLATE)
    (folder / "slots").mkdir()
    options = EngineOptions(
        context=2048,
        threads=1,
        slot_save_path=folder / "slots",
        chat_template_file=folder / "template.jinja",
    )
    engine = EngineHandle(smol_model, folder, options)
    made = ProxyProcess(engine.url, engine.slot_dir, folder)
    made.start()
    yield engine, made
    assert made.stop() == 0
    engine.stop()


@pytest.fixture
def client(front: ProxyProcess) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client."""
    with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as made:
        yield made


def text_of(message: Any) -> str:
    """What it says."""
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_n(message: Any) -> int:
    """Length of its prompt in tokens."""
    return int(message.usage.input_tokens + message.usage.cache_read_input_tokens)


def test_streamed_and_whole(client: anthropic.Anthropic) -> None:
    """The same text and figures either way; the second asking finds everything in the slot."""
    asked: Any = {"model": "m", "max_tokens": 12, "system": "Be brief.", "extra_body": COLD}
    message = client.messages.create(messages=HELLO, **asked)
    with client.messages.stream(messages=HELLO, **asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert text_of(streamed) == text_of(message) != ""
    assert streamed.usage.output_tokens == message.usage.output_tokens == 12
    assert streamed.stop_reason == message.stop_reason == "max_tokens"
    assert streamed.usage.cache_read_input_tokens == prompt_n(message) - 1
    assert streamed.id.startswith("msg_")


def test_the_answer_is_the_backends(client: anthropic.Anthropic, smol: EngineHandle) -> None:
    """The text of the engine's own ``/v1/messages`` for a prompt both render alike."""
    body = {"messages": HELLO, "max_tokens": 12, **COLD}
    direct = ask(smol.url, MESSAGES, body).body
    message = client.messages.create(
        model="m", max_tokens=12, messages=HELLO, extra_body={**COLD, "cache_prompt": False}
    )
    assert text_of(message)[:5] == direct["content"][0]["text"][:5]
    assert prompt_n(message) == sum(
        direct["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(client: anthropic.Anthropic, stream: bool) -> None:
    """The one that was met is named."""
    asked: Any = {"model": "m", "max_tokens": 12, "stop_sequences": ["zzz", ","]}
    asked |= {"messages": HELLO, "extra_body": COLD}
    if stream:
        with client.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ",")
    assert text_of(message) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefilled_answer(client: anthropic.Anthropic, stream: bool) -> None:
    """Only what comes after the client's own beginning is the answer."""
    messages = [*HELLO, {"role": "assistant", "content": "Hello, my dear"}]
    asked: Any = {"model": "m", "max_tokens": 4, "messages": messages, "extra_body": COLD}
    if stream:
        with client.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert text_of(message)
    assert not text_of(message).startswith("Hello, my dear")


def test_count_tokens(client: anthropic.Anthropic, smol: EngineHandle) -> None:
    """The engine's own count of the chat request, and of the prompt it then computes."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": prose(50, 9)}]}]
    counted = client.messages.count_tokens(model="m", system="S", messages=messages)
    plain = [{"role": "system", "content": "S"}, {"role": "user", "content": prose(50, 9)}]
    chat = {"messages": plain}
    assert (
        counted.input_tokens
        == (ask(smol.url, "/v1/chat/completions/input_tokens", chat).body["input_tokens"])
    )
    message = client.messages.create(model="m", max_tokens=1, system="S", messages=messages)
    assert prompt_n(message) == counted.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_images_are_refused_as_the_backend_does(
    client: anthropic.Anthropic, smol: EngineHandle, stream: bool
) -> None:
    """A model that cannot see says so, in the client's shape; also in a tool's result."""
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    image = {"type": "image", "source": source}
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    direct = ask(
        smol.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}
    )
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    for content in (image, result):
        messages: Any = [{"role": "user", "content": [content]}]
        with pytest.raises(anthropic.APIStatusError) as error:
            client.messages.create(model="m", max_tokens=1, messages=messages, stream=stream)
        assert error.value.status_code == direct.status
        assert error.value.body == {
            "type": "error",
            "error": {"type": "api_error", "message": direct.body["error"]["message"]},
        }


def test_a_prompt_that_is_too_long(client: anthropic.Anthropic) -> None:
    """The words by which clients know that they have to compact."""
    messages: Any = [{"role": "user", "content": "a b c d " * 5000}]
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 max"
    ):
        client.messages.create(model="m", max_tokens=1, messages=messages)


def test_turns_reuse_the_slot_whatever_the_api(
    client: anthropic.Anthropic, front: ProxyProcess
) -> None:
    """One conversation through both APIs: rendered alike, one cache entry, only new tokens."""
    system = prose(300, 5)
    asked: Any = {"model": "m", "max_tokens": 8, "extra_body": COLD}
    turns: list[Any] = [{"role": "user", "content": "Go on, please."}]
    first = client.messages.create(
        system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        messages=turns,
        **asked,
    )
    turns += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
    ]
    second = client.messages.create(system=system, messages=turns, **asked)
    assert second.usage.cache_read_input_tokens >= prompt_n(first)
    plain = [
        {"role": "system", "content": system},
        turns[0],
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And then?"},
    ]
    converted = DIALECTS[MESSAGES].parse(orjson.dumps({"system": system, "messages": turns}))
    _, body = DIALECTS[MESSAGES].rendered(converted)
    prompts = {
        ask(front.url, "/apply-template", given).body["prompt"]
        for given in (body, {"messages": plain})
    }
    assert len(prompts) == 1
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as other:
        third = other.chat.completions.with_raw_response.create(
            model="m",
            max_tokens=8,
            temperature=0,
            messages=plain,
        )
    assert third.headers["x-slotkeeper"].startswith("slot-hit")
    usage = third.parse().usage
    assert usage is not None
    assert usage.prompt_tokens == prompt_n(second)
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= prompt_n(second) - 1 - SLACK


def tool_history() -> list[Any]:
    """A conversation that makes even a small model call a tool."""
    messages: list[Any] = []
    for city in ("Rome", "Paris", "Oslo"):
        use = {"type": "tool_use", "id": city, "name": "get_weather", "input": {"city": city}}
        result = {"type": "tool_result", "tool_use_id": city, "content": "sunny"}
        messages += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": "sunny"},
        ]
    return [*messages, {"role": "user", "content": "Weather in Rome?"}]


def test_tools(calling: tuple[EngineHandle, ProxyProcess]) -> None:
    """History and definitions are rendered, a call comes back, its result goes in, and it hits."""
    engine, proxy = calling
    messages = tool_history()
    call = DIALECTS[MESSAGES].parse(orjson.dumps({"messages": messages, "tools": [WEATHER]}))
    prompt = ask(engine.url, "/apply-template", DIALECTS[MESSAGES].rendered(call)[1]).body["prompt"]
    assert '"name": "get_weather", "description": "Weather of a city"' in prompt
    assert '"arguments": {"city": "Oslo"}' in prompt
    assert prompt.count("<tool_response>\nsunny\n</tool_response>") == 3
    forced = {"temperature": 0, "logit_bias": [["response", -100]]}
    with anthropic.Anthropic(base_url=proxy.url, api_key="any", max_retries=0) as client:
        asked: Any = {"model": "m", "max_tokens": 64, "tools": [WEATHER], "extra_body": forced}
        asked |= {"tool_choice": {"type": "any"}}
        with client.messages.stream(messages=messages, **asked) as stream:
            streamed: Any = stream.get_final_message()
        whole: Any = client.messages.create(messages=messages, **asked)
        for message in (streamed, whole):
            assert message.stop_reason == "tool_use"
            use = message.content[-1]
            assert use.type == "tool_use"
            assert use.id
            assert use.name == "get_weather"
            assert set(use.input) == {"city"}
        result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": "rainy"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
            {"role": "user", "content": [result]},
        ]
        after = client.messages.create(messages=messages, **{**asked, "max_tokens": 2})
    assert (after.usage.cache_read_input_tokens or 0) >= prompt_n(whole) - SLACK


@pytest.mark.parametrize("stream", [False, True])
def test_chat_by_the_openai_client(front: ProxyProcess, stream: bool) -> None:
    """The client for chat reads answers, streamed and not, and refusals."""
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": "m", "max_tokens": 6, "temperature": 0, "messages": HELLO}
        if stream:
            chunks = list(client.chat.completions.create(**asked, stream=True))
            text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            answer = client.chat.completions.create(**asked)
            text = answer.choices[0].message.content or ""
            assert answer.choices[0].finish_reason == "length"
        assert text.startswith("Hello")
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a b c d " * 5000}], stream=stream
            )
