"""Clients and their side requests are told by anchored signs, not by what merely looks so."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.normalise.clients import Side, client, side

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.5b4; cc_entrypoint=cli; cch=0a1b2;"
CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude."


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("claude-cli/2.1.332 (external, cli)", "claude-code"),
        ("opencode/1.18.33 ai-sdk/provider-utils/3.0.0", "opencode"),
        ("Kilo-Code/7.8.3 ai-sdk/provider-utils/3.0.0", "kilo"),
        ("kilo/latest/7.8.3/cli", "kilo"),
        ("Cline/3.0.65", "cline"),
        ("RooCode/3.54.0", "roo"),
        ("roo-code/3.54.0 (linux; x64) node/22.0.0", "roo"),
        ("codex_cli_rs/0.171.0 (Linux; x86_64)", "codex"),
        ("codex-tui/0.1.0", "codex"),
        ("codex_exec/0.171.0", "codex"),
        ("QwenCode/0.24.4 (linux; x64)", "qwen-code"),
        ("GeminiCLI/0.61.0 (linux; x64)", "gemini-cli"),
        ("Charm-Crush/v0.97.1 (https://charm.land/crush)", "crush"),
        ("Zed/0.210.0 (macos; aarch64)", "zed"),
        ("GitHubCopilotChat/0.38.0", "copilot"),
        ("HermesAgent/0.20.6", "hermes"),
        ("openclaw/2026.9.6", "openclaw"),
        ("HomeAssistant/2026.10.1 aiohttp/3.12 Python/3.13", "home-assistant"),
        ("pi (linux; x64)", "pi"),
        ("  goose/1.28.0 ", "goose"),
        # SDKs and things that only look alike
        ("OpenAI/JS 5.20.1", ""),
        ("OpenAI/Python 2.20.0", ""),
        ("python-httpx/0.28", ""),
        ("pi-hole/1.0", ""),
        ("raspberrypi/1.0", ""),
        ("not-codex_cli_rs/1.0", ""),
        ("codexter/1.0", ""),
        ("geminiclient/1.0", ""),
        ("https://example.com/codex", ""),
        ("", ""),
        ("/", ""),
    ],
)
def test_by_user_agent(agent: str, name: str) -> None:
    """The first product counts, whole and nothing after it."""
    assert client({"user-agent": agent}, "", "") == name


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"x-title": "Kilo Code"}, "kilo"),
        ({"x-title": "Open WebUI"}, "open-webui"),
        ({"x-title": "SillyTavern"}, "sillytavern"),
        ({"x-title": "AnythingLLM"}, "anything-llm"),
        ({"x-title": "LibreChat"}, "librechat"),
        ({"x-title": "n8n"}, "n8n"),
        ({"x-title": "my app"}, ""),
        ({"originator": "codex_vscode", "user-agent": "node"}, "codex"),
        ({"originator": "openclaw"}, "openclaw"),
        ({"x-claude-code-session-id": "1"}, "claude-code"),
        ({"x-openwebui-chat-id": "1", "user-agent": "Python/3.12 aiohttp/3.12"}, "open-webui"),
        ({"x-interaction-type": "conversation-user", "user-agent": "OpenAI/JS 5.20.1"}, "copilot"),
        ({"x-interaction-type": ""}, ""),
        # built on another: the own name wins
        ({"x-title": "Kilo Code", "user-agent": "opencode/7.8.3"}, "kilo"),
        ({"x-title": "pi", "user-agent": "codex_cli_rs/0.144.0"}, "pi"),
    ],
)
def test_by_headers(headers: dict[str, str], name: str) -> None:
    """Programs that name themselves are believed, most specific first."""
    assert client(headers, "", "") == name


@pytest.mark.parametrize(
    ("system", "name"),
    [
        (CLAUDE, "claude-code"),
        (BILLING + CLAUDE, "claude-code"),
        (BILLING + "\n" + CLAUDE, "claude-code"),
        ("You are a Claude agent, built on Anthropic's Claude Agent SDK.", "claude-code"),
        ("You are opencode, an interactive CLI tool", "opencode"),
        ("You are Kilo, a highly skilled software engineer", "kilo"),
        ("You are Cline, a highly skilled software engineer", "cline"),
        ("You are Roo, a highly skilled software engineer", "roo"),
        ("You are a general-purpose AI agent called goose, created by AAIF", "goose"),
        ("You are Codex, based on GPT-5.", "codex"),
        ("You are a coding agent running in the Codex CLI, a terminal", "codex"),
        ("You are Qwen Code, a non-interactive CLI agent", "qwen-code"),
        ("You are Gemini CLI, an agent", "gemini-cli"),
        ("Act as an expert software developer.\nAlways use best practices", "aider"),
        ("Act as an expert code analyst.", "aider"),
        ("You are an agent in the Continue CLI. Given the user's prompt", "continue"),
        ("You are the GitHub Copilot CLI, a terminal assistant", "copilot"),
        ("You are Crush, a powerful AI Assistant that runs in the CLI.", "crush"),
        ("You are an expert coding assistant operating inside pi, a coding agent", "pi"),
        ("You are Hermes Agent, an intelligent AI assistant", "hermes"),
        ("You are a personal assistant running inside OpenClaw.", "openclaw"),
        ("You are gptme v0.35.1, a general-purpose AI assistant", "gptme"),
        ("You are a voice assistant for Home Assistant.", "home-assistant"),
        ("Current time is 20:37:19. Today's date is 2026-10-09.\nYou are", "home-assistant"),
        ("You are a helpful assistant that can interact with a computer shell to", "mini"),
        ("Given the following conversation, relevant context, and a follow up q", "anything-llm"),
        ("Write Ada's next reply in a fictional chat between Ada and Ben.", "sillytavern"),
        ("You are a helpful assistant.", ""),
        ("Current time is short. Be brief.", ""),
        ("", ""),
        # quoted, not spoken
        (f"Explain this prompt: {CLAUDE}", ""),
        (f"> {CLAUDE}", ""),
    ],
)
def test_by_system(system: str, name: str) -> None:
    """Prompts are known by their first words only."""
    assert client({}, system, "") == name
    assert client({"user-agent": "OpenAI/Python 2.20.0"}, system + " more" * 1000, "x") == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("This is the Qwen Code. We are setting up the context", "qwen-code"),
        ("<session_context>\nThis is the Gemini CLI. We are", "gemini-cli"),
        ("### Task:\nGenerate 1-3 broad tags", "open-webui"),
        ("<system-reminder>\nThis is the Qwen Code. We are", "qwen-code"),
        ("What is This is the Qwen Code.?", ""),
        ("hello", ""),
    ],
)
def test_by_first_user_text(text: str, name: str) -> None:
    """Some clients introduce themselves in the first user message."""
    assert client({}, "", text) == name


def ask(user: Any, system: Any = None, **more: Any) -> dict[str, Any]:
    """A chat body."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*head, {"role": "user", "content": user}], **more}


