"""Traits are decided by where the samples' words come out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from proxy.core.template import DATE, REASONING, SAMPLES, SECOND, TOOL, Traits, traits


def _chatml(body: Mapping[str, Any], *, tools: str = "", head: str = "") -> str:
    """A prompt with everything in it; ``tools``: where they go."""
    declared = orjson.dumps(body["tools"]).decode() if tools and "tools" in body else ""
    last = max(i for i, one in enumerate(body["messages"]) if one["role"] == "user")
    text = head + (declared if tools == "first" else "")
    for place, message in enumerate(body["messages"]):
        text += declared if tools == "late" and place == last else ""
        thought = message.get("reasoning_content")
        text += f"<{message['role']}>{f'<think>{thought}</think>' if thought else ''}"
        text += message["content"]
        text += declared if tools == "system" and place == 0 else ""
    return text


def _rendered(**how: str) -> dict[str, str | None]:
    return {name: _chatml(body, **how) for name, body in SAMPLES.items()}


ALL = Traits(
    mid_system=True,
    two_systems=True,
    tools_first=False,
    renders_tools=True,
    keeps_reasoning=True,
    loop_reasoning=True,
    tools_late=False,
)


def test_samples_are_json() -> None:
    """Every sample can be sent, and none shares a word with another role."""
    for body in SAMPLES.values():
        assert orjson.loads(orjson.dumps(body)) == body
    assert len(SAMPLES) == 8


def test_everything_rendered() -> None:
    """A template that renders all in place, tools behind the system text."""
    assert traits(_rendered(tools="system"), None) == ALL


@pytest.mark.parametrize(
    ("where", "first", "late"), [("first", True, False), ("system", False, False)]
)
def test_where_tools_go(where: str, first: bool, late: bool) -> None:
    """Before the system text, behind it."""
    found = traits(_rendered(tools=where), "")
    assert (found.renders_tools, found.tools_first, found.tools_late) == (True, first, late)


def test_tools_with_the_last_user_message() -> None:
    """Behind the first user message is late: each new one moves them."""
    found = traits(_rendered(tools="late"), "")
    assert (found.renders_tools, found.tools_first, found.tools_late) == (True, False, True)


def test_tools_not_rendered() -> None:
    """Where they would go is then not known."""
    found = traits(_rendered(), "")
    assert (found.renders_tools, found.tools_first, found.tools_late) == (False, None, None)


def test_tools_refused() -> None:
    """A template that raises at tools tells nothing of them."""
    found = traits({**_rendered(tools="system"), "tools": None}, "")
    assert (found.renders_tools, found.tools_first, found.tools_late) == (None, None, None)


@pytest.mark.parametrize(
    ("sample", "field"),
    [
        ("mid_system", "mid_system"),
        ("two_systems", "two_systems"),
        ("reasoning", "keeps_reasoning"),
        ("loop", "loop_reasoning"),
    ],
)
def test_refused(sample: str, field: str) -> None:
    """A template that raises cannot do it; nothing else changes."""
    found = traits({**_rendered(tools="system"), sample: None}, None)
    assert getattr(found, field) is False
    assert {name for name in Traits.__slots__ if getattr(found, name) != getattr(ALL, name)} == {
        field
    }


def test_not_asked_is_not_known() -> None:
    """A sample that was not rendered leaves its trait open."""
    rendered = _rendered(tools="system")
    del rendered["mid_system"], rendered["loop"]
    found = traits(rendered, None)
    assert found.mid_system is None
    assert found.loop_reasoning is None


def test_hoisted_is_not_in_place() -> None:
    """Later system messages moved to the front are not rendered where they stand."""
    rendered = _rendered(tools="system")
    text = rendered["mid_system"] or ""
    rendered["mid_system"] = f"<system>{SECOND}" + text.replace(f"<system>{SECOND}", "")
    assert traits(rendered, None).mid_system is False


def test_reasoning_left_out() -> None:
    """The thinking of a finished turn is gone, that of the running one is there."""
    rendered = _rendered(tools="system")
    rendered["reasoning"] = (rendered["reasoning"] or "").replace(REASONING, "")
    found = traits(rendered, None)
    assert (found.keeps_reasoning, found.loop_reasoning) == (False, True)


def test_a_server_that_renders_nothing() -> None:
    """Nothing is known, rather than everything impossible."""
    assert traits(dict.fromkeys(SAMPLES), "{{ x }}") == Traits()
    assert traits({}, None) == Traits()


@pytest.mark.parametrize(
    "date",
    ["09 Oct 2026", "9 October 2026", "October 9, 2026", "2026-10-09", "10/9/2026"],
)
def test_writes_date(date: str) -> None:
    """A date that the template's text does not hold was written by the clock."""
    head = f"Today Date: {date}\n"
    assert traits(_rendered(head=head), "{{ strftime_now('%d') }}").writes_date
    assert traits(_rendered(head=head), None).writes_date
    assert not traits(_rendered(head=head), f"Today Date: {date}").writes_date


def test_date_only_without_a_system_text() -> None:
    """A default system text may be the only place with a date."""
    rendered = _rendered()
    rendered["plain"] = "The current date is 2026-10-09." + (rendered["plain"] or "")
    assert traits(rendered, "").writes_date


@pytest.mark.parametrize("head", ["Knowledge cutoff: 2024-06\n", "December 2023\n", "v1.2.2026\n"])
def test_no_date(head: str) -> None:
    """A month or a version is no day."""
    assert not traits(_rendered(head=head), "").writes_date


def test_takes_a_date() -> None:
    """The argument's value comes out."""
    rendered = _rendered(tools="system")
    assert not traits(rendered, None).has_date_string
    rendered["date"] = f"Today: {DATE}" + (rendered["date"] or "")
    assert traits(rendered, None).has_date_string
    assert TOOL not in (rendered["date"] or "")
