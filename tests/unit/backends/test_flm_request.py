"""Requests for FastFlowLM: what is left of them, and in which types (fastflowlm.md 1.5, 5)."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.backends import flm_request
from proxy.errors import BadRequestError

TAG = "qwen3.5:4b"
PNG = "data:image/png;base64,AAAA"
CATALOGUE = {TAG, "gpt-oss:20b", "llama3.2:1b"}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"default": None}}}


def sent(modern: bool = False, loaded: str = "", **body: Any) -> dict[str, Any]:
    """What goes out for a chat."""
    given = {"messages": HELLO, **body}
    return flm_request.chat(given, catalogue=CATALOGUE, loaded=loaded, modern=modern)


@pytest.mark.parametrize(
    ("message", "want"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        (
            {"content": [{"type": "image_url", "image_url": {"url": PNG}, "detail": None}]},
            [{"type": "image_url", "image_url": {"url": PNG}}],
        ),
    ],
)
def test_content(message: dict[str, Any], want: Any) -> None:
    """Text is one string; images stay parts; nothing is null or missing."""
    assert sent(messages=[{"role": "user", **message}])["messages"] == [
        {"role": "user", "content": want}
    ]


def test_messages() -> None:
    """Developers are the system, reasoning and nulls go, calls and their ids stay."""
    calls = [{"id": "c", "function": {"name": "ls", "arguments": "{}"}}]
    given = [
        {"role": "developer", "content": "D"},
        {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "c", "name": None},
    ]
    assert sent(messages=given)["messages"] == [
        {"role": "system", "content": "D"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]


def test_what_is_not_read_is_not_sent() -> None:
    """Nulls, other servers' fields and ``min_p``, which would become 0 for good, stay behind."""
    usual = sent()
    assert usual == sent(stop=["x"], seed=1, cache_prompt=True, min_p=0.05, top_p=None, user="u",
                         id_slot=3, stream=False, n=1, stream_options=None)  # fmt: skip
    assert usual["stream"] is True
    assert not any(value is None for value in usual.values())


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({}, {"temperature": 0.8, "top_k": 40, "presence_penalty": 0.0}),
        ({"model": TAG}, {"temperature": 0.7, "top_k": 20, "presence_penalty": 1.5}),
        ({"temperature": 0, "top_k": 7.0}, {"temperature": 0.0, "top_k": 7}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"max_tokens": 5.0, "max_completion_tokens": 9}, {"max_tokens": 5}),
        ({"max_tokens": None, "max_completion_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 0}, {"max_tokens": 1}),
        ({"max_tokens": -1, "top_k": 10**12}, {"max_tokens": -1, "top_k": 10**6}),
        ({"reasoning_effort": "none", "model": TAG}, {"think": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "minimal"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": None}, {"reasoning_effort": "medium"}),
        ({"think": False, "model": TAG}, {"think": False}),
        ({"model": TAG}, {"think": True}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"think": False}),
    ],
)
def test_each_value_is_explicit(body: dict[str, Any], want: dict[str, Any]) -> None:
    """What a request leaves open is not what the last one happened to set."""
    found = sent(**body)
    assert {name: found[name] for name in want} == want
    assert type(found["top_k"]) is int


@pytest.mark.parametrize(
    ("model", "want"), [(TAG, TAG), ("qwen3.5", None), ("gpt-4o", None), (None, None), (7, None)]
)
def test_model(model: Any, want: str | None) -> None:
    """Only a tag of the catalogue is sent; any other name means the loaded model."""
    assert sent(model=model, loaded="gpt-oss:20b").get("model") == want


def test_the_loaded_model_decides_defaults() -> None:
    """Whether it thinks is known once the model is; before, nothing is claimed."""
    assert "think" not in sent(model="gpt-4o")
    assert sent(model="gpt-4o", loaded=TAG)["think"] is True
    assert "think" not in sent(loaded="llama3.2:1b")


@pytest.mark.parametrize("modern", [True, False])
def test_tools(modern: bool) -> None:
    """``strict`` goes, a schema's own nulls stay; only a choice that means something is sent."""
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    usual = sent(modern, tools=[strict], tool_choice="auto", parallel_tool_calls=True)
    assert usual["tools"] == [TOOL]
    assert not {"tool_choice", "parallel_tool_calls"} & set(usual)
    assert not {"tools", "tool_choice"} & set(sent(modern, tools=[TOOL], tool_choice="none"))
    required = sent(modern, tools=[TOOL], tool_choice="required")
    assert required.get("tool_choice") == ("required" if modern else None)
    assert not {"tools", "tool_choice"} & set(sent(modern, tools=[], tool_choice="none"))
    assert ("stream_options" in usual) is modern


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [7]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": 1}]}]},
        {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]},
        {"temperature": "hot"},
        {"max_tokens": True},
        {"tools": [{"type": "function"}]},
        {"n": 2},
    ],
)
def test_what_would_break_it_is_refused(body: dict[str, Any]) -> None:
    """The server never sees what it could not read, nor leaves out without a word."""
    with pytest.raises(BadRequestError):
        sent(**body)


