"""What differs between releases, and how an emulator is started (fastflowlm.md 0 and 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Profile:
    """The rules of one release."""

    version: str
    cache: Literal["none", "delta", "checksums"]  # eras A, B, and C to E
    plain_keeps: bool = True  # requests that are not streamed use the prompt cache
    single_turn: bool = False  # "flash" models exist
    modern: bool = False  # era E: usage on request, true totals, tool policy, buffered tools


PROFILES: dict[str, Profile] = {
    "0.9.20": Profile("0.9.20", "none", plain_keeps=False),
    "0.9.42": Profile("0.9.42", "delta", plain_keeps=False),
    "0.9.45": Profile("0.9.45", "checksums"),
    "1.0.6": Profile("1.0.6", "checksums", single_turn=True),
    "1.0.8": Profile("1.0.8", "checksums", single_turn=True, modern=True),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of ``flm serve``, and what only an emulator needs (last block)."""

    model: str = "model-faker"  # flm's own name for "nothing loaded"
    host: str = "127.0.0.1"
    port: int = 0
    ctx_len: int = -1
    prefill_chunk_len: int = -1
    socket: int = 10
    q_len: int = 10
    cors: bool = True
    asr: bool = False
    embed: bool = False

    profile: str = "0.9.45"
    time_scale: float = 0.0  # real seconds per emulated second; 0 only counts
    seed: int = 0
    leak: bool = True  # a failed streaming write loses its connection slot (#680)
    ub: Literal["crash", "error"] = "crash"
    strict_restore: bool = False
    """After checksums were reset together with the context, a conversation of more than two
    messages is "restored" with nothing matched and no checkpoint. False: it prefills fully
    (section 5, item 6). True: "Max length reached!" (3.2 and 3.3 read to the letter)."""
    max_body: int = 256 * 1024 * 1024
    clear_window: float = 0.005  # emulated seconds between the lock's release and the clearing
