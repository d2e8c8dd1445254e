"""Era E: what ``tool_choice``, ``parallel_tool_calls`` and ``strict`` do (section 1.5)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tests.emulators.fastflowlm.errors import type_error

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Refused(Exception):  # noqa: N818  # becomes a 400 answer
    """The tools of a request break the rules."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of a request's tools, and what its answer must keep to."""

    tools: list[Any]
    preface: str = ""  # a system message put in front
    required: bool = False
    one: bool = False
    buffered: bool = False

    def broken(self, calls: int) -> str:
        """The contract an answer with so many calls violates; "" if none."""
        if self.required and not calls:
            return "Model did not produce a required tool call"
        if self.one and calls > 1:
            return "Model produced parallel tool calls"
        return ""


def _check(tools: list[Any]) -> list[str]:
    names: list[str] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Refused("tool names must match [A-Za-z0-9_-]{1,64}")
        if function and function.get("strict") is True:
            raise Refused("function.strict is not supported")
        names.append(name)
    if len(set(names)) != len(names):
        raise Refused("tool names must be unique")
    return names


def apply(body: dict[str, Any], tools: list[Any]) -> Policy:
    """Read the three fields.

    Raises:
        Refused: a tool, or the choice, is against the rules.
    """
    names = _check(tools)
    choice = body.get("tool_choice", "auto")
    parallel = body.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise type_error("boolean", parallel)
    buffered = bool(tools) or "tool_choice" in body or "parallel_tool_calls" in body
    orders: list[str] = []
    required = choice == "required"
    if isinstance(choice, dict):
        name = choice.get("function", {}).get("name")
        if name not in names:
            raise Refused("tool_choice names no tool")
        tools = [tools[names.index(name)]]
        required = True
        orders.append(f"You must call the tool {name}.")
    elif required:
        orders.append("You must call one of the tools.")
    elif choice == "none":
        tools = []
    if not parallel:
        orders.append("Call at most one tool.")
    return Policy(tools, " ".join(orders), required, not parallel, buffered)
