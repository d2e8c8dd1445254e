"""Requests of other APIs as chat requests.

About proxy.dialects.retelling, proxy.dialects.completion_as_chat, proxy.dialects.ollama,
proxy.dialects.responses, proxy.dialects.responses_request and proxy.dialects.responses_input.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import TRANSLATIONS
from proxy.dialects.responses_request import namespaces
from proxy.errors import BadRequestError

TEXT, RESPONSES = "/v1/completions", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    OLLAMA: {"messages": HELLO},
    GENERATE: {"prompt": "hi"},
}
PNG = "iVBORw0KGgo="


def chat(path: str, **body: Any) -> dict[str, Any]:
    """The chat request it becomes; the bytes say the same as the body."""
    call = TRANSLATIONS[path].parse(orjson.dumps({**LEAST[path], **body}))
    assert (call.path, call.chat) == ("/v1/chat/completions", True)
    assert orjson.loads(call.raw) == call.body
    return dict(call.body)


def said(path: str, **body: Any) -> list[dict[str, Any]]:
    """Its messages."""
    return list(chat(path, **body)["messages"])


@pytest.mark.parametrize("path", sorted(TRANSLATIONS))
def test_the_least(path: str) -> None:
    """One text is one message of the user's; what is new to us passes; usage is asked for."""
    assert said(path) == HELLO
    assert chat(path, odd=1)["odd"] == 1
    streamed = chat(path, stream=True)
    assert (streamed["stream"], streamed["stream_options"]) == (True, {"include_usage": True})
    assert "stream_options" not in chat(path, stream=False)


@pytest.mark.parametrize("path", sorted(TRANSLATIONS))
@pytest.mark.parametrize(
    "raw", [b"\xef\xbb\xbf{}", b"[" * 2000, b"{", b"[]", b'{"stream":1}', b"{}"]
)
def test_what_cannot_be_read_is_refused(path: str, raw: bytes) -> None:
    """Also what llama-server might read: nobody behind reads this API."""
    with pytest.raises(BadRequestError):
        TRANSLATIONS[path].parse(raw)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *((TEXT, name, 2) for name in ("best_of", "n", "logprobs")),
        (TEXT, "logprobs", 0),
        (TEXT, "echo", True),
        (TEXT, "suffix", "x"),
        *((TEXT, "prompt", value) for value in (None, [], ["a", "b"], [1, 2], [[1]], {"a": 1})),
        *((RESPONSES, name, "x") for name in ("previous_response_id", "conversation", "prompt")),
        (RESPONSES, "background", True),
        (RESPONSES, "instructions", ["x"]),
        (RESPONSES, "tools", {}),
        (RESPONSES, "tools", [1]),
        (RESPONSES, "tools", [{"type": "function"}]),
        (RESPONSES, "input", None),
        (RESPONSES, "input", ["x"]),
        (OLLAMA, "messages", [{"role": "robot", "content": ""}]),
        (OLLAMA, "messages", ["x"]),
        (OLLAMA, "messages", [{"role": "user", "content": []}]),
        (OLLAMA, "messages", [{"role": "user", "content": "", "images": "x"}]),
        (OLLAMA, "messages", [{"role": "assistant", "tool_calls": [{}]}]),
        (OLLAMA, "messages", [{"role": "assistant", "tool_calls": [1]}]),
        (OLLAMA, "messages", [{"role": "assistant", "tool_calls": "x"}]),
        (OLLAMA, "messages", [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]),
        (OLLAMA, "options", 1),
        (OLLAMA, "format", "yaml"),
        *((GENERATE, name, "x") for name in ("suffix", "template")),
        (GENERATE, "raw", True),
        (GENERATE, "context", [1]),
        (GENERATE, "prompt", 1),
        (GENERATE, "system", 1),
    ],
)
def test_what_would_be_lost_is_refused(path: str, field: str, value: Any) -> None:
    """With 400, in words that name the field."""
    with pytest.raises(BadRequestError, match=field.removesuffix("s")):
        chat(path, **{field: value})


