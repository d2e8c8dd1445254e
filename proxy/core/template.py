"""What a chat template does with a conversation, learned once per template by rendering samples.

The samples are conversations of words that no template contains; where these words come out in
the rendered prompt, if at all, decides. The server may help a template along with work-arounds of
its own: what counts is what it renders, not what the template says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Traits:
    """What the served model's chat template can do. None: not known, so nothing depends on it.

    ``mid_system``: renders a system message after the first user message. ``two_systems``: renders
    two leading ones. ``tools_first``: tools come before the system text. ``renders_tools``: they
    are rendered at all. ``keeps_reasoning``: ``reasoning_content`` of an assistant message before
    the last user message is rendered. ``has_date_string``: takes ``date_string`` as an argument.
    ``writes_date``: writes today's date by itself. ``loop_reasoning``: reasoning of an assistant
    message after the last user message is rendered. ``tools_late``: tools come with the last user
    message, so every user message moves them.
    """

    mid_system: bool | None = None
    two_systems: bool | None = None
    tools_first: bool | None = None
    renders_tools: bool | None = None
    keeps_reasoning: bool | None = None
    has_date_string: bool = False
    writes_date: bool = False
    loop_reasoning: bool | None = None
    tools_late: bool | None = None


# Words no template has in it; lower case and letters only, so that no filter changes them.
SYSTEM, SECOND, LATER = "zqsysalpha", "zqsysbravo", "zqsyscharlie"
USER, USER_2, USER_3 = "zqusralpha", "zqusrbravo", "zqusrcharlie"
ANSWER, REASONING = "zqanswer", "zqreasoning"
TOOL, RESULT, DATE = "zqtool", "zqresult", "zqdate"

# A day as templates write it: 09 Oct 2026, 9 October 2026, October 9, 2026, 2026-10-09, 10/9/2026.
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
A_DATE = re.compile(
    rf"\b\d{{1,2}} {_MONTH} \d{{4}}|\b{_MONTH} \d{{1,2}},? \d{{4}}|\b\d{{4}}-\d{{2}}-\d{{2}}"
    r"|\b\d{1,2}/\d{1,2}/\d{4}"
)


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _body(*messages: dict[str, Any], **more: Any) -> Mapping[str, Any]:
    return {"messages": list(messages), **more}


_CALL = {
    "id": "zqcall012",  # nine letters and digits: Mistral's templates insist
    "type": "function",
    "function": {"name": TOOL, "arguments": "{}"},
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": TOOL,
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
_SYSTEM, _USER, _ANSWER = _message("system", SYSTEM), _message("user", USER), "assistant"

SAMPLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": _body(_USER),
        "system": _body(_SYSTEM, _USER),
        "two_systems": _body(_SYSTEM, _message("system", SECOND), _USER),
        # both places Claude Code uses: behind the first user message, and behind a later one
        "mid_system": _body(
            _SYSTEM,
            _USER,
            _message("system", SECOND),
            _message(_ANSWER, ANSWER),
            _message("user", USER_2),
            _message("system", LATER),
        ),
        "tools": _body(
            _SYSTEM,
            _USER,
            _message(_ANSWER, ANSWER),
            _message("user", USER_2),
            tools=_TOOLS,
        ),
        "reasoning": _body(
            _USER,
            _message(_ANSWER, ANSWER, reasoning_content=REASONING),
            _message("user", USER_2),
        ),
        "loop": _body(
            _USER,
            _message(_ANSWER, ANSWER, reasoning_content=REASONING, tool_calls=[_CALL]),
            _message("tool", RESULT, tool_call_id=_CALL["id"]),
            tools=_TOOLS,
        ),
        "date": _body(_SYSTEM, _USER, chat_template_kwargs={"date_string": DATE}),
    }
)


def traits(rendered: Mapping[str, str | None], template: str | None) -> Traits:
    """Decide from the rendered samples.

    ``rendered``: by name of the sample, None where the template refused it. ``template``: its
    text, None when not known: then every date in a prompt counts as today's.
    """
    plain, system, tools = (rendered.get(name) for name in ("plain", "system", "tools"))
    if plain is None:  # nothing renders: the server cannot tell, or is not there
        return Traits()
    shown = tools is not None and TOOL in tools
    return Traits(
        mid_system=_in_order(rendered, "mid_system", SYSTEM, USER, SECOND, ANSWER, USER_2, LATER),
        two_systems=_in_order(rendered, "two_systems", SYSTEM, SECOND, USER),
        tools_first=tools.index(TOOL) < tools.find(SYSTEM) if tools and shown else None,
        renders_tools=shown if tools is not None else None,
        keeps_reasoning=_in_order(rendered, "reasoning", REASONING, ANSWER, USER_2),
        has_date_string=DATE in (rendered.get("date") or ""),
        writes_date=any(_writes_date(text or "", template or "") for text in (plain, system)),
        loop_reasoning=_in_order(rendered, "loop", USER, REASONING, RESULT),
        tools_late=tools.index(TOOL) > tools.find(USER) if tools and shown else None,
    )


def _in_order(rendered: Mapping[str, str | None], sample: str, *words: str) -> bool | None:
    """Whether all words came out, in this order. None: the sample was not rendered at all."""
    if sample not in rendered:
        return None
    text, place = rendered[sample] or "", 0
    for word in words:
        place = text.find(word, place)
        if place < 0:
            return False
    return True


def _writes_date(text: str, template: str) -> bool:
    """A date that is not a constant of the template (``26 Jul 2024`` is Llama's fallback)."""
    return any(date not in template for date in A_DATE.findall(text))
