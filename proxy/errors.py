"""Every error a user can meet: who failed, what happened, what to do.

The envelope is OpenAI-shaped (clients parse it) with two additions: ``source`` says whether
``slotkeeper`` or the ``backend`` failed, ``hint`` says what to do about it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Source = Literal["slotkeeper", "backend"]


class SlotkeeperError(Exception):
    """Base of all errors that become an HTTP answer; subclasses fix status, type and source."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    source: ClassVar[Source] = "slotkeeper"

    def __init__(self, message: str, *, hint: str = "", retry_after: int | None = None) -> None:
        """``message`` must hold no prompt text and no key; ``retry_after`` is in seconds."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retry_after = retry_after

    def envelope(self) -> dict[str, Any]:
        """The JSON body of the answer; also the payload of an SSE error event."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "code": self.status,
            "source": self.source,
        }
        if self.hint:
            error["hint"] = self.hint
        return {"error": error}


class BadRequestError(SlotkeeperError):
    """The client's request cannot be understood; nothing was forwarded."""

    status = 400
    kind = "invalid_request_error"


class UnauthorizedError(SlotkeeperError):
    """A key is required and none, or a wrong one, was sent."""

    status = 401
    kind = "authentication_error"


class ForbiddenError(SlotkeeperError):
    """The key is good but does not allow this."""

    status = 403
    kind = "permission_error"


class NotFoundError(SlotkeeperError):
    """No such page of the proxy's own."""

    status = 404
    kind = "not_found_error"


class MethodNotAllowedError(SlotkeeperError):
    """The page exists, the method does not."""

    status = 405
    kind = "invalid_request_error"


class RequestTimeoutError(SlotkeeperError):
    """The client did not get its body across in time."""

    status = 408
    kind = "invalid_request_error"


class TooLargeError(SlotkeeperError):
    """The body exceeds the configured limit."""

    status = 413
    kind = "invalid_request_error"


class UnsupportedMediaError(SlotkeeperError):
    """A content encoding the proxy does not read."""

    status = 415
    kind = "invalid_request_error"


class MisdirectedError(SlotkeeperError):
    """The Host header names a host this proxy does not serve (DNS rebinding)."""

    status = 421
    kind = "invalid_request_error"


class UpgradeRefusedError(SlotkeeperError):
    """WebSocket and other upgrades are not proxied."""

    status = 501
    kind = "not_supported_error"


class OverloadedError(SlotkeeperError):
    """Queue full, or waited longer than the deadline."""

    status = 503
    kind = "overloaded_error"


class DrainingError(SlotkeeperError):
    """The proxy is shutting down."""

    status = 503
    kind = "unavailable_error"


class BackendUnreachableError(SlotkeeperError):
    """No connection, or it broke before an answer began."""

    status = 502
    kind = "backend_unreachable"
    source = "backend"


class BackendAbsentError(BackendUnreachableError):
    """Nobody took the connection, so nothing was done."""


class BackendTimeoutError(SlotkeeperError):
    """The backend accepted the request and stayed silent too long."""

    status = 504
    kind = "backend_timeout"
    source = "backend"


class BackendBrokenError(SlotkeeperError):
    """The backend answered with something that is no answer."""

    status = 502
    kind = "backend_error"
    source = "backend"


class BackendRefusedError(SlotkeeperError):
    """A driver call (save, restore, tokenize ...) got an HTTP error, its status in ``answer``."""

    status = 502
    kind = "backend_error"
    source = "backend"

    def __init__(self, message: str, *, answer: int, hint: str = "") -> None:
        """``answer`` is the HTTP status the backend gave."""
        super().__init__(message, hint=hint)
        self.answer = answer


class ConfigError(Exception):
    """All faults of a configuration at once; ``str()`` is what the user reads."""

    def __init__(self, problems: list[str]) -> None:
        """Each problem already names place, setting and suggestion."""
        super().__init__("\n".join(problems))
        self.problems = problems
