"""OpenAI's Responses API (Codex speaks it) on the real engine, asked by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.real.conftest import EngineFactory, ProxyFactory
from tests.real.test_conversations import SLACK, prose

pytestmark = pytest.mark.real

TOOL: Any = {
    "type": "function",
    "name": "read_file",
    "description": "Reads a file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}


@pytest.fixture
def client(
    tools_model: Path, engine: EngineFactory, proxy: ProxyFactory
) -> Iterator[openai.OpenAI]:
    """Through a proxy that drives its backend."""
    front = proxy(engine(tools_model, context=4096))
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def asked(client: openai.OpenAI, items: list[Any], *, stream: bool) -> Any:
    """One turn; the last event of a stream holds the whole answer."""
    body: dict[str, Any] = {
        "model": "local",
        "instructions": prose(120, 7),
        "input": items,
        "tools": [TOOL],
        "max_output_tokens": 8,
        "temperature": 0,
    }
    if not stream:
        return client.responses.create(**body)
    *_, last = client.responses.create(**body, stream=True)
    assert last.type in {"response.completed", "response.incomplete"}
    return last.response


@pytest.mark.parametrize("stream", [True, False])
def test_turns_are_reused(client: openai.OpenAI, stream: bool) -> None:
    """A conversation with a tool's result goes on from what its slot holds."""
    call = {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "three rivers"}
    items: list[Any] = [{"role": "user", "content": "Read the file."}]
    before = asked(client, items, stream=stream).usage
    items += [call, result]
    after = asked(client, items, stream=stream).usage
    assert before.input_tokens > 100
    assert after.input_tokens > before.input_tokens
    assert after.input_tokens_details.cached_tokens >= before.input_tokens - SLACK
