"""When FastFlowLM would go on from the wrong thing (fastflowlm.md 0, 3.3, 5.9)."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.backends.flm_memory import Cache, Memory, Prompt, cache_of, merged

PNG = "data:image/png;base64,"
CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "ls"}}]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def picture(data: str) -> list[dict[str, Any]]:
    """A question with an image."""
    return [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": PNG + data}},
    ]


def chat(*messages: dict[str, Any], **more: Any) -> Prompt:
    """A prompt."""
    return Prompt.of({"messages": [*messages], "reasoning_effort": "medium", **more})


U1, A1, U2 = said("user", "a"), said("assistant", "b"), said("user", "c")
LAST = chat(U1)


def memory(cache: Cache, last: Prompt | None = LAST, **answer: Any) -> Memory:
    """After ``last``, answered with ``b``."""
    held = Memory(cache)
    if last is not None:
        held.begins(last)
        held.ended(last, {"role": "assistant", "content": "b", "tool_calls": [], **answer}, 10)
    return held


@pytest.mark.parametrize(
    ("version", "want"),
    [((), Cache.WHOLE), ((0, 9, 23), Cache.NONE), ((0, 9, 24), Cache.DELTA),
     ((0, 9, 42), Cache.DELTA), ((0, 9, 43), Cache.WHOLE), ((1, 0, 7), Cache.WHOLE)],
)  # fmt: skip
def test_releases(version: tuple[int, ...], want: Cache) -> None:
    """By the release."""
    assert cache_of(version) is want


@pytest.mark.parametrize(
    ("new", "flush"),
    [
        (chat(U1, A1, U2), False),
        (chat(U1, A1, U2, tools=TOOLS), True),  # the model would see other tools
        (chat(U1, said("assistant", "B"), U2), True),  # it would see its own answer
        (chat(U1, A1, said("user", "c"), said("user", "d")), False),  # merged: one message
        (chat(U1, A1, U2, A1, U2), True),  # only the last would be inserted
        (chat(U1, A1, said("assistant", "x")), True),
        (chat(U2, A1, U1), True),
        (chat(U1, A1), False),  # never looked up
        (chat(U1, A1, U2, reasoning_effort="high"), True),
    ],
)
def test_era_b_goes_on_blindly(new: Prompt, flush: bool) -> None:
    """Only the exact next step may meet what an old release holds."""
    assert memory(Cache.DELTA).flush_before(new) is flush
    assert memory(Cache.NONE).flush_before(new) is False


def test_era_b_tools() -> None:
    """One result is a step; two at once, or other calls than it made, are not."""
    asked = said("assistant", "", tool_calls=[CALL])
    last = chat(U1, tools=TOOLS)
    result = said("tool", "x", tool_call_id="c")
    made = {"content": "", "tool_calls": [{**CALL, "id": "other", "index": 0}]}
    step = chat(U1, asked, result, tools=TOOLS)
    assert not memory(Cache.DELTA, last, **made).flush_before(step)
    assert memory(Cache.DELTA, last, content="").flush_before(step)
    both = chat(U1, asked, result, result, tools=TOOLS)
    assert memory(Cache.DELTA, last, **made).flush_before(both)


@pytest.mark.parametrize("what", ["start", "cancel", "completion"])
def test_era_b_unknown(what: str) -> None:
    """What it holds is not known at the start, after a cancel, and after other work."""
    held = memory(Cache.DELTA, None if what == "start" else LAST)
    if what == "cancel":
        held.begins(chat(U2))
    if what == "completion":
        held.lost()
    assert held.flush_before(chat(U1, A1, U2))


@pytest.mark.parametrize(
    ("new", "flush"),
    [
        (chat(U1, A1, U2), True),
        (chat(U1, said("assistant", " b\n"), U2), True),  # a template that trims makes it the same
        (chat(U1, said("assistant", "b", tool_calls=[CALL]), U2), True),
        (chat(U1, A1, U2, tools=TOOLS), False),  # tools are compared, and were forgotten
        (chat(U1, A1, U2, A1, U1), False),
        (chat(U1, A1, U1), False),
        (chat(U1, A1), False),
    ],
)
def test_the_same_after_a_cancel(new: Prompt, flush: bool) -> None:
    """The identical conversation would leave nothing to compute."""
    held = memory(Cache.WHOLE)
    held.begins(chat(U1, A1, U2))
    assert held.flush_before(new) is flush
    held.ended(chat(U1, A1, U2), A1, 10)
    assert not held.flush_before(new)


SEEN = chat(said("user", picture("AA")))


@pytest.mark.parametrize(
    ("new", "flush"),
    [
        (chat(said("user", picture("AA")), A1, U2), False),
        (chat(said("user", picture("BB")), A1, U2), True),
        (chat(said("user", [*picture("AA"), *picture("AA")[1:]]), A1, U2), True),
        (chat(said("user", "what?"), A1, said("user", picture("AA"))), True),
        (chat(said("user", "other"), A1, said("user", picture("AA"))), False),
        (chat(U1, A1, U2), False),
    ],
)
def test_other_images(new: Prompt, flush: bool) -> None:
    """Images are compared by nobody else."""
    assert memory(Cache.WHOLE, SEEN).flush_before(new) is flush
    assert memory(Cache.WHOLE, None).flush_before(new) is new.media


def test_merged() -> None:
    """Neighbours become one, whatever their form."""
    parts = picture("AA")
    got = merged([said("user", "a"), said("user", parts), said("tool", "x"), said("tool", "y")])
    assert got == [
        said("user", [{"type": "text", "text": "a"}, *parts]), said("tool", "x"), said("tool", "y"),
    ]  # fmt: skip


@pytest.mark.timeout(10)
def test_many_are_merged() -> None:
    """Texts stay one text until a part comes, and nothing is copied again for each message."""
    count = 100_000
    part = {"type": "text", "text": "x"}
    (got,) = merged([said("user", "a")] * count + [said("user", [part])] * count)
    assert got["content"] == [{"type": "text", "text": "a" * count}, *[part] * count]
    (got,) = merged([said("user", [part]), *[said("user", "b")] * 2])
    assert got["content"] == [part, *[{"type": "text", "text": "b"}] * 2]


def test_what_is_expected() -> None:
    """Reuse is expected of the step after a prompt, with the same tools."""
    for new, want in ((chat(U1, A1, U2), True), (chat(U1, A1, U2, tools=TOOLS), False),
                      (chat(U2, A1, U2), False)):  # fmt: skip
        held = memory(Cache.WHOLE)
        held.begins(new)
        assert held.expected is want


S = said("system", "s")


@pytest.mark.parametrize(
    ("new", "same"),
    [
        (chat(S, U2), True),
        (chat(S, U1), False),  # the same once more
        (chat(said("system", "t"), U2), False),
        (chat(S, U1, A1, U2), False),
        (chat(U2), False),
    ],
)
def test_questions_that_begin_alike(new: Prompt, same: bool) -> None:
    """One each, behind one system text: what looks like a hit to a user, and can be none."""
    assert new.begins_as(chat(S, U1)) is same
    assert chat(S, U1).begins_as(new) is same
    assert not chat(said("assistant", "b"), U1).begins_as(chat(said("assistant", "b"), U2))
