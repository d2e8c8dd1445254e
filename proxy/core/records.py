"""The nouns shared by placement, retention, the store and the drivers. Pure data.

Units: tokens are counted as the backend counts them; seconds are floats; bytes are bytes.
Clock values are handed in by the caller (``time.time()`` for what survives a restart).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """What may be done to a backend (DESIGN.md, Vocabulary)."""

    EXCLUSIVE = "exclusive"
    ROUTED = "routed"  # placed: which process, and in which order; nothing is saved or restored
    FORWARD = "forward"


class Reuse(StrEnum):
    """What a prompt must have in common with what a slot holds, to be spared any of it."""

    PREFIX = "prefix"  # any beginning (llama-server)
    NONE = "none"  # nothing is ever spared (FastFlowLM up to 0.9.23)
    EXTENSION = "extension"  # all of it, and go on with its answer (fastflowlm.md 3.1, 3.3)


class Reason(StrEnum):
    """Why a request got what it got: one word for log, metric label, header and API."""

    SLOT_HIT = "slot-hit"  # the slot already held the prefix
    RESTORED = "restored"  # a snapshot was restored first
    COLD = "cold"  # nothing known covers this prompt
    PINNED = "pinned"  # the client named the slot (id_slot)
    WIDE = "wide"  # takes every slot: n>1, prompt arrays, embeddings
    FORWARD = "forward"  # this backend is not (yet) proved safe to drive
    BYPASS = "bypass"  # caching failed; forwarded plainly
    PENDING = "pending"  # headers left before the reuse was known
    PASS = "pass"  # computes nothing; relayed byte for byte
    REFUSED = "refused"  # queue full, deadline, draining


Tokens = array  # array("i"): 4 bytes a token, compares and slices at C speed


@dataclass(frozen=True, slots=True)
class Prompt:
    """What placement knows of a prompt.

    ``seed`` digests everything that must be equal before two prompts may share KV at all (API-key
    namespace, LoRA set). ``chain`` are running digests over the request's segments (message by
    message, or fixed blocks of text); ``ends[i]`` is the size in bytes up to and including
    segment i, ``size`` of all. The chain is the fast hint. ``tokens`` is the rendered prompt as
    the backend will see it, present once somebody had to know exactly. ``conversation``: the id of
    the one it belongs to, ``""`` for none; only what "forget this conversation" goes by.
    ``adapters``: the LoRA set it was or will be computed with, as the request names it. ``side``:
    a client's request beside the conversation, likely never to be continued.
    """

    seed: bytes
    chain: tuple[bytes, ...]
    ends: tuple[int, ...]
    size: int
    tokens: array[int] | None = None
    conversation: str = ""
    adapters: bytes = b"null"
    side: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One KV state on disk. ``tokens`` is read from the state file's own header.

    ``n_prompt``: how many of the tokens came from the client's prompt; the rest was generated and
    may never be sent back. ``checksum``: hex sha256 of the whole file. Times are unix seconds.
    ``conversation``: as in ``Prompt``, the last that ran there before the save. ``pinned``: its
    owner wants it kept, whatever it is worth.
    """

    id: str
    fingerprint: str
    seed: bytes
    tokens: array[int] = field(repr=False)
    n_prompt: int
    size: int
    checksum: str
    created: float
    last_used: float
    save_seconds: float
    restores: int = 0
    conversation: str = ""
    pinned: bool = False

    @property
    def n_tokens(self) -> int:
        """Length in tokens."""
        return len(self.tokens)
