"""A client's request made ready for FastFlowLM. Pure but for the random id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import orjson

from proxy.backends import flm_request, flm_stop
from proxy.backends.flm_answer import Repair
from proxy.backends.flm_memory import Cache, Memory, Prompt
from proxy.backends.flm_models import goes_on_from_answer, ignores_tools
from proxy.backends.flm_spelling import Alike, replayed, schema_orders
from proxy.backends.transport import Headers
from proxy.errors import BadRequestError

CHAT = "/v1/chat/completions"
JSON: Headers = [("Content-Type", "application/json")]
FORGETTING = {"/api/chat", "/api/generate", "/v1/completions"}  # use the chat's context (1.4)
FORM = {"/v1/audio/transcriptions": (b'name="model"', b'name="file"')}
LIMIT = 4096  # tokens of an answer nobody limits (1.5)
_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Release:
    """What a request's form depends on, of the server it goes to."""

    catalogue: frozenset[str] = frozenset()
    loaded: str = ""
    modern: bool = False  # era E


@dataclass(slots=True)
class Work:
    """A request on its way.

    ``name``: by which it can be cancelled. ``key``: of a retry of it, and of nothing else: the
    client's key counts too. ``owner``: tells one client from another; None: it is the proxy's own.
    ``prompt`` None: no chat. ``whole``: the client wants one body. ``unread``: fields the server
    will not heed. ``spelled``: how its tool calls are written.
    """

    path: str
    headers: Headers
    body: bytes
    name: str
    key: bytes
    owner: str | None = None
    prompt: Prompt | None = None
    model: str = ""  # the tag that is meant, "" where it is not known
    think: bool = False
    limit: int = LIMIT
    whole: bool = False
    repair: Repair | None = None
    unread: list[str] = field(default_factory=list)
    spelled: dict[bytes, Alike] = field(default_factory=dict)
    blind: bool = False  # its tools were left out: the model's template shows none


def prepare(
    path: str, headers: Headers, raw: bytes, owner: str | None, release: Release, memory: Memory
) -> Work:
    """What is sent. ``owner``: see ``Work``.

    Raises ``BadRequestError`` for what the server could not read or would not survive.
    """
    answer_id = uuid4().hex[:24]
    name = f"slotkeeper-{answer_id}"
    body = _object(raw)
    if any(part not in raw for part in FORM.get(path, ())) or (path == CHAT and body is None):
        raise BadRequestError("The request body lacks what this path needs.")
    if body is None:
        return Work(path, headers, raw, name, _key(owner, path, raw), owner)
    if path != CHAT:
        sent = flm_request.other(path, body, catalogue=release.catalogue)
        key = _key(owner, path, orjson.dumps(sent))
        return Work(path, JSON, orjson.dumps({**sent, "request_id": name}), name, key, owner)
    return _chat(body, owner, answer_id, release, memory)


def _chat(
    body: dict[str, Any], owner: str | None, answer_id: str, release: Release, memory: Memory
) -> Work:
    sent = flm_request.chat(
        body, catalogue=release.catalogue, loaded=release.loaded, modern=release.modern
    )
    tag = str(sent.get("model", release.loaded))
    spelled = _spelled(sent, tag, memory)
    blind = _without_tools(sent, tag, memory)
    model, stream, stops = body.get("model"), body.get("stream") is True, flm_stop.strings(body)
    echoed = model if isinstance(model, str) else ""
    options = body.get("stream_options")
    counted = isinstance(options, dict) and options.get("include_usage") is True
    name = f"slotkeeper-{answer_id}"
    return Work(
        CHAT,
        JSON,
        orjson.dumps({**sent, "request_id": name}),
        name,
        _key(owner, CHAT, orjson.dumps(flm_request.identity(body))),
        owner,
        prompt=Prompt.of(sent),
        model=tag,
        think=sent.get("think") is True,
        limit=sent["max_tokens"] if sent.get("max_tokens", 0) > 0 else LIMIT,
        whole=not stream,
        repair=Repair(
            model=echoed,
            answer_id=answer_id,
            usage_chunk=counted and stream,
            stops=stops,
        ),
        unread=flm_request.unread(body, modern=release.modern),
        spelled=spelled,
        blind=blind,
    )


def _spelled(sent: dict[str, Any], tag: str, memory: Memory) -> dict[bytes, Alike]:
    """Write its tool calls as the model did; how, for each.

    Before the first answer it is not known which is loaded: most likely the one it was before.
    """
    tag = tag or memory.spellings.last
    exact = goes_on_from_answer(tag, think=sent.get("think") is True)
    orders, writer = schema_orders(sent.get("tools")), tag if exact else None
    sent["messages"], how = replayed(sent["messages"], orders, memory.spellings, writer)
    return how


def _without_tools(sent: dict[str, Any], tag: str, memory: Memory) -> bool:
    """Take out tools no model will see, unless its conversation went with them until now."""
    if "tools" not in sent or not ignores_tools(tag):
        return False
    last = memory.last
    if last is not None and last.tools and Prompt.of(sent).extends(last):
        return False
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        sent.pop(name, None)
    return True


def question(path: str, raw: bytes, catalogue: frozenset[str]) -> bytes:
    """The body of a question: what is no object asks nothing.

    Raises ``BadRequestError`` where it lacks what the server reads.
    """
    return orjson.dumps(flm_request.other(path, _object(raw) or {}, catalogue=catalogue))


def flush(cache: Cache) -> bytes:
    """A request after which the server goes on from nothing it held before.

    Era B does not even note a conversation of one message: hence three, one never said before.
    """
    said = [("user", ".")]
    if cache is Cache.DELTA:
        said = [("user", uuid4().hex), ("assistant", "."), ("user", ".")]
    messages = [{"role": role, "content": text} for role, text in said]
    return orjson.dumps({"messages": messages, "max_tokens": 1, "stream": True})


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value: Mapping[str, Any] = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _key(owner: str | None, path: str, said: bytes) -> bytes:
    digest = blake2b(digest_size=_DIGEST)
    for part in (repr(owner).encode(), path.encode(), said):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
