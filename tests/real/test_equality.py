"""Through the dialects an answer equals a direct one: event by event, and field by field.

No proxy runs here: what a dialect sends and what its filter and assembler make of the engine's
stream is compared with what the same engine answers directly under equal conditions (temperature
0, nothing cached, one request at a time).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.sse import Parser
from proxy.dialects import DIALECTS
from proxy.dialects.base import Unreadable
from proxy.engine import EngineOptions
from proxy.errors import BadRequestError
from tests.real import tiny_gguf
from tests.real.conftest import EngineFactory, EngineHandle

pytestmark = pytest.mark.real

CHAT, TEXT, NATIVE, INFILL = "/v1/chat/completions", "/v1/completions", "/completion", "/infill"
SAME = {"temperature": 0, "cache_prompt": False, "max_tokens": 12}
HELLO = {"messages": [{"role": "user", "content": "Say hello to Bob."}]}
TALE = {"prompt": "Once upon a time"}
VOLATILE = {"id", "created", "id_slot"}
THINKING_TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
THOUGHT = {**HELLO, "grammar": 'root ::= "I think</think>\\n\\nHello."'}
SCRIPTS = 'root ::= "x😀é日本y"'  # characters of several tokens each
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
    host = url.removeprefix("http://")
    with closing(HTTPConnection(host, timeout=60)) as connection:
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


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


def by_choice(data: list[Any]) -> dict[int, list[Any]]:
    """Events per choice: between choices the engine's own order varies from run to run.

    Those of no choice (usage, the end) are kept as a choice of their own.
    """
    rows: dict[int, list[Any]] = {}
    for item in data:
        told = item if isinstance(item, dict) else {}
        choice = told["choices"][0] if told.get("choices") else told
        rows.setdefault(choice.get("index", -1), []).append(item)
    return rows


def filtered(url: str, path: str, body: dict[str, Any]) -> list[bytes]:
    """The events a streaming client gets through the dialect; what the filter saw is checked."""
    dialect = DIALECTS[path]
    call = dialect.parse(orjson.dumps(body))
    events_filter = dialect.filter(call)
    got = []
    for data in events(url, path, dialect.upstream(call, call.id_slot)):
        kept = events_filter.feed(data)
        if kept is not None:
            got.append(kept)
    assert (events_filter.cache_n == 0) is not call.cache
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
    for data in events(url, path, dialect.upstream(call, call.id_slot)):
        assembler.feed(data)
    assert assembler.error() is None
    assert not assembler.lossy
    return orjson.loads(assembler.answer())


def ordered(value: Any) -> str:
    """The spelling of ``value``: order of keys included."""
    return orjson.dumps(steady(value)).decode()


def compare_streams(url: str, path: str, body: dict[str, Any]) -> None:
    """What remains after the filter is the direct stream."""
    body = {**body, "stream": True}
    direct = parsed(events(url, path, orjson.dumps(body)))
    assert parsed(filtered(url, path, body)) == direct


def compare_answers(url: str, path: str, body: dict[str, Any]) -> Any:
    """What is put together is the direct answer, in spelling and order too; returns that."""
    direct = ask(url, path, body)
    assert ordered(assembled(url, path, body)) == ordered(direct)
    return direct


STREAMS = [
    (CHAT, HELLO),
    (CHAT, {**HELLO, "stream_options": {"include_usage": True}}),
    (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**HELLO, "max_tokens": 0}),
    (CHAT, {**HELLO, "timings_per_token": True}),
    (CHAT, {**HELLO, "verbose": True}),
    (CHAT, {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Hello dear"}]}),
    (TEXT, TALE),
    (TEXT, {**TALE, "stream_options": {"include_usage": True}}),
    (TEXT, {**TALE, "logprobs": 2}),
    (TEXT, {"prompt": ["Once upon a time"]}),
    (NATIVE, TALE),
    (NATIVE, {**TALE, "n_probs": 2, "return_tokens": True}),
    (NATIVE, {**TALE, "n_probs": 2, "post_sampling_probs": True}),
    (NATIVE, {**TALE, "response_fields": ["content", "timings"]}),
    (NATIVE, {"prompt": [12, "once", 13]}),
]
REAL_TEXT_STREAMS = [
    (CHAT, {**HELLO, "stop": ["Bob"]}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
    (TEXT, {**TALE, "stop": "city"}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_filtered_stream_equals_a_direct_one(
    tools_engine: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """What remains after the filter is the direct stream, event for event."""
    compare_streams(tools_engine.url, path, {**SAME, **body})


@pytest.mark.parametrize(("path", "body"), REAL_TEXT_STREAMS)
def test_a_filtered_stream_of_real_text_equals_a_direct_one(
    smol: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """The same, where the text matters or the template must bear odd messages."""
    compare_streams(smol.url, path, {**SAME, **body})


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
    tools_engine: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """Each choice's events are the direct ones, in their order."""
    body = {**SAME, **body, "stream": True}
    direct = by_choice(parsed(events(tools_engine.url, path, orjson.dumps(body))))
    assert by_choice(parsed(filtered(tools_engine.url, path, body))) == direct


