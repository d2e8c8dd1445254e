"""``make demo``: the embedded llama.cpp server and the proxy before it, ready to be tried.

Environment: ``DEMO_PORT`` (8088), ``DEMO_MODEL`` (a GGUF; default SmolLM2-135M-Instruct),
``DEMO_STATE`` (``.demo``: saved slots and the engine's log, kept between runs).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from proxy import service
from proxy.checks import machine
from proxy.config import Config, load
from proxy.engine import Engine, EngineError, EngineOptions, bundled_model
from proxy.errors import ConfigError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main() -> int:
    """Start the engine, serve until Ctrl-C or SIGTERM, stop the engine; the exit status."""
    state = Path(os.environ.get("DEMO_STATE", ".demo")).resolve()
    slots = state / "slots"
    # Saved slots are conversations: nobody else's business.
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    slots.mkdir(mode=0o700, exist_ok=True)
    engine: Engine | None = None
    try:
        _look_for_room(slots)
        chosen = os.environ.get("DEMO_MODEL")
        model = Path(chosen).resolve() if chosen else bundled_model()
        options = EngineOptions(slot_save_path=slots)
        engine = Engine(model, options, log=state / "engine.log")
        address = engine.url
        config = _config(address, slots)
        print(f"loading {model.name} ...", file=sys.stderr, flush=True)
        engine.wait_healthy()
        print(service.TRYING, file=sys.stderr, flush=True)
        return service.run(
            config,
            lambda url: print(_banner(url, model, state), flush=True),
            lambda: _config(address, slots),
        )
    except EngineError as error:
        print(f"demo: {error}", file=sys.stderr)
        return FAILED
    except ConfigError as error:
        print(error, file=sys.stderr)
        return MISUSED
    except KeyboardInterrupt:  # while the engine was loading; later ones are the service's
        return INTERRUPTED
    finally:
        if engine is not None:
            engine.terminate()


def _look_for_room(slots: Path) -> None:
    """Before the model is loaded. Raises ``EngineError``, and ``ConfigError`` for what is none."""
    server = _config("http://127.0.0.1", slots).server  # the engine has no address yet
    if machine.taken(server.host, server.port):
        raise EngineError(f"port {server.port} is taken: set DEMO_PORT to another")


def _config(backend: str, slots: Path) -> Config:
    overrides = {
        "backend.url": backend,
        "backend.slot_save_path": str(slots),
        "server.port": os.environ.get("DEMO_PORT", "8088"),
    }
    return load(None, overrides, os.environ)


def _banner(url: str, model: Path, state: Path) -> str:
    return f"""
  Slotkeeper   {url}/v1   (before llama.cpp with {model.name})
  Dashboard    {url}/_slotkeeper/
  Look         .venv/bin/slotkeeper status --url {url}
  State        {state}   (kept: the next start goes on where this one ends)

  Try this twice, and see in the header X-Slotkeeper how much of the prompt was reused:

    curl -i {url}/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{{"messages":[{{"role":"user","content":"Name three rivers."}}],"max_tokens":32}}'

  Ctrl-C saves the slots and stops both.
"""


if __name__ == "__main__":
    sys.exit(main())
