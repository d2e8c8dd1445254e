"""What a streaming client gets of the backend's events."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.sse import Event, Parser
from proxy.dialects import DIALECTS
from proxy.dialects.base import EventFilter

CHAT, TEXT, NATIVE, INFILL = "/v1/chat/completions", "/v1/completions", "/completion", "/infill"
BODY: dict[str, Any] = {"messages": [], "prompt": "a", "stream": True, "model": "m"}
ROLE = {"role": "assistant", "content": None}
PATHS = pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, INFILL])


def start(path: str, **more: Any) -> EventFilter:
    """The filter of a streaming request."""
    dialect = DIALECTS[path]
    return dialect.filter(dialect.parse(orjson.dumps({**BODY, **more})), "own", 77)


def chunk(path: str, delta: Any = None, finish: str | None = None, **more: Any) -> bytes:
    """An event in the shape of the path's API."""
    index = more.pop("index", 0)
    frame = {"created": 5, "id": "real", "model": "real.gguf"}
    if path == CHAT:
        choice = {"finish_reason": finish, "index": index, "delta": {} if delta is None else delta}
        return orjson.dumps({"choices": [choice], **frame, **more})
    if path == TEXT:
        choice = {"text": delta or "", "index": index, "logprobs": None, "finish_reason": finish}
        return orjson.dumps({"choices": [choice], **frame, **more})
    return orjson.dumps({"index": index, "content": delta or "", "stop": bool(finish), **more})


def text(path: str, value: str) -> bytes:
    """An event with text."""
    return chunk(path, {"content": value} if path == CHAT else value)


def progress(path: str, processed: int, delta: Any = None, **more: Any) -> bytes:
    """A progress event: 3 of 9 tokens were cached."""
    state = {"total": 9, "cache": 3, "processed": processed, "time_ms": 1}
    delta = ROLE if path == CHAT and delta is None else delta
    return chunk(path, delta, prompt_progress=state, **more)


def data_of(wire: bytes) -> Any:
    """The JSON in one event as it goes out."""
    (event,) = Parser().feed(wire)
    return orjson.loads(event.data)


@PATHS
def test_wire_keeps_what_is_not_touched(path: str) -> None:
    """An event goes out as it came, comments and odd spacing too; progress does not."""
    events = start(path)
    assert events.wire(Event(progress(path, 3), b"data: x\n\n", comment_only=False)) == b""
    odd = b"id: 7\ndata:" + text(path, "a") + b"\n\n"
    assert events.wire(Parser().feed(odd)[0]) == odd
    assert events.wire(Parser().feed(b": still here\n\n")[0]) == b": still here\n\n"


@PATHS
def test_errors_and_whole_answers_are_the_backends_own(path: str) -> None:
    """These APIs are llama-server's: nothing to translate."""
    events = start(path)
    assert events.fail(b'{"error":{}}') == b'data: {"error":{}}\n\n'
    body = b'{ "choices": [] }'
    assert events.whole(200, body) is body


@PATHS
def test_progress_is_read_and_taken_out(path: str) -> None:
    """The rest is passed on as the very same bytes."""
    events = start(path)
    assert events.feed(progress(path, 3)) is None
    assert (events.cache_n, events.prompt_n, events.prefilled) == (3, 9, False)
    assert events.feed(progress(path, 9)) is None
    assert events.prefilled
    last = chunk(path, None, "stop", timings={"cache_n": 3, "prompt_n": 6, "predicted_n": 1})
    for data in (text(path, "a"), last, b"[DONE]", b"null"):
        assert events.feed(data) is data
    assert events.timings == {"cache_n": 3, "prompt_n": 6, "predicted_n": 1}
    assert not events.truncated


@PATHS
def test_progress_the_client_asked_for_is_left_in(path: str) -> None:
    """It is read all the same."""
    events = start(path, return_progress=True)
    data = progress(path, 3)
    assert events.feed(data) is data
    assert events.cache_n == 3


@PATHS
@pytest.mark.parametrize("words", ['"prompt_progress"', '"timings"', '"role"', '"error"'])
def test_model_text_does_not_mislead(path: str, words: str) -> None:
    """An answer that speaks of the protocol is an answer."""
    events = start(path)
    data = text(path, f'{{{words}: {{"total": 1, "cache": 1}}}}')
    assert events.feed(data) is data
    assert events.cache_n is None
    assert events.timings is None
    assert events.prefilled


@PATHS
def test_errors_pass(path: str) -> None:
    """An error is no first token."""
    events = start(path)
    data = b'{"error":{"code":500,"message":"x"}}'
    assert events.feed(data) is data
    assert not events.prefilled


