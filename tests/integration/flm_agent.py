"""A coding agent's session for FastFlowLM, and the same session by a client that makes no mistake.

``Session`` is what a coding agent sends over ``/v1/messages``: a long system prompt, a billing
block that changes with each request, tools in any order, messages that are a string at one time
and a list of parts at another, answers that come back stripped, loops of tool calls. ``Ideal``
holds the same conversation over the server's own API and sends every byte again as it was: what
the server reuses of it is what its rules allow at best.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.emulators.fastflowlm import Answer, Emulator, Record
from tests.emulators.fastflowlm.client import ask
from tests.emulators.fastflowlm.engine import Engine
from tests.traffic import Agent, Body, Message, title_request

CHAT = "/v1/chat/completions"
SYSTEM_SIZE = 100_000  # characters
NAMES = ("Read", "Bash", "Edit", "Grep", "Glob", "Write")
NAMING = "You are naming a coding session."
STEPS = 2  # answers with tool calls per turn
RESULT = "1  def f() -> int:\n2      return 1\n" * 8
# How a model writes its arguments. The server tells all of them sorted and without blanks (3.3).
SPELLINGS = {
    "spaced": '{{"path": "src/{0}.py", "limit": 9}}',
    "compact": '{{"limit":9,"path":"src/{0}.py"}}',
}
WRITTEN = re.compile(r'"arguments": (.*)\}\n</tool_call>')


def title(messages: list[Any]) -> bool:
    """Whether a chat is a side request."""
    return NAMING in str(messages[0].get("content", ""))


def scripted(spelling: str, record: Record, _engine: Engine) -> Answer | None:
    """Two answers with tool calls (the second with two at once), then a text; titles are echoed.

    ``spelling``: a row of ``SPELLINGS``; a model has one.
    """
    messages = record.body["messages"]
    if title(messages):
        return None
    asked = max(n for n, m in enumerate(messages) if m["role"] == "user")
    steps = sum(m["role"] == "assistant" for m in messages[asked:])
    turn = sum(m["role"] == "user" for m in messages)
    if steps == STEPS:
        return Answer(f"\n\nFile {turn} returns one.\n")
    written = SPELLINGS[spelling]
    calls = tuple(("Read", written.format(f"{turn}-{n}")) for n in range(steps + 1))
    return Answer(f"I look at file {turn}.", calls=calls)


@dataclass
class Session:
    """The agent: what it sends next, and what it makes of an answer."""

    seed: int = 0
    agent: Agent = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        stamps = count(0xAB120 + self.seed)
        self.agent = Agent("claude-main-5b4", NAMES, lambda: next(stamps), SYSTEM_SIZE)

    def ask(self, turn: int) -> None:
        """The person types; the first time the client adds what it knows of the machine."""
        again = f", session {self.seed}" if self.seed else ""
        self.agent.user(f"Turn {turn}{again}: what does file number {turn} return?")
        if turn == 0:
            environment = "# Environment\nWorking directory: /home/u/p\n"
            self.agent.messages.append({"role": "system", "content": environment})

    def body(self) -> Body:
        """The next request of the main conversation."""
        self.agent.tool_names = tuple(self._random.sample(NAMES, len(NAMES)))
        return {**self.agent.body(), "max_tokens": 400}

    def title(self, turn: int) -> Body:
        """A side request."""
        return {**title_request(f"Turn {turn} is about file number {turn}."), "max_tokens": 60}

    def heard(self, blocks: list[Message]) -> bool:
        """Keep an answer, stripped as clients do, and run its tools; whether the loop goes on."""
        kept = [
            {**block, "text": block["text"].strip()} if block["type"] == "text" else block
            for block in blocks
        ]
        calls = [block for block in kept if block["type"] == "tool_use"]
        if not calls:
            self.agent.answered("".join(b["text"] for b in kept if b["type"] == "text"))
            return False
        self.agent.messages.append({"role": "assistant", "content": kept})
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT} for call in calls
        ]
        self.agent.messages.append({"role": "user", "content": results})
        return True


@dataclass
class Ideal:
    """The main conversation as chat: nothing volatile, and every answer as it was generated.

    That is more than a client can know: how a model wrote its arguments, only the emulator tells.
    """

    emu: Emulator
    messages: list[Message] = field(default_factory=list)
    tools: list[Body] = field(default_factory=list)

    async def send(self, body: Body) -> None:
        """Say what is new in an agent's request, and keep the answer."""
        if title_of(body):
            await self._ask({"messages": _opening(body) + _said(body["messages"][-1], {})})
            return
        if not self.messages:
            self.messages = _opening(body)
            self.tools = [_tool(tool) for tool in body["tools"]]
        self.messages += self._news(body["messages"])
        answer = await self._ask({"messages": self.messages, "tools": self.tools})
        self.messages.append(answer)

    def _news(self, messages: list[Message]) -> list[Message]:
        """What the client adds behind the newest answer; results under the server's own ids."""
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return [new for message in messages for new in _said(message, {})]
        theirs = [b["id"] for b in _blocks(messages[answers[-1]]) if b["type"] == "tool_use"]
        ours = [call["id"] for call in self.messages[-1].get("tool_calls", [])]
        ids = dict(zip(theirs, ours, strict=True))
        return [new for message in messages[answers[-1] + 1 :] for new in _said(message, ids)]

    async def _ask(self, body: Body) -> Message:
        got = await ask(self.emu.url, CHAT, {**body, "stream": True, "max_tokens": 400})
        assert got.status == 200, got.body
        message: Message = {"role": "assistant", "content": got.text}
        calls = [call for delta in got.deltas for call in delta.get("tool_calls", [])]
        written = WRITTEN.findall(self.emu.records[-1].text)
        for call, arguments in zip(calls, written, strict=True):
            call["function"]["arguments"] = arguments
        return {**message, "tool_calls": calls} if calls else message


