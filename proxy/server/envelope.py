"""Around every request: the gate first, and whatever goes wrong becomes one JSON envelope."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from aiohttp import web

from proxy.dialects import anthropic_errors, ollama_errors
from proxy.errors import (
    BadRequestError,
    ForbiddenError,
    MethodNotAllowedError,
    NotFoundError,
    SlotkeeperError,
    TooLargeError,
    UnauthorizedError,
    UnsupportedMediaError,
)
from proxy.telemetry import logs

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

REQUEST_ID = web.RequestKey("request_id", str)
ANTHROPIC = "/v1/messages"
# Paths whose clients read errors of another shape than OpenAI's.
_SHAPES: Mapping[str, Callable[[int, Any], dict[str, Any]]] = {
    ANTHROPIC: anthropic_errors.shaped,
    "/api/": ollama_errors.shaped,
}
_BEGUN = web.RequestKey("begun", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Check = Callable[[web.Request], None]

# What aiohttp raises by itself, in our words.
_KINDS: Mapping[int, type[SlotkeeperError]] = {
    kind.status: kind
    for kind in (
        BadRequestError,
        UnauthorizedError,
        ForbiddenError,
        NotFoundError,
        MethodNotAllowedError,
        TooLargeError,
        UnsupportedMediaError,
    )
}
_log = structlog.stdlib.get_logger("slotkeeper.server")


def install(app: web.Application, *checks: Check) -> None:
    """Add the envelope; every answer is stamped with its request id.

    ``checks`` come before the handler and what they raise is answered like what it raises. They are
    no middlewares: each of those is one more frame that every event of a stream goes through.
    """
    app.middlewares.append(_envelope(checks))
    app.on_response_prepare.append(_stamp)


def json_response(
    payload: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An answer of the proxy's own: never cached, never guessed at by a browser."""
    fixed = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.Response(
        body=orjson.dumps(payload),
        status=status,
        content_type="application/json",
        headers={**fixed, **(headers or {})},
    )


def _envelope(checks: Sequence[Check]) -> Middleware:
    """The middleware: sets ``request[REQUEST_ID]`` and turns exceptions into answers.

    Cancellation passes through. An error after the answer has begun cuts the connection: appended
    to a stream, an envelope would look like a complete answer.
    """

    @web.middleware
    async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
        identity = request[REQUEST_ID] = logs.request_id(request.headers.get("X-Request-Id"))
        structlog.contextvars.bind_contextvars(request_id=identity)  # each has a task of its own
        try:
            for check in checks:
                check(request)
            return await handler(request)
        except ConnectionError:  # the client left, which is no fault
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            answer = _answered(request, error)
        if request.get(_BEGUN):
            _cut(request)
        return answer

    return envelope


def _answered(request: web.Request, error: Exception) -> web.Response:
    """What went wrong, as an answer. Raises what is none (a redirection)."""
    kind = type(error).__name__
    if isinstance(error, SlotkeeperError):
        answer, kind = _refusal(request, error), error.kind
    elif isinstance(error, web.HTTPException):
        if error.status < HTTPStatus.BAD_REQUEST:
            raise error
        answer = _translated(request, error)
    elif isinstance(error, web.RequestPayloadError):
        answer = _refusal(request, BadRequestError("The request body is broken."))
    else:
        hint = f"Its log has the details under request id {request[REQUEST_ID]}."
        answer = _refusal(request, SlotkeeperError("An error inside Slotkeeper.", hint=hint))
        _log.exception("unexpected error", method=request.method, error=kind)
        return answer
    level = _log.warning if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else _log.info
    level("refused", method=request.method, status=answer.status, kind=kind)
    return answer


def _cut(request: web.Request) -> None:
    """Reset the connection: to a reader "until close" an orderly end would be the end."""
    transport = request.transport
    connection = transport.get_extra_info("socket") if transport is not None else None
    if transport is not None and connection is not None:
        layout = "hh" if sys.platform == "win32" else "ii"
        linger = struct.pack(layout, 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    request[_BEGUN] = True
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
        if request.path.startswith(ANTHROPIC):  # Anthropic's clients look for it under this name
            response.headers["request-id"] = request[REQUEST_ID]


def _refusal(request: web.Request, error: SlotkeeperError) -> web.Response:
    found = {}
    if error.retry_after is not None:
        found["Retry-After"] = str(error.retry_after)
    if isinstance(error, UnauthorizedError):
        found["WWW-Authenticate"] = "Bearer"
    answer = _shaped(request, error.envelope(), error.status, found)
    # What is left of a refused request must not be taken for the next one.
    answer.force_close()
    return answer


def _shaped(
    request: web.Request, body: dict[str, Any], status: int, headers: Mapping[str, str]
) -> web.Response:
    """In the shape of the API the path belongs to."""
    for path, shaped in _SHAPES.items():
        if request.path.startswith(path):
            body = shaped(status, body["error"])
    return json_response(body, status=status, headers=headers)


def _translated(request: web.Request, error: web.HTTPException) -> web.Response:
    kind = _KINDS.get(error.status, SlotkeeperError)
    body = kind(f"{error.reason}.").envelope()
    body["error"]["code"] = error.status
    kept = {
        name: value for name, value in error.headers.items() if name in {"Allow", "Retry-After"}
    }
    answer = _shaped(request, body, error.status, kept)
    answer.force_close()
    return answer
