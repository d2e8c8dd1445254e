"""Through the dialects an answer equals a direct one: event by event, and field by field.

No proxy runs here: what a dialect sends and what its filter and assembler make of the engine's
stream is compared with what the same engine answers directly under equal conditions (temperature
0, nothing cached, one request at a time).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import orjson
import pytest

from proxy.core.sse import Parser
from proxy.dialects import DIALECTS
from tests.real import tiny_gguf
from tests.real.conftest import EngineFactory, EngineHandle

pytestmark = pytest.mark.real

CHAT, TEXT, NATIVE, INFILL = "/v1/chat/completions", "/v1/completions", "/completion", "/infill"
SAME = {"temperature": 0, "cache_prompt": False, "max_tokens": 12}
HELLO = {"messages": [{"role": "user", "content": "Say hello to Bob."}]}
TALE = {"prompt": "Once upon a time"}
VOLATILE = {"id", "created", "id_slot"}
THINKING_TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
THOUGHT = {**HELLO, "grammar": 'root ::= "I think</think>\\n\\nHello."'}
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
            },
        },
    }
]


def post(url: str, path: str, raw: bytes) -> tuple[int, bytes]:
    """Status and body, whatever they are."""
    request = Request(url + path, raw, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    """A direct answer."""
    status, answer = post(url, path, orjson.dumps(body))
    assert status == 200, answer
    return orjson.loads(answer)


def events(url: str, path: str, raw: bytes) -> list[bytes]:
    """The data of the events of a stream."""
    status, answer = post(url, path, raw)
    assert status == 200, answer
    return [event.data for event in Parser().feed(answer) if not event.comment_only]


def steady(value: Any) -> Any:
    """``value`` without what differs between two equal answers: ids, clocks, speeds."""
    if isinstance(value, list):
        return [steady(item) for item in value]
    if isinstance(value, dict):
        timed = ("_ms", "_per_second")
        return {
            name: steady(item)
            for name, item in value.items()
            if name not in VOLATILE and not name.endswith(timed)
        }
    return value


def parsed(data: list[bytes]) -> list[Any]:
    """Events ready for comparison."""
    return [item if item == b"[DONE]" else steady(orjson.loads(item)) for item in data]


def by_choice(data: list[Any]) -> dict[Any, list[Any]]:
    """Events per choice: between choices the engine's own order varies from run to run."""
    rows: dict[Any, list[Any]] = {}
    for item in data:
        choices = item.get("choices") if isinstance(item, dict) else None
        key = choices[0]["index"] if choices else item.get("index") if choices is None else -1
        rows.setdefault(key, []).append(item)
    return rows


def filtered(url: str, path: str, body: dict[str, Any]) -> list[bytes]:
    """The events a streaming client gets through the dialect; what the filter saw is checked."""
    dialect = DIALECTS[path]
    call = dialect.parse(orjson.dumps(body))
    events_filter = dialect.filter(call)
    got = []
    for data in events(url, path, dialect.upstream(call, None)):
        kept = events_filter.feed(data)
        if kept is not None:
            got.append(kept)
    assert events_filter.cache_n == 0
    assert events_filter.prompt_n
    assert events_filter.prefilled
    assert events_filter.timings
    assert not events_filter.truncated
    return got


def assembled(url: str, path: str, body: dict[str, Any]) -> Any:
    """The answer a non-streaming client gets, put together from a stream."""
    dialect = DIALECTS[path]
    call = dialect.parse(orjson.dumps(body))
    assert call.streamable
    assembler = dialect.assembler(call)
    for data in events(url, path, dialect.upstream(call, None)):
        assembler.feed(data)
    assert assembler.error() is None
    assert not assembler.lossy
    return orjson.loads(assembler.answer())


def ordered(value: Any) -> str:
    """The spelling of ``value``: order of keys included."""
    return orjson.dumps(steady(value)).decode()


