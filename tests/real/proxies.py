"""A real proxy process in front of a real engine, and a client that says what it got."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import orjson

PATIENCE = 60.0  # seconds for a start or a stop
REPO = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Reply:
    """An answer: the JSON, and what the proxy said it did."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def reason(self) -> str:
        """The first word of ``X-Slotkeeper``."""
        return self.headers.get("x-slotkeeper", "").split(";")[0]

    @property
    def text(self) -> str:
        """What the model said."""
        content: str = self.body["choices"][0]["message"]["content"]
        return content

    @property
    def cached(self) -> int:
        """Tokens the engine reused, by its own count."""
        return int(self.body["timings"]["cache_n"])

    @property
    def computed(self) -> int:
        """Prompt tokens it computed."""
        return int(self.body["timings"]["prompt_n"])

    @property
    def prompt(self) -> int:
        """The prompt's length in tokens."""
        return self.cached + self.computed


def ask(url: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
    """GET, or POST of a JSON body; HTTP errors are replies too."""
    data = None if body is None else orjson.dumps(body)
    request = Request(url + path, data=data, headers=headers or {})  # noqa: S310 - loopback
    try:
        with urlopen(request, timeout=600) as answer:  # noqa: S310 - loopback
            status, found, raw = answer.status, answer.headers, answer.read()
    except HTTPError as error:
        status, found, raw = error.code, error.headers, error.read()
    text = found.get("Content-Type", "")
    parsed = orjson.loads(raw) if "json" in text and raw else raw
    return Reply(status, {name.lower(): value for name, value in found.items()}, parsed)


@dataclass
class ProxyProcess:
    """``slotkeeper serve`` as its own process; the same port and folders across restarts."""

    backend: str
    slot_dir: Path | None
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_file(self) -> Path:
        """Where it logs."""
        return self.folder / "proxy.log"

    @property
    def log(self) -> str:
        """Everything it logged."""
        return self.log_file.read_text()

    def start(self, *, mode: str = "exclusive") -> None:
        """Start and wait until it is ready in ``mode``."""
        command = [sys.executable, "-m", "proxy", "serve", "--backend", self.backend]
        command += ["--port", str(self.port)]
        if self.slot_dir is not None:
            command += ["--slot-save-path", str(self.slot_dir)]
        before = self.log.count('"event":"listening"') if self.log_file.exists() else 0
        settings = {"SLOTKEEPER_CACHE__KEEP_FREE": "0", "SLOTKEEPER_SERVER__LOG_FORMAT": "json"}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=REPO,
                env={**os.environ, **settings, **self.settings},
                start_new_session=True,
            )
        self.wait(mode)
        while self.log.count('"event":"listening"') <= before:  # its first look is over
            time.sleep(0.02)

    def wait(self, mode: str = "exclusive") -> None:
        """Until it is ready in ``mode``."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise AssertionError(f"the proxy ended:\n{self.log[-2000:]}")
            try:
                ready = ask(self.url, "/_slotkeeper/readyz").body
            except URLError:
                ready = {}
            if ready.get("ready") and ready.get("mode") == mode:
                return
            time.sleep(0.05)
        raise AssertionError(f"the proxy is not ready in mode {mode}:\n{self.log[-2000:]}")

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Signal it and wait; the exit status."""
        assert self.process is not None
        self.process.send_signal(sig)
        code = self.process.wait(PATIENCE)
        self.process = None
        return code

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> Reply:
        """One non-streaming turn at temperature 0."""
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **more}
        reply = ask(self.url, "/v1/chat/completions", body)
        assert reply.status == 200, reply.body
        return reply

    def admin(self, page: str) -> Any:
        """One of its own pages."""
        return ask(self.url, f"/_slotkeeper/{page}").body

    def metric(self, name: str) -> float:
        """The value of a series, labels included in ``name``; 0 when it is not there."""
        text = ask(self.url, "/_slotkeeper/metrics").body.decode()
        found = re.search(rf"^slotkeeper_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0
