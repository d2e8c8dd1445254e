"""Chat answers as Anthropic's events and messages.

About proxy.dialects.anthropic_answer, proxy.dialects.anthropic_errors and
proxy.dialects.openai_chat.generated.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.sse import Parser, encode
from proxy.dialects import DIALECTS
from proxy.dialects.anthropic_answer import SIGNATURE
from proxy.dialects.anthropic_errors import shaped, translated
from proxy.dialects.base import EventFilter
from proxy.dialects.openai_chat import generated
from proxy.errors import BackendBrokenError

MESSAGES = "/v1/messages"
HEAD = {"created": 5, "id": "chatcmpl-7", "model": "m.gguf", "object": "chat.completion.chunk"}
ROLE = {"role": "assistant", "content": None}
USAGE = {
    "completion_tokens": 4,
    "prompt_tokens": 9,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 3},
}
TIMINGS = {"cache_n": 3, "prompt_n": 6, "predicted_n": 4}
FIGURES = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 4,
}
DONE = b"[DONE]"


def start(**body: Any) -> EventFilter:
    """The filter of a request."""
    dialect = DIALECTS[MESSAGES]
    raw = orjson.dumps({"messages": [], "stream": True, **body})
    return dialect.filter(dialect.parse(raw), "slotkeeper-r", 5)


def chunk(delta: Any, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of the engine's."""
    choice = {"finish_reason": finish, "index": 0, "delta": delta}
    return orjson.dumps({"choices": [choice], **HEAD, **more})


def progress(processed: int, delta: Any = None) -> bytes:
    """A progress event: 3 of 9 tokens were cached."""
    state = {"total": 9, "cache": 3, "processed": processed, "time_ms": 1}
    return chunk(delta or ROLE, prompt_progress=state)


def call(index: int, **function: str) -> dict[str, Any]:
    """A piece of a tool call; the first one has its name."""
    piece: dict[str, Any] = {"index": index, "function": function}
    if "name" in function:
        piece |= {"id": f"id{index}", "type": "function"}
    return {"tool_calls": [piece]}


BEGIN = [progress(3), progress(9), chunk(ROLE)]
USED = orjson.dumps({"choices": [], **HEAD, "usage": USAGE, "timings": TIMINGS})


def stream(*deltas: dict[str, Any], finish: str = "stop", **more: Any) -> list[bytes]:
    """A whole stream of the engine's, as asked for with progress and usage."""
    said = [chunk(delta) for delta in deltas]
    return [*BEGIN, *said, chunk({}, finish, **more), USED, DONE]


def events(events_filter: EventFilter, payloads: list[bytes]) -> list[dict[str, Any]]:
    """What the client gets; the name of each event must be its type."""
    found = []
    for payload in payloads:
        wire = events_filter.wire(Parser().feed(encode(payload))[0])
        for event in Parser().feed(wire):
            found.append(orjson.loads(event.data))
            assert event.raw.startswith(b"event: %b\n" % found[-1]["type"].encode())
    return found


def brief(found: list[dict[str, Any]]) -> list[Any]:
    """Events in short: a block's begin, what a delta adds, its end."""
    short: list[Any] = []
    for event in found:
        if event["type"] == "content_block_start":
            short.append((event["index"], event["content_block"]))
        elif event["type"] == "content_block_delta":
            short.append((event["index"], *list(event["delta"].values())[1:]))
        elif event["type"] == "content_block_stop":
            short.append((event["index"], "stop"))
        else:
            short.append(event["type"])
    return short


def text_block(index: int) -> tuple[int, Any]:
    """How a text begins."""
    return index, {"type": "text", "text": ""}


def tool_block(index: int, identity: str, name: str) -> tuple[int, Any]:
    """How a tool call begins."""
    return index, {"type": "tool_use", "id": identity, "name": name, "input": {}}


