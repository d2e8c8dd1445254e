"""Anthropic's requests as chat requests.

About proxy.dialects.anthropic, proxy.dialects.anthropic_request and
proxy.dialects.anthropic_content.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import DIALECTS
from proxy.dialects.base import Call, Unreadable
from proxy.errors import BadRequestError

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
IMAGE = {"type": "image", "source": PNG}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"b": 1.0, "a": "é"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def parse(**body: Any) -> Call:
    """The call of a body."""
    return DIALECTS[MESSAGES].parse(orjson.dumps({"messages": [], **body}))


def chat(**body: Any) -> dict[str, Any]:
    """The chat request it becomes."""
    return dict(parse(**body).body)


def part(text: str) -> dict[str, Any]:
    """A text part, a text block."""
    return {"type": "text", "text": text}


def result(content: Any, **more: Any) -> dict[str, Any]:
    """A tool's result."""
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def tool(content: Any) -> dict[str, Any]:
    """A message with a tool's result."""
    return {"role": "tool", "tool_call_id": "toolu_1", "content": content}


def user(content: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("You are brief.", "You are brief."),
        ([{**part("a"), "cache_control": {"type": "ephemeral"}}], "a"),
        ([part("a"), part("b")], [part("a"), part("b")]),
        ([part("a"), part("")], "a"),
        ("", None),
        ([], None),
        ([part("")], None),
        (None, None),
    ],
)
def test_system(system: Any, content: Any) -> None:
    """One message before all others, none when it says nothing."""
    found = chat(system=system, messages=[user("hi")])["messages"]
    before = [] if content is None else [{"role": "system", "content": content}]
    assert found == [*before, user("hi")]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("hi", [user("hi")]),
        ([part("hi")], [user("hi")]),
        ([{**part("hi"), "cache_control": {"type": "ephemeral"}, "citations": []}], [user("hi")]),
        ([part("a"), part("b")], [user([part("a"), part("b")])]),
        ([], [user("")]),
        ([IMAGE], [user([IMAGE_PART])]),
        (
            [part("see"), {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}],
            [user([part("see"), {"type": "image_url", "image_url": {"url": "http://x/y.png"}}])],
        ),
        ([{"type": "document", "source": {"type": "text", "data": "words"}}], [user("words")]),
        (
            [{"type": "document", "title": "T", "source": {"type": "content", "content": "words"}}],
            [user([part("T"), part("words")])],
        ),
        (
            [{"type": "search_result", "title": "T", "source": "http://x", "content": [part("a")]}],
            [user([part("T"), part("a")])],
        ),
        ([{"type": "container_upload", "file_id": "f"}, part("a")], [user("a")]),
        ([{"type": "of_next_year"}, part("a")], [user("a")]),
        ([result("sunny")], [tool("sunny")]),
        ([result([part("sunny")])], [tool("sunny")]),
        ([result([part("a"), part("b")])], [tool([part("a"), part("b")])]),
        ([result("sunny", is_error=True)], [tool("sunny")]),
        ([result("", is_error=True)], [tool("Error")]),
        ([result(None)], [tool("")]),
        ([result([IMAGE])], [tool("[image]"), user([IMAGE_PART])]),
        (
            [result([part("shot"), IMAGE]), part("go")],
            [tool("shot"), user([IMAGE_PART, part("go")])],
        ),
        (
            [result([{"type": "tool_reference", "tool_name": "look"}])],
            [tool("Loaded tool: look")],
        ),
        (
            [part("first"), result("a"), part("then"), {**result("b"), "tool_use_id": "toolu_2"}],
            [
                tool("a"),
                {**tool("b"), "tool_call_id": "toolu_2"},
                user([part("first"), part("then")]),
            ],
        ),
    ],
)  # fmt: skip
def test_what_users_send(content: Any, wanted: list[Any]) -> None:
    """Text, images, documents and results of tools, in a fixed order."""
    assert chat(messages=[user(content)])["messages"] == wanted


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("yes", {"content": "yes"}),
        ([part("yes")], {"content": "yes"}),
        ([part("A"), USE, part("B")], {"content": "AB", "tool_calls": [USE]}),
        ([USE], {"content": "", "tool_calls": [USE]}),
        (
            [{"type": "thinking", "thinking": "hm", "signature": "any"}, part("yes")],
            {"content": "yes", "reasoning_content": "hm"},
        ),
        ([{"type": "thinking", "thinking": ""}, part("yes")], {"content": "yes"}),
        ([{"type": "redacted_thinking", "data": "x"}, part("yes")], {"content": "yes"}),
        ([{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
          {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
          part("yes")], {"content": "yes"}),
        ([], {"content": ""}),
    ],
)  # fmt: skip
def test_what_assistants_said(content: Any, wanted: dict[str, Any]) -> None:
    """Text is one text again, thinking is reasoning, arguments keep order and number spelling."""
    calls = [
        {
            "id": "toolu_1",
            "type": "function",
            "function": {"name": "look", "arguments": '{"b":1.0,"a":"é"}'},
        }
        for _ in wanted.pop("tool_calls", [])
    ]
    message = {"role": "assistant", **wanted, **({"tool_calls": calls} if calls else {})}
    got = chat(messages=[user("x"), {"role": "assistant", "content": content}, user("y")])
    assert got["messages"][1] == message


