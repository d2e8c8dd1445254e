"""Driver of llama.cpp's ``llama-server`` (protocol: llama-server.md section 1)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from proxy.backends.base import Facts, Single, SlotView, StateIO, Upstream
from proxy.backends.transport import Headers, Transport
from proxy.errors import BackendBrokenError, BackendRefusedError, BackendTimeoutError

T = TypeVar("T")

# Random per process, unless the user pinned LLAMA_MEDIA_MARKER (then it identifies nothing).
RANDOM_MARKER = re.compile(r"<__media_[A-Za-z0-9]{32}__>")
# Stricter than what the server takes (llama-server.md 3.4); the name is all it ever gets.
STATE_NAME = re.compile(r"[A-Za-z0-9_-]+\.[a-z]+")
# Facts that change KV bytes or their layout and can be seen over HTTP (llama-server.md 4).
PROPS_IDENTITY = ("model_path", "model_ftype", "build_info", "modalities")
MODEL_IDENTITY = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size", "ftype")
MILLISECONDS = 1e-3
ANSWER_SECONDS = 60.0  # for a look at the server: it may be in the middle of a large batch
ACTION_SECONDS = 300.0  # for a save or restore: gigabytes on a slow disk
QUOTED = 200  # characters of the backend's own error message


class LlamaServer(Single):
    """A ``Backend`` (see base.py) with everything llama-server can do."""

    # It makes a chat request of it, and names no slot for it: done here, it is cached like chat.
    lacking = frozenset({"/v1/responses"})

    def __init__(
        self, url: str, *, key: str | None, connect_timeout: float, silence_timeout: float
    ) -> None:
        """``key`` replaces the client's own on every request; None lets the client's through."""
        self._transport = Transport(
            url, connect_timeout=connect_timeout, silence_timeout=silence_timeout, ahead=True
        )
        self._key = key
        self._port = urlsplit(url).port or 0
        self._total_slots: int | None = None

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | None,
        *,
        slot: int | None = None,  # noqa: ARG002 - the body names it
    ) -> AbstractAsyncContextManager[Upstream]:
        """Forward a request; see ``Transport.send``."""
        return self._transport.send(method, target, self._with_key(headers), body)

    async def facts(self) -> Facts:
        """``/props``, ``/v1/models`` and ``/lora-adapters`` in one."""
        props = _mapping(await self._call("GET", "/props"), "/props")
        listed = _mapping(await self._call("GET", "/v1/models"), "/v1/models")
        adapters = _list(await self._call("GET", "/lora-adapters"), "/lora-adapters")
        model = _mapping(next(iter(_take(listed, "data", list)), None), "/v1/models data")
        meta = _mapping(model.get("meta") or {}, "/v1/models meta")
        identity: dict[str, Any] = {name: props.get(name) for name in PROPS_IDENTITY}
        identity |= {name: meta.get(name) for name in MODEL_IDENTITY}
        identity["lora"] = [
            {"path": _take(one, "path", str), "scale": float(_take(one, "scale", (int, float)))}
            for one in (_mapping(adapter, "/lora-adapters") for adapter in adapters)
        ]
        settings = _take(props, "default_generation_settings", dict)
        template = props.get("chat_template")
        self._total_slots = _take(props, "total_slots", int)
        return Facts(
            kind="llama-server",
            instance=_instance(props),
            total_slots=self._total_slots,
            n_ctx=_take(settings, "n_ctx", int),
            model=_take(model, "id", str),
            model_path=_take(props, "model_path", str),
            identity=identity,
            template=template if isinstance(template, str) else "",
            port=self._port,
        )

    async def instance(self) -> str:
        """The random media marker of this process, ``""`` when it is pinned."""
        return _instance(_mapping(await self._call("GET", "/props"), "/props"))

    async def slots(self) -> tuple[SlotView, ...]:
        """``/slots``; a slot that never ran a task shows neither task nor tokens."""
        rows = _list(await self._call("GET", "/slots"), "/slots")
        views = sorted(map(_slot_view, rows), key=lambda view: view.index)
        self._total_slots = len(views)
        return tuple(views)

    async def save(self, slot: int, name: str) -> StateIO:
        """Save to a fresh name; whether the file is whole is for the caller to check (3.4)."""
        answer = await self._act(slot, "save", name)
        return _state_io(answer, "n_saved", "n_written", "save_ms")

    async def restore(self, slot: int, name: str) -> StateIO:
        """Never call this with a file of doubtful size: it can abort the server (finding 3)."""
        answer = await self._act(slot, "restore", name)
        return _state_io(answer, "n_restored", "n_read", "restore_ms")

    async def erase(self, slot: int) -> None:
        """Forget tokens, KV and the draft model's state."""
        await self._act(slot, "erase", None)

    async def render(self, body: Mapping[str, Any]) -> str:
        """``/apply-template``; fields it does not know are ignored by the server."""
        answer = await self._call("POST", "/apply-template", body, quote=False)
        return _take(_mapping(answer, "/apply-template"), "prompt", str)

    async def tokenize(self, text: str) -> list[int]:
        """``/tokenize`` with the flags the server itself uses for prompts (1.9)."""
        question = {"content": text, "add_special": True, "parse_special": True}
        answer = await self._call("POST", "/tokenize", question, quote=False)
        tokens: list[int] = _take(_mapping(answer, "/tokenize"), "tokens", list)
        if not all(type(token) is int for token in tokens):
            raise _broken("/tokenize")
        return tokens

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def _act(self, slot: int, action: str, name: str | None) -> Mapping[str, Any]:
        # The server takes the id modulo the number of slots and echoes what it was given (1.7).
        total = self._total_slots
        if total is None:
            total = (await self.facts()).total_slots
        if not 0 <= slot < total:
            raise ValueError(f"slot {slot} is not one of {total}")
        if name is not None and not STATE_NAME.fullmatch(name):
            raise ValueError("a state's name is a bare file name of letters, digits, _ and -")
        body = {} if name is None else {"filename": name}
        target = f"/slots/{slot}?action={action}"
        return _mapping(await self._call("POST", target, body), target)

    async def _call(
        self, method: str, target: str, body: Mapping[str, Any] | None = None, *, quote: bool = True
    ) -> Any:
        """The JSON answer. ``quote``: the server's error text may be repeated, it has no prompt."""
        data = None if body is None else orjson.dumps(body)
        headers = [] if data is None else [("Content-Type", "application/json")]
        try:
            async with (
                asyncio.timeout(ACTION_SECONDS if "action=" in target else ANSWER_SECONDS),
                self._transport.send(
                    method, target, self._with_key(headers), data, keep=True
                ) as upstream,
            ):
                raw = await upstream.read()
        except TimeoutError as error:
            raise BackendTimeoutError(f"{method} {target} was not answered in time") from error
        if upstream.status != HTTPStatus.OK:
            said = _error_message(raw) if quote else ""
            raise BackendRefusedError(
                f"{method} {target} was answered with {upstream.status}" + (said and f": {said}"),
                answer=upstream.status,
            )
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _broken(target) from error

    def _with_key(self, headers: Headers) -> Headers:
        if self._key is None:
            return headers
        kept = [pair for pair in headers if pair[0].lower() not in {"authorization", "x-api-key"}]
        return [*kept, ("Authorization", f"Bearer {self._key}")]