def test_text_completions() -> None:
    """What asks for what holds anyway is no reason to refuse."""
    body = {"echo": False, "suffix": "", "n": 1, "best_of": None, "logprobs": None}
    assert chat(TEXT, prompt=["hi"], max_tokens=5, stop=["x"], tools=[1], **body) == {
        "max_tokens": 5, "stop": ["x"], "messages": HELLO,
    }  # fmt: skip


def test_ollamas_options() -> None:
    """Sampling goes by llama.cpp's own names; how to load a model is nobody's business here."""
    options = {"num_predict": 7, "num_ctx": 1, "numa": True, "temperature": 0.5, "stop": ["x"]}
    body = chat(OLLAMA, model="m", options=options, keep_alive="5m", think="high")
    assert body == {
        "model": "m", "temperature": 0.5, "stop": ["x"], "max_tokens": 7, "stream": True,
        "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high",
        "stream_options": {"include_usage": True}, "messages": HELLO,
    }  # fmt: skip
    assert chat(GENERATE, think=False, stream=None)["stream"] is True
    assert chat(GENERATE, think=False)["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ["0", "0.", "0s", "00.00m", "0.0", "-0", "µs"])
@pytest.mark.parametrize("end", ["", "x", "1"])
def test_a_long_duration(piece: str, end: str) -> None:
    """Whatever a client writes there is read once, and nothing of it twice."""
    text = piece * 50_000 + end
    raw = orjson.dumps({"model": "m", "messages": [], "keep_alive": text})
    settled = TRANSLATIONS[OLLAMA].parse(raw).settled
    assert settled is not None
    reason = orjson.loads(settled)["choices"][0]["finish_reason"]
    nothing = not end and piece in {"0", "0s", "00.00m"}
    assert reason == ("unload" if nothing else "load")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("by", ["id", "name", "order"])
def test_many_tool_results(by: str) -> None:
    """Each finds its call, and none of the others is looked through for it."""
    count = 40_000
    calls = [{"function": {"name": f"f{n}"}} for n in range(count)]
    told = {"id": ("tool_call_id", "call_0_"), "name": ("tool_name", "f"), "order": ("name", "?")}
    field, start = told[by]
    order = range(count) if by == "order" else range(count - 1, -1, -1)
    results = [{"role": "tool", field: f"{start}{n}"} for n in order]
    messages = said(OLLAMA, messages=[{"role": "assistant", "tool_calls": calls}, *results])
    assert [one["tool_call_id"] for one in messages[1:]] == [f"call_0_{n}" for n in order]


def test_ollamas_formats() -> None:
    """``json`` and a schema, in chat's words."""
    assert chat(OLLAMA, format="json")["response_format"] == {"type": "json_object"}
    wanted = chat(GENERATE, format={"type": "object"})["response_format"]
    assert wanted["json_schema"]["schema"] == {"type": "object"}
    assert "response_format" not in chat(OLLAMA, format="")


def test_ollamas_tools() -> None:
    """Calls get ids by their place, results find their call by id, by name, or as the next."""
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in "xyz"]
    calls.append({"id": "own", "function": {"name": "x", "arguments": '{"b": 2}'}})  # type: ignore[dict-item]
    results = [
        {"role": "tool", "content": "1", "tool_name": "y"},
        {"role": "tool", "content": "2", "tool_call_id": "own"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4", "tool_name": "z"},
        {"role": "tool", "content": "5"},
    ]
    asked = {"role": "assistant", "thinking": "Hm", "tool_calls": calls}
    _, turn, *told = said(OLLAMA, messages=[*HELLO, asked, *results], tools=[{"t": 1}])
    assert turn["reasoning_content"] == "Hm"
    assert turn["tool_calls"][0] == {
        "id": "call_1_0", "type": "function", "function": {"name": "x", "arguments": '{"a":1}'},
    }  # fmt: skip
    assert turn["tool_calls"][3]["function"]["arguments"] == '{"b": 2}'
    ids = [message["tool_call_id"] for message in told]
    assert ids == ["call_1_1", "own", "call_1_0", "call_1_2", "call_unknown"]
    assert chat(OLLAMA, tools=[{"t": 1}])["tools"] == [{"t": 1}]


def test_ollamas_pictures() -> None:
    """Base64 becomes a URL of its kind; one that is a URL stays it."""
    (message,) = said(GENERATE, images=[PNG, "/9j/x", "??", "data:image/gif;base64,x"])
    text, *pictures = message["content"]
    assert text == {"type": "text", "text": "hi"}
    assert [p["image_url"]["url"].partition(";")[0] for p in pictures] == [
        "data:image/png", "data:image/jpeg", "data:image/jpeg", "data:image/gif",
    ]  # fmt: skip
    (mute,) = said(OLLAMA, messages=[{"role": "user", "content": "", "images": [PNG]}])
    assert [part["type"] for part in mute["content"]] == ["image_url"]
    system, _ = said(GENERATE, system="S")
    assert system == {"role": "system", "content": "S"}


TURN: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
    {"role": "user", "content": "u"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"type": "function_call", "call_id": "1", "name": "ls", "arguments": '{"p": 1}'},
    {"type": "function_call", "call_id": "2", "name": "ls", "namespace": "fs", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "bin"},
    {"type": "function_call_output", "call_id": "2", "output": [
        {"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"},
    ]},
]  # fmt: skip


