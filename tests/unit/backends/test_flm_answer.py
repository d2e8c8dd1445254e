"""FastFlowLM's answers, repaired: events, figures, errors (fastflowlm.md 1.4, 1.5)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.backends.flm_answer import Repair, assembled, judged, too_long
from proxy.core.sse import encode

DONE = b"data: [DONE]\n\n"
USAGE = {
    "prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35, "active_kv_tokens": 135,
    "max_kv_token_capacity": 4096, "prefill_duration_ttft": 1.5, "decoding_duration": 0.25,
    "prefill_speed_tps": None,
}  # fmt: skip


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    """An event as the server sends it."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return encode(orjson.dumps({"id": "chatcmpl-1", "model": "m:1b", "choices": [choice], **more}))


def call(index: int, name: str) -> bytes:
    """A tool call, its index one that never starts anew."""
    function = {"name": name, "arguments": "{}"}
    return chunk({"tool_calls": [{"index": index, "id": "generate_id()", "function": function}]})


def end(finish: str = "stop", **usage: Any) -> bytes:
    """The end before era E."""
    return chunk({"content": None}, finish, usage={**USAGE, **usage}) + DONE


def repaired(data: bytes, size: int = 0, **how: Any) -> tuple[list[Any], Repair]:
    """The events that come out, ``data`` fed in pieces of ``size`` bytes."""
    repair = Repair(**{"model": "gpt-4o", "answer_id": "abc", "usage_chunk": False, **how})
    size = size or len(data)
    out = b"".join(repair.feed(data[at : at + size]) for at in range(0, len(data), size))
    events = [event.removeprefix(b"data: ") for event in out.split(b"\n\n")[:-1]]
    return [e if e == b"[DONE]" else orjson.loads(e) for e in events], repair


@pytest.mark.parametrize("size", [0, 1, 7])
def test_text(size: int) -> None:
    """The role comes once, what is empty not at all, and the name is the client's."""
    role = {"role": "assistant"}
    data = (
        chunk({**role, "content": ""})
        + chunk({**role, "reasoning_content": "Hm"})
        + chunk({**role, "content": "a"})
        + end()
    )
    events, repair = repaired(data, size)
    assert [e["choices"][0]["delta"] for e in events[:-1]] == [
        {"role": "assistant", "reasoning_content": "Hm"}, {"content": "a"}, {},
    ]  # fmt: skip
    assert {e["model"] for e in events[:-1]} == {"gpt-4o"}
    assert (events[-1], repair.told, repair.capacity) == (b"[DONE]", "m:1b", 4096)
    assert repaired(data, model="")[0][0]["model"] == "m:1b"


def test_tool_calls() -> None:
    """Calls count from 0 in each answer, each with an id nobody else has."""
    events, _ = repaired(call(17, "a") + call(18, "b") + end("tool_calls"))
    calls = [e["choices"][0]["delta"]["tool_calls"][0] for e in events[:2]]
    assert [(c["index"], c["id"]) for c in calls] == [(0, "call_abc_0"), (1, "call_abc_1")]
    other, _ = repaired(call(17, "a") + end("tool_calls"), answer_id="xyz")
    assert other[0]["choices"][0]["delta"]["tool_calls"][0]["id"] == "call_xyz_0"


def test_figures() -> None:
    """Up to 1.0.6 the prompt's tokens are the computed ones; the truth is in the context's."""
    events, _ = repaired(chunk({"content": "a"}) + end())
    usage, timings = events[-2]["usage"], events[-2]["timings"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (130, 135)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 100}
    assert usage["prefill_speed_tps"] is None
    assert timings == {
        "cache_n": 100, "prompt_n": 30, "prompt_ms": 1500.0, "predicted_n": 5,
        "predicted_ms": 250.0,
    }  # fmt: skip


def test_figures_of_era_e() -> None:
    """Newer releases tell the truth themselves, after the end, and only to those who ask."""
    counted = {**USAGE, "prompt_tokens": 130, "prompt_tokens_details": {"cached_tokens": 100}}
    last = encode(orjson.dumps({"id": "chatcmpl-1", "model": "m", "choices": [], "usage": counted}))
    data = chunk({"content": "a"}, usage=None) + chunk({}, "stop", usage=None) + last + DONE
    events, _ = repaired(data)
    assert [len(e["choices"]) for e in events[:-1]] == [1, 1]
    assert events[-2]["usage"]["prompt_tokens"] == 130
    assert events[-2]["timings"]["cache_n"] == 100
    asked, _ = repaired(data, usage_chunk=True)
    assert "usage" not in asked[-3]
    assert (asked[-2]["choices"], asked[-2]["usage"]["prompt_tokens"]) == ([], 130)


def test_without_figures() -> None:
    """A stream without usage gets none invented."""
    events, repair = repaired(chunk({"content": "a"}) + chunk({}, "stop") + DONE)
    assert not {"usage", "timings"} & set(events[-2])
    assert repair.capacity == 0


