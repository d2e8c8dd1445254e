"""Chat answers in the words of other APIs.

About proxy.dialects.retelling, proxy.dialects.completion_as_chat, proxy.dialects.ollama_answer,
proxy.dialects.ollama_errors, proxy.dialects.responses_answer and proxy.dialects.responses_object.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.sse import Parser, encode
from proxy.dialects import TRANSLATIONS
from proxy.dialects.base import EventFilter
from proxy.dialects.ollama_errors import shaped
from proxy.errors import BackendBrokenError

TEXT, RESPONSES = "/v1/completions", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
HEAD = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}
LEAST: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    OLLAMA: {"messages": [{"role": "user", "content": "hi"}]},
    GENERATE: {"prompt": "hi"},
}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 3},
    "load_duration": 0.5,
}
TIMINGS = {"cache_n": 3, "prompt_n": 6, "prompt_ms": 2.0, "predicted_n": 4, "predicted_ms": 1.5}
ERROR = b'{"error":{"message":"too much","type":"exceed_context_size_error","code":400}}'
DONE = b"[DONE]"


def start(path: str, **body: Any) -> EventFilter:
    """The filter of a request."""
    dialect = TRANSLATIONS[path]
    raw = orjson.dumps({**LEAST[path], "model": "m", **body})
    return dialect.filter(dialect.parse(raw), "slotkeeper-r", 5)


def chunk(delta: Any, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of the backend's."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return orjson.dumps({**HEAD, "choices": [choice], **more})


def call(index: int, arguments: str, **function: str) -> dict[str, Any]:
    """A piece of a tool call."""
    piece: dict[str, Any] = {"index": index, "function": {"arguments": arguments, **function}}
    return {"tool_calls": [piece | ({"id": f"id{index}"} if function else {})]}


def stream(*deltas: dict[str, Any], finish: str = "stop") -> list[bytes]:
    """A whole stream, its usage in a chunk of its own."""
    used = orjson.dumps({**HEAD, "choices": [], "usage": USAGE, "timings": TIMINGS})
    return [*(chunk(delta) for delta in deltas), chunk({}, finish), used, DONE]


def wired(events: EventFilter, payloads: list[bytes]) -> bytes:
    """What the client gets."""
    out = bytearray()
    for event in Parser().feed(b"".join(encode(data) for data in payloads)):
        out += events.wire(event)
    return bytes(out)


def read(raw: bytes) -> list[Any]:
    """Events or lines, parsed."""
    if raw.startswith(b"{"):
        return [orjson.loads(line) for line in raw.splitlines()]
    data = [event.data for event in Parser().feed(raw)]
    return [one if one == DONE else orjson.loads(one) for one in data]


def answer(message: dict[str, Any], finish: str = "stop") -> bytes:
    """A whole chat answer."""
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return orjson.dumps({**HEAD, "choices": [choice], "usage": USAGE, "timings": TIMINGS})


SPOKEN = (
    {"role": "assistant", "reasoning_content": "H"},
    {"reasoning_content": "m"},
    {"content": "a"},
    {"content": "b"},
)
CALLS = (call(0, '{"p"', name="ls"), call(0, ":1.0}"), call(1, "", name="cat"))
MESSAGE: dict[str, Any] = {
    "role": "assistant",
    "reasoning_content": "Hm",
    "content": "ab",
    "tool_calls": [
        {"id": "id0", "function": {"name": "ls", "arguments": '{"p":1.0}'}},
        {"id": "id1", "function": {"name": "cat", "arguments": ""}},
    ],
}


def kinds(events: list[Any]) -> list[str]:
    """The types of a response's events."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return [event["type"].removeprefix("response.") for event in events]