STREAMS = [
    (CHAT, HELLO),
    (CHAT, {**HELLO, "stream_options": {"include_usage": True}}),
    (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**HELLO, "stop": ["Bob"]}),
    (CHAT, {**HELLO, "max_tokens": 0}),
    (CHAT, {**HELLO, "timings_per_token": True}),
    (CHAT, {**HELLO, "verbose": True}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
    (CHAT, {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Hello dear"}]}),
    (TEXT, TALE),
    (TEXT, {**TALE, "stream_options": {"include_usage": True}}),
    (TEXT, {**TALE, "logprobs": 2}),
    (TEXT, {"prompt": ["Once upon a time"], "stop": "city"}),
    (NATIVE, TALE),
    (NATIVE, {**TALE, "n_probs": 2, "return_tokens": True}),
    (NATIVE, {**TALE, "n_probs": 2, "post_sampling_probs": True}),
    (NATIVE, {**TALE, "response_fields": ["content", "timings"]}),
    (NATIVE, {"prompt": [12, "once", 13]}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_filtered_stream_equals_a_direct_one(
    smol: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """What remains after the filter is the direct stream, event for event."""
    body = {**SAME, **body, "stream": True}
    direct = parsed(events(smol.url, path, orjson.dumps(body)))
    assert parsed(filtered(smol.url, path, body)) == direct


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HELLO, "n": 2}),
        (CHAT, {**HELLO, "n": 2, "stream_options": {"include_usage": True}}),
        (TEXT, {**TALE, "n": 2}),
        (NATIVE, {**TALE, "n_cmpl": 2}),
    ],
)
def test_a_filtered_stream_of_several_choices_equals_a_direct_one(
    smol: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """Each choice's events are the direct ones, in their order."""
    body = {**SAME, **body, "stream": True}
    direct = by_choice(parsed(events(smol.url, path, orjson.dumps(body)))[:-1])
    assert by_choice(parsed(filtered(smol.url, path, body))[:-1]) == direct


@pytest.mark.parametrize("path", [TEXT, NATIVE])
def test_a_stream_of_several_prompts_equals_a_direct_one(smol: EngineHandle, path: str) -> None:
    """Prompt arrays get no progress asked for, so that the engine's null events stay as they are."""
    body = {**SAME, "prompt": ["a", "b"], "stream": True}
    dialect = DIALECTS[path]
    call = dialect.parse(orjson.dumps(body))
    assert call.wide
    assert dialect.upstream(call, None) is call.raw
    stream = events(smol.url, path, call.raw)
    assert stream[0] == b"null"
    events_filter = dialect.filter(call)
    assert [events_filter.feed(data) for data in stream] == stream


def test_progress_a_client_asked_for_stays(smol: EngineHandle) -> None:
    """Nothing is taken out of a stream whose progress the client wanted."""
    body = {**SAME, **HELLO, "stream": True, "return_progress": True}
    got = filtered(smol.url, CHAT, body)
    assert sum(b"prompt_progress" in data for data in got) == 2


ANSWERS = [
    (CHAT, HELLO),
    (CHAT, {**HELLO, "max_tokens": 60}),
    (CHAT, {**HELLO, "grammar": 'root ::= "x😀é日本y"'}),
    (CHAT, {**HELLO, "stream_options": {"include_usage": False}}),
    (CHAT, {**HELLO, "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": []}),
    (TEXT, TALE),
    (TEXT, {**TALE, "max_tokens": 60, "timings_per_token": True}),
    (TEXT, {"prompt": ""}),
    (NATIVE, TALE),
    (NATIVE, {**TALE, "return_progress": True, "stream": False}),
    (NATIVE, {"prompt": [[12, 13]]}),
    (NATIVE, {"prompt": "a", "grammar": 'root ::= "x😀é日本y"'}),
    (NATIVE, {"prompt": ""}),
]


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_an_assembled_answer_equals_a_direct_one(
    smol: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """Field by field, in the same order of keys."""
    body = {**SAME, **body}
    assert ordered(assembled(smol.url, path, body)) == ordered(ask(smol.url, path, body))


@pytest.mark.parametrize(
    ("path", "body", "differs"),
    [
        (NATIVE, {"prompt": "a", "grammar": 'root ::= "x😀y"', "return_tokens": True}, "tokens"),
        (NATIVE, {**TALE, "stop": ["the city zzz"]}, "content"),
    ],
)
def test_what_the_stream_does_not_hold_is_not_streamed(
    smol: EngineHandle, path: str, body: dict[str, Any], differs: str
) -> None:
    """These requests stay unstreamed, for a reason that still holds: the stream lacks a part."""
    body = {**SAME, **body}
    call = DIALECTS[path].parse(orjson.dumps(body))
    assert not call.streamable
    direct = ask(smol.url, path, body)
    stream = [
        orjson.loads(data)
        for data in events(smol.url, path, orjson.dumps({**body, "stream": True}))
    ]
    parts = [event[differs] for event in stream]
    whole = "".join(parts) if differs == "content" else [item for part in parts for item in part]
    assert whole != direct[differs]


def test_a_prefilled_answer_is_not_streamed(smol: EngineHandle) -> None:
    """The direct answer starts with the client's own last message, the stream does not."""
    body = {**SAME, "messages": [*HELLO["messages"], {"role": "assistant", "content": "Hi dear"}]}
    assert not DIALECTS[CHAT].parse(orjson.dumps(body)).streamable
    assert ask(smol.url, CHAT, body)["choices"][0]["message"]["content"].startswith("Hi dear")


@pytest.fixture(scope="module")
def thinking(
    smol_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHandle]:
    """SmolLM2 behind a template that opens every answer with a thought."""
    yield from _with_template(smol_model, tmp_path_factory, THINKING_TEMPLATE)


@pytest.fixture(scope="module")
def calling(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """SmolLM2 behind a template that renders tools."""
    yield from _with_template(smol_model, tmp_path_factory, tiny_gguf.TOOLS_TEMPLATE)
