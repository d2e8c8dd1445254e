"""How each client is installed, configured and run without a terminal (clients.md, section 2)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

CACHE = Path(os.environ.get("SLOTKEEPER_CLIENTS", "~/.cache/slotkeeper-clients")).expanduser()
RUN_SECONDS = 90.0
MODEL = "scripted"
PROMPTS = ("Show me what a.py does.", "I changed a.py, look again.", "And once more, please.")
# Local time of each turn's process: the last one runs on the next day (26 hours lie between).
ZONES = ("Etc/GMT+12", "Etc/GMT+12", "Etc/GMT-14")


@dataclass(frozen=True, slots=True)
class Run:
    """One process of a client: ``turn`` counts from 0, ``home`` and ``repo`` stay over turns."""

    url: str
    home: Path
    repo: Path
    turn: int

    @property
    def prompt(self) -> str:
        """What the user says in this turn."""
        return PROMPTS[self.turn]


@dataclass(frozen=True, slots=True)
class Client:
    """A client program.

    ``package``: pinned, of npm, or of PyPI when it has ``==``. ``program``: in the package's bin
    folder. ``arguments`` and ``environment`` of a run; ``configure`` writes files once per home.
    """

    name: str
    package: str
    program: str
    arguments: Callable[[Run], list[str]]
    environment: Callable[[Run], dict[str, str]] = field(default=lambda _run: {})
    configure: Callable[[Run], None] = field(default=lambda _run: None)

    @property
    def folder(self) -> Path:
        """Where this very version of it is installed."""
        version = re.split("==|@", self.package)[-1]
        return CACHE / f"{self.name}-{version}"

    @property
    def command(self) -> Path:
        """The program."""
        bins = "bin" if "==" in self.package else "node_modules/.bin"
        return self.folder / bins / self.program

    def install(self) -> None:
        """Install it unless it is there. Raises ``CalledProcessError``."""
        if self.command.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if "==" in self.package:
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            pip = [str(self.folder / "bin/python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, self.package], check=True)
        else:
            npm = ["npm", "install", "--prefix", str(self.folder), "--no-audit", "--no-fund"]
            subprocess.run([*npm, self.package], check=True)

    async def run(self, run: Run) -> tuple[int | None, str]:
        """One turn in a process of its own; exit code (None: ended by us) and what it printed."""
        if run.turn == 0:
            self.configure(run)
        process = await asyncio.create_subprocess_exec(
            self.command,
            *self.arguments(run),
            cwd=run.repo,
            env=_environment(run) | self.environment(run),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(RUN_SECONDS):
                output, _ = await process.communicate()
        except TimeoutError:
            return None, "took too long"
        finally:
            with suppress(ProcessLookupError):  # what it left behind in its session ends too
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return process.returncode, output.decode(errors="replace")


def _environment(run: Run) -> dict[str, str]:
    """Nothing of ours but the path: no keys, no settings of the user's own clients."""
    return {
        "HOME": str(run.home),
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TZ": ZONES[run.turn],
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(value))


# Claude Code

SESSION = "3f0c6f5e-6f0e-4a8e-9a55-0c2b7d1f9e10"


def _claude(run: Run) -> list[str]:
    session = ["--session-id", SESSION] if run.turn == 0 else ["--resume", SESSION]
    rights = ["--permission-mode", "acceptEdits", "--allowedTools", "Bash Read"]
    return ["-p", run.prompt, *session, *rights]


def _claude_environment(run: Run) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": run.url,
        "ANTHROPIC_AUTH_TOKEN": "dummy",
        "ANTHROPIC_MODEL": MODEL,
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


# OpenCode


def _opencode_configure(run: Run) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{run.url}/v1", "apiKey": "dummy"},
        "models": {MODEL: {"limit": {"context": 131_072, "output": 8192}}},
    }
    settings = {"model": f"local/{MODEL}", "autoupdate": False, "share": "disabled"}
    path = run.home / ".config/opencode/opencode.json"
    _write(path, {**settings, "provider": {"local": provider}})


def _opencode(run: Run) -> list[str]:
    return ["run", *(["--continue"] if run.turn else []), run.prompt]


# Qwen Code, aider and other users of OpenAI's variables


def _openai_environment(run: Run) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{run.url}/v1",
        "OPENAI_API_BASE": f"{run.url}/v1",
        "OPENAI_API_KEY": "dummy",
        "OPENAI_MODEL": MODEL,
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
    }


def _qwen(run: Run) -> list[str]:
    return ["-y", *(["--continue"] if run.turn else []), "-p", run.prompt]


def _aider(run: Run) -> list[str]:
    return [
        "--model", f"openai/{MODEL}", "--yes-always", "--no-gitignore", "--map-tokens", "1024",
        *(["--restore-chat-history"] if run.turn else []), "--message", run.prompt, "a.py",
    ]  # fmt: skip


# pi


def _pi_configure(run: Run) -> None:
    model = {"id": MODEL, "reasoning": True, "contextWindow": 131_072, "maxTokens": 8192}
    provider = {"baseUrl": f"{run.url}/v1", "api": "openai-completions", "apiKey": "dummy"}
    path = run.home / ".pi/agent/models.json"
    _write(path, {"providers": {"local": {**provider, "models": [model]}}})


def _pi(run: Run) -> list[str]:
    model = ["--provider", "local", "--model", MODEL]
    return [*model, *(["-c"] if run.turn else []), "-p", run.prompt]


# Copilot CLI


def _copilot(run: Run) -> list[str]:
    quiet = ["--allow-all-tools", "--disable-client-telemetry"]
    return [*quiet, *(["--continue"] if run.turn else []), "-p", run.prompt]


def _copilot_environment(run: Run) -> dict[str, str]:
    return {
        "COPILOT_PROVIDER_BASE_URL": f"{run.url}/v1",
        "COPILOT_PROVIDER_API_KEY": "dummy",
        "COPILOT_MODEL": MODEL,
        "COPILOT_OFFLINE": "true",
    }


# llm

LLM_TOOL = '''
def shell(command: str) -> str:
    """Run a shell command."""
    import subprocess
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
'''


def _llm_configure(run: Run) -> None:
    model = {"model_id": MODEL, "model_name": MODEL, "api_base": f"{run.url}/v1"}
    # JSON is YAML
    _write(
        run.home / "llm/extra-openai-models.yaml",
        [{**model, "supports_tools": True, "api_key_name": "local"}],
    )


def _llm(run: Run) -> list[str]:
    return [*(["-c"] if run.turn else []), "-m", MODEL, "--functions", LLM_TOOL, run.prompt]


def _llm_environment(run: Run) -> dict[str, str]:
    return {"LLM_USER_PATH": str(run.home / "llm"), "OPENAI_API_KEY": "dummy"}


CLIENTS = (
    Client("claude", "@anthropic-ai/claude-code@2.1.332", "claude", _claude, _claude_environment),
    Client("opencode", "opencode-ai@1.18.33", "opencode", _opencode, configure=_opencode_configure),
    Client("qwen", "@qwen-code/qwen-code@0.24.4", "qwen", _qwen, _openai_environment),
    Client("pi", "@mariozechner/pi-coding-agent@0.73.1", "pi", _pi, configure=_pi_configure),
    Client("aider", "aider-chat==0.86.2", "aider", _aider, _openai_environment),
    Client("copilot", "@github/copilot@1.0.102", "copilot", _copilot, _copilot_environment),
    Client("llm", "llm==0.36", "llm", _llm, _llm_environment, _llm_configure),
)
