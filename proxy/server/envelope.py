"""Outermost middleware: whatever goes wrong becomes one JSON envelope with a request id."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

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

REQUEST_ID = web.RequestKey("request_id", str)
ANTHROPIC = "/v1/messages"
# Paths whose clients read errors of another shape than OpenAI's.
_SHAPES: Mapping[str, Callable[[int, Any], dict[str, Any]]] = {
    ANTHROPIC: anthropic_errors.shaped,
    "/api/": ollama_errors.shaped,
}
_BEGUN = web.RequestKey("begun", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

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


def install(app: web.Application) -> None:
    """Make ``envelope`` the outermost middleware and stamp every answer with its request id."""
    app.middlewares.insert(0, envelope)
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


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Sets ``request[REQUEST_ID]``; turns exceptions into answers.

    Cancellation passes through. An error after the answer has begun cuts the connection: appended
    to a stream, an envelope would look like a complete answer.
    """
    identity = request[REQUEST_ID] = logs.request_id(request.headers.get("X-Request-Id"))
    structlog.contextvars.bind_contextvars(request_id=identity)  # each has a task of its own
    try:
        return await handler(request)
    except SlotkeeperError as error:
        answer = _refusal(request, error)
        _note(request, answer.status, error.kind)
    except web.HTTPException as error:
        if error.status < HTTPStatus.BAD_REQUEST:
            raise
        answer = _translated(request, error)
        _note(request, answer.status, type(error).__name__)
    except web.RequestPayloadError as error:
        answer = _refusal(request, BadRequestError("The request body is broken."))
        _note(request, answer.status, type(error).__name__)
    except ConnectionError:  # the client left, which is no fault
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
        answer = _refusal(
            request,
            SlotkeeperError(
                "An error inside Slotkeeper.",
                hint=f"Its log has the details under request id {identity}.",
            ),
        )
        _log.exception("unexpected error", method=request.method, error=type(error).__name__)
    if request.get(_BEGUN):
        _cut(request)
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


def _note(request: web.Request, status: int, kind: str) -> None:
    level = _log.warning if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _log.info
    level("refused", method=request.method, status=status, kind=kind)
