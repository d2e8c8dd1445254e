"""``POST /v1/chat/completions`` (section 1.5), with both cache layers (3.1, 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.emulators.fastflowlm import policy as tool_policy
from tests.emulators.fastflowlm.cache import Delta, Verdict
from tests.emulators.fastflowlm.call import Call
from tests.emulators.fastflowlm.engine import Engine, Prompt
from tests.emulators.fastflowlm.errors import (
    Interrupted,
    JsonError,
    UndefinedBehaviour,
    kind_of,
    type_error,
)
from tests.emulators.fastflowlm.normalise import Message, normalise
from tests.emulators.fastflowlm.policy import Policy, Refused
from tests.emulators.fastflowlm.shapes import Chunks, Parser, Part, parts_of, plain, usage

OVERFLOW = {"error": {"message": "Max length reached!", "type": "model_error", "code": 400}}
SINGLE_TURN = (
    "This model only supports single-turn requests. Multi-turn conversation history "
    "(assistant messages) is not allowed."
)


def server_error(what: str) -> dict[str, Any]:
    """An error that goes out with HTTP 200."""
    return {"error": {"message": what, "type": "server_error", "code": 500}}


@dataclass(frozen=True, slots=True)
class Fields:
    """What the handler reads of a request, beside messages and sampling."""

    model: str
    stream: bool
    limit: int
    tools: list[Any]
    include_usage: bool


def field(body: dict[str, Any], name: str, default: Any, kind: str) -> Any:
    """``request.value(name, default)``: a value of another type throws, null above all."""
    value = body.get(name, default)
    if kind_of(value) != kind:
        raise type_error(kind, value)
    return value


def read_fields(body: dict[str, Any], current: str) -> Fields:
    """Read a body.

    Raises:
        JsonError: a field has another type.
        UndefinedBehaviour: there are no messages.
    """
    if "messages" not in body:
        raise UndefinedBehaviour("request[messages] of a const object without messages")
    more = field(body, "max_completion_tokens", 4096, "number")
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise type_error("object", options)
    tools = body.get("tools")
    return Fields(
        model=field(body, "model", current, "string"),
        stream=field(body, "stream", False, "boolean"),
        limit=int(field(body, "max_tokens", more, "number")),
        tools=tools if isinstance(tools, list) else [],
        include_usage=options.get("include_usage") is True,
    )


async def chat(call: Call) -> None:
    """Answer one request, whatever it is."""
    try:
        await _chat(call)
    except JsonError as error:
        await call.answer(server_error(str(error)))
    except Refused as error:
        body = {"message": str(error), "type": "invalid_request_error", "code": 400}
        await call.answer({"error": body})


async def _chat(call: Call) -> None:
    emu, record = call.emu, call.record
    modern = emu.profile.modern
    fields = read_fields({**call.body} if modern else _without(call.body), emu.current_tag)
    rules = tool_policy.apply(call.body, fields.tools) if modern else Policy(fields.tools)
    record.stream = fields.stream
    engine = await emu.ensure_model(fields.model, record)
    if engine is None:
        await call.answer({"error": f"Failed to load {fields.model} model!"})
        return
    engine.configure(call.body)
    raw = call.body["messages"]
    if rules.preface and isinstance(raw, list):
        raw = [{"role": "system", "content": rules.preface}, *raw]
    messages = normalise(raw)
    if engine.model.family.flash and any(m.get("role") == "assistant" for m in messages):
        await call.answer({"error": SINGLE_TURN})
        return
    prompt = _judge(call, engine, fields, rules.tools, messages)
    await _run(call, engine, fields, rules, prompt)


def _without(body: dict[str, Any]) -> dict[str, Any]:
    """Before era E ``stream_options`` is not read at all."""
    return {key: value for key, value in body.items() if key != "stream_options"}


def _judge(
    call: Call, engine: Engine, fields: Fields, tools: list[Any], messages: list[Message]
) -> Prompt:
    """Layer 1: what may be kept, and what is inserted."""
    emu, record = call.emu, call.record
    if emu.profile.cache == "none" or engine.model.family.flash:
        return Prompt(messages, tools)
    if fields.model != emu.last_model:
        emu.layer.store(messages, tools)
        emu.last_model = fields.model
        verdict = Verdict(hit=False, reason="another model than last time")
        record.layer1 = "switch"
    else:
        verdict = emu.layer.judge(messages, tools)
        record.layer1 = "hit" if verdict.hit else "miss"
    record.reason, record.matched = verdict.reason, verdict.matched
    if verdict.hit:
        new = len(messages) - verdict.matched
        record.note("Use cached prompt!")
        record.note(
            f"Matched {verdict.matched} out of {len(messages)} rounds ({new} new to prefill)."
        )
    elif record.layer1 == "miss":
        record.note("Prompt cache miss.")
        record.note("Clearing context...")
        engine.clear()
    if not isinstance(emu.layer, Delta):
        return Prompt(messages, tools, restore=verdict.hit, matched=verdict.matched)
    if not fields.stream:
        engine.clear()
    record.last_only = verdict.hit and not fields.stream
    return Prompt(messages[-1:] if verdict.hit else messages, tools, append=True)


async def _run(call: Call, engine: Engine, fields: Fields, rules: Policy, prompt: Prompt) -> None:
    emu, record = call.emu, call.record
    if fields.stream:
        call.token.reset()
    if emu.take("error"):
        await call.answer({"error": "emulated exception"})
        await call.clear_later()
        return
    record.note("Start prefill...")
    with engine.used(record):
        inserted = await engine.insert(prompt, record, call.token)
    if not inserted:
        await _not_inserted(call, engine, fields)
        return
    record.note("Start generating...")
    answer = _Answering(call, engine, fields, rules)
    try:
        await (answer.stream() if fields.stream else answer.plain())
    except Interrupted as error:
        await _interrupted(call, str(error))


async def _interrupted(call: Call, what: str) -> None:
    """An exception in mid-stream: nothing is written, the stream never ends (1.5)."""
    if call.connection.streaming:
        await call.release()
        await call.clear_later()
        await call.hang()
    else:
        await call.answer({"error": what})
        await call.clear_later()


async def _not_inserted(call: Call, engine: Engine, fields: Fields) -> None:
    if call.record.finish != "cancel":
        await call.answer(OVERFLOW)
    elif fields.stream:
        call.record.note("Prefill Cancelled!")
        await _Answering(call, engine, fields, Policy([])).finish([])
    else:
        call.record.note("Prefill Cancelled!")
        await call.answer(None)
    await call.clear_later()


class _Answering:
    """From the first token to the last byte."""

    def __init__(self, call: Call, engine: Engine, fields: Fields, rules: Policy) -> None:
        emu = call.emu
        self.call, self.engine, self.fields, self.rules = call, engine, fields, rules
        self.modern = emu.profile.modern
        self.index = 0
        self.parser = Parser.for_model(engine.model, think=engine.setting.think)
        self.chunks = Chunks(
            stream_id=f"chatcmpl-{emu.random_hex(24)}",
            fingerprint=f"fp_{emu.random_hex(16)}",
            created=emu.unix_time(),
            model=fields.model,
            usage_null=self.modern and fields.include_usage,
        )

    async def _generate(self) -> list[Part]:
        """All parts; those of a stream are sent as they come, except where era E buffers them."""
        call, record = self.call, self.call.record
        live = self.fields.stream and not self.rules.buffered
        parts: list[Part] = []
        planned = call.emu.plan(call.body, record, self.engine)
        with self.engine.used(record):
            async for token in self.engine.generate(planned, self.fields.limit, record, call.token):
                record.text += token
                part = self.parser.feed(token)
                if part is not None:
                    parts.append(part)
                    if live:
                        await self._send(part)
                call.emu.strike(record, call.connection)
        if record.finish == "cancel":
            record.note("Generation Cancelled!")
            call.emu.layer.reset()
        elif record.finish == "stop" and any(part.kind == "tool" for part in parts):
            record.finish = "tool_calls"
        return parts

    def _call_id(self) -> str:
        literal = self.engine.model.family.ids and not self.modern
        return "generate_id()" if literal else f"call_{self.call.emu.unix_time()}"

    async def _send(self, part: Part) -> None:
        if part.kind == "tool":
            emu = self.call.emu
            index = self.index if self.modern else emu.tool_index
            self.index += 1
            emu.tool_index += 1
            await self.call.event(self.chunks.call(part, index, self._call_id()))
        elif part.text or not self.modern:
            await self.call.event(self.chunks.text(part))

    async def stream(self) -> None:
        """A streamed answer."""
        parts = await self._generate()
        if not await self._contract(parts):
            if self.rules.buffered:
                for part in _joined(parts):
                    await self._send(part)
            await self.finish(parts)
            self._after()

    async def finish(self, parts: list[Part]) -> None:
        """The final chunk, usage and ``[DONE]``."""
        record = self.call.record
        counted = usage(self.engine, record, modern=self.modern, plain=False)
        if not self.modern:
            await self.call.event(self.chunks.final(record.finish, counted))
        else:
            await self.call.event(self.chunks.final(record.finish, None))
            if self.fields.include_usage:
                await self.call.event(self.chunks.counted(counted))
        await self.call.end(b"data: [DONE]\n\n")

    async def plain(self) -> None:
        """An answer in one piece."""
        record = self.call.record
        parts = await self._generate()
        if await self._contract(parts):
            return
        finish = record.finish
        if not self.modern and finish in {"length", "cancel"}:
            finish = "stop"
        counted = usage(self.engine, record, modern=self.modern, plain=True)
        message = self._message(parts)
        created = self.call.emu.unix_time()
        if not self.call.emu.profile.plain_keeps:
            self._after()
            self.call.emu.layer.reset()
        await self.call.answer(plain(self.fields.model, created, message, finish, counted))

    def _message(self, parts: list[Part]) -> dict[str, Any]:
        """The message of a plain answer: reasoning apart, except in two families before era E."""
        message: dict[str, Any] = {"role": "assistant"}
        name = self.engine.model.family.name
        raw = name in {"qwen3.5", "qwen3.6-moe"} and not self.modern
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        if raw and reasoning:
            content = f"<think>{reasoning}</think>{content}"
        elif reasoning:
            message["reasoning_content"] = reasoning
        calls = [part for part in parts if part.kind == "tool"]
        if calls:
            message["tool_calls"] = [
                {
                    "index": place,
                    "id": self._call_id(),
                    "type": "function",
                    "function": {"name": part.name, "arguments": part.text},
                }
                for place, part in enumerate(calls)
            ]
        if content or not calls:
            message["content"] = content
        return message

    async def _contract(self, parts: list[Part]) -> bool:
        """Era E: an answer that breaks the policy becomes an error, and the context is cleared."""
        calls = sum(part.kind == "tool" for part in parts)
        broken = self.rules.broken(calls) if self.call.record.finish != "cancel" else ""
        if broken:
            await self.call.answer(server_error(broken))
            self.engine.clear()
        return bool(broken)

    def _after(self) -> None:
        """Era A forgets everything after each request."""
        if self.call.emu.profile.cache == "none":
            self.engine.clear()


def _joined(parts: list[Part]) -> list[Part]:
    """What era E flushes at the end: reasoning, one content chunk, then the calls."""
    out = []
    for kind in ("reasoning", "content"):
        text = "".join(part.text for part in parts if part.kind == kind)
        if text:
            out.append(Part(kind, text))
    return out + [part for part in parts if part.kind == "tool"]


def text_of(tokens: list[str], engine: Engine) -> str:
    """The visible text of an answer, for the endpoints that do not take it apart."""
    parser = Parser.for_model(engine.model, think=engine.setting.think)
    return "".join(part.text for part in parts_of(tokens, parser) if part.kind != "tool")