THINKING = {"type": "thinking", "thinking": "", "signature": ""}
SEQUENCES = [
    pytest.param(
        stream({"content": "Hel"}, {"content": "lo"}),
        [text_block(0), (0, "Hel"), (0, "lo"), (0, "stop")],
        ("end_turn", None),
        id="text",
    ),
    pytest.param(
        stream({"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "Yes"}),
        [
            (0, THINKING), (0, "h"), (0, "m"), (0, SIGNATURE), (0, "stop"),
            text_block(1), (1, "Yes"), (1, "stop"),
        ],
        ("end_turn", None),
        id="thinking and text",
    ),
    pytest.param(
        stream(
            call(0, name="look", arguments=""),
            call(0, arguments='{"a":'),
            call(0, arguments=" 1}"),
            finish="tool_calls",
        ),
        [tool_block(0, "id0", "look"), (0, '{"a":'), (0, " 1}"), (0, "stop")],
        ("tool_use", None),
        id="a tool only",
    ),
    pytest.param(
        stream(
            {"content": "Let me see."},
            call(0, name="look", arguments="{}"),
            call(1, name="hear", arguments=""),
            call(1, arguments="{}"),
            finish="tool_calls",
        ),
        [
            text_block(0), (0, "Let me see."), (0, "stop"),
            tool_block(1, "id0", "look"), (1, "{}"), (1, "stop"),
            tool_block(2, "id1", "hear"), (2, "{}"), (2, "stop"),
        ],
        ("tool_use", None),
        id="text and two tools",
    ),
    pytest.param(
        stream({"reasoning_content": "h"}, finish="length"),
        [(0, THINKING), (0, "h"), (0, SIGNATURE), (0, "stop")],
        ("max_tokens", None),
        id="cut while thinking",
    ),
    pytest.param(
        stream(call(0, name="look", arguments='{"a'), finish="length"),
        [tool_block(0, "id0", "look"), (0, '{"a'), (0, "stop")],
        ("max_tokens", None),
        id="cut in a tool call",
    ),
    pytest.param(
        stream(call(0, name="look", arguments="{}"), finish="stop"),
        [tool_block(0, "id0", "look"), (0, "{}"), (0, "stop")],
        ("tool_use", None),
        id="a tool call that ends with stop",
    ),
    pytest.param(
        stream({"content": "a"}, __verbose={"stopping_word": "END"}),
        [text_block(0), (0, "a"), (0, "stop")],
        ("stop_sequence", "END"),
        id="a stop sequence",
    ),
    pytest.param(
        stream({"content": "a"}, __verbose={"stopping_word": ""}),
        [text_block(0), (0, "a"), (0, "stop")],
        ("end_turn", None),
        id="no stop sequence met",
    ),
    pytest.param(
        stream({"content": "a"}, finish="content_filter"),
        [text_block(0), (0, "a"), (0, "stop")],
        ("refusal", None),
        id="refused",
    ),
    pytest.param(stream(), [], ("end_turn", None), id="empty"),
]  # fmt: skip


@pytest.mark.parametrize(("payloads", "blocks", "stop"), SEQUENCES)
def test_order_of_events(payloads: list[bytes], blocks: list[Any], stop: Any) -> None:
    """Start, each block whole, one delta with reason and usage, stop; nothing after it."""
    events_filter = start()
    found = events(events_filter, payloads)
    assert brief(found) == ["message_start", *blocks, "message_delta", "message_stop"]
    first, last = found[0]["message"], found[-2]
    assert first == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "m.gguf",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**FIGURES, "output_tokens": 0},
    }
    assert (last["delta"]["stop_reason"], last["delta"]["stop_sequence"]) == stop
    assert last["usage"] == FIGURES
    assert (events_filter.cache_n, events_filter.prompt_n) == (3, 9)
    assert events_filter.timings == TIMINGS


