"""The line that starts llama-server as it should be, for readyz, the log and the doctor."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proxy.backends.base import Facts

DEFAULT_PORT = 8080
GOOD_SLOTS = 2
DEFAULT_SLOTS = 4  # what llama-server takes when nobody says -np, all in one pool
DEFAULT_CONTEXT = 8192  # tokens per slot


def line(facts: Facts | None, folder: Path | None, *, port: int = 0, batch: int = 0) -> str:
    """It can be pasted: what is known is filled in. ``-c`` is slots times tokens per slot.

    ``facts``: of a server that runs, which knows its port better than ``port``; None: of none.
    ``folder``: where states are saved. ``batch`` 0: llama-server's own.
    """
    slots, context, model = GOOD_SLOTS, DEFAULT_CONTEXT, "MODEL.gguf"
    if facts is not None:
        slots = facts.total_slots if facts.total_slots != DEFAULT_SLOTS else GOOD_SLOTS
        context, model = facts.n_ctx, facts.model_path or model
        port = facts.port or port
    words = ["llama-server", "-m", model, "-np", str(slots), "--no-kv-unified"]
    words += ["-c", str(slots * context), "--cache-ram", "0", "-sps", "0"]
    words += ["--slot-save-path", str(folder.absolute()) if folder else "DIR"]
    words += ["-b", str(batch)] if batch else []
    words += ["--port", str(port)] if port and port != DEFAULT_PORT else []
    return spelled(words)


def spelled(words: Sequence[str]) -> str:
    """A command as it is typed here."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