@pytest.mark.parametrize(
    "url", ["https://a/b.png", "http://a", "file:///x", "data:image/webp;base64,AA", "", None]
)
def test_images_it_cannot_see(url: Any) -> None:
    """Nobody fetches an address, and only two formats are read."""
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(BadRequestError):
        sent(messages=[{"role": "user", "content": [part]}])


def test_what_an_answer_held_beside_text() -> None:
    """Parts of an answer that were never text are no reason to refuse it."""
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]
    assert sent(messages=[{"role": "assistant", "content": parts}])["messages"][0] == {
        "role": "assistant", "content": "a",
    }  # fmt: skip


def test_systems_that_come_later() -> None:
    """They become the user's, set apart from what the server joins them with."""
    given = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": "T"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "note"},
    ]
    got = sent(messages=given)["messages"]
    assert [message["role"] for message in got] == ["system", "system", "user", "user"]
    assert got[-1]["content"] == "\n\nnote\n\n"


@pytest.mark.parametrize(
    ("body", "modern", "want"),
    [
        ({}, False, []),
        ({"response_format": {"type": "text"}, "seed": None, "logit_bias": {}}, False, []),
        ({"response_format": {"type": "json_object"}, "seed": 3}, True,
         ["response_format", "seed"]),
        ({"tools": [TOOL], "tool_choice": "required"}, False, ["tool_choice"]),
        ({"tools": [TOOL], "tool_choice": "required"}, True, []),
        ({"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False}, False,
         ["parallel_tool_calls"]),
    ],
)  # fmt: skip
def test_what_is_not_heeded(body: dict[str, Any], modern: bool, want: list[str]) -> None:
    """Fields that ask for another answer than the server gives are named."""
    assert flm_request.unread(body, modern=modern) == want


def test_other_paths() -> None:
    """No nulls, and no name that loads a model, except for engines of their own."""
    done = flm_request.other(
        "/v1/completions", {"prompt": "x", "model": "gpt-4o", "n": None}, catalogue=CATALOGUE
    )
    assert done == {"prompt": "x"}
    embed = {"input": "x", "model": "embed-gemma:300m"}
    assert flm_request.other("/v1/embeddings", embed, catalogue=CATALOGUE) == embed
    asked = {"model": "x", "request_id": 17}
    assert flm_request.other("/api/show", asked, catalogue=CATALOGUE) == {"model": "x"}
    named = {"request_id": "mine"}
    assert flm_request.other("/api/cancel", named, catalogue=CATALOGUE) == named
    ollama = {"model": "gpt-4o", "messages": []}
    assert flm_request.other("/api/chat", ollama, catalogue=CATALOGUE) == {"messages": []}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": None}),
        ("/v1/embeddings", {"input": "x"}),
        ("/api/generate", {}),
        ("/api/show", {}),
        ("/api/chat", {}),
        ("/api/chat", {"messages": [], "stream": True}),
    ],
)
def test_what_other_paths_do_not_survive(path: str, body: dict[str, Any]) -> None:
    """A missing field is undefined behaviour there, and Ollama's stream a crash."""
    with pytest.raises(BadRequestError):
        flm_request.other(path, body, catalogue=CATALOGUE)
