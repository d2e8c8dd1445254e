"""The client APIs of the cached path."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from proxy.dialects.anthropic import Messages
from proxy.dialects.base import Dialect
from proxy.dialects.completion_as_chat import CompletionAsChat
from proxy.dialects.infill import Infill
from proxy.dialects.llama_completion import LlamaCompletion
from proxy.dialects.ollama import OllamaChat, OllamaGenerate
from proxy.dialects.openai_chat import OpenAIChat
from proxy.dialects.openai_completion import OpenAICompletion
from proxy.dialects.responses import Responses

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
# Become chat requests where ``Backend.lacks`` names them; else they are the backend's own.
TRANSLATIONS: Mapping[str, Dialect] = MappingProxyType(
    {
        "/v1/completions": CompletionAsChat(),
        "/v1/responses": Responses(),
        "/api/chat": OllamaChat(),
        "/api/generate": OllamaGenerate(),
    }
)
