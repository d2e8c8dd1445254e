"""Which client program sent a request, and whether it is one of its side requests.

By the names programs give themselves in headers, else by how their prompts begin (clients.md 4,
volatile-fields.md). Every text is anchored at a start: a user who quotes one is not that client.
Recognition chooses clocks to look for, metrics and priority; it never decides what is answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from proxy.core.conversation import SYSTEM, texts_of

START = 400  # characters of a text that are looked at

_T = TypeVar("_T")


class _Table(Generic[_T]):
    """What a text is, by how it begins: the first row that fits."""

    def __init__(self, *rows: tuple[str, _T]) -> None:
        self._rows = rows
        self._starts = tuple(start for start, _ in rows)

    def find(self, text: str) -> _T | None:
        if not text.startswith(self._starts):  # as for most: asked once, not row by row
            return None
        return next(found for start, found in self._rows if text.startswith(start))


# The name in ``X-Title``, or the product in ``User-Agent``: lower case, letters and digits only.
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "aider": "aider",
        "anythingllm": "anything-llm",
        "charmcrush": "crush",
        "claudecli": "claude-code",
        "claudecode": "claude-code",
        "cline": "cline",
        "continue": "continue",
        "copilot": "copilot",
        "crush": "crush",
        "geminicli": "gemini-cli",
        "githubcopilotchat": "copilot",
        "goose": "goose",
        "gptme": "gptme",
        "hermesagent": "hermes",
        "homeassistant": "home-assistant",
        "kilo": "kilo",
        "kilocode": "kilo",
        "librechat": "librechat",
        "llm": "llm",
        "minisweagent": "mini",
        "n8n": "n8n",
        "openclaw": "openclaw",
        "opencode": "opencode",
        "openwebui": "open-webui",
        "pi": "pi",
        "privategpt": "private-gpt",
        "qwencode": "qwen-code",
        "roocode": "roo",
        "sillytavern": "sillytavern",
        "zed": "zed",
    }
)
# ``originator`` and ``User-Agent`` of Codex name its front-end: codex_cli_rs, codex-tui ...
_CODEX = re.compile(r"codex(?:[_-][a-z_]+)?(?:/|$)")
_PRODUCT = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_NOT_A_NAME = re.compile(r"[^a-z0-9]")
# How the system text begins.
_SYSTEMS = _Table(
    ("You are Claude Code, Anthropic's official CLI", "claude-code"),
    ("You are a Claude agent, built on Anthropic's Claude Agent SDK", "claude-code"),
    ("You are opencode", "opencode"),
    ("You are OpenCode", "opencode"),
    ("You are Kilo", "kilo"),
    ("You are Cline", "cline"),
    ("You are Roo", "roo"),
    ("You are a general-purpose AI agent called goose", "goose"),
    ("You are Codex", "codex"),
    ("You are a coding agent running in the Codex CLI", "codex"),
    ("You are Qwen Code", "qwen-code"),
    ("You are now acting as the managed memory extraction subagent", "qwen-code"),
    ("You are Gemini CLI", "gemini-cli"),
    ("Act as an expert software developer", "aider"),
    ("Act as an expert code analyst", "aider"),
    ("Act as an expert architect engineer", "aider"),
    ("You are an agent in the Continue CLI", "continue"),
    ("You are the GitHub Copilot CLI", "copilot"),
    ("You are an expert AI programming assistant, working with a user in the VS Code", "copilot"),
    ("You are Crush", "crush"),
    ("You are an expert coding assistant operating inside pi", "pi"),
    ("You are Hermes Agent", "hermes"),
    ("You are a personal assistant running inside OpenClaw", "openclaw"),
    ("You are gptme", "gptme"),
    ("You are a voice assistant for Home Assistant", "home-assistant"),
    ("You are a helpful assistant that can interact with a computer shell", "mini"),
    ("Given the following conversation, relevant context, and a follow up", "anything-llm"),
)
# Home Assistant puts its clock before its instructions (HA-1).
_HOME_CLOCK = re.compile(
    r"Current time is \d{1,2}:\d{2}:\d{2}\. Today's date is \d{4}-\d{2}-\d{2}\."
)
_ROLE_PLAY = re.compile(r"Write .{1,80}'s next reply in a fictional chat between ")
# How the first user text begins.
_USERS = _Table(
    ("This is the Qwen Code.", "qwen-code"),
    ("<session_context>\nThis is the Gemini CLI.", "gemini-cli"),
    ("### Task:\n", "open-webui"),
)
_BILLING = re.compile(r"x-anthropic-billing-header:\s*(?:[A-Za-z_]+=[^;\s]*;\s*)+")
_CLAUDE = re.compile(
    r"You are (?:Claude Code, Anthropic's official CLI for Claude"
    r"|a Claude agent, built on Anthropic's Claude Agent SDK)\.\s*"
)


class Side(StrEnum):
    """What a request is for, in the life of its client's conversation."""

    MAIN = "main"  # the conversation itself, or not recognised
    TITLE = "title"
    TAGS = "tags"
    FOLLOW_UPS = "follow-ups"
    SUGGESTION = "suggestion"  # what the user might type next
    QUERY = "query"  # search queries for the question asked
    COMPLETION = "completion"  # of what the user is typing
    MEMORY = "memory"  # extraction of what is worth remembering
    SUMMARY = "summary"  # compaction of the conversation
    RECAP = "recap"  # for a user who comes back
    PROBE = "probe"  # is the server there