def parts(*texts: str) -> list[dict[str, str]]:
    """Text parts."""
    return [{"type": "text", "text": text} for text in texts]


NAMING = "You are naming a coding session so the user can find it."
OPENCODE = "You are a title generator. You output ONLY a thread title. Nothing else."


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (ask("x", NAMING), Side.TITLE),
        (ask("x", f"{BILLING}{CLAUDE}\n\n{NAMING}"), Side.TITLE),
        (ask("x", parts(BILLING, CLAUDE, NAMING)), Side.TITLE),
        (ask("x", OPENCODE), Side.TITLE),
        (
            ask("x", "\n\n    - you will generate a short title based on the first message"),
            Side.TITLE,
        ),
        (ask("Generate a descriptive name for this conversation.\n\nThe name"), Side.TITLE),
        (ask("### Task:\nGenerate a concise, 3-5 word title with an emoji"), Side.TITLE),
        (ask("Provide a concise, 5-word-or-less title for the conversation"), Side.TITLE),
        (ask("### Task:\nGenerate 1-3 broad tags categorizing"), Side.TAGS),
        (ask("### Task:\nSuggest 3-5 relevant follow-up questions"), Side.FOLLOW_UPS),
        (ask("### Task:\nYou are an autocompletion system. Continue"), Side.COMPLETION),
        (ask("### Task:\nAnalyze the chat history to determine the necessity of x"), Side.QUERY),
        (
            ask("[SUGGESTION MODE: Suggest what the user might naturally type next]", CLAUDE),
            Side.SUGGESTION,
        ),
        (
            ask(parts("<system-reminder>x</system-reminder>", "[SUGGESTION MODE: x]")),
            Side.SUGGESTION,
        ),
        (ask("The user stepped away and is coming back. Recap in under 40 words"), Side.RECAP),
        (ask("Describe your most recent action in 3-5 words using present tense"), Side.RECAP),
        (ask("x", "You are now acting as the managed memory extraction subagent for"), Side.MEMORY),
        (ask("You are now acting as the memory extraction subagent. Analyze"), Side.MEMORY),
        (
            ask("x", "You are a helpful AI assistant tasked with summarizing conversations."),
            Side.SUMMARY,
        ),
        (
            ask("Your task is to create a detailed summary of the conversation so far, paying"),
            Side.SUMMARY,
        ),
        (ask("quota", max_tokens=1), Side.PROBE),
        # the conversation itself, and what only quotes
        (ask("quota", max_tokens=100), Side.MAIN),
        (ask("quota", "x", max_tokens=1), Side.MAIN),
        (ask("fix the bug", f"{CLAUDE}\nYou are an interactive agent"), Side.MAIN),
        (ask(f"why does it say: {NAMING}"), Side.MAIN),
        (ask("### Task:\nwrite a poem"), Side.MAIN),
        (ask(None), Side.MAIN),
        (ask([7, {"type": "image_url"}]), Side.MAIN),
        ({"messages": []}, Side.MAIN),
        ({"messages": [7]}, Side.MAIN),
        ({"messages": "x"}, Side.MAIN),
        ({}, Side.MAIN),
    ],
)
def test_side(body: dict[str, Any], what: Side) -> None:
    """Known side requests by their first words; everything else is the conversation."""
    assert side(body, {}) is what


def test_only_the_newest_message_tells() -> None:
    """A side request's text in the history is history."""
    earlier = ask("[SUGGESTION MODE: x]")["messages"]
    answered = [*earlier, {"role": "assistant", "content": "[SUGGESTION MODE: x]"}]
    assert side({"messages": answered}, {}) is Side.MAIN
    assert side({"messages": [*answered, {"role": "user", "content": "on"}]}, {}) is Side.MAIN
    middle = [*answered, {"role": "system", "content": OPENCODE}, {"role": "user", "content": "on"}]
    assert side({"messages": middle}, {}) is Side.MAIN


def test_kilo_names_its_title_sessions() -> None:
    """The header tells; the conversation's own session id does not."""
    assert side(ask("x"), {"x-session-id": "title-abc"}) is Side.TITLE
    assert side(ask("x"), {"x-session-id": "abc"}) is Side.MAIN
