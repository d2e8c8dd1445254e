"""Every endpoint but the chat of OpenAI (section 1.4)."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tests.emulators.fastflowlm.call import Call
from tests.emulators.fastflowlm.chat import chat, field, server_error, text_of
from tests.emulators.fastflowlm.engine import Engine, Prompt
from tests.emulators.fastflowlm.errors import (
    JsonError,
    UndefinedBehaviour,
    string_of,
    type_error,
)
from tests.emulators.fastflowlm.models import CATALOGUE, Model
from tests.emulators.fastflowlm.normalise import Message
from tests.emulators.fastflowlm.shapes import sse
from tests.emulators.fastflowlm.tokens import token_id
from tests.emulators.fastflowlm.transport import to_json

Handler = Callable[[Call], Awaitable[None]]

EMBEDDING_SIZE = 768
EMBEDDING_SECONDS = 0.05
TRANSCRIPTION_SECONDS = 2.0
TOO_LONG = {"error": "Max length reached"}


def _details(model: Model) -> dict[str, str]:
    return {
        "family": model.family.name,
        "parameter_size": model.size.upper(),
        "quantization_level": "Q4_1",
    }


def _listed(call: Call) -> list[Model]:
    flash = call.emu.profile.single_turn
    return [m for _, m in sorted(CATALOGUE.items()) if flash or not m.family.flash]


async def models(call: Call) -> None:
    """The catalogue, loaded or not; keys in alphabetical order."""
    now = call.emu.unix_time()
    data = [
        {"created": now, "id": m.tag, "object": "model", "owned_by": "FastFlowLM"}
        for m in _listed(call)
    ]
    await call.answer({"data": data, "object": "list"})


async def tags(call: Call) -> None:
    """The catalogue in Ollama's form."""
    entries = [{"details": _details(m), "model": m.tag, "name": m.tag} for m in _listed(call)]
    await call.answer({"models": entries})


async def running(call: Call) -> None:
    """The loaded model; with none the look-up is undefined."""
    emu = call.emu
    if emu.engine is None:
        raise UndefinedBehaviour("model-faker is in no list")
    model = emu.engine.model
    local = time.localtime(emu.unix_time() + 3600)
    entry = {
        "name": model.tag,
        "model": model.tag,
        "size": int(float(re.sub(r"[^\d.]", "", model.size)) * 1e9),
        "details": _details(model),
        "expires_at": time.strftime("%Y-%m-%dT%H:%M:%S.00000+00:00", local),
    }
    await call.answer({"models": [entry]})


async def version(call: Call) -> None:
    """The release."""
    await call.answer({"version": call.emu.profile.version})


async def npu_status(call: Call) -> None:
    """Only this server has it."""
    busy = call.emu.npu.busy
    message = "NPU is currently in use" if busy else "NPU is available"
    await call.answer({"npu_available": not busy, "active_requests": int(busy), "message": message})


async def show(call: Call) -> None:
    """A constant."""
    _needs(call, "model")
    details = {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [""],
        "parameter_size": "",
        "quantization_level": "",
    }
    await call.answer({
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details,
        "model_info": {"general.architecture": "flm"},
        "capabilities": ["chat", "vision", "completion"],
    })  # fmt: skip


async def pull(call: Call) -> None:
    """Not implemented, says the server with 200."""
    await call.answer({"error": "Pull operation not implemented"})


async def cancel(call: Call) -> None:
    """Cancel a running request by the id its client gave it."""
    name = call.body.get("request_id")
    if not isinstance(name, str):
        await call.answer({"error": "request_id is required"})
        return
    token = call.emu.cancellable.get(name)
    if token is None:
        message = "Request not found or already completed"
        await call.answer({"cancelled": False, "message": message})
        return
    token.cancel()
    await call.answer({"cancelled": True, "message": "Request cancelled successfully"})


def _needs(call: Call, name: str) -> Any:
    if name not in call.body:
        raise UndefinedBehaviour(f"request[{name}] of a const object without it")
    return call.body[name]


async def _engine(call: Call) -> Engine | None:
    name = field(call.body, "model", call.emu.current_tag, "string")
    engine = await call.emu.ensure_model(name, call.record)
    if engine is None:
        await call.answer({"error": f"Failed to load {name} model!"})
    return engine


async def _say(call: Call, engine: Engine, limit: int) -> list[str]:
    planned = call.emu.plan(call.body, call.record, engine)
    tokens = []
    with engine.used(call.record):
        async for token in engine.generate(planned, limit, call.record, call.token):
            tokens.append(token)
            call.record.text += token
    return tokens


async def _insert(call: Call, engine: Engine, messages: list[Message]) -> bool:
    with engine.used(call.record):
        if await engine.insert(Prompt(messages), call.record, call.token):
            return True
    await call.answer(TOO_LONG)
    engine.clear()
    return False


def _prompt(call: Call) -> list[Message]:
    prompt = _needs(call, "prompt")
    if not isinstance(prompt, str):
        raise type_error("string", prompt)
    return [{"role": "user", "content": prompt}]


def _durations(call: Call) -> dict[str, Any]:
    record = call.record
    return {
        "done": True,
        "prompt_eval_count": record.prefilled,
        "eval_count": record.completion,
        "total_duration": int((record.prefill_seconds + record.decode_seconds) * 1e9),
        "load_duration": int(record.load_seconds * 1e9),
        "prompt_eval_duration": int(record.prefill_seconds * 1e9),
        "eval_duration": int(record.decode_seconds * 1e9),
        "done_reason": record.finish,
    }


