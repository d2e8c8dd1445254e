"""What an emulated FastFlowLM must do, as data: written before the emulator and the driver.

``situation`` and ``result`` are the rows of fastflowlm.md 3.2 word for word (that table was made
by running the real header); ``asks`` spells each row out as requests. ``SCENES`` does the same
for the acceptance tests that section 6 names and that are about the cache; ``WIRE`` and ``USAGE``
hold the literal texts and shapes of sections 1.1 to 1.5 which the remaining ones compare with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Layer = Literal["hit", "miss", "switch", "empty", ""]
End = Literal["answer", "cancel in decode", "cancel in prefill", "overflow", "error 400", "crash"]

MESSAGES: dict[str, dict[str, Any]] = {
    "s": {"role": "system", "content": "You are a careful assistant."},
    "u1": {"role": "user", "content": "What is a slot?"},
    "u2": {"role": "user", "content": "And a snapshot?"},
    "u3": {"role": "user", "content": "And a chain?"},
    "u4": {"role": "user", "content": "And a lease?"},
    "title": {"role": "user", "content": "Write a title of three words for this chat."},
    "a1": {"role": "assistant", "content": "one two three"},
    "a2": {"role": "assistant", "content": "four five six"},
    "a3": {"role": "assistant", "content": "seven eight"},
    "a1 other": {"role": "assistant", "content": "one two four"},
    "a1 spaced": {"role": "assistant", "content": "\n\none two three"},
    "a1 thought": {"role": "assistant", "content": "one two three", "reasoning_content": "Hm."},
    "call": {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "read", "arguments": '{"path":"a"}'},
            }
        ],
    },
    "r1": {"role": "tool", "tool_call_id": "call_1", "content": "text of a"},
    "far too long": {"role": "user", "content": "word " * 5000},
    "r2": {"role": "tool", "tool_call_id": "call_1", "content": "text of b"},
}
"""By name, in the form a client sends."""

TOOLS: dict[str, dict[str, Any]] = {
    "read": {"type": "function", "function": {"name": "read", "description": "reads"}},
    "write": {"type": "function", "function": {"name": "write", "description": "writes"}},
    "read, keys in another order": {
        "function": {"description": "reads", "name": "read"},
        "type": "function",
    },
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, in order, and what each cache layer says of it ("" = the row does not say).

    ``switch``: the model's name is not the last one used, nothing is compared. ``empty``: layer 2
    has nothing to compare with (the context was cleared), everything is prefilled.
    """

    messages: str  # names of MESSAGES, separated by a blank, or by commas where names have one
    layer1: Layer = ""
    matched: int | None = None  # how many cached messages were found again
    layer2: Layer = ""
    tools: tuple[str, ...] = ()
    end: End = "answer"
    answer: str = "one two three"  # the text the model is made to generate
    model: str = ""  # other than the scene's
    path: str = "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        """The request's messages and tools as JSON values."""
        names = self.messages.split(", ") if "," in self.messages else self.messages.split()
        body: dict[str, Any] = {"messages": [MESSAGES[name] for name in names]}
        if self.tools:
            body["tools"] = [TOOLS[name] for name in self.tools]
        return body


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the decision table, or a scene of the same form."""

    situation: str
    result: str
    asks: tuple[Ask, ...]
    model: str = "qwen3.5:4b"


TURN1 = Ask("s u1", "miss")
TURN2 = Ask("s u1 a1 u2", "hit", 2, answer="four five six")
READ_WRITE = ("read", "write")

DECISIONS: tuple[Row, ...] = (
    Row("[s,u1] first", "miss (<=2)", (TURN1,)),
    Row("[s,u1,a1,u2]", "hit, matched 2", (TURN1, TURN2)),
    Row(
        "same 4 again (retry / regenerate)",
        "**miss**",
        (TURN1, TURN2, Ask("s u1 a1 u2", "miss")),
    ),
    Row(
        "+1 message (continue / prefill assistant)",
        "**miss**",
        (TURN1, TURN2, Ask("s u1 a1 u2 a2", "miss")),
    ),
    Row(
        "+4 messages at once (run); +3 by the same rule (parallel tools)",
        "hit",
        (
            TURN1,
            TURN2,
            Ask("s u1 a1 u2 a2 u3 a3 u4", "hit", 4),
            Ask("s u1 a1 u2 a2 u3 a3 u4 call r1 r2", "hit", 8),
        ),
    ),
    Row(
        "[u1] then [u1,a1,u2]",
        "hit",
        (Ask("u1", "miss"), Ask("u1 a1 u2", "hit", 1)),
    ),
    Row(
        "another request in between (title generation, other chat)",
        "**miss for both**",
        (TURN1, Ask("title", "miss"), Ask("s u1 a1 u2", "miss")),
    ),
    Row(
        "tools reordered / one key order changed",
        "**miss**",
        (
            Ask("s u1", "miss", tools=READ_WRITE),
            Ask("s u1 a1 u2", "hit", 2, tools=READ_WRITE),
            Ask("s u1 a1 u2 a2 u3", "miss", tools=("write", "read")),
            Ask("s u1", "miss", tools=READ_WRITE),
            Ask("s u1 a1 u2", "miss", tools=("read, keys in another order", "write")),
        ),
    ),
    Row(
        "after cancel/error reset, >2 messages, no tools",
        '"hit" with 0 matched -> layer 2 decides',
        (
            Ask("s u1", "miss", end="cancel in decode"),
            Ask("s u1 a1 u2", "hit", 0, "hit"),
        ),
    ),
    Row(
        "same with tools",
        "miss",
        (
            Ask("s u1", "miss", tools=READ_WRITE, end="cancel in decode"),
            Ask("s u1 a1 u2", "miss", tools=READ_WRITE),
        ),
    ),
)
"""fastflowlm.md 3.2. Before each row the model has answered another request."""

CKPT, CKPT_END, HIST = "qwen3.5:4b", "gemma4-it:e4b", "llama3.2:3b"

SCENES: tuple[Row, ...] = (
    Row(
        "side-request eviction",
        "They cost a full re-prefill of the main chat (#640)",
        (TURN1, TURN2, Ask("title", "miss"), Ask("s u1 a1 u2 a2 u3", "miss", layer2="empty")),
    ),
    Row(
        "HIST exact answer",
        "prompt + generated tokens incl. EOS must be reproduced",
        (TURN1, Ask("s u1 a1 u2", "hit", 2, "hit")),
        model=HIST,
    ),
    Row(
        "HIST inexact answer",
        "**exact answer text, canonical tokenisation, same template trimming**",
        (TURN1, Ask("s, u1, a1 other, u2", "hit", 2, "miss")),
        model=HIST,
    ),
    Row(
        "HIST tokens that are not canonical",
        "the tokens generated are not those the same text is encoded to",
        (Ask("s u1", "miss", answer="one tw|o three"), Ask("s u1 a1 u2", "hit", 2, "miss")),
        model=HIST,
    ),
    Row(
        "CKPT-END exact answer",
        "checkpoint after the answer (minus last token)",
        (TURN1, Ask("s u1 a1 u2", "hit", 2, "hit")),
        model=CKPT_END,
    ),
    Row(
        "CKPT-END inexact answer",
        "answer must re-tokenise identically",
        (TURN1, Ask("s, u1, a1 other, u2", "hit", 2, "miss")),
        model=CKPT_END,
    ),
    Row(
        "CKPT with stripped reasoning",
        "answer need not be replayed exactly**; reasoning may be stripped",
        (
            Ask("s u1", "miss", answer="Hm.</think>\n\none two three"),
            Ask("s u1 a1 u2", "hit", 2, "hit"),
        ),
    ),
    Row(
        "CKPT inexact answer",
        "previous answer is thrown away and re-prefilled from the client's text",
        (TURN1, Ask("s, u1, a1 other, u2", "hit", 2, "hit")),
    ),
    Row(
        "CKPT + stock template after a tool loop",
        "inside one tool loop hits; "
        "the **first new user turn after a multi-step tool loop misses**",
        (
            Ask("s u1", "miss", tools=READ_WRITE),
            Ask("s u1 call r1", "hit", 2, "hit", tools=READ_WRITE),
            Ask("s u1 call r1 call r2", "hit", 4, "hit", tools=READ_WRITE),
            Ask("s u1 call r1 call r2 a1 u2", "hit", 6, "miss", tools=READ_WRITE),
        ),
        model="qwen3:4b",
    ),
    Row(
        "CKPT + patched template after a tool loop",
        "FLM ships patched qwen3.5/gemma4 templates (PR #561)",
        (
            Ask("s u1", "miss", tools=READ_WRITE),
            Ask("s u1 call r1", "hit", 2, "hit", tools=READ_WRITE),
            Ask("s u1 call r1 call r2", "hit", 4, "hit", tools=READ_WRITE),
            Ask("s u1 call r1 call r2 a1 u2", "hit", 6, "hit", tools=READ_WRITE),
        ),
    ),
    Row(
        "cancel in decode",
        "`prompt_cache.reset()` (checksums emptied), KV kept",
        (
            TURN1,
            Ask("s u1 a1 u2", "hit", 2, "hit", end="cancel in decode"),
            Ask("s u1 a1 u2 a2 u3", "hit", 0, "hit"),
        ),
    ),
    Row(
        "cancel in prefill",
        "`clear_context()` **and** reset; context was reset, so the retry prefills fully",
        (
            TURN1,
            Ask("s u1 a1 u2", "hit", 2, "hit", end="cancel in prefill"),
            Ask("s u1 a1 u2", "hit", 0, "empty"),
        ),
    ),
    Row(
        "cancel in decode, then the identical conversation",
        "zero tokens left -> empty logits sampled -> **crash**",
        (
            TURN1,
            Ask("s u1 a1 u2", "hit", 2, "hit", end="cancel in decode"),
            Ask("s u1 a1 u2", "hit", 0, "", end="crash"),
        ),
    ),
    Row(
        "#744 path",
        "context was cleared without resetting checksums: after `/api/chat`, `/v1/completions`",
        (
            TURN1,
            Ask("title", path="/api/chat"),
            Ask("s u1 a1 u2", "hit", 2, "", end="error 400"),
            Ask("s u1", "miss"),
        ),
    ),
    Row(
        "HIST has no checkpoint to miss",
        "the context was cleared behind its back: nothing kept, no error",
        (
            TURN1,
            Ask("title", path="/api/chat"),
            Ask("s u1 a1 u2", "hit", 2, "empty"),
        ),
        model=HIST,
    ),
    Row(
        "overflow",
        "Max length reached! *and the whole context is cleared*",
        (
            TURN1,
            Ask("s, u1, a1, u2, far too long", "hit", 2, "hit", end="error 400"),
            Ask("s u1 a1 u2", "hit", 0, "empty"),
            Ask("s u1", "miss"),
        ),
    ),
    Row(
        "alias reload",
        '`"qwen3"` (no size) or an unknown name: **the model is reloaded on every request**',
        (
            Ask("s u1", "switch", model="qwen3"),
            Ask("s u1 a1 u2", "hit", 2, "", model="qwen3", end="error 400"),
        ),
    ),
)
"""The minimum acceptance tests of section 6 that the cache decides (``result``: page's words).

Before each scene the model has answered another request; the context has 4096 tokens."""

FIRST = Ask("s u1", "switch")

LEGACY: tuple[Row, ...] = (
    Row(
        "0.9.42: exactly +2 messages",
        "on a hit **only the last message is inserted** on top of the live KV",
        (FIRST, Ask("s u1 a1 u2", "hit", layer2="hit")),
    ),
    Row(
        "0.9.42: the answer is not compared",
        "Assistant text never compared",
        (FIRST, Ask("s, u1, a1 other, u2", "hit", layer2="hit")),
    ),
    Row(
        "0.9.42: +4 messages",
        "additive checksum of *all message contents except last two*",
        (FIRST, Ask("s u1 a1 u2 a2 u3", "miss")),
    ),
)
"""Era B (section 0), streamed; the first ask is the first one of its model."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What ``usage`` says in a release (sections 1.5 and 0)."""

    prompt_tokens: Literal["prefilled", "total"]
    cached_tokens: bool  # prompt_tokens_details.cached_tokens
    only_if_asked: bool  # stream_options.include_usage
    keeps: bool  # any prompt cache at all
    keeps_unstreamed: bool


USAGE: dict[str, Usage] = {
    "0.9.20": Usage("prefilled", False, False, keeps=False, keeps_unstreamed=False),
    "0.9.42": Usage("prefilled", False, False, keeps=True, keeps_unstreamed=False),
    "0.9.45": Usage("prefilled", False, False, keeps=True, keeps_unstreamed=True),
    "1.0.6": Usage("prefilled", False, False, keeps=True, keeps_unstreamed=True),
    "1.0.8": Usage("total", True, True, keeps=True, keeps_unstreamed=True),
}

STREAM_USAGE_KEYS = (
    "prompt_tokens", "completion_tokens", "total_tokens", "active_kv_tokens",
    "max_kv_token_capacity", "kv_token_occupancy_rate_percentage", "load_duration",
    "prefill_duration_ttft", "decoding_duration", "prefill_speed_tps", "decoding_speed_tps",
)  # fmt: skip
NOT_IN_PLAIN_USAGE = ("active_kv_tokens", "max_kv_token_capacity")

SOCKETS = 10  # --socket; the 11th is closed without a byte; leaked streams count for ever (#680)
COOLDOWN_SECONDS = 0.333
CHUNK_TOKENS = 4096
HEADER_BYTES = 8192
BODY_BYTES = 256 * 1024 * 1024

WIRE: dict[str, tuple[int, bytes]] = {
    "queue full": (
        503,
        b'{"error":"NPU is in use and request queue is full (limit: 10). Please try again later."}',
    ),
    "overflow": (
        400,
        b'{"error":{"message":"Max length reached!","type":"model_error","code":400}}',
    ),
    "not found": (404, b'{"error":"Not Found"}'),
    "too large": (413, b'{"error":"Request payload too large","max_bytes":268435456}'),
    "cancelled": (200, b'{"cancelled":true,"message":"Request cancelled successfully"}'),
    "nothing to cancel": (
        200,
        b'{"cancelled":false,"message":"Request not found or already completed"}',
    ),
    "cancel without an id": (200, b'{"error":"request_id is required"}'),
    "pull": (200, b'{"error":"Pull operation not implemented"}'),
}
"""Status and body, byte for byte."""

PREFILL_SECONDS: dict[str, tuple[float, float]] = {
    "qwen3.5:0.8b": (5.2, 22.6),
    "qwen3.5:4b": (16.6, 72.8),
    "qwen3.5:9b": (21.6, 91.8),
    "llama3.2:1b": (3.7, 28.3),
    "llama3.2:3b": (8.8, 65.5),
    "llama3.1:8b": (17.5, 116.6),
    "gpt-oss:20b": (17.2, 83.8),
    "qwen3.6-moe:35b": (45.1, 149.0),
}
"""Section 3.4: seconds for 8k and 32k (8192 and 32768) tokens at once; the fit is good to 3.4 %."""