def test_the_events_of_a_response() -> None:
    """In OpenAI's order; the whole response at the end is what a client that waits would get."""
    events = start(RESPONSES, instructions="S")
    raw = wired(events, stream(*SPOKEN, *CALLS, finish="tool_calls"))
    got = read(raw)
    said = ["output_item.added", "content_part.added"]
    function = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert kinds(got) == [
        "created", "in_progress",
        *said, "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        *said, "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        function[0], *["function_call_arguments.delta"] * 2, *function[1:],
        *function,
        "completed",
    ]  # fmt: skip
    assert [event["output_index"] for event in got if event["type"].endswith("item.done")] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    added = [event["item"] for event in got if event["type"].endswith("item.added")]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert [item.get("content") for item in added] == [[], [], None, None]
    last = got[-1]["response"]
    assert last == orjson.loads(start(RESPONSES, instructions="S").whole(200, answer(MESSAGE)))
    assert (last["id"], last["status"], last["instructions"]) == ("resp_7", "completed", "S")
    assert [item["type"] for item in last["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert len({item["id"] for item in last["output"]}) == 4
    assert last["output"][2]["arguments"] == '{"p":1.0}'
    assert last["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    assert got[0]["response"]["usage"] is None
    assert wired(start(RESPONSES, instructions="S"), stream(*SPOKEN, *CALLS)) == raw


def test_a_response_that_was_cut() -> None:
    """Its limit makes it incomplete, whichever way it is asked for; nothing said is no item."""
    (*_, last) = read(wired(start(RESPONSES), stream(finish="length")))
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"] == []
    whole = orjson.loads(start(RESPONSES).whole(200, answer({"content": "a"}, "length")))
    assert whole["status"] == "incomplete"


def test_functions_of_a_namespace() -> None:
    """They go by their own name and their namespace again; ids are made where there are none."""
    tools = [{"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "ls"}]}]
    piece: Any = {"tool_calls": [{"function": {"name": "fs__ls", "arguments": "{}"}}]}
    (*_, last) = read(wired(start(RESPONSES, tools=tools), stream(piece)))
    (item,) = last["response"]["output"]
    assert (item["namespace"], item["name"], item["call_id"]) == ("fs", "ls", "call_7_0")
    assert last["response"]["tools"] == tools


def test_pings_of_a_response() -> None:
    """The first opens the stream, whose id then stays; the others say that it goes on."""
    events = start(RESPONSES)
    raw = events.ping() + events.ping() + wired(events, stream({"content": "a"})[:1])
    raw += events.ping() + wired(events, stream()[1:])
    got = read(raw)
    assert kinds(got)[:4] == ["created", "in_progress", "in_progress", "output_item.added"]
    ids = {event["response"]["id"] for event in got if "response" in event}
    assert ids == {"resp_slotkeeper-r"}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ERROR, "context_length_exceeded", "too much"),
        (
            b'{"error":{"message":"x","code":"context_length_exceeded"}}',
            "context_length_exceeded",
            "x",
        ),
        (b'{"error":{"message":"x","code":400}}', "invalid_prompt", "x"),
        (b'{"error":{"message":"x","code":[]}}', "server_error", "x"),
        (b'{"error":{"message":"x","code":503}}', "server_is_overloaded", "x"),
        (b'{"error":{"message":"x"}}', "server_error", "x"),
        (b'{"error":"x"}', "server_error", "The backend failed."),
        (b"<html>", "server_error", "The backend failed."),
    ],
)
def test_a_response_that_failed(error: bytes, code: str, message: str) -> None:
    """Says so in its last event, in words clients act on; nothing comes after it."""
    events = start(RESPONSES)
    got = read(wired(events, [chunk({"content": "a"}), error, DONE]))
    assert (kinds(got)[-1], got[-1]["response"]["status"]) == ("failed", "failed")
    assert got[-1]["response"]["error"] == {"code": code, "message": message}
    assert kinds(read(start(RESPONSES).fail(error))) == ["created", "in_progress", "failed"]


@pytest.mark.parametrize("path", [OLLAMA, GENERATE])
def test_ollamas_lines(path: str) -> None:
    """Each piece is a line; the last one has the reason and the figures."""
    events = start(path)
    assert events.media == "application/x-ndjson"
    got = read(events.ping() + wired(events, stream(*SPOKEN, *CALLS)))
    texts = [line["message"]["content"] if path == OLLAMA else line["response"] for line in got]
    assert texts == ["", "", "", "a", "b", "", ""]
    inner = [line.get("message", line) for line in got]
    assert [line.get("thinking") for line in inner] == [None, "H", "m", *[None] * 4]
    assert inner[-2]["tool_calls"] == [
        {"id": "id0", "function": {"index": 0, "name": "ls", "arguments": {"p": 1.0}}},
        {"id": "id1", "function": {"index": 1, "name": "cat", "arguments": {}}},
    ]
    assert [line["done"] for line in got] == [*[False] * 6, True]
    figures = {
        "model": "m", "created_at": "2023-11-14T22:13:20Z", "done": True, "done_reason": "stop",
        "total_duration": 503_500_000, "load_duration": 500_000_000, "prompt_eval_count": 9,
        "prompt_eval_duration": 2_000_000, "eval_count": 4, "eval_duration": 1_500_000,
        "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip
    assert figures.items() <= got[-1].items()
    raw = start(path, stream=False).whole(200, answer(MESSAGE))
    assert b'"arguments":{"p":1.0}' in raw
    whole = orjson.loads(raw)
    assert figures.items() <= whole.items()
    said = whole["message"] if path == OLLAMA else whole
    assert (said["thinking"], said["tool_calls"]) == ("Hm", inner[-2]["tool_calls"])
    assert (whole["message"]["content"] if path == OLLAMA else whole["response"]) == "ab"


def test_ollamas_figures_where_none_are_told() -> None:
    """A backend that counts nothing is no reason to fail; a limit is told."""
    bare = orjson.dumps(
        {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}], "created": "now"}
    )
    got = orjson.loads(start(OLLAMA).whole(200, bare))
    assert (got["done_reason"], got["prompt_eval_count"]) == ("length", 0)
    assert got["created_at"].startswith("1970-01-01")


def test_ollamas_errors() -> None:
    """A text under ``error``, as a line or as the body; comments are no lines and fall away."""
    assert read(start(OLLAMA).fail(ERROR)) == [{"error": "too much"}]
    assert orjson.loads(start(OLLAMA).whole(400, ERROR)) == {"error": "too much"}
    assert orjson.loads(start(OLLAMA).whole(502, b"<html>")) == {
        "error": "The backend answered with status 502."
    }
    kept = {"message": "m", "hint": "h", "source": "backend", "code": 1}
    assert shaped(400, kept) == {"error": "m", "hint": "h", "source": "backend"}
    (comment,) = Parser().feed(b": hello\n\n")
    assert start(OLLAMA).wire(comment) == b""
    assert start(RESPONSES).wire(comment) == comment.raw


@pytest.mark.parametrize("counted", [True, False])
def test_the_chunks_of_a_completion(counted: bool) -> None:
    """Text alone, then the reason, then the usage if it was asked for."""
    events = start(TEXT, stream=True, stream_options={"include_usage": counted})
    got = read(events.ping() + wired(events, stream(*SPOKEN, finish="length")))
    assert got.pop() == DONE
    assert {(one["id"], one["object"]) for one in got} == {("cmpl-slotkeeper-r", "text_completion")}
    if counted:
        last = got.pop()
        assert (last["choices"], last["usage"]) == ([], USAGE)
    choices = [choice for one in got for choice in one["choices"]]
    assert [choice["text"] for choice in choices] == ["", "a", "b", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert not any("usage" in one for one in got)


def test_a_whole_completion() -> None:
    """OpenAI's object with the backend's usage; its errors are OpenAI's already."""
    got = orjson.loads(start(TEXT).whole(200, answer(MESSAGE, "tool_calls")))
    assert got == {
        "id": "cmpl-7", "object": "text_completion", "created": 1700000000, "model": "m",
        "choices": [{"text": "ab", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }  # fmt: skip
    assert start(TEXT).whole(400, ERROR) is ERROR
    assert start(TEXT).fail(ERROR) == encode(ERROR)


@pytest.mark.parametrize("path", sorted(TRANSLATIONS))
def test_what_is_no_answer(path: str) -> None:
    """An answer without a message is the backend's fault; odd events pass unheard."""
    for body in (b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{"message":1}]}'):
        with pytest.raises(BackendBrokenError):
            start(path).whole(200, body)
    progress = chunk({}, prompt_progress={"total": 9, "cache": 3, "processed": 3})
    odd = [b"null", progress, orjson.dumps({**HEAD, "choices": [{"delta": 1}]})]
    events = start(path)
    assert wired(events, [*odd, *stream({"content": "a"})])
    assert (events.cache_n, events.prompt_n) == (3, 9)
