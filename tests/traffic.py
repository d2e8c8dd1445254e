"""Requests shaped like those of a coding agent (clients.md 3 and 4), without the agent.

One main conversation with tool loops, sub-agents with prompts of their own, a title request beside
every turn; the billing block changes with each request, and the mark that says what may be cached
moves, which flips messages between a string and a list of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Body = dict[str, Any]
Message = dict[str, Any]

MARK = {"type": "ephemeral"}
WORDS = "The tool reads a file and returns its lines with their numbers and says when it is gone. "


def system_text(name: str, size: int) -> str:
    """``size`` characters in lines, that no other prompt begins with."""
    text = f"You are {name}.\n" + f"{WORDS.strip()}\n" * (size // len(WORDS) + 1)
    return text[:size]


def tools(names: tuple[str, ...]) -> list[Body]:
    """Definitions as the agent sends them."""
    return [
        {
            "name": name,
            "description": f"{name}: {WORDS}",
            "input_schema": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where it is."},
                    "limit": {"type": "number", "description": "How much of it."},
                },
                "required": ["path"],
            },
        }
        for name in names
    ]


@dataclass
class Agent:
    """One conversation of the agent: the main one or a sub-agent's."""

    name: str
    tool_names: tuple[str, ...]
    stamp: Callable[[], int]
    size: int = 3000
    messages: list[Message] = field(default_factory=list)

    def body(self) -> Body:
        """The next request: the history, the newest message marked, the others plain strings."""
        history = [dict(message) for message in self.messages]
        last = history[-1]
        if isinstance(last["content"], str):
            part = {"type": "text", "text": last["content"], "cache_control": MARK}
            last["content"] = [part]
        else:
            *others, newest = last["content"]
            last["content"] = [*others, {**newest, "cache_control": MARK}]
        billing = f"x-anthropic-billing-header: cc_version=2.1.332.{self.name[-3:]}; "
        billing += f"cc_entrypoint=cli; cch={self.stamp():05x};"
        return {
            "model": "local",
            "max_tokens": 8,
            "temperature": 0,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are an agent.", "cache_control": MARK},
                {"type": "text", "text": system_text(self.name, self.size), "cache_control": MARK},
            ],
            "tools": tools(self.tool_names),
            "metadata": {"user_id": '{"session_id":"1"}'},
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "messages": history,
        }

    def user(self, text: str) -> None:
        """The person says something."""
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """The model's answer, as the client keeps it."""
        self.messages.append({"role": "assistant", "content": text or "Done."})

    def used_tool(self, text: str, call: str, path: str, result: str) -> None:
        """The answer asked for a tool: the call and what came of it."""
        said: list[Body] = [{"type": "text", "text": text}] if text else []
        use = {"type": "tool_use", "id": call, "name": self.tool_names[0], "input": {"path": path}}
        self.messages.append({"role": "assistant", "content": [*said, use]})
        back = {"type": "tool_result", "tool_use_id": call, "content": result}
        self.messages.append({"role": "user", "content": [back]})


def title_request(about: str) -> Body:
    """A side request, as the agent sends one beside a turn."""
    return {
        "model": "local",
        "max_tokens": 8,
        "temperature": 0,
        "system": "You are naming a coding session. Answer with a title and a git branch name.",
        "messages": [{"role": "user", "content": about}],
    }


def session(turns: int) -> Iterator[tuple[str, Body, Callable[[str], None]]]:
    """The requests in order: who sends it, its body, and what to do with the answer's text."""
    stamps = count(0xAB120)
    environment = "# Environment\nWorking directory: /home/u/p\n" + WORDS * 12
    main = Agent("claude-main-5b4", ("Read", "Bash", "Edit", "Grep"), lambda: next(stamps), 6000)
    helpers = [Agent(f"helper-{n}-{n}ed", ("Read", "Grep"), lambda: next(stamps)) for n in range(2)]
    for turn in range(turns):
        main.user(f"Turn {turn}: look at file number {turn}, please.")
        if turn == 0:
            main.messages.append({"role": "system", "content": environment})
        yield "title", title_request(f"Turn {turn} is about file number {turn}."), _ignore
        heard: list[str] = []
        yield "main", main.body(), heard.append
        main.used_tool(heard[-1], f"toolu_{turn:028d}", f"src/{turn}.py", WORDS * (1 + turn % 3))
        helper = helpers[turn % 2]
        helper.user(f"Search for name {turn}.")
        yield helper.name, helper.body(), helper.answered
        yield "main", main.body(), main.answered


def _ignore(_text: str) -> None:
    """Nobody reads it."""
