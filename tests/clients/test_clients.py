"""Real clients, directly and through the proxy: how much of its last prompt a request extends."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from proxy.engine import Engine
from tests.clients import script
from tests.clients.measure import BEGIN, Step, percent, steps
from tests.clients.recipes import CLIENTS, PROMPTS, Client, Run
from tests.clients.scripted import CHAT, TEMPLATES, Asked, ScriptedEngine, render, render_chat
from tests.real.proxies import ProxyProcess

WANTED = 0.99
LIVE = "qwen3"  # the template of the engine the clients talk to
WAYS = ("direct", "proxy")
TOOL_END = "<|im_end|>\n<|im_start|>user\n<tool_response>\nEND"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a request may extend less: ``sign`` is in the text at the first difference."""

    template: str
    clients: tuple[str, ...]
    sign: str
    why: str


# What stays below 99 % with the proxy. A row that never happens is a failure too.
CAUSES = (
    Cause(
        "qwen3",
        ("claude", "copilot", "llm", "opencode", "pi", "qwen"),
        "<think>",
        "the template drops reasoning of earlier turns; large prompts hardly feel it",
    ),
    Cause(
        "*",
        ("qwen",),
        "git: Status:",
        "its system text quotes git status anew in every process; the rule git-status is opt-in",
    ),
    Cause(
        "*",
        ("aider",),
        "*added these files to the chat*",
        "files and repository map come behind the history and are written anew every turn",
    ),
)


@asynccontextmanager
async def _address(way: str, backend: str, folder: Path) -> AsyncIterator[str]:
    """Where the client is sent: to the engine itself, or to a proxy in front of it."""
    if way == "direct":
        yield backend
        return
    proxy = ProxyProcess(backend, None, folder)
    await asyncio.to_thread(proxy.start, mode="forward")
    try:
        yield proxy.url
    finally:
        await asyncio.to_thread(proxy.stop)


def _scratch(folder: Path) -> tuple[Path, Path]:
    """An empty home and a repository with one file and one commit."""
    home, repo = folder / "home", folder / "repo"
    home.mkdir()
    repo.mkdir()
    _edit(repo, 0)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "--quiet"), ("add", "."), (*who, "commit", "--quiet", "-m", "first")):
        subprocess.run(["git", *command], cwd=repo, check=True)
    return home, repo


def _edit(repo: Path, turn: int) -> None:
    (repo / "a.py").write_text(f"def f():\n    return {turn}\n", encoding="utf-8")


async def _talk(client: Client, url: str, folder: Path, scripted: ScriptedEngine) -> None:
    """All turns, each in a process of its own, a file edited in between."""
    home, repo = _scratch(folder)
    for turn in range(len(PROMPTS)):
        _edit(repo, turn)
        before = len(scripted.requests)
        code, output = await client.run(Run(url, home, repo, turn))
        assert code == 0, f"turn {turn} of {client.name}: {code}\n{output[-2000:]}"
        assert len(scripted.requests) > before, f"turn {turn} of {client.name} asked nothing"


async def _measure(engine: Engine, requests: Sequence[Asked]) -> list[Step]:
    async with aiohttp.ClientSession(engine.url) as session:
        prompts = [await render(session, asked) for asked in requests]
        answers = [await _rendered_answer(session, asked) for asked in requests]
    return steps([asked.body for asked in requests], prompts, answers)


async def _rendered_answer(session: aiohttp.ClientSession, asked: Asked) -> str:
    """The answer to it as the template writes one of the newest turn."""
    message = script.chat_whole(script.answer(asked.body))["choices"][0]["message"]
    end = {"role": "tool", "tool_call_id": "x", "content": "END"}
    messages = [{"role": "user", "content": "x"}, message, end]
    prompt = await render_chat(session, {"messages": messages})
    return prompt.partition(BEGIN)[2].partition(TOOL_END)[0]


def _cause(template: str, client: Client, step: Step) -> Cause | None:
    for cause in CAUSES:
        here = cause.template in {"*", template} and client.name in cause.clients
        if here and cause.sign in step.around + step.before:
            return cause
    return None


def _row(template: str, client: Client, found: dict[str, list[Step]]) -> str:
    figures = [
        percent([getattr(step, what) for step in found[way]])
        for what in ("share", "held")
        for way in WAYS
    ]
    return f"{client.name:9} {template:8} {len(found['proxy']):2} | " + " | ".join(figures)


HEADER = """\
Least and mean, %. Left: how much of its conversation's last prompt a request extends. Right: of
last prompt and answer together, which is what the slot holds by then.
client    template  n |          direct |           proxy |          direct |           proxy"""


async def _record(client: Client, engine: Engine, folder: Path) -> dict[str, list[Asked]]:
    """The requests that reach the engine, directly and through the proxy."""
    recorded: dict[str, list[Asked]] = {}
    for way in WAYS:
        place = folder / way
        place.mkdir()
        async with (
            ScriptedEngine(engine.url) as scripted,
            _address(way, scripted.url, place) as url,
        ):
            await _talk(client, url, place, scripted)
            recorded[way] = scripted.requests
    return recorded


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_prompts_extend(
    client: Client, engines: dict[str, Engine], tmp_path: Path, table: list[str]
) -> None:
    """With the proxy every request extends its conversation's last prompt, but for known causes."""
    await asyncio.to_thread(client.install)
    recorded = await _record(client, engines[LIVE], tmp_path)
    assert {asked.path for asked in recorded["proxy"]} == {CHAT}
    table.extend([] if table else HEADER.splitlines())
    bad: list[str] = []
    met: set[Cause | None] = set()
    for template in TEMPLATES:
        found = {way: await _measure(engines[template], recorded[way]) for way in WAYS}
        table.append(_row(template, client, found))
        for way, step in ((name, step) for name in WAYS for step in found[name]):
            if step.share >= WANTED:
                continue
            line = f"{way}, request {step.at}: {100 * step.share:.1f} %, "
            cause = _cause(template, client, step)
            table.append(f"    {line}" + (cause.why if cause else step.quote))
            if way == "proxy":
                met.add(cause)
                bad += [] if cause else [f"{template}, {line}{step.quote}"]
    unmet = {cause for cause in CAUSES if client.name in cause.clients} - met
    assert not bad, "\n".join(bad)
    assert not unmet, unmet
