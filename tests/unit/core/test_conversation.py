"""Messages as segments of the prefix chain."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.conversation import both_json, has_media, json_equal, key, segments, texts_of


def text(value: str) -> dict[str, Any]:
    """A text part."""
    return {"type": "text", "text": value}


def test_one_text_part_equals_a_string() -> None:
    """Clients switch between the two forms; templates render both alike."""
    plain = {"role": "user", "content": "hi", "name": "x"}
    parts = {"role": "user", "content": [text("hi")], "name": "x"}
    assert segments([plain]) == segments([parts])


@pytest.mark.parametrize(
    "content",
    [
        [text("h"), text("i")],
        [],
        None,
        ["hi"],
        [{"type": "text", "text": 5}],
        [{"type": "image_url", "text": "hi"}],
    ],
)
def test_other_contents_are_something_else(content: Any) -> None:
    """Nothing else may pass for the plain string."""
    assert segments([{"content": "hi"}]) != segments([{"content": content}])


def test_one_segment_per_message_in_order() -> None:
    """A later message leaves the earlier segments as they are."""
    messages = [{"role": "user", "content": "a"}, "odd", {"role": "assistant", "content": "b"}]
    assert segments(messages)[:2] == segments(messages[:2])
    assert len(segments(messages)) == 3


@pytest.mark.parametrize(
    ("messages", "media"),
    [
        ([{"content": [text("a"), {"type": "image_url"}]}], True),
        ([{"content": [{"type": "input_audio"}]}], True),
        ([{"content": [text("a")]}, {"content": "b"}, {"content": None}, "odd"], False),
        ([{"content": ["odd"]}], False),
    ],
)
def test_media(messages: list[Any], media: bool) -> None:
    """Any part that is not text makes the tokens unknowable."""
    assert has_media(messages) is media


def said(content: Any = "", role: str = "assistant", **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def calling(arguments: Any, name: str = "f", call_id: str = "1") -> dict[str, Any]:
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": arguments}
    return said(tool_calls=[{"id": call_id, "type": "function", "function": function}])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("hi"), said([text("hi")])),
        (said("\nhi  "), said("hi")),
        (said(None), said("")),
        (said("hi"), said("hi", reasoning_content="because", refusal=None)),
        (said("hi", "tool", name="f"), said("hi", "tool")),
        (said("hi", "tool", tool_call_id="a"), said("hi", "tool", tool_call_id="b")),
        (said('{"a": 1.0, "b":2}', "tool"), said('{"b":2,"a":1}', "tool")),
        (calling('{"b":  10000.0,"a":"\\u00e9"}'), calling('{"a":"é","b":10000}')),
        (calling("{}"), calling("")),
        (calling("{}", call_id="x"), calling("{}", call_id="y")),
        (calling('{"a":[1.0,{"b":2.0}]}'), calling('{"a":[1,{"b":2}]}')),
    ],
)
def test_what_means_the_same_has_one_key(one: Any, other: Any) -> None:
    """What real clients change in passing (clients.md 6) leaves a message the same."""
    assert key(one) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("hi"), said("hi", "user")),
        (said("hi"), said("hi there")),
        (said([text("a"), text("b")]), said([text("ab")])),
        (said([text("a")]), said([{"type": "image_url", "image_url": {"url": "a"}}])),
        (said("1.0", "tool"), said("1", "tool")),
        (said('{"a":1}'), said('{"a":1.0}')),
        (said(), calling("{}")),
        (calling("{}"), calling("{}", name="g")),
        (calling('{"a":1}'), calling('{"a":2}')),
        (calling('{"a":1}'), calling('{"a":"1"}')),
        (calling('{"a":true}'), calling('{"a":1}')),
        (calling('{"a":12345678901234567890123}'), calling('{"a":12345678901234567890124}')),
        (calling("{bad"), calling("{worse")),
        (
            calling('{"a":100000000000000000001,"b":100000000000000000002}'),
            calling('{"a":100000000000000000002,"b":100000000000000000001}'),
        ),
        (
            calling('{"a":100000000000000000001,"b":100000000000000000002}'),
            calling('{"b":100000000000000000001,"a":100000000000000000002}'),
        ),
        (
            calling('{"a":0.10000000000000000001,"b":0.1}'),
            calling('{"a":0.1,"b":0.10000000000000000001}'),
        ),
        (calling("[" * 600 + "]" * 600), calling("[" * 600 + " " + "]" * 600)),
        (said(function_call={"name": "f"}), said(function_call={"name": "g"})),
        ("text", "other"),
    ],
)
def test_what_differs_has_another_key(one: Any, other: Any) -> None:
    """Anything a template could render differently is another message."""
    assert key(one) != key(other)


def test_arguments_that_are_no_strings_are_compared_too() -> None:
    """Some clients send arguments as an object."""
    assert json_equal({"a": 1}, '{"a":1.0}')
    assert not json_equal({"a": 1}, None)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ('{"a": 1}', '{"a":1.0}\n', True),
        ("[1]", "[1 ]", True),
        ("ok", "ok\n", False),
        ("{}", "", False),
        ("", "", False),
        ("{bad", "{bad ", False),
        ("1", "1.0", False),
    ],
)
def test_results_that_are_json(one: str, other: str, equal: bool) -> None:
    """Space around a text is the text's; around JSON it is nobody's."""
    assert both_json(one, other) is both_json(other, one) is equal


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("a", ["a"]),
        (None, []),
        ([text("a"), "b", {"type": "image_url"}, text("c"), {"text": 5}], ["a", "b", "c"]),
        ({"text": "a"}, ["a"]),
        (5, []),
    ],
)
def test_texts_of(content: Any, texts: list[str]) -> None:
    """Part by part, whatever stands between them."""
    assert texts_of({"content": content}) == texts