async def completions(call: Call) -> None:
    """Text completion, which wraps the prompt into a user message; takes no lock."""
    messages = _prompt(call)
    limit = int(field(call.body, "max_tokens", 4096, "number"))
    call.record.stream = field(call.body, "stream", False, "boolean")
    engine = await _engine(call)
    if engine is None:
        return
    engine.configure(call.body)
    if not await _insert(call, engine, messages):
        return
    tokens = await _say(call, engine, limit)
    record = call.record
    head = {
        "id": "fastflowlm-chat-completion",
        "object": "text_completion",
        "created": call.emu.unix_time(),
        "model": call.body.get("model", call.emu.current_tag),
    }
    counted = {
        "prompt_tokens": record.prefilled,
        "completion_tokens": record.completion,
        "total_tokens": record.prefilled + record.completion,
    }
    choice = {"text": text_of(tokens, engine), "index": 0, "logprobs": None}
    if not record.stream:
        body = {**head, "choices": [{**choice, "finish_reason": record.finish}], "usage": counted}
        await call.answer(body)
        return
    await call.event(sse({**head, "choices": [{**choice, "finish_reason": None}]}))
    await call.event(sse({**head, "choices": [{"finish_reason": record.finish}], "usage": counted}))
    await call.end(b"data: [DONE]\n\n")
    engine.clear()


async def generate(call: Call) -> None:
    """Ollama's completion: streamed unless asked otherwise, as lines of JSON."""
    messages = _prompt(call)
    call.record.stream = field(call.body, "stream", True, "boolean")
    limit = int(field(call.body, "max_tokens", 4096, "number"))
    engine = await _engine(call)
    if engine is None or not await _insert(call, engine, messages):
        return
    text = text_of(await _say(call, engine, limit), engine)
    head = {"model": call.body.get("model", call.emu.current_tag)}
    last = {"context": [token_id(token) for token in engine.history], **_durations(call)}
    if not call.record.stream:
        await call.answer({**head, "response": text, **last})
        return
    await call.event(to_json({**head, "response": text, "done": False}) + b"\n")
    await call.end(to_json({**head, "response": "", **last}) + b"\n")


def _flat(message: Any) -> Message:
    if not isinstance(message, dict):
        raise type_error("object", message)
    return {**message, "content": string_of(message.get("content") or "")}


async def ollama_chat(call: Call) -> None:
    """Ollama's chat: the context is gone afterwards, the checksums are not.

    Streamed it inserts twice and never generates: the second time nothing is left to insert.
    """
    messages = _needs(call, "messages")
    call.record.stream = field(call.body, "stream", False, "boolean")
    options = field(call.body, "options", {}, "object")
    limit = int(field(options, "num_predict", 4096, "number"))
    engine = await _engine(call)
    if engine is None:
        return
    engine.configure(call.body)
    flat = [_flat(message) for message in messages] if isinstance(messages, list) else []
    if not await _insert(call, engine, flat):
        return
    head = {"model": call.body.get("model", call.emu.current_tag)}
    if call.record.stream:
        if call.emu.options.ub == "crash":
            raise UndefinedBehaviour("insert() without tokens")
        empty = {"role": "assistant", "content": ""}
        await call.end(to_json({**head, "message": empty, **_durations(call)}) + b"\n")
    else:
        text = text_of(await _say(call, engine, limit), engine)
        message = {"role": "assistant", "content": text, "images": None}
        await call.answer({**head, "message": message, **_durations(call)})
    engine.clear()


async def embeddings(call: Call) -> None:
    """Vectors that only depend on the length of each text; null without ``--embed``."""
    _needs(call, "model")
    given = _needs(call, "input")
    if not isinstance(given, str | list):
        raise type_error("array", given)
    texts = [given] if isinstance(given, str) else [string_of(text) for text in given]
    await call.emu.clock.sleep(EMBEDDING_SECONDS * len(texts))
    if not call.emu.options.embed:
        await call.answer(None)
        return
    data = [
        {
            "object": "embedding",
            "embedding": [((len(text) + i) % 97) / 97 for i in range(EMBEDDING_SIZE)],
            "index": place,
        }
        for place, text in enumerate(texts)
    ]
    await call.answer({
        "object": "list",
        "data": data,
        "model": call.body["model"],
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    })  # fmt: skip


async def transcriptions(call: Call) -> None:
    """A text for any sound; null without ``--asr``."""
    await call.emu.clock.sleep(TRANSCRIPTION_SECONDS)
    if not call.emu.options.asr:
        await call.answer(None)
        return
    found = re.search(rb'name="model"\r\n\r\n([^\r\n]+)', call.request.body)
    model = found[1].decode(errors="replace") if found else str(_needs(call, "model"))
    await call.answer({"model": model, "text": "emulated transcription"})


def guarded(handler: Handler, *, plain: bool = True) -> Handler:
    """Errors of JSON become an answer with HTTP 200, in the form of the API."""

    async def run(call: Call) -> None:
        try:
            await handler(call)
        except JsonError as error:
            what = str(error)
            await call.answer({"error": what} if plain else server_error(what))

    return run


ROUTES: dict[str, Handler] = {
    "GET /v1/models": models,
    "GET /api/tags": tags,
    "GET /api/ps": running,
    "GET /api/version": version,
    "GET /v1/version": version,
    "GET /api/npu/status": npu_status,
    "POST /api/show": guarded(show),
    "POST /api/pull": pull,
    "POST /api/cancel": cancel,
    "POST /v1/embeddings": guarded(embeddings),
    "POST /api/embeddings": guarded(embeddings),
    "POST /v1/audio/transcriptions": guarded(transcriptions, plain=False),
    "POST /v1/completions": guarded(completions, plain=False),
    "POST /api/generate": guarded(generate),
    "POST /api/chat": guarded(ollama_chat),
    "POST /v1/chat/completions": chat,
}
"""By method and exact target."""
