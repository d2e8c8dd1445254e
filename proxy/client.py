"""Talks to a running proxy over its own API: plain blocking HTTP, for the command line.

Nothing is taken from the environment and no redirect is followed: the admin key goes to the one
address that was named.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import orjson

OWN = "/_slotkeeper"
OURS = "slotkeeper"  # the source of an error that the proxy itself made
READY_SECONDS = 5.0
READ_SECONDS = 30.0
LISTEN_SECONDS = 60.0  # of silence between two events; the proxy sends a sign of life every 15 s
RUN_SECONDS = 3600.0  # for what computes a prompt or reads every snapshot


class ApiError(Exception):
    """The proxy refused, or answered something else; ``hint`` says what to do, if anything."""

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        """``status``: of the HTTP answer, 0 when there was none."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status


class UnreachableError(ApiError):
    """No connection to the proxy, or it broke."""


class Client:
    """One proxy."""

    def __init__(self, url: str, key: str = "") -> None:
        """``url`` as clients name it; ``key``: the admin key.

        Raises ``ValueError``: no URL, or no key. Its text does not hold the key.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in {"http", "https"} or not _is_host(host):
            raise ValueError('expected an address like "http://127.0.0.1:8088"')
        if not (key.isascii() and key.isprintable()):  # http.client's own error quotes it
            raise ValueError("a key is printable ASCII")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._secure = parts.scheme == "https"
        self._host = host
        self._port = parts.port
        self._base = parts.path.rstrip("/") + OWN
        self._headers = {"Accept": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, page: str, **query: Any) -> Any:
        """A page, such as ``api/slots``; queries that are None are left out."""
        given = urlencode({name: value for name, value in query.items() if value is not None})
        return self._call("GET", f"{page}?{given}" if given else page, None, READ_SECONDS)

    def post(self, page: str, body: Any = None, *, seconds: float = READ_SECONDS) -> Any:
        """Have something done, waiting ``seconds`` at most."""
        return self._call("POST", page, {} if body is None else body, seconds)

    def delete(self, page: str) -> Any:
        """Remove what the page shows."""
        return self._call("DELETE", page, {}, READ_SECONDS)

    def ready(self) -> dict[str, Any] | None:
        """What ``readyz`` says, which is open to all; None when no slotkeeper answers there."""
        try:
            _, raw = self._exchange("GET", "readyz", None, READY_SECONDS)
            found = orjson.loads(raw)
        except (UnreachableError, orjson.JSONDecodeError):
            return None
        return found if isinstance(found, dict) and "ready" in found else None

    def is_slotkeeper(self) -> bool:
        """Whether a proxy like this one is there, whatever it would let this user see."""
        try:
            _, raw = self._exchange("GET", "healthz", None, READY_SECONDS)
            found = orjson.loads(raw)
        except (UnreachableError, orjson.JSONDecodeError):
            return False
        said = found.get("error") if isinstance(found, dict) else None
        refused = isinstance(said, dict) and said.get("source") == OURS
        return refused or found == {"alive": True}

    def events(self) -> Iterator[tuple[str, Any]]:
        """What happens, as it happens: the kind of event and its JSON.

        Raises ``UnreachableError`` when the connection ends, and what ``get`` raises.
        """
        connection = self._connect(LISTEN_SECONDS)
        try:
            answer = self._send(connection, "GET", "api/events", None)
            if answer.status != HTTPStatus.OK:
                self._result(answer.status, answer.read())
            yield from _events(answer)
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"the connection to {self.url} broke: {_why(error)}") from error
        finally:
            connection.close()
        raise UnreachableError(f"the proxy at {self.url} ended the connection")

    def _call(self, method: str, page: str, body: Any, seconds: float) -> Any:
        return self._result(*self._exchange(method, page, body, seconds))

    def _exchange(self, method: str, page: str, body: Any, seconds: float) -> tuple[int, bytes]:
        connection = self._connect(seconds)
        try:
            answer = self._send(connection, method, page, body)
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(
                f"cannot reach the proxy at {self.url}: {_why(error)}",
                "Is it running (`slotkeeper serve`)? If it is elsewhere, say --url.",
            ) from error
        finally:
            connection.close()

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=seconds)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, page: str, body: Any
    ) -> http.client.HTTPResponse:
        data = None if body is None else orjson.dumps(body)
        headers = self._headers if data is None else self._headers | _JSON
        connection.request(method, f"{self._base}/{page}", data, headers)
        return connection.getresponse()

    def _result(self, status: int, raw: bytes) -> Any:
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError:
            found = None
        if status == HTTPStatus.OK and found is not None:
            return found
        error = found.get("error") if isinstance(found, dict) else None
        if not isinstance(error, dict) or error.get("source") not in {OURS, "backend"}:
            raise ApiError(
                f"{self.url} answered {status}, and not as a slotkeeper of this version does",
                "Is the address that of the proxy, not of the model server?",
                status,
            )
        hint = str(error.get("hint") or "")
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN} and error["source"] == OURS:
            hint = "Give the proxy's server.admin_key as SLOTKEEPER_ADMIN_KEY or --key."
        raise ApiError(str(error.get("message")), hint[:1].upper() + hint[1:], status)


_JSON = {"Content-Type": "application/json"}


def segment(text: str) -> str:
    """``text`` as one segment of a page's path."""
    return quote(text, safe="")


def _is_host(name: str) -> bool:
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return name.isprintable() and name != "" and " " not in name


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name, data = "", b""
    for line in answer:
        field, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"data":
            data += value
        elif not line.strip() and data:
            yield name, orjson.loads(data)
            name, data = "", b""


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