# How the system text of a side request begins.
_SIDE_SYSTEMS = _Table(
    ("You are naming a coding session", Side.TITLE),  # Claude Code (CC-12)
    ("Generate a concise, sentence-case title", Side.TITLE),
    ("You are coming up with a succinct title and git branch name", Side.TITLE),
    ("You are a title generator. You output ONLY", Side.TITLE),  # OpenCode, Kilo, Crush (OC-7)
    ("you will generate a short title based on the first message", Side.TITLE),
    ("Generate a descriptive name for this conversation", Side.TITLE),  # gptme
    ("You are now acting as the managed memory extraction subagent", Side.MEMORY),  # Qwen Code
    ("You are a helpful AI assistant tasked with summarizing conversations", Side.SUMMARY),
    ("You are an anchored context summarization assistant", Side.SUMMARY),
)
# How the newest user text of a side request begins.
_SIDE_USERS = _Table(
    ("[SUGGESTION MODE: ", Side.SUGGESTION),  # Claude Code (CC-12)
    ("The user stepped away and is coming back", Side.RECAP),
    ("You are now acting as the memory extraction subagent", Side.MEMORY),
    ("# Dream: Memory Consolidation", Side.MEMORY),
    ("Describe your most recent action in 3-5 words", Side.RECAP),
    ("Your task is to create a detailed summary of the conversation so far", Side.SUMMARY),
    ("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.", Side.SUMMARY),
    ("### Task:\nGenerate a concise, 3-5 word title", Side.TITLE),  # Open WebUI (OU-2)
    ("### Task:\nCreate a concise, 3-5 word title", Side.TITLE),
    ("### Task:\nGenerate 1-3 broad tags", Side.TAGS),
    ("### Task:\nSuggest 3-5 relevant follow-up", Side.FOLLOW_UPS),
    ("### Task:\nYou are an autocompletion system", Side.COMPLETION),
    ("### Task:\nAnalyze the chat history to determine the necessity of", Side.QUERY),
    ("Provide a concise, 5-word-or-less title for the conversation", Side.TITLE),  # LibreChat
    ("Generate a title for this conversation:", Side.TITLE),
    ("Generate a descriptive name for this conversation", Side.TITLE),  # gptme
    ("That was the context of the conversation. Now, answer with a descriptive name", Side.TITLE),
)


def client(headers: Mapping[str, str], system: str, first_user: str) -> str:
    """The client program, ``""`` when not recognised.

    ``headers``: names in lower case. ``system``, ``first_user``: the first system and the first
    user text, ``""`` where there is none. A program that says its name is believed first: many
    are built on another one and send that one's headers or prompt as well.
    """
    for header, name in _HEADERS:
        value = headers.get(header)
        found = value and (name if isinstance(name, str) else name(value))
        if found:
            return found
    return (
        _by_system(system[:START])
        or _USERS.find(first_user[:START].removeprefix("<system-reminder>").lstrip())
        or ""
    )


def side(body: Mapping[str, Any], headers: Mapping[str, str]) -> Side:
    """What a chat request is for; ``headers``: names in lower case."""
    if headers.get("x-session-id", "").startswith("title-"):  # Kilo
        return Side.TITLE
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in SYSTEM:
            break
        for text in _starts(message):
            bare = _CLAUDE.sub("", _BILLING.sub("", text, count=1).lstrip(), count=1)
            if found := _SIDE_SYSTEMS.find(bare.lstrip(" -\n")):
                return found
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "user":
        return Side.MAIN
    for text in _starts(last):
        if found := _SIDE_USERS.find(text.lstrip()):
            return found
    probe = len(messages) == 1 and body.get("max_tokens") == 1 and last.get("content") == "quota"
    return Side.PROBE if probe else Side.MAIN


def _named(title: str) -> str:
    return _NAMES.get(_NOT_A_NAME.sub("", title[:START].lower()), "")


def _agent(value: str) -> str:
    """By the first product of a user agent; ``pi-hole/1.0`` is no pi."""
    value = value[:START].strip()
    if _CODEX.match(value.lower()):
        return "codex"
    product = _PRODUCT.match(value)
    return _named(product.group()) if product else ""


# What a header says of its sender, or who alone sends it.
_HEADERS: tuple[tuple[str, str | Callable[[str], str]], ...] = (
    ("x-title", _named),
    ("x-claude-code-session-id", "claude-code"),
    ("x-openwebui-chat-id", "open-webui"),
    ("x-openwebui-user-id", "open-webui"),
    ("x-interaction-type", "copilot"),
    ("originator", _agent),
    ("user-agent", _agent),
)


def _by_system(text: str) -> str:
    if not text:
        return ""
    text = _BILLING.sub("", text, count=1).lstrip()
    if _HOME_CLOCK.match(text):
        return "home-assistant"
    if _ROLE_PLAY.match(text):
        return "sillytavern"
    return _SYSTEMS.find(text) or ""


def _starts(message: Mapping[str, Any]) -> list[str]:
    """The beginnings of a message's text, or of its text parts."""
    return [text[:START] for text in texts_of(message)]
