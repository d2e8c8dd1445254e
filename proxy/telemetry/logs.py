"""Structured logs on stderr: one event a line, no secrets and no prompt text."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

import orjson
import structlog
from rich.console import Console
from structlog.typing import EventDict, Processor, WrappedLogger

from proxy.telemetry import limits
from proxy.telemetry.lines import line

# Whoever logs one of these made a mistake; the value must not pay for it.
SECRET_NAMES = frozenset(
    {"key", "keys", "api_key", "x_api_key", "admin_key", "authorization", "body", "prompt"}
    | {"content", "messages"}
)
LEVELS = ("debug", "info", "warning", "error", "critical")
_FRAMES = 12
_ID_BYTES = 16


def request_id(incoming: str | None) -> str:
    """The client's own id where it is harmless in logs and headers, else a new one."""
    if incoming is not None and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", incoming):
        return incoming
    return os.urandom(_ID_BYTES).hex()


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor: drops what is named like a secret, however deep."""
    return {name: _clean(value) for name, value in event.items() if not _is_secret(name)}


def _is_secret(name: object) -> bool:
    return isinstance(name, str) and name.lower().replace("-", "_") in SECRET_NAMES


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _clean(inner) for name, inner in value.items() if not _is_secret(name)}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return value


def locate(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor: an exception becomes types and lines of code, without its message.

    Messages of foreign exceptions quote what they choked on, and that is a client's text.
    """
    found = event.pop("exc_info", None)
    if found is True:
        found = sys.exc_info()
    if isinstance(found, BaseException):
        found = (type(found), found, found.__traceback__)
    if isinstance(found, tuple) and found[1] is not None:
        event["exception"] = _outline(found[1], found[2])
    return event


def _outline(error: BaseException, trace: TracebackType | None) -> str:
    frames = [f"{f.name} ({f.filename}:{f.lineno})" for f in traceback.extract_tb(trace)[-_FRAMES:]]
    text = " < ".join([type(error).__name__, *reversed(frames)])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text if cause is None else f"{text}, after {_outline(cause, cause.__traceback__)}"


def setup(level: str = "info", fmt: str = "auto", stream: TextIO | None = None) -> None:
    """Send all logs, also those of libraries, to one place.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        fmt: ``console`` (lines as ``slotkeeper logs`` prints them), ``json``, or ``auto``:
            console on a terminal.
        stream: stderr if None.
    """
    stream = sys.stderr if stream is None else stream
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        locate,
        redact,
    ]
    console = fmt == "console" or (fmt == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        People(stream)
        if console
        else structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(serializer=_dumps),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler, *(other for other in root.handlers if isinstance(other, Ring))]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *common,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class People(logging.Formatter):
    """Lines for a person, coloured where the stream is a terminal that can do it."""

    def __init__(self, stream: TextIO) -> None:
        """``stream``: only looked at."""
        super().__init__()
        self._console = Console(file=stream, markup=False, emoji=False, highlight=False)
        self._coloured = self._console.is_terminal and not self._console.legacy_windows

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        text = line(row(record))
        if not self._coloured:
            return text.plain
        with self._console.capture() as captured:
            self._console.print(text, soft_wrap=True, end="")
        return captured.get()


class Ring(logging.Handler):
    """The newest lines of the log, for the owner's page; what they lack, the stream lacks too.

    Beside the stream: ``attach`` it, and ``setup`` lets it stay.
    """

    def __init__(self, limit: int = limits.LOG_LINES) -> None:
        """``limit``: how many are kept; older ones are dropped."""
        super().__init__()
        self._rows: deque[dict[str, Any]] = deque(maxlen=limit)
        self.seq = 0  # of the newest line; the first has 1

    def attach(self) -> None:
        """Hear everything that is logged from now on."""
        logging.getLogger().addHandler(self)

    def detach(self) -> None:
        """Hear no more."""
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; called under the handler's lock, in whatever thread logs."""
        self.seq += 1
        self._rows.append({"seq": self.seq, **row(record)})

    def recent(self, n: int, *, level: str = "debug", after: int = 0) -> list[dict[str, Any]]:
        """At most ``n`` lines of ``level`` or worse, newer than number ``after``, newest last."""
        least = LEVELS.index(level)
        with self._held():
            rows = [
                row
                for row in self._rows
                if row["seq"] > after and LEVELS.index(row["level"]) >= least
            ]
        return rows[-n:] if n > 0 else []

    @contextmanager
    def _held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


def row(record: logging.LogRecord) -> dict[str, Any]:
    """What was logged, as plain values: unix seconds, level, event, and its fields."""
    fields = dict(record.msg) if isinstance(record.msg, dict) else _foreign(record)
    event = str(fields.pop("event", ""))
    for name in ("level", "timestamp"):
        fields.pop(name, None)
    level = LEVELS[max(0, min(record.levelno // 10, len(LEVELS)) - 1)]
    fields = orjson.loads(_dumps(fields))
    return {"at": record.created, "level": level, "event": event, "fields": fields}


def _foreign(record: logging.LogRecord) -> dict[str, Any]:
    """A line of a library, as the stream shows it."""
    event: EventDict = {"event": record.getMessage(), "logger": record.name}
    return dict(locate(None, "", {**event, "exc_info": record.exc_info or None}))


def _dumps(event: Mapping[str, Any], **_: Any) -> str:
    """JSON; a field that cannot be (a lone surrogate, 2**64) is told as text, the line is kept."""
    try:
        return _json(event)
    except TypeError:
        return _json({_text(name): _fit(value) for name, value in event.items()})


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _fit(value: Any) -> Any:
    try:
        _json(value)
    except TypeError:
        return _text(value)
    return value


def _text(value: Any) -> str:
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except Exception:  # noqa: BLE001 - whatever it is, the rest of the line is told
        return f"<{type(value).__name__}>"