def test_a_tool_without_arguments() -> None:
    """It was called with none."""
    use = {"type": "tool_use", "id": "t", "name": "now"}
    message = chat(messages=[{"role": "assistant", "content": [use]}])["messages"][0]
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_system_in_the_middle_stays_there() -> None:
    """A reminder is a system message at its place."""
    messages = [user("a"), {"role": "system", "content": [part("mind the date")]}, user("b")]
    got = chat(messages=messages, system="S")["messages"]
    assert [one["role"] for one in got] == ["system", "user", "system", "user"]
    assert got[2]["content"] == "mind the date"


def test_tools() -> None:
    """Name, description and schema go on; what runs on Anthropic's servers does not."""
    tools = [
        {
            "name": "look",
            "description": "Looks",
            "input_schema": SCHEMA,
            "defer_loading": True,
            "cache_control": {"type": "ephemeral"},
            "strict": True,
            "eager_input_streaming": True,
            "type": "custom",
        },
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "bare", "input_schema": {}},
    ]
    function = {"name": "look", "description": "Looks", "parameters": SCHEMA}
    got = chat(tools=tools)
    assert got["tools"] == [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "bare", "parameters": {}}},
    ]
    assert "tool_choice" not in got
    assert "tools" not in chat(tools=tools[1:2], tool_choice={"type": "any"})
    assert "tools" not in chat(tools=None)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"type": "of_next_year"}, {}),
        ("auto", {}),
    ],
)
def test_tool_choice(choice: Any, wanted: dict[str, Any]) -> None:
    """In the words of chat."""
    tools = [{"name": "look", "input_schema": SCHEMA}]
    got = chat(tools=tools, tool_choice=choice)
    assert {
        name: got[name] for name in ("tool_choice", "parallel_tool_calls") if name in got
    } == wanted


def test_one_certain_tool() -> None:
    """The engine has no word for it: only that tool is offered, and one must be called."""
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("a", "b", "c")]
    got = chat(tools=tools, tool_choice={"type": "tool", "name": "b"})
    assert [one["function"]["name"] for one in got["tools"]] == ["b"]
    assert got["tool_choice"] == "required"
    with pytest.raises(BadRequestError, match="tool_choice"):
        chat(tools=tools, tool_choice={"type": "tool", "name": "d"})


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking_budget_tokens": 9}),
        (
            {"thinking": {"type": "disabled"}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"x": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "x": 1}},
        ),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}),
        ({"thinking": None}, {}),
        (
            {"output_config": {"effort": "x", "format": {"type": "json_schema", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        (
            {"output_format": {"type": "json_schema", "schema": SCHEMA}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        ({"output_config": {"effort": "high"}}, {}),
        ({"stop_sequences": ["\n\n"]}, {"stop": ["\n\n"], "verbose": True}),
        ({"stop_sequences": []}, {}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stream": False}, {"stream": False}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": None}, {}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}),
        (
            {"top_k": 3, "id_slot": 1, "cache_prompt": True, "seed": 3, "min_p": 0.1, "lora": []},
            {"top_k": 3, "id_slot": 1, "cache_prompt": True, "seed": 3, "min_p": 0.1, "lora": []},
        ),
        ({"of_next_year": {"a": [1]}}, {"of_next_year": {"a": [1]}}),
        (
            {
                "cache_control": {"type": "ephemeral"},
                "context_management": {"edits": []},
                "metadata": {"user_id": "u"},
                "safeguards": {},
                "n": 2,
                "logprobs": True,
            },
            {},
        ),
    ],
)  # fmt: skip
def test_fields(asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    """llama-server's own names pass, Anthropic's are said in its words or left out."""
    got = chat(**asked)
    assert got.pop("messages") == []
    assert got == {"max_tokens": 4096, **wanted}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": None},
        {"messages": {}},
        {"messages": ["hi"]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [user(5)]},
        {"messages": [user(["hi"])]},
        {"messages": [user([{"type": "text"}])]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
        {"messages": [user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])]},
        {"messages": [user([{"type": "image"}])]},
        {"messages": [user([{"type": "document", "source": PNG}])]},
        {"messages": [user([{"type": "document"}])]},
        {"system": 5},
        {"tools": {}},
        {"tools": ["look"]},
        {"tools": [{"input_schema": {}}]},
        {"stream": "yes"},
    ],
)
def test_what_is_refused(body: dict[str, Any]) -> None:
    """What is no request of this API, and what would lose the user's content without a word."""
    with pytest.raises(BadRequestError) as error:
        parse(**body)
    assert len(error.value.message) > 10