@pytest.mark.parametrize("data", [b"oops", b"[1]", b'"x"', b'{"choices":[5]}', b'{"choices":[]}'])
def test_strange_events_pass(data: bytes) -> None:
    """What is not understood is not touched."""
    events = start(CHAT)
    assert events.feed(data) is data
    assert events.feed(b'{"role"' + data) == b'{"role"' + data


def test_truncation_is_noted() -> None:
    """The native API tells of a shifted context."""
    events = start(NATIVE)
    events.feed(chunk(NATIVE, None, "stop", truncated=True, timings={}))
    assert events.truncated


def test_pings_have_the_clients_protocol() -> None:
    """Empty content, in the shape of the API's own events, with the proxy's own id at first."""
    pings = {path: start(path).ping() for path in (CHAT, TEXT, NATIVE, INFILL)}
    assert all(pings.values())
    got = {path: data_of(ping) for path, ping in pings.items()}
    assert got[CHAT]["choices"] == [{"finish_reason": None, "index": 0, "delta": {"content": ""}}]
    assert got[TEXT]["choices"][0]["text"] == ""
    for path, kind in ((CHAT, "chat.completion.chunk"), (TEXT, "text_completion")):
        frame = {name: got[path][name] for name in ("id", "created", "model", "object")}
        assert frame == {"id": "own", "created": 77, "model": "m", "object": kind}
    assert got[NATIVE] == got[INFILL]
    assert (got[NATIVE]["content"], got[NATIVE]["stop"]) == ("", False)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_ping_after_the_first_event_has_the_real_id(path: str) -> None:
    """Then nothing has to be rewritten."""
    events = start(path)
    events.feed(progress(path, 3))
    ping = data_of(events.ping())
    assert (ping["id"], ping["created"], ping["model"]) == ("real", 5, "real.gguf")
    data = text(path, "a")
    assert events.feed(data) is data


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_early_ping_gives_the_answer_its_id(path: str) -> None:
    """One answer, one id, throughout; text that mentions the real id stays."""
    events = start(path)
    events.ping()
    events.feed(progress(path, 3))
    kept = [
        events.feed(text(path, 'a "real" thing')),
        orjson.dumps(data_of(events.ping())),
        events.feed(chunk(path, None, "stop", timings={})),
    ]
    assert [orjson.loads(data or b"")["id"] for data in kept] == ["own"] * 3
    assert b'a \\"real\\" thing' in (kept[0] or b"")


def test_an_early_ping_where_answers_have_no_id() -> None:
    """Nothing to rewrite."""
    events = start(NATIVE)
    events.ping()
    data = text(NATIVE, "a")
    assert events.feed(data) is data


def test_a_templates_opening_returns_to_the_first_content() -> None:
    """Role once, opening at the head of the content: as in a stream without progress."""
    events = start(CHAT, n=2)
    role = chunk(CHAT, ROLE)
    assert events.feed(role) is role
    assert not events.prefilled
    assert events.feed(progress(CHAT, 3, {"content": "<think>\n"})) is None
    assert events.feed(progress(CHAT, 9)) is None
    assert events.feed(chunk(CHAT, ROLE)) is None
    other = chunk(CHAT, {"content": "x"}, index=1)
    assert events.feed(other) is other
    assert events.feed(text(CHAT, "I")) == text(CHAT, "<think>\nI")
    data = text(CHAT, " am")
    assert events.feed(data) is data


def test_an_opening_without_content_comes_with_the_end() -> None:
    """It is never lost."""
    events = start(CHAT)
    events.feed(progress(CHAT, 3, {"content": "<think>\n"}))
    thought = chunk(CHAT, {"reasoning_content": "x"})
    assert events.feed(thought) is thought
    assert events.feed(b'{"choices":[]}') == b'{"choices":[]}'
    last = events.feed(chunk(CHAT, {}, "stop"))
    assert last == chunk(CHAT, {"content": "<think>\n"}, "stop")


def test_roles_stay_where_progress_is_the_clients() -> None:
    """Then the stream is not ours to tidy."""
    events = start(CHAT, return_progress=True)
    role = chunk(CHAT, ROLE)
    assert events.feed(role) is role
    assert events.feed(role) is role


def test_a_whole_answer_tells_its_figures() -> None:
    """The filter also reads answers that were not streamed."""
    events = start(NATIVE)
    events.feed(b'{"content":"a","truncated":true,"timings":{"cache_n":2,"prompt_n":3}}')
    assert (events.cache_n, events.prompt_n, events.truncated) == (2, 5, True)


@PATHS
def test_each_request_has_its_own_assembler(path: str) -> None:
    """Nothing is shared between answers."""
    dialect = DIALECTS[path]
    call = dialect.parse(orjson.dumps(BODY))
    assert dialect.assembler(call) is not dialect.assembler(call)
    assert dialect.filter(call) is not dialect.filter(call)
