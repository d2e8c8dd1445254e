"""The client APIs of the cached path."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from proxy.dialects.anthropic import Messages
from proxy.dialects.base import Dialect
from proxy.dialects.infill import Infill
from proxy.dialects.llama_completion import LlamaCompletion
from proxy.dialects.openai_chat import OpenAIChat
from proxy.dialects.openai_completion import OpenAICompletion

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "/v1/chat/completions": OpenAIChat(),
        "/chat/completions": OpenAIChat(),
        "/v1/messages": Messages(),
        "/v1/completions": OpenAICompletion(),
        "/completion": LlamaCompletion(),
        "/completions": LlamaCompletion(),
        "/infill": Infill(),
    }
)
