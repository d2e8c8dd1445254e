"""A programmable llama-server in this process: real sockets, real state files, faults on demand.

    async with FakeLlamaServer(folder) as fake:
        stall = fake.fail("stall", on="/v1/chat/completions", at="progress")
        ...
        await stall.hit.wait()      # the request has come this far
        stall.release.set()         # and may go on

Nothing sleeps: ``fake.go`` holds every computing step while it is cleared.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from proxy.core import slotfile
from tests.integration import fake_engine
from tests.integration.fake_answers import MODEL, Answer, limit_of, prompts_of
from tests.integration.fake_engine import FakeEngine, FakeSlot
from tests.integration.fake_faults import At, Fault, Kind, Seen, as_error, as_json, matches
from tests.listening import killed
from tests.state_files import state_bytes

NO_STATE = "Unable to restore slot: No available space in KV cache or invalid slot save file"


SEEN = web.RequestKey("seen", Seen)


class FakeLlamaServer:
    """See the module. Attributes may be changed at any time; ``engine`` is the running process."""

    def __init__(self, slot_dir: Path | None, *, key: str | None = None, **engine: Any) -> None:
        """``slot_dir`` None: started without --slot-save-path. ``engine``: see ``FakeEngine``."""
        self.slot_dir = slot_dir
        self.key = key
        self.loading = False
        self.lora: list[dict[str, Any]] = []
        self.window = False  # states have a second section, as sliding-window models write them
        self.go = asyncio.Event()
        self.go.set()
        self.faults: list[Fault] = []
        self.requests: list[Seen] = []
        self.script: Callable[[Any], list[str] | dict[str, Any]] | None = None  # words or a message
        self.date = ""  # the template writes it at the prompt's head
        self.port = 0
        self._settings = engine
        self._changed = asyncio.Event()
        self._dying: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self.engine = FakeEngine(**engine)
        self.marker = ""

    # Life

    @property
    def url(self) -> str:
        """Base URL without a slash at the end; stays over restarts."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.die()

    async def start(self, **changes: Any) -> None:
        """A new process on the same port; ``changes`` to its engine's settings stay."""
        self._settings |= changes
        self.engine = FakeEngine(**self._settings)
        self.marker = f"<__media_{secrets.token_hex(16)}__>"
        app = web.Application(middlewares=[self._entry], client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._route)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """As kill -9 does: every connection breaks, the port is closed, all slots are lost."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        await killed(runner)

    async def restart(self, **changes: Any) -> None:
        """Die and come back."""
        await self.die()
        await self.start(**changes)

    # What tests ask and say

    def fail(self, kind: Kind, **fault: Any) -> Fault:
        """Arm a fault; see ``Fault``."""
        self.faults.append(Fault(kind, **fault))
        return self.faults[-1]

    def seen(self, on: str) -> list[Seen]:
        """Requests whose target begins so, or whose action is this."""
        return [one for one in self.requests if matches(one.target, on)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds; looked at whenever a request begins, ends or uses a slot."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # Requests

    @web.middleware
    async def _entry(self, request: web.Request, handler: Any) -> web.StreamResponse:
        seen = Seen(request.method, request.path_qs, list(request.headers.items()))
        self.requests.append(seen)
        self._changed.set()
        request[SEEN] = seen
        try:
            seen.body = await request.read()
            refusal = self._refuse(request)
            if refusal is None:
                refusal = await self._strike(request, "headers")
            answer: web.StreamResponse = refusal or await handler(request)
        except (asyncio.CancelledError, ConnectionError):
            seen.cancelled = True
            raise
        else:
            return answer
        finally:
            seen.done = True
            self._changed.set()

    def _refuse(self, request: web.Request) -> web.Response | None:
        if self.loading:
            return as_error(503, "Loading model", "unavailable_error")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = request.headers.get("X-Api-Key", given)
        if self.key is not None and given != self.key and request.path != "/health":
            return as_error(401, "Invalid API Key", "authentication_error")
        return None

    def _take(self, request: web.Request, at: At, *kinds: Kind) -> Fault | None:
        for fault in self.faults:
            if fault.at == at and fault.kind in kinds and matches(request.path_qs, fault.on):
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                fault.hit.set()
                return fault
        return None

    async def _strike(self, request: web.Request, at: At) -> web.Response | None:
        fault = self._take(request, at, "stall", "reset", "cut", "error", "bad-json", "die")
        if fault is None:
            return None
        if fault.kind == "stall":
            await fault.release.wait()
            return None
        if fault.kind == "error":
            loading = fault.status == 503
            return as_error(
                fault.status, "Loading model" if loading else "it broke", "server_error"
            )
        if fault.kind == "bad-json":
            return web.Response(body=b'{"never": ', content_type="application/json")
        transport = request.transport
        assert transport is not None
        if fault.kind == "cut":
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            transport.write((head if at == "headers" else b"") + b"ff\r\ndata: {")
            transport.close()
        else:
            transport.abort()
        if fault.kind == "die":
            self._dying = asyncio.create_task(self.die())
        raise ConnectionResetError

    async def _route(self, request: web.Request) -> web.StreamResponse:
        key = f"{request.method} {request.path.removeprefix('/v1')}"
        pages: dict[str, Callable[[], Any]] = {
            "GET /health": lambda: {"status": "ok"},
            "GET /props": self._props,
            "GET /models": self._models,
            "GET /slots": self._slots,
            "GET /lora-adapters": lambda: self.lora,
        }
        if key in pages:
            return as_json(pages[key]())
        if key.startswith("POST /slots/"):
            return await self._action(request)
        if request.method != "POST":
            return as_error(404, "File Not Found", "not_found_error")
        try:
            body = request[SEEN].json
        except orjson.JSONDecodeError:
            return as_error(400, "parse error", "invalid_request_error")
        return await self._post(request, request.path.removeprefix("/v1"), body)

    async def _post(
        self, request: web.Request, path: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        if path == "/tokenize":
            return as_json({"tokens": fake_engine.tokenize(body["content"])})
        if path == "/apply-template":
            return as_json({"prompt": self._render(body)})
        if path == "/chat/completions/input_tokens":
            n = len(fake_engine.tokenize(self._render(body)))
            return as_json({"input_tokens": n, "object": "response.input_tokens"})
        if path == "/chat/completions":
            if "messages" not in body:
                return as_error(400, "'messages' is required", "invalid_request_error")
            return await self._complete(request, body, "chat")
        if path == "/completions" and request.path != path:
            return await self._complete(request, body, "text")
        if path in {"/completion", "/completions", "/infill"}:
            return await self._complete(request, body, "native")
        if path == "/embeddings":
            async with self._slot(request, -1, []) as slot:
                slot.tokens = []
                return as_json({"object": "list", "data": [{"embedding": [0.0], "index": 0}]})
        return as_error(404, "File Not Found", "not_found_error")

    def _props(self) -> dict[str, Any]:
        return {
            "default_generation_settings": {"n_ctx": self.engine.n_ctx, "params": {}},
            "total_slots": self.engine.n_slots,
            "model_alias": MODEL,
            "model_ftype": "F16",
            "model_path": "/models/fake.gguf",
            "modalities": {"vision": False, "audio": False},
            "media_marker": self.marker,
            "chat_template": "chatml",
            "build_info": "b0-fake",
            "is_sleeping": False,
        }

    def _models(self) -> dict[str, Any]:
        meta = {"vocab_type": 2, "n_vocab": fake_engine.N_VOCAB, "n_ctx_train": 8192}
        meta |= {"n_embd": 8, "n_params": 1000, "size": 2000}
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "meta": meta}]}

    def _slots(self) -> list[dict[str, Any]]:
        rows = []
        for slot in self.engine.slots:
            row: dict[str, Any] = {"id": slot.index, "n_ctx": self.engine.n_ctx}
            row |= {"speculative": False, "is_processing": slot.busy}
            if slot.id_task is not None:
                row |= {"id_task": slot.id_task, "n_prompt_tokens": len(slot.tokens)}
            rows.append(row)
        return rows

    # Slot actions

    async def _action(self, request: web.Request) -> web.Response:
        if self.slot_dir is None:
            return as_error(501, "This server does not support slots action", "not_supported_error")
        index, action = int(request.path.rpartition("/")[2]), request.query.get("action")
        async with self.engine.idle(index) as slot:
            if action == "erase":
                n, slot.tokens = len(slot.tokens), []
                return as_json({"id_slot": index, "n_erased": n})
            name = request[SEEN].json["filename"]
            if "/" in name or ".." in name:
                return as_error(400, "Invalid filename", "invalid_request_error")
            answer = {"id_slot": index, "filename": name}
            lie = self._take(request, "headers", "lie") is not None
            if action == "save":
                data = state_bytes(
                    slot.tokens, n_stream=self.engine.n_slots, slot=index, window=self.window
                )
                (self.slot_dir / name).write_bytes(data[:-1] if lie else data)
                answer |= {"n_saved": len(slot.tokens), "n_written": len(data)}
                return as_json(answer | {"timings": {"save_ms": 0.5}})
            slot.tokens = []  # a restore that fails leaves an empty slot (finding 9)
            try:
                data = (self.slot_dir / name).read_bytes()
                state = slotfile.parse(lambda at, n: data[at : at + n], len(data))
            except (OSError, slotfile.SlotFileError):
                return as_error(400, NO_STATE, "invalid_request_error")
            if state.n_stream != self.engine.n_slots:
                return as_error(400, NO_STATE, "invalid_request_error")
            slot.tokens, slot.useless = state.tokens.tolist(), lie
            answer |= {"n_restored": len(slot.tokens), "n_read": len(data)}
            return as_json(answer | {"timings": {"restore_ms": 0.5}})

    # Completions

    async def _complete(
        self, request: web.Request, body: dict[str, Any], kind: str
    ) -> web.StreamResponse:
        if kind == "chat":
            prompts = [fake_engine.tokenize(self._render(body))]
        else:
            prompts = prompts_of(body, fake_engine.tokenize)
        if any(len(prompt) >= self.engine.n_ctx for prompt in prompts):
            return as_error(400, "the request exceeds the context", "exceed_context_size_error")
        if body.get("stream"):
            return await self._stream(request, body, kind, prompts)
        wholes = []
        for index, prompt in enumerate(prompts):
            answer = None
            async with aclosing(self._compute(request, body, kind, index, prompt)) as steps:
                async for answer, _ in steps:
                    refusal = await self._after(request, answer)
                    if refusal is not None:
                        return refusal
            assert answer is not None
            wholes.append(answer.whole())
        if kind == "native":
            return as_json(wholes if len(wholes) > 1 else wholes[0])
        n = int(body.get("n", 1)) if len(wholes) == 1 else 1
        choices = [choice for whole in wholes for choice in whole["choices"]]
        choices = [{**choice, "index": i} for i, choice in enumerate(choices * n)]
        return as_json({**wholes[0], "choices": choices})

    async def _stream(
        self, request: web.Request, body: dict[str, Any], kind: str, prompts: list[list[int]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        for index, prompt in enumerate(prompts):
            async with aclosing(self._compute(request, body, kind, index, prompt)) as steps:
                async for answer, events in steps:
                    for event in events:
                        if not response.prepared:
                            await response.prepare(request)
                        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
                    if response.prepared:
                        await self._after(request, answer)
        if kind != "native":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _after(self, request: web.Request, answer: Answer) -> web.Response | None:
        return await self._strike(request, "stream" if answer.words else "progress")

    async def _compute(
        self, request: web.Request, body: dict[str, Any], kind: str, index: int, prompt: list[int]
    ) -> AsyncGenerator[tuple[Answer, list[dict[str, Any]]], None]:
        """One prompt in one slot: ``(answer so far, events to send)`` after every step."""
        limit = limit_of(body)
        pinned = body.get("id_slot", -1)
        async with self._slot(request, pinned if isinstance(pinned, int) else -1, prompt) as slot:
            n_cached = self.engine.reuse(slot, prompt, cache=body.get("cache_prompt", True))
            answer = Answer(
                kind,
                index,
                total=len(prompt),
                cache=n_cached,
                slot=slot.index,
                prompt=prompt,
                limited=limit is not None,
                usage=bool((body.get("stream_options") or {}).get("include_usage")),
                processed=n_cached,
            )
            progress = bool(body.get("return_progress") and body.get("stream"))
            slot.tokens = prompt[:n_cached]
            yield answer, [answer.progress()] if progress else []
            while answer.processed < len(prompt):
                await self._step()
                answer.processed = min(len(prompt), answer.processed + self.engine.batch)
                slot.tokens = prompt[: answer.processed]
                yield answer, [answer.progress()] if progress else []
            if int(body.get("n", 1)) > 1:
                self._overwrite_idle_slots()
            said = self.script(body) if self.script else self.engine.answer(prompt, 8)
            if isinstance(said, dict):
                answer.extra = {k: v for k, v in said.items() if k not in ("role", "content")}
                said = [said["content"]]
            words = said if limit is None else self._fit(said, prompt, max(1, limit))
            opening = answer.opening()
            for word in words:
                await self._step()
                if answer.words:  # the one before is decoded now, the last one never is
                    slot.tokens = [*slot.tokens, *fake_engine.tokenize(answer.words[-1])]
                yield answer, [*opening, answer.token(word)]
                opening = []
            yield answer, [*answer.asked(), *answer.closing()]

    def _render(self, body: dict[str, Any]) -> str:
        today = f"Today is {self.date}\n" if self.date else ""
        return today + fake_engine.render(body)

    def _fit(self, words: list[str], prompt: list[int], limit: int) -> list[str]:
        if self.script is None:
            words = self.engine.answer(prompt, limit)
        return words[:limit]

    def _overwrite_idle_slots(self) -> None:
        """N > 1: the children take idle slots and leave them empty (1.10)."""
        for other in self.engine.slots:
            if not other.busy:
                other.tokens, other.id_task = [], self.engine.next_task()

    @asynccontextmanager
    async def _slot(
        self, request: web.Request, pinned: int, prompt: list[int]
    ) -> AsyncIterator[FakeSlot]:
        async with self.engine.slot(pinned, prompt) as slot:
            request[SEEN].slot = slot.index
            self._changed.set()
            yield slot
        self._changed.set()

    async def _step(self) -> None:
        await asyncio.sleep(0)
        await self.go.wait()