def test_no_messages_at_all() -> None:
    """They are required; what is no JSON is refused, what only the engine can read is its."""
    with pytest.raises(BadRequestError, match="messages"):
        DIALECTS[MESSAGES].parse(b"{}")
    with pytest.raises(BadRequestError, match="JSON"):
        DIALECTS[MESSAGES].parse(b"[")
    with pytest.raises(Unreadable):
        DIALECTS[MESSAGES].parse(b'\xef\xbb\xbf{"messages":[]}')


def test_the_call_is_that_of_the_chat_request() -> None:
    """Prompt, body to send and what to render are those of chat; only the path is another."""
    body = {"system": "S", "messages": [user([part("hi")])], "max_tokens": 5, "model": "m"}
    made = parse(**body)
    wanted = {**body, "messages": [{"role": "system", "content": "S"}, user("hi")]}
    del wanted["system"]
    same = DIALECTS[CHAT].parse(orjson.dumps(wanted))
    assert made.path == CHAT
    assert same.path == ""
    assert made.keep
    assert same.keep
    assert DIALECTS[MESSAGES].prompt(made, b"k").chain == DIALECTS[CHAT].prompt(same, b"k").chain
    assert DIALECTS[MESSAGES].rendered(made) == DIALECTS[CHAT].rendered(same)
    sent = orjson.loads(DIALECTS[MESSAGES].upstream(made, 1))
    assert sent == orjson.loads(DIALECTS[CHAT].upstream(same, 1))
    assert orjson.loads(made.raw) == made.body


@pytest.mark.parametrize(
    ("more", "streamable", "keep"),
    [
        ({}, True, True),
        ({"stop_sequences": ["x"]}, False, True),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, False, False),
    ],
)
def test_what_is_put_together_from_a_stream(
    more: dict[str, Any], streamable: bool, keep: bool
) -> None:
    """Not where the stream would lack a part; half an answer is no message for the ledger."""
    made = parse(**more)
    assert (made.streamable, made.keep) == (streamable, keep)


TEXT = st.text(max_size=8)
BLOCK = st.one_of(
    st.builds(part, TEXT),
    st.just(IMAGE),
    st.builds(result, TEXT),
    st.builds(lambda text: result([part(text), IMAGE]), TEXT),
)
REPLY = st.one_of(
    st.builds(part, TEXT),
    st.builds(lambda text: {"type": "thinking", "thinking": text}, TEXT),
    st.builds(
        lambda value: {**USE, "input": value}, st.dictionaries(TEXT, st.floats(allow_nan=False))
    ),
)
TURN = st.one_of(
    st.builds(user, st.one_of(TEXT, st.lists(BLOCK, max_size=3))),
    st.builds(
        lambda content: {"role": "assistant", "content": content},
        st.one_of(TEXT, st.lists(REPLY, max_size=3)),
    ),
)


@given(st.lists(TURN, max_size=6))
def test_same_input_same_bytes(messages: list[Any]) -> None:
    """Twice the same request is twice the same bytes."""
    raw = orjson.dumps({"messages": messages, "system": "S"})
    assert DIALECTS[MESSAGES].parse(raw).raw == DIALECTS[MESSAGES].parse(raw).raw


@given(st.lists(TURN, max_size=6), TEXT)
def test_a_string_is_a_single_text_part(messages: list[Any], system: str) -> None:
    """Claude Code flips between the two on every request; cache_control comes and goes."""

    def flipped(content: Any) -> Any:
        mark = {"cache_control": {"type": "ephemeral"}}
        return [{**part(content), **mark}] if isinstance(content, str) else content

    other = [{**one, "content": flipped(one["content"])} for one in messages]
    assert parse(messages=messages, system=system).raw == (
        parse(messages=other, system=flipped(system)).raw
    )


@given(st.lists(TURN, max_size=5), st.lists(TURN, max_size=3))
def test_longer_conversations_stay_longer(before: list[Any], new: list[Any]) -> None:
    """No later message changes what an earlier one became."""
    shorter = parse(messages=before).body["messages"]
    assert parse(messages=[*before, *new]).body["messages"][: len(shorter)] == shorter