@pytest.mark.parametrize(("payloads", "blocks", "stop"), SEQUENCES)
def test_whole_answers_equal_streamed_ones(
    payloads: list[bytes], blocks: list[Any], stop: Any
) -> None:
    """Put together from the same events the message has the same blocks, reason and usage."""
    dialect = DIALECTS[MESSAGES]
    events_filter = start()
    assembler = dialect.assembler(dialect.parse(b'{"messages":[]}'))
    for payload in payloads:
        assembler.feed(payload)
    answer = orjson.loads(assembler.answer())
    answer |= next((orjson.loads(p) for p in payloads if b"__verbose" in p), {}) | {
        "choices": answer["choices"]
    }
    message = orjson.loads(events_filter.whole(200, orjson.dumps(answer)))
    wanted: list[Any] = []
    for index, piece in blocks:
        if isinstance(piece, dict):
            wanted.append(dict(piece))
        elif piece != "stop":
            kind = wanted[index]["type"]
            name = "signature" if piece == SIGNATURE else {"tool_use": "json"}.get(kind, kind)
            wanted[index][name] = wanted[index].get(name, "") + piece
    for block in wanted:
        if "json" in block:
            raw = block.pop("json")
            block["input"] = orjson.loads(raw) if raw.endswith("}") else {}
    assert message["content"] == wanted
    assert (message["stop_reason"], message["stop_sequence"]) == stop
    assert message["usage"] == FIGURES
    assert (message["id"], message["type"], message["role"]) == ("msg_7", "message", "assistant")


def test_message_start_goes_out_before_the_prompt_is_computed() -> None:
    """The first progress event has all it needs."""
    (first,) = events(start(), [progress(3)])
    assert first["message"]["usage"]["cache_read_input_tokens"] == 3


def test_a_templates_opening_is_part_of_the_text() -> None:
    """What comes with a progress event goes before the first content."""
    payloads = [progress(3, {"content": "<think>"}), chunk({"content": "a"})]
    assert brief(events(start(), payloads))[1:] == [text_block(0), (0, "<think>a")]


def test_pings_come_and_go() -> None:
    """Before message_start and after it, without an id of their own."""
    events_filter = start()
    assert events_filter.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'
    found = events(events_filter, stream({"content": "a"}))
    assert found[0]["message"]["id"] == "msg_7"
    assert b"slotkeeper" not in orjson.dumps(found)
    assert events_filter.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_comments_pass_and_null_is_nothing() -> None:
    """Neither is an event of an answer."""
    events_filter = start()
    assert events_filter.wire(Parser().feed(b": hi\n\n")[0]) == b": hi\n\n"
    assert events(events_filter, [b"null"]) == []


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b'{"error":{"code":500,"message":"x","type":"server_error"}}', "api_error"),
        (b'{"error":{"code":400,"message":"x"}}', "invalid_request_error"),
        (b'{"id":"a","error":{"code":503,"message":"x"}}', "overloaded_error"),
        (b'{"error":"x"}', "api_error"),
    ],
)
def test_an_error_in_mid_stream_is_the_end(payload: bytes, kind: str) -> None:
    """One error event; no message_stop that would make the answer look whole."""
    found = events(
        start(), [*BEGIN, chunk({"content": "a"}), payload, chunk({"content": "b"}), DONE]
    )
    assert [event["type"] for event in found][-1] == "error"
    assert brief(found)[:-1] == ["message_start", text_block(0), (0, "a")]
    assert found[-1] == {"type": "error", "error": {"type": kind, "message": "x"}}  # fmt: skip


def test_what_is_no_chunk_is_an_error() -> None:
    """Nothing is made up of it."""
    (found,) = events(start(), [b"nonsense"])
    assert found["error"]["type"] == "api_error"
    assert events(start(), [chunk({}), b'{"choices":[5]}'])[1:] == []


def test_without_usage_the_timings_tell() -> None:
    """A backend that ignores ``stream_options`` still says how much it reused."""
    payloads = [*BEGIN, chunk({"content": "a"}), chunk({}, "stop", timings=TIMINGS), DONE]
    assert events(start(), payloads)[-2]["usage"] == FIGURES
    answer = {**HEAD, "choices": [{"message": {"content": "a"}}], "timings": TIMINGS}
    assert orjson.loads(start().whole(200, orjson.dumps(answer)))["usage"] == FIGURES


def test_without_progress_the_last_event_tells() -> None:
    """The usage of ``message_delta`` is the whole one."""
    found = events(start(), [chunk({"content": "a"}), chunk({}, "stop"), USED, DONE])
    assert found[0]["message"]["usage"]["input_tokens"] == 0
    assert found[-2]["usage"] == FIGURES


