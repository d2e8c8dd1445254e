"""Messages as segments of the prefix chain."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.conversation import has_media, segments


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