def _broken(where: str) -> BackendBrokenError:
    return BackendBrokenError(
        f"the backend's answer has an unknown shape: {where}", hint="is it a llama-server?"
    )


def _take(source: Mapping[str, Any], key: str, kind: type[T] | tuple[type[T], ...]) -> T:
    value = source.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _broken(f"field {key}")
    return value


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _broken(where)
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _broken(where)
    return value


def _instance(props: Mapping[str, Any]) -> str:
    marker = props.get("media_marker")
    return marker if isinstance(marker, str) and RANDOM_MARKER.fullmatch(marker) else ""


def _slot_view(value: Any) -> SlotView:
    row = _mapping(value, "/slots")
    busy = row.get("is_processing")
    if not isinstance(busy, bool):
        raise _broken("field is_processing")
    return SlotView(
        index=_take(row, "id", int),
        n_ctx=_take(row, "n_ctx", int),
        is_processing=busy,
        id_task=_take(row, "id_task", int) if "id_task" in row else None,
        n_tokens=_take(row, "n_prompt_tokens", int) if "n_prompt_tokens" in row else None,
    )


def _state_io(answer: Mapping[str, Any], tokens: str, size: str, elapsed: str) -> StateIO:
    timings = _take(answer, "timings", dict)
    return StateIO(
        n_tokens=_take(answer, tokens, int),
        n_bytes=_take(answer, size, int),
        seconds=_take(timings, elapsed, (int, float)) * MILLISECONDS,
    )


def _error_message(raw: bytes) -> str:
    """``error.message`` of llama-server's envelope (1.2), shortened; ``""`` for anything else."""
    try:
        message = orjson.loads(raw)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return ""
    return message[:QUOTED] if isinstance(message, str) else ""