def test_a_turn_of_items_is_one_message() -> None:
    """Thought, text and calls come together again, results follow, a picture goes to the user."""
    calls = [
        {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"p": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "fs__ls", "arguments": "{}"}},
    ]
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert said(RESPONSES, instructions="S", input=TURN) == [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "reasoning_content": "Hm", "content": "a", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "bin"},
        {"role": "tool", "tool_call_id": "2", "content": "x"},
        {"role": "user", "content": [picture]},
    ]


def test_turns_that_follow_each_other_stay_apart() -> None:
    """Each thought begins anew, a text after a text is another message, thoughts alone are none."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    text = {"role": "assistant", "content": "a"}
    call = {"type": "custom_tool_call", "call_id": "1", "name": "x", "input": "y"}
    nothing = {"type": "reasoning", "summary": []}
    got = said(RESPONSES, input=[thought, thought, text, text, call, thought, nothing])
    (made,) = got[1].pop("tool_calls")
    assert orjson.loads(made["function"]["arguments"]) == {"input": "y"}
    assert got == [
        {"role": "assistant", "reasoning_content": "Hm", "content": "a"},
        {"role": "assistant", "content": "a"},
    ]
    (only,) = said(RESPONSES, input=[call])
    assert (only["content"], len(only["tool_calls"])) == ("", 1)


def test_parts() -> None:
    """What a chat message can hold is kept, in order; an empty content is an empty text."""
    sound = {"type": "input_audio", "input_audio": {"data": "x"}}
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "t"}, sound]
    (message,) = said(RESPONSES, input=[{"role": "user", "content": parts}])
    texts = [{"type": "text", "text": "no"}, {"type": "text", "text": "t"}]
    assert message["content"] == [*texts, sound]
    assert said(RESPONSES, input=[{"role": "user", "content": []}])[0]["content"] == ""
    image = {"type": "input_image", "image_url": "data:,"}
    result = {"type": "function_call_output", "call_id": "1", "output": [image]}
    assert said(RESPONSES, input=[result])[0]["content"] == "[image]"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "x"},
        {"type": "web_search_call"},
        {"role": "robot", "content": ""},
        {"role": "user", "content": 1},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
        {"role": "user", "content": [{"type": "input_image", "file_id": "x"}]},
        {"role": "user", "content": [{"type": "input_text"}]},
        {"type": "function_call", "name": "x"},
        {"type": "function_call", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "reasoning", "content": "x"},
        {"type": "reasoning", "content": [{"type": "reasoning_text"}]},
    ],
)
def test_items_that_cannot_be_said_are_refused(item: dict[str, Any]) -> None:
    """With their place; nothing of the conversation is left out without a word."""
    with pytest.raises(BadRequestError, match=r"input\[0\]"):
        said(RESPONSES, input=[item])


def test_tools_of_a_response() -> None:
    """Functions in chat's shape, grouped ones under a joint name; what runs at OpenAI is left."""
    grouped = {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "ls"}, 1]}
    own = {
        "type": "function", "name": "f", "description": "d", "strict": True,
        "parameters": {"type": "object"},
    }  # fmt: skip
    body = {"tools": [own, {"type": "web_search"}, {"type": "custom", "name": "c"}, grouped]}
    first, second = chat(RESPONSES, **body)["tools"]
    assert first["function"] == {name: own[name] for name in own if name != "type"}
    empty = {"type": "object", "properties": {}}
    assert second["function"] == {"name": "fs__ls", "parameters": empty}
    assert namespaces(body) == {"fs__ls": ("fs", "ls")}
    bare = chat(
        RESPONSES, tools=[{"type": "web_search"}], tool_choice="auto", parallel_tool_calls=1
    )
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & bare.keys()


