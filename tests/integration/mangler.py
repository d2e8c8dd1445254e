"""A client that writes its history anew in every request, as real ones do (clients.md 4 and 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.integration.fake_faults import Seen
from tests.integration.proxies import CHAT

Body = dict[str, Any]
MESSAGES = "/v1/messages"
TOOLS = ("read", "bash", "edit", "grep")


@dataclass
class Mangler:
    """Trims texts, re-spaces arguments, drops reasoning, flips string and part, reorders tools."""

    system: str = "You are helpful."
    tools: Sequence[str] = TOOLS
    history: list[Body] = field(default_factory=list)
    count: int = 0

    def user(self, text: str) -> None:
        """The person says something."""
        self.history.append({"role": "user", "content": text})

    def heard(self, message: Mapping[str, Any]) -> None:
        """The model said this; what the client keeps of it."""
        kept = {name: message[name] for name in message if name != "reasoning_content"}
        self.history.append({**kept, "content": message["content"].strip()})

    def result(self, text: str, call: str) -> None:
        """What a tool gave."""
        self.history.append({"role": "tool", "tool_call_id": call, "content": text})

    def body(self, api: str = CHAT, **more: Any) -> Body:
        """The next request."""
        self.count += 1
        shift = self.count % len(self.tools) if self.tools else 0
        names = [*self.tools[shift:], *self.tools[:shift]]
        return {**(self._chat(names) if api == CHAT else self._messages(names)), **more}

    def _chat(self, names: Sequence[str]) -> Body:
        messages = [{"role": "system", "content": self.system}, *map(self._chat_form, self.history)]
        tools = [{"type": "function", "function": _function(name, "parameters")} for name in names]
        return {"messages": messages, **({"tools": tools} if tools else {})}

    def _chat_form(self, message: Body) -> Body:
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [self._respaced(call) for call in calls]}
        if message["role"] == "user" and self.count % 2:
            return {"role": "user", "content": [{"type": "text", "text": message["content"]}]}
        return message

    def _respaced(self, call: Body) -> Body:
        arguments = orjson.dumps(self._input(call)).decode()
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _input(self, call: Body) -> Body:
        given = orjson.loads(call["function"]["arguments"])
        names = sorted(given, reverse=bool(self.count % 2))
        whole = {k: int(v) if isinstance(v, float) and v == int(v) else v for k, v in given.items()}
        return {name: whole[name] for name in names}

    def _messages(self, names: Sequence[str]) -> Body:
        tools = [_function(name, "input_schema") for name in names]
        return {
            "max_tokens": 64,
            "system": [{"type": "text", "text": self.system}],
            "messages": [self._block_form(message) for message in self.history],
            **({"tools": tools} if tools else {}),
        }

    def _block_form(self, message: Body) -> Body:
        text = {"type": "text", "text": message["content"]}
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            return {"role": "user", "content": [{**result, "content": [text]}]}
        if calls := message.get("tool_calls"):
            uses = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": self._input(call),
                }
                for call in calls
            ]
            return {"role": "assistant", "content": [text, *uses] if text["text"] else uses}
        string = message["role"] == "user" and self.count % 2
        return {"role": message["role"], "content": message["content"] if string else [text]}


def _function(name: str, parameters: str) -> Body:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"name": name, "description": f"Does {name}.", parameters: schema}


def says(number: int, text: str = "", *, tool: bool = False) -> Body:
    """What the model generates: space at its ends, reasoning, arguments no client spells so."""
    message: Body = {
        "role": "assistant",
        "content": text or f" Answer number {number}, as it was generated.\n",
        "reasoning_content": f"Thought number {number}. ",
    }
    if tool:
        arguments = f'{{"path":  "{number}.py", "limit": 1.0, "flags": ["-n",2.0]}}'
        function = {"name": TOOLS[0], "arguments": arguments}
        message["tool_calls"] = [{"type": "function", "function": function, "id": f"call{number}"}]
    return message


def listed(seen: Seen, name: str = "messages") -> list[bytes]:
    """The elements of an array the backend got; they must stand there in just these bytes."""
    found = [orjson.dumps(one) for one in seen.json.get(name, ())]
    assert not found or b'"%b":[%b]' % (name.encode(), b",".join(found)) in seen.body
    return found


def extends(before: Seen, after: Seen) -> bool:
    """What the backend gets begins with what it got before, byte for byte; tools are the same."""
    sent, now = listed(before), listed(after)
    return now[: len(sent)] == sent and listed(before, "tools") == listed(after, "tools")


def says_more(before: Seen, after: Seen) -> bool:
    """The same but for the order of names in an object, which two APIs need not agree on."""
    sent, now = before.json, after.json
    told: bool = now["messages"][: len(sent["messages"])] == sent["messages"]
    return told and bool(sent.get("tools") == now.get("tools"))