def test_calls_without_ids_get_one() -> None:
    """Clients need it to name the result; the same in both forms."""
    piece = {"index": 0, "function": {"name": "look", "arguments": "{}"}}
    found = events(start(), stream({"tool_calls": [piece]}, finish="tool_calls"))
    assert found[1]["content_block"]["id"] == "toolu_7_0"
    message = {"content": None, "tool_calls": [piece]}
    answer = {**HEAD, "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    whole = orjson.loads(start().whole(200, orjson.dumps(answer)))
    assert whole["content"][0]["id"] == "toolu_7_0"


def test_arguments_are_as_generated() -> None:
    """To the digit and the space: nothing is read and written anew."""
    arguments = '{"big": 123456789012345678901234567890, "a": 1.0}'
    message = {"tool_calls": [{"id": "t", "function": {"name": "look", "arguments": arguments}}]}
    answer = {**HEAD, "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    assert arguments.encode() in start().whole(200, orjson.dumps(answer))


def test_the_clients_own_beginning_is_not_repeated() -> None:
    """The engine shows it in an unstreamed answer; this API does not."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon"}]
    answer = {**HEAD, "choices": [{"message": {"content": "Once upon a time"}}]}
    got = orjson.loads(start(messages=messages).whole(200, orjson.dumps(answer)))
    assert got["content"] == [{"type": "text", "text": " a time"}]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{}]}', b'{"choices":[{"message":5}]}',
     b'{"choices":[{"message":{"tool_calls":[5]}}]}'],
)  # fmt: skip
def test_what_is_no_answer(body: bytes) -> None:
    """It is the backend's failure."""
    with pytest.raises(BackendBrokenError):
        start().whole(200, body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (402, "billing_error"),
        (403, "permission_error"), (404, "not_found_error"), (405, "invalid_request_error"),
        (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
        (502, "api_error"), (503, "overloaded_error"), (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)  # fmt: skip
def test_kinds_of_errors(status: int, kind: str) -> None:
    """Each status has its word; who failed and what to do about it are kept."""
    ours = {"message": "m", "type": "t", "code": status, "source": "slotkeeper", "hint": "h"}
    error = {"type": kind, "message": "m", "source": "slotkeeper", "hint": "h"}
    assert shaped(status, ours) == {"type": "error", "error": error}
    assert orjson.loads(start().whole(status, orjson.dumps({"error": ours}))) == shaped(
        status, ours
    )


def test_a_prompt_that_is_too_long() -> None:
    """Clients know by these words that they have to compact."""
    error = {"code": 400, "message": "request (9 tokens) exceeds", "n_prompt_tokens": 9, "n_ctx": 5}
    body = orjson.dumps({"error": {**error, "type": "exceed_context_size_error"}})
    message = orjson.loads(translated(body))["error"]["message"]
    assert message == "prompt is too long: 9 tokens > 5 maximum: request (9 tokens) exceeds"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error":{}}', b'{"error":{"message":5}}'])
def test_refusals_without_words(body: bytes) -> None:
    """Their status is all there is to say."""
    error = orjson.loads(translated(body, 502))["error"]
    assert error == {"type": "api_error", "message": "The backend answered with status 502."}


def test_what_was_generated() -> None:
    """The assistant message, from a stream or from a whole answer; none of what did not end."""
    piece = call(0, name="look", arguments="{}")
    payloads = stream({"reasoning_content": "h"}, {"content": "a"}, piece, finish="tool_calls")
    function = {"name": "look", "arguments": "{}"}
    message = {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "h",
        "tool_calls": [{"type": "function", "function": function, "id": "id0"}],
    }
    assert orjson.loads(generated(payloads) or b"") == message
    whole = orjson.dumps({"choices": [{"message": message}]})
    assert generated([whole]) == orjson.dumps(message)
    assert generated(payloads[:-1]) is None
    assert generated([*payloads[:4], b'{"error":{}}']) is None
    assert generated([b"nonsense"]) is None
    assert generated([b'{"choices":[{"message":5}]}']) is None
    assert generated([b"nonsense", b"{}"]) is None