def test_the_choice_of_a_tool() -> None:
    """As chat says it; one that could only be ignored is refused."""
    body: dict[str, Any] = {"tools": [{"type": "function", "name": "f"}]}
    assert "tool_choice" not in chat(RESPONSES, **body)
    assert chat(RESPONSES, tool_choice="required", **body)["tool_choice"] == "required"
    named = {"type": "function", "name": "f", "namespace": "fs"}
    chosen = chat(RESPONSES, tool_choice=named, **body)["tool_choice"]
    assert chosen == {"type": "function", "function": {"name": "fs__f"}}
    with pytest.raises(BadRequestError, match="tool_choice"):
        chat(RESPONSES, tool_choice={"type": "web_search"}, **body)


def test_the_rest_of_a_response() -> None:
    """Limits, effort and form have other names in chat; what only OpenAI keeps is left out."""
    wanted = {"type": "json_schema", "name": "n", "schema": {}}
    body = chat(
        RESPONSES, max_output_tokens=5, reasoning={"effort": "low"}, text={"format": wanted},
        store=True, include=["x"], metadata={}, top_p=0.5, prompt_cache_key="k",
    )  # fmt: skip
    assert body == {
        "top_p": 0.5, "max_tokens": 5, "reasoning_effort": "low", "messages": HELLO,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    }  # fmt: skip
    loose = chat(RESPONSES, text={"format": {"type": "json_object"}})
    assert loose["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat(RESPONSES, text={"format": {"type": "text"}})


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
names = st.sampled_from(
    [
        "messages", "prompt", "input", "tools", "options", "stream", "system", "images", "format",
        "think", "instructions", "tool_choice", "text", "reasoning", "stop", "n", "model",
    ]
)  # fmt: skip
kinds = st.sampled_from(["function_call", "message", "reasoning", "function_call_output", "x"])
shaped = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"])})
    | st.fixed_dictionaries(
        {"type": kinds | values, "content": values, "output": values, "name": values}
    )
    | st.fixed_dictionaries({"role": st.just("user"), "content": values, "images": values})
    | st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": values}),
    max_size=3,
)


@given(st.sampled_from(sorted(TRANSLATIONS)), st.dictionaries(names, values | shaped))
def test_any_body_is_translated_or_refused(path: str, body: dict[str, Any]) -> None:
    """No body makes it fail; equal bodies become equal bytes."""
    raw = orjson.dumps({**LEAST[path], **body})
    dialect = TRANSLATIONS[path]
    try:
        call = dialect.parse(raw)
    except BadRequestError:
        return
    assert dialect.parse(raw).raw == call.raw
    dialect.prompt(call, b"")
    dialect.filter(call, "x", 1).ping()