@pytest.mark.parametrize(
    ("finish", "active", "want"),
    [
        ("stop", 135, "stop"), ("stop", 4096, "length"), ("length", 135, "length"),
        ("cancel", 135, "stop"), ("tool_calls", 4096, "tool_calls"),
    ],
)  # fmt: skip
def test_reasons(finish: str, active: int, want: str) -> None:
    """``cancel`` is no reason clients know, and a full context no stop."""
    events, repair = repaired(chunk({"content": "a"}) + end(finish, active_kv_tokens=active))
    assert events[-2]["choices"][0]["finish_reason"] == want
    assert repair.cancelled is (finish == "cancel")


def test_an_empty_answer_has_a_role() -> None:
    """Even if the model says nothing."""
    events, _ = repaired(chunk({"role": "assistant", "content": ""}) + end())
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_missing_end_is_not_hidden() -> None:
    """Without a finish chunk there is none; without ``[DONE]`` the answer is not done."""
    events, repair = repaired(chunk({"content": "a"}) + DONE)
    assert (events[-1], len(events), repair.done) == (b"[DONE]", 2, True)
    assert not repaired(chunk({"content": "a"}))[1].done
    with pytest.raises(ValueError, match="missing"):
        assembled(chunk({"content": "a"}) + DONE)


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 7\n\n"])
def test_nonsense(data: bytes) -> None:
    """What is no event of an answer is an error."""
    with pytest.raises(ValueError):
        repaired(data)


def test_assembled() -> None:
    """A whole answer has the text, the calls and the figures."""
    repair = Repair(model="", answer_id="abc", usage_chunk=False)
    answer = orjson.loads(assembled(repair.feed(b": hi\n\n" + chunk({"content": "a"}) + end())))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "a"}
    assert (answer["usage"]["prompt_tokens"], answer["timings"]["cache_n"]) == (130, 100)


@pytest.mark.parametrize(
    ("status", "body", "want", "kind"),
    [
        (200, {"error": "Failed to load x model!"}, 502, "backend_error"),
        (200, {"error": {"message": "m", "type": "server_error", "code": 500}}, 500,
         "server_error"),
        (200, {"error": {"message": "[json.exception.type_error.302] x", "code": 500}}, 400,
         "invalid_request_error"),
        (200, {"error": "anything"}, 500, "backend_error"),
        (200, {"error": {"message": "m", "code": "x"}}, 500, "backend_error"),
        (503, {"error": "NPU is in use and request queue is full"}, 503, "backend_error"),
        (404, {"error": "Not Found"}, 404, "backend_error"),
        (200, None, 501, "backend_error"),
    ],
)  # fmt: skip
def test_errors(status: int, body: Any, want: int, kind: str) -> None:
    """Each error has its status, and one shape."""
    got, answer = judged(status, orjson.dumps(body))
    error = orjson.loads(answer)["error"]
    assert (got, error["code"], error["type"], error["source"]) == (want, want, kind, "backend")
    assert error["message"]


@pytest.mark.parametrize("body", [b'{"data":[1]}', b"no json", b"[]", b'{"error":null}'])
def test_what_is_no_error(body: bytes) -> None:
    """Other answers stay as they are."""
    assert judged(200, body) == (200, body)


def test_too_long() -> None:
    """A prompt that does not fit is told as OpenAI tells it, with the sizes as far as known."""
    said = orjson.dumps({"error": {"message": "Max length reached!", "code": 400}})
    for capacity, figures in ((0, (None, None)), (512, (512, 512))):
        status, body = judged(400, said, capacity)
        error = orjson.loads(body)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert (error["type"], error["source"]) == ("exceed_context_size_error", "backend")
        assert (error.get("n_prompt_tokens"), error.get("n_ctx")) == figures
        assert "--ctx-len" in error["hint"]
    local = orjson.loads(too_long(900, 512, source="slotkeeper"))["error"]
    assert (local["n_prompt_tokens"], local["source"]) == (900, "slotkeeper")
    assert "900 tokens or more, 512 at most" in local["message"]


def test_stop_strings() -> None:
    """The text ends before the first of them; what was held back in vain comes at the end."""
    data = (
        chunk({"content": "a S"}) + chunk({"content": "TOP b"}) + call(1, "x") + end("tool_calls")
    )
    events, repair = repaired(data, stops=("STOP",))
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert (text, repair.stopped, events[-2]["choices"][0]["finish_reason"]) == ("a ", True, "stop")
    assert not any(e["choices"][0]["delta"].get("tool_calls") for e in events[:-1])
    assert repair.message["content"] == "a STOP b"
    events, repair = repaired(chunk({"content": "a ST"}) + end("length"), stops=("STOP",))
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert (text, repair.stopped, events[-2]["choices"][0]["finish_reason"]) == (
        "a ST", False, "length",
    )  # fmt: skip
    events, _ = repaired(chunk({"content": "a ST"}) + call(1, "x") + end("tool_calls"),
                         stops=("STOP",))  # fmt: skip
    shown = [e["choices"][0]["delta"] for e in events[:-1]]
    assert (shown[1]["content"], shown[1]["tool_calls"][0]["index"]) == ("ST", 0)