@pytest.mark.parametrize("path", [TEXT, NATIVE])
def test_a_stream_of_several_prompts_equals_a_direct_one(
    tools_engine: EngineHandle, path: str
) -> None:
    """Prompt arrays get no progress asked for: the engine's null events stay as they are."""
    body = {**SAME, "prompt": ["a", "b"], "stream": True}
    dialect = DIALECTS[path]
    call = dialect.parse(orjson.dumps(body))
    assert call.wide
    assert orjson.loads(dialect.upstream(call, None)) == body
    stream = events(tools_engine.url, path, call.raw)
    assert stream[0] == b"null"
    events_filter = dialect.filter(call)
    assert [events_filter.feed(data) for data in stream] == stream


def test_progress_a_client_asked_for_stays(tools_engine: EngineHandle) -> None:
    """Nothing is taken out of a stream whose progress the client wanted."""
    body = {**SAME, **HELLO, "stream": True, "return_progress": True}
    got = filtered(tools_engine.url, CHAT, body)
    assert sum(b"prompt_progress" in data for data in got) == 2


ANSWERS = [
    (CHAT, HELLO),
    (CHAT, {**HELLO, "max_tokens": 60}),
    (CHAT, {**HELLO, "stream_options": {"include_usage": False}}),
    (CHAT, {**HELLO, "response_format": {"type": "json_object"}}),
    (TEXT, TALE),
    (TEXT, {**TALE, "max_tokens": 60, "timings_per_token": True}),
    (TEXT, {"prompt": ""}),
    (NATIVE, TALE),
    (NATIVE, {**TALE, "return_progress": True, "stream": False}),
    (NATIVE, {"prompt": [[12, 13]]}),
    (NATIVE, {"prompt": "", "id_slot": 0}),  # it shows how many tokens the slot happens to hold
]
REAL_TEXT_ANSWERS = [
    (CHAT, {**HELLO, "max_tokens": 24}),
    (CHAT, {"messages": []}),
    (CHAT, {**HELLO, "grammar": SCRIPTS}),
    (NATIVE, {"prompt": "a", "grammar": SCRIPTS}),
]


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_an_assembled_answer_equals_a_direct_one(
    tools_engine: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """Field by field, in the same order of keys."""
    compare_answers(tools_engine.url, path, {**SAME, **body})


@pytest.mark.parametrize(("path", "body"), REAL_TEXT_ANSWERS)
def test_an_assembled_answer_of_real_text_equals_a_direct_one(
    smol: EngineHandle, path: str, body: dict[str, Any]
) -> None:
    """The same, where the text matters."""
    compare_answers(smol.url, path, {**SAME, **body})


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


def test_a_prefilled_answer_is_not_streamed(tools_engine: EngineHandle) -> None:
    """The direct answer starts with the client's own last message, the stream does not."""
    body = {**SAME, "messages": [*HELLO["messages"], {"role": "assistant", "content": "Hi dear"}]}
    assert not DIALECTS[CHAT].parse(orjson.dumps(body)).streamable
    assert ask(tools_engine.url, CHAT, body)["choices"][0]["message"]["content"].startswith(
        "Hi dear"
    )


@pytest.fixture(scope="module")
def thinking(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """SmolLM2 behind a template that opens every answer with a thought."""
    yield from _with_template(smol_model, tmp_path_factory, THINKING_TEMPLATE)


@pytest.fixture(scope="module")
def calling(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """SmolLM2 behind a template that renders tools."""
    yield from _with_template(smol_model, tmp_path_factory, tiny_gguf.TOOLS_TEMPLATE)


def _with_template(
    model: Path, folders: pytest.TempPathFactory, template: str
) -> Iterator[EngineHandle]:
    folder = folders.mktemp("template")
    (folder / "template.jinja").write_text(template)
    options = EngineOptions(context=2048, threads=1, chat_template_file=folder / "template.jinja")
    handle = EngineHandle(model, folder, options)
    yield handle
    handle.stop()


@pytest.mark.parametrize(
    ("more", "thought"),
    [
        ({}, "I think"),
        ({"max_tokens": 2}, "I think"),
        ({"reasoning_format": "none"}, None),
        ({"reasoning_format": "deepseek-legacy"}, "I think"),
    ],
)
def test_reasoning(thinking: EngineHandle, more: dict[str, Any], thought: str | None) -> None:
    """Thoughts arrive where they do directly; also where the template's opening belongs to them."""
    body = {**SAME, **THOUGHT, **more}
    direct = compare_answers(thinking.url, CHAT, body)
    assert direct["choices"][0]["message"].get("reasoning_content") == thought
    compare_streams(thinking.url, CHAT, body)


def test_an_echoed_prefill_streams_as_directly(thinking: EngineHandle) -> None:
    """The echo comes at the head of the first content, as without progress."""
    body = {
        **SAME,
        "messages": [*HELLO["messages"], {"role": "assistant", "content": "Hello dear"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "stream": True,
    }
    direct = parsed(events(thinking.url, CHAT, orjson.dumps(body)))
    assert parsed(filtered(thinking.url, CHAT, body)) == direct
    assert "Hello dear" in direct[1]["choices"][0]["delta"]["content"]


def test_a_swallowed_answer_is_said_to_be_lossy(thinking: EngineHandle) -> None:
    """Directly, text in which the parser finds no message is shown raw; the stream has nothing."""
    body = {**SAME, **HELLO, "grammar": 'root ::= "</think>\\n\\n"'}
    assert ask(thinking.url, CHAT, body)["choices"][0]["message"]["content"]
    dialect = DIALECTS[CHAT]
    call = dialect.parse(orjson.dumps(body))
    assembler = dialect.assembler(call)
    for data in events(thinking.url, CHAT, dialect.upstream(call, None)):
        assembler.feed(data)
    assert not orjson.loads(assembler.answer())["choices"][0]["message"]["content"]
    assert assembler.lossy


def _weather(**more: Any) -> dict[str, Any]:
    """A conversation that makes even a small model call a tool."""
    messages: list[dict[str, Any]] = []
    for city in ("Rome", "Paris", "Oslo"):
        function = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
        called = {"id": city, "type": "function", "function": function}
        messages += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": city, "content": "sunny"},
            {"role": "assistant", "content": "sunny"},
        ]
    messages.append({"role": "user", "content": "Weather in Rome and Paris?"})
    forced = {"tool_choice": "required", "logit_bias": [["response", -100]]}
    warm = {"cache_prompt": True, "id_slot": 0}  # equal conditions, too, once the prompt is there
    body = {**SAME, "messages": messages, "tools": WEATHER, "max_tokens": 64}
    return {**body, **forced, **warm, **more}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "tool_calls"),
        ({"max_tokens": 20}, "length"),
        ({"tool_choice": "auto", "logit_bias": []}, "stop"),
    ],
)
def test_tool_calls(calling: EngineHandle, more: dict[str, Any], reason: str) -> None:
    """Calls, whole and cut off, equal the direct ones in both forms; the tool is in the prompt."""
    body = _weather(**more)
    kind, needed = DIALECTS[CHAT].rendered(DIALECTS[CHAT].parse(orjson.dumps(body)))
    assert kind == "render"
    assert (
        "get_weather" in ask(calling.url, "/apply-template", needed)["prompt"].split("<tools>")[2]
    )
    ask(calling.url, CHAT, {**body, "max_tokens": 0})
    direct = compare_answers(calling.url, CHAT, body)
    assert direct["choices"][0]["finish_reason"] == reason
    compare_streams(calling.url, CHAT, body)


def test_tools_with_logprobs_are_not_streamed(calling: EngineHandle) -> None:
    """The engine refuses to stream them; unstreamed they work."""
    body = _weather(logprobs=True)
    call = DIALECTS[CHAT].parse(orjson.dumps(body))
    assert not call.streamable
    assert b'"stream"' not in DIALECTS[CHAT].upstream(call, 0)
    status, answer = post(calling.url, CHAT, orjson.dumps({**body, "stream": True}))
    assert (status, b"not supported" in answer) == (400, True)
    assert ask(calling.url, CHAT, body)["choices"][0]["logprobs"]


def test_infill(engine: EngineFactory, tiny_model: Path, tmp_path: Path) -> None:
    """Streamed and not, on a model whose vocabulary has the markers of a gap."""
    model = tmp_path / "infill.gguf"
    data = tiny_model.read_bytes()
    for old, new in (
        (b"<jupyter_text>", b"<|fim_prefix|>"),
        (b"<jupyter_code>", b"<|fim_suffix|>"),
        (b"<empty_output>", b"<|fim_middle|>"),
    ):
        data = data.replace(old, new)
    model.write_bytes(data)
    url = engine(model).url
    body = {**SAME, "input_prefix": "def f(", "input_suffix": "return", "n_predict": 4}
    compare_answers(url, INFILL, body)
    compare_streams(url, INFILL, body)


def test_of_duplicate_names_the_last_counts(tools_engine: EngineHandle) -> None:
    """What ``splice`` relies on, for every field that is spliced in."""
    head = b'{"prompt":"one two three four five","max_tokens":1,"temperature":0,'

    def answer(fields: bytes) -> bytes:
        status, data = post(tools_engine.url, NATIVE, head + fields + b"}")
        assert status == 200, data
        return data

    for slot in (0, 1, 0):
        got = orjson.loads(answer(b'"id_slot":%d,"id_slot":%d' % (1 - slot, slot)))
        assert got["id_slot"] == slot
    for off, on in ((b"false", b"true"), (b"null", b"true")):
        assert answer(b'"stream":%b,"stream":%b' % (off, on)).startswith(b"data: ")
        assert answer(b'"stream":%b,"stream":%b' % (on, off)).startswith(b"{")
        wanted = answer(b'"stream":true,"return_progress":%b,"return_progress":%b' % (off, on))
        assert b"prompt_progress" in wanted
    cached = [
        orjson.loads(answer(b'"id_slot":0,' + fields))["timings"]["cache_n"]
        for fields in (
            b'"cache_prompt":true',
            b'"cache_prompt":false,"cache_prompt":true',
            b'"cache_prompt":true,"cache_prompt":false',
        )
    ]
    assert cached[1] > 0
    assert cached[2] == 0
    chat = orjson.dumps({**SAME, **HELLO, "stream": True})[:-1]
    for first, second, times in ((b"false", b"true", 1), (b"true", b"false", 0)):
        options = b',"stream_options":{"include_usage":%b}' * 2 % (first, second)
        assert post(tools_engine.url, CHAT, chat + options + b"}")[1].count(b'"usage"') == times


REFUSED = [
    (CHAT, b""),
    (CHAT, b"{"),
    (CHAT, b"[]"),
    (CHAT, b'{"messages":{}}'),
    (CHAT, b"{}"),
    (CHAT, b'{"messages":[],"x":NaN}'),
    (CHAT, b'{"messages":[],"x":"\\ud800"}'),
    (CHAT, b'{"messages":[],"x":1e999}'),
    (CHAT, b'{"messages":[],"stream":1}'),
    (CHAT, b'{"messages":[],"cache_prompt":0}'),
    (CHAT, b'{"messages":[],"return_progress":"yes"}'),
    (CHAT, b'{"messages":[],"stream_options":{"include_usage":1}}'),
    (NATIVE, b"{}"),
    (NATIVE, b'{"prompt":null}'),
    (NATIVE, b'{"prompt":[]}'),
    (NATIVE, b'{"prompt":[1,1.5]}'),
    (TEXT, b'{"prompt":[["a"],5]}'),
]


@pytest.mark.parametrize(("path", "raw"), REFUSED)
def test_what_a_dialect_refuses_the_engine_refuses_too(
    tools_engine: EngineHandle, path: str, raw: bytes
) -> None:
    """A client may never lose an answer to the proxy's own strictness."""
    with pytest.raises(BadRequestError):
        DIALECTS[path].parse(raw)
    assert post(tools_engine.url, path, raw)[0] == 400


@pytest.mark.parametrize(
    "raw",
    [
        b'\xef\xbb\xbf{"prompt":"a","max_tokens":1}',
        b'{"prompt":"a","max_tokens":1}\0 what is this',
        b'{"prompt":"a","max_tokens":1,"x":' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
)
def test_what_only_the_engine_can_read(tools_engine: EngineHandle, raw: bytes) -> None:
    """Such bodies are passed on, not refused."""
    with pytest.raises(Unreadable):
        DIALECTS[NATIVE].parse(raw)
    assert post(tools_engine.url, NATIVE, raw)[0] == 200


def test_slot_numbers_as_the_engine_reads_them(tools_engine: EngineHandle) -> None:
    """Numbers are cut down, true is 1; the rest is no number."""
    for spelled in (b"1", b"1.7", b"true", b"1e0", b'"1"', b"null"):
        raw = b'{"prompt":"a","max_tokens":1,"id_slot":' + spelled + b"}"
        wanted = DIALECTS[NATIVE].parse(raw).id_slot
        slots = {orjson.loads(post(tools_engine.url, NATIVE, raw)[1])["id_slot"] for _ in range(3)}
        assert slots == ({1} if wanted == 1 else {0, 1})
