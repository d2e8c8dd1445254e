"""A proxy's own API with canned answers, on a real socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

import orjson

NOW = 1_800_000_000.0
STATUS: dict[str, Any] = {
    "version": "9.9",
    "started": NOW - 7380,
    "now": NOW,
    "mode": "exclusive",
    "why": "it was proved",
    "advice": "",
    "ready": True,
    "paused": False,
    "draining": False,
    "restores": "in use",
    "backend": {
        "kind": "llama-server",
        "url": "http://127.0.0.1:8080",
        "up": True,
        "model": "smol",
        "n_ctx": 8192,
        "total_slots": 2,
        "restarts": 0,
    },
    "store": {
        "path": "/s",
        "used": 1536,
        "limit": 2**30,
        "free": 2**40,
        "snapshots": 3,
        "keep_free": 10 * 2**30,
    },
    "queue": {"waiting": 1, "running": 2},
    "totals": {
        "requests": 12,
        "prompt_tokens": {"slot": 600, "snapshot": 200, "computed": 200},
        "seconds_saved": 250.0,
        "saves": 4,
        "restores": 5,
        "evictions": 6,
    },
    "first_token": {"p50": 0.2, "p95": 3.0, "count": 12},
    "hide_titles": False,
}
SLOT: dict[str, Any] = {
    "index": 1,
    "state": "leased",
    "conversation": "c" * 32,
    "title": "Rivers",
    "client": "claude-code",
    "tokens": 3667,
    "saved_tokens": 3660,
    "used": NOW,
    "since": NOW,
    "storable": True,
}
RUNNING: dict[str, Any] = {
    "request_id": "r1",
    "path": "/v1/messages",
    "client": "goose",
    "conversation": None,
    "title": "Mountains",
    "slot": 0,
    "reason": "cold",
    "state": "prefill",
    "prompt": 5000,
    "cached": 0,
    "processed": 1024,
    "at": NOW - 4,
    "queued": 0.0,
    "generated": None,
}
SNAPSHOT: dict[str, Any] = {
    "id": "ab" * 16,
    "tokens": 3660,
    "prompt_tokens": 3600,
    "bytes": 2**20,
    "created": NOW,
    "last_used": NOW,
    "restores": 2,
    "barred": False,
    "pinned": True,
    "conversation": "c" * 32,
    "title": "Rivers",
    "value": 0.25,
    "seconds_saved": 20.9,
    "fingerprint": "f0" * 16,
}
OTHER_SNAPSHOT = SNAPSHOT | {"id": "ac" * 16, "pinned": False, "barred": True, "value": None}
CONVERSATION: dict[str, Any] = {
    "id": "c" * 32,
    "client": "claude-code",
    "messages": 12,
    "used": NOW,
    "prompt_n": 3660,
    "title": "Rivers",
    "bytes": 4096,
}
OPTION: dict[str, Any] = {
    "slot": 0,
    "reason": "restored",
    "hit": 3660,
    "prompt": 3667,
    "snapshot": "ab" * 16,
    "save_first": False,
    "wait": 0.0,
    "prefill": 0.0412,
    "transfer": 0.017,
    "loss": 0.0,
    "cost": 0.0582,
}
COLD = {
    "cause": "system",
    "sentence": "system prompt changed at character 118",
    "before": "14:02",
    "after": "14:03",
    "advice": "move the clock to the end",
}
REQUEST: dict[str, Any] = {
    "request_id": "r2",
    "at": NOW,
    "path": "/v1/messages",
    "reason": "cold",
    "status": 200,
    "total": 2.5,
    "queued": 0.0,
    "slot": 0,
    "reused": 0,
    "prompt": 3667,
    "computed": 3667,
    "first_token": 2.0,
    "costs": [OPTION],
    "note": "",
    "conversation": "c" * 32,
    "client": "goose",
    "side": "",
    "rules": ["clock"],
    "cold": None,
    "title": "Rivers",
}
LOG: dict[str, Any] = {
    "seq": 7,
    "at": NOW,
    "level": "warning",
    "event": "mode",
    "fields": {"why": "RAM cache"},
}


@dataclass
class FakeApi:
    """``answers``: what ``"GET api/slots"`` gets: JSON, (status, JSON), or a function
    that gives it; ``events``: then the end.

    ``port`` 0: any free one.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, Any, str | None]] = field(default_factory=list)
    port: int = 0

    def __enter__(self) -> Self:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                api.answer(self)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.thread = Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def lines(self) -> list[str]:
        """What was asked for: method and page."""
        return [line for line, _, _ in self.asked]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One request."""
        page = handler.path.removeprefix("/_slotkeeper/")
        line = f"{handler.command} {page}"
        length = int(handler.headers.get("Content-Length") or 0)
        body = orjson.loads(handler.rfile.read(length)) if length else None
        if body is not None:
            assert handler.headers["Content-Type"] == "application/json"
        self.asked.append((line, body, handler.headers.get("Authorization")))
        if line == "GET api/events" and self.events:
            self._stream(handler)
            return
        found = self.answers.get(line, self.answers.get(line.partition("?")[0]))
        found = found() if callable(found) else found
        status, value = found if isinstance(found, tuple) else (200, found)
        if found is None:
            status, value = 404, refusal("No such page.")
        raw = value if isinstance(value, bytes) else orjson.dumps(value)
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    def _stream(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b": a sign of life\n\n")
        for kind, value in self.events:
            handler.wfile.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(value)))
        handler.close_connection = True


def refusal(message: str, hint: str = "") -> dict[str, Any]:
    """An error as the proxy sends it."""
    return {"error": {"message": message, "source": "slotkeeper", "hint": hint}}
