"""Answers put together from streams; equality with the engine's own is tested on the engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.assemble import DONE, ChatAnswer, NativeAnswer, TextAnswer

Answer = ChatAnswer | NativeAnswer | TextAnswer


def fed(answer: Answer, *events: Any) -> Answer:
    """``answer`` after these events; bytes go in as they are."""
    for event in events:
        answer.feed(event if isinstance(event, bytes) else orjson.dumps(event))
    return answer


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chat chunk."""
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"choices": choices, "id": "x", "created": 7, "object": "chat.completion.chunk", **more}


def usage(tokens: int) -> dict[str, Any]:
    """The chunk that follows the last one."""
    return {**chunk({}), "choices": [], "usage": {"completion_tokens": tokens}, "timings": {}}


def message(*events: Any) -> dict[str, Any]:
    """The one message of the answer to these chat events."""
    answer = orjson.loads(fed(ChatAnswer(), *events).answer())
    got: dict[str, Any] = answer["choices"][0]["message"]
    return got


def test_chat_text_and_frame() -> None:
    """Deltas are joined by name, the frame is that of an unstreamed answer, the unknown is kept."""
    answer = fed(
        ChatAnswer(),
        chunk({"role": "assistant", "content": None}),
        chunk({"reasoning_content": "Hm"}),
        chunk({"content": "He"}),
        chunk({"content": "y", "odd": 5}),
        chunk({}, "stop"),
        {**usage(3), "novel": 1},
        DONE,
    )
    assert orjson.loads(answer.answer()) == {
        "choices": [
            {
                "finish_reason": "stop",
                "index": 0,
                "message": {"role": "assistant", "content": "Hey", "reasoning_content": "Hm"},
            }
        ],
        "created": 7,
        "object": "chat.completion",
        "usage": {"completion_tokens": 3},
        "id": "x",
        "timings": {},
        "novel": 1,
    }
    assert not answer.lossy


def test_chat_tool_calls_are_merged_by_index() -> None:
    """Arguments arrive in pieces of several calls; content beside calls is the empty string."""

    def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
        head = {"id": f"id{index}", "type": "function"} if name else {}
        function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
        return chunk({"tool_calls": [{"index": index, **head, "function": function}]})

    got = message(
        call(1, "{", "b"),
        call(0, '{"x"', "a"),
        call(0, ":1}"),
        call(1, "}"),
        chunk({"tool_calls": None}),
        chunk(None, "tool_calls"),
        usage(9),
        DONE,
    )
    assert got["content"] == ""
    assert got["tool_calls"] == [
        {"type": "function", "function": {"name": "a", "arguments": '{"x":1}'}, "id": "id0"},
        {"type": "function", "function": {"name": "b", "arguments": "{}"}, "id": "id1"},
    ]


@pytest.mark.parametrize(
    ("finish", "tokens", "text", "lossy"),
    [
        ("stop", 1, None, False),
        ("stop", 2, None, True),
        ("length", 1, None, True),
        ("length", 1, "x", False),
        ("stop", 1, "x", False),
    ],
)
def test_chat_says_when_all_text_was_withheld(
    finish: str, tokens: int, text: str | None, lossy: bool
) -> None:
    """An empty message is only whole when the one token generated was the end token."""
    answer = fed(ChatAnswer(), chunk({"content": text}), chunk({}, finish), usage(tokens), DONE)
    assert answer.answer()
    assert answer.lossy is lossy


def test_native_text_and_settings() -> None:
    """The last event is the answer but for the text and the fact that it was streamed."""
    last = {"content": "", "stop": True, "generation_settings": {"stream": True, "seed": 1}}
    answer = fed(NativeAnswer(), b"null", {"content": "a"}, {"content": "b", "stop": False}, last)
    assert orjson.loads(answer.answer()) == {
        "content": "ab",
        "stop": True,
        "generation_settings": {"stream": False, "seed": 1},
    }


def test_native_without_settings() -> None:
    """A server that shows no settings gets none invented."""
    answer = fed(NativeAnswer(), {"content": None, "stop": True})
    assert orjson.loads(answer.answer()) == {"content": "", "stop": True}


def test_text() -> None:
    """The last chunk is the answer but for the text."""

    def piece(text: str | None, finish: str | None = None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        return {"choices": [choice], "object": "text_completion"}

    last = {**piece(None, "length"), "usage": {"total_tokens": 3}}
    answer = orjson.loads(fed(TextAnswer(), piece("a"), piece("b"), {}, last, DONE).answer())
    assert answer == {**last, "choices": [{**last["choices"][0], "text": "ab"}]}


@pytest.mark.parametrize(
    ("answer", "events"),
    [
        (ChatAnswer, [chunk({"content": "a"}), DONE]),
        (ChatAnswer, [chunk({"content": "a"}, "stop")]),
        (TextAnswer, [{"choices": [{"text": "a", "finish_reason": None}]}, DONE]),
        (TextAnswer, [{"choices": [{"text": "a", "finish_reason": "stop"}]}]),
        (NativeAnswer, [{"content": "a", "stop": False}]),
    ],
)
def test_a_stream_that_broke_off_is_no_answer(answer: type[Answer], events: list[Any]) -> None:
    """Half an answer must never look like a whole one."""
    with pytest.raises(ValueError, match="last event"):
        fed(answer(), *events).answer()


@pytest.mark.parametrize("answer", [ChatAnswer, TextAnswer, NativeAnswer])
def test_an_error_event_is_kept_as_it_came(answer: type[Answer]) -> None:
    """It becomes the answer."""
    error = b'{"error": {"code": 500, "message": "decode() failed"}}'
    assert fed(answer(), {"content": "a"}).error() is None
    assert fed(answer(), {"content": "a"}, error).error() == error


def test_what_is_no_json_is_refused() -> None:
    """The caller must learn of it, not get an answer with a hole."""
    with pytest.raises(ValueError):
        fed(ChatAnswer(), b"oops")