def title_of(body: Body) -> bool:
    """Whether an agent's request is a side request."""
    return isinstance(body["system"], str) and body["system"].startswith(NAMING)


def _opening(body: Body) -> list[Message]:
    """The system prompt without the billing block."""
    system = body["system"]
    texts = [system] if isinstance(system, str) else [block["text"] for block in system[1:]]
    return [{"role": "system", "content": "".join(texts)}]


def _blocks(message: Message) -> list[Message]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _said(message: Message, ids: dict[str, str]) -> list[Message]:
    """A message of the client's side as chat messages."""
    if message["role"] == "user" and any(b["type"] == "tool_result" for b in _blocks(message)):
        return [
            {"role": "tool", "tool_call_id": ids[b["tool_use_id"]], "content": b["content"]}
            for b in _blocks(message)
        ]
    text = "".join(block["text"] for block in _blocks(message))
    return [{"role": message["role"], "content": text}]


def _tool(tool: Body) -> Body:
    function = {"name": tool["name"], "description": tool["description"]}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


@dataclass(frozen=True)
class Figures:
    """What a run cost, in emulated seconds and tokens."""

    name: str
    prompt: int
    kept: int
    seconds: float

    @classmethod
    def of(cls, name: str, emu: Emulator) -> Figures:
        """All chats that an emulator has answered."""
        chats = emu.chats()
        prompt, kept = sum(c.prompt for c in chats), sum(c.kept for c in chats)
        return cls(name, prompt, kept, emu.prefill_seconds)

    @property
    def share(self) -> float:
        """Of all prompt tokens, those that were reused."""
        return self.kept / self.prompt

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.name}: {self.share:.1%} of {self.prompt} prompt tokens reused, "
            f"{self.seconds:.0f} s of prefill"
        )


def allowed(ideal: list[Record], found: list[Record], *, whole: bool) -> list[int]:
    """Tokens each of ``found`` could reuse: all of the request before it, or nothing.

    Which of the two, ``ideal`` says, the same requests in the same order by a client that makes no
    mistake. ``whole``: this memory keeps the answer too (HIST, CKPT-END).
    """
    best = [0]
    for before, perfect in zip(found, ideal[1:], strict=False):
        past = before.prompt + (before.completion if whole else 0)
        best.append(past if perfect.kept else 0)
    return best
