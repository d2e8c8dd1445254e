"""The JSON shapes of the fake's answers, as captured from the real server (b11549)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "fake-model"


@dataclass
class Answer:
    """One completion while it is made. ``kind``: chat, text (/v1/completions) or native.

    ``extra``: what a chat message has beside its text: ``reasoning_content``, ``tool_calls``.
    """

    kind: str
    index: int
    total: int
    cache: int
    slot: int
    prompt: list[int]
    limited: bool
    usage: bool
    words: list[str] = field(default_factory=list)
    processed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def progress(self) -> dict[str, Any]:
        """The event before computing begins, and after each batch."""
        now = {"total": self.total, "cache": self.cache, "processed": self.processed, "time_ms": 1}
        if self.kind == "native":
            return {**self._native(""), "tokens": [0], "prompt_progress": now}
        return {**self._openai({"role": "assistant", "content": None}, ""), "prompt_progress": now}

    def opening(self) -> list[dict[str, Any]]:
        """Chat begins with a role."""
        if self.kind != "chat":
            return []
        role = self._openai({"role": "assistant", "content": None})
        thought = {name: self.extra[name] for name in ("reasoning_content",) if name in self.extra}
        return [role, self._openai(thought)] if thought else [role]

    def asked(self) -> list[dict[str, Any]]:
        """Tool calls come after the text."""
        calls = self.extra.get("tool_calls", ())
        return [self._openai({"tool_calls": [{"index": i, **c}]}) for i, c in enumerate(calls)]

    def token(self, word: str) -> dict[str, Any]:
        """One word."""
        self.words.append(word)
        return (
            self._native(word) if self.kind == "native" else self._openai({"content": word}, word)
        )

    def closing(self) -> list[dict[str, Any]]:
        """The last events; for OpenAI's kinds ``[DONE]`` follows."""
        if self.kind == "native":
            return [{**self.whole(), "content": ""}]
        last = self._openai({}, "", self._finish())
        if self.kind == "text" or not self.usage:
            usage = {"usage": self._usage()} if self.usage or self.kind == "text" else {}
            return [{**last, **usage, "timings": self.timings()}]
        extra = {"choices": [], "usage": self._usage(), "timings": self.timings()}
        return [last, {**last, **extra}]

    def whole(self) -> dict[str, Any]:
        """The answer to a client that does not stream (and the native stream's last event)."""
        text = "".join(self.words)
        if self.kind == "native":
            return {
                "index": self.index,
                "content": text,
                "tokens": [],
                "id_slot": self.slot,
                "stop": True,
                "model": MODEL,
                "tokens_predicted": len(self.words),
                "tokens_evaluated": self.total,
                "truncated": False,
                "stop_type": "limit" if self.limited else "eos",
                "stopping_word": "",
                "tokens_cached": self.total + max(0, len(self.words) - 1),
                "timings": self.timings(),
            }
        choice: dict[str, Any] = {"finish_reason": self._finish(), "index": self.index}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, **self.extra}
        else:
            choice |= {"text": text, "logprobs": None}
        return {
            **self._envelope("chat.completion" if self.kind == "chat" else "text_completion"),
            "choices": [choice],
            "usage": self._usage(),
            "timings": self.timings(),
        }

    def timings(self) -> dict[str, Any]:
        """``cache_n + prompt_n`` is the prompt's length (1.10)."""
        return {
            "cache_n": self.cache,
            "prompt_n": self.total - self.cache,
            "prompt_ms": float(self.total - self.cache),
            "predicted_n": len(self.words),
            "predicted_ms": float(len(self.words)),
        }

    def _finish(self) -> str:
        if "tool_calls" in self.extra:
            return "tool_calls"
        return "length" if self.limited else "stop"

    def _usage(self) -> dict[str, Any]:
        return {
            "completion_tokens": len(self.words),
            "prompt_tokens": self.total,
            "total_tokens": self.total + len(self.words),
            "prompt_tokens_details": {"cached_tokens": self.cache},
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        head = {"created": 1_700_000_000, "id": "chatcmpl-fake", "model": MODEL}
        return {**head, "system_fingerprint": "b0-fake", "object": kind}

    def _openai(
        self, delta: dict[str, Any], text: str = "", finish: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"finish_reason": finish, "index": self.index}
        if self.kind == "chat":
            return {
                **self._envelope("chat.completion.chunk"),
                "choices": [{**choice, "delta": delta}],
            }
        choice |= {"text": text, "logprobs": None}
        return {**self._envelope("text_completion"), "choices": [choice]}

    def _native(self, word: str) -> dict[str, Any]:
        return {
            "index": self.index,
            "content": word,
            "tokens": [0] if word else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self.words),
            "tokens_evaluated": self.total,
        }


def prompts_of(body: dict[str, Any], tokenize: Any) -> list[list[int]]:
    """The token lists a ``prompt`` field means: text, tokens, or a list of either."""
    prompt = body.get("prompt", body.get("input_prefix", ""))
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if all(isinstance(part, int) for part in prompt):
        return [prompt]
    return [tokenize(part) if isinstance(part, str) else part for part in prompt]


def limit_of(body: dict[str, Any]) -> int | None:
    """How many tokens the request allows; None or negative: no limit said."""
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and value >= 0:
            return value
    return None
