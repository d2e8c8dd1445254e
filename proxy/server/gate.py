"""The first thing a request meets: framing, target, host, size, keys. Nothing is read before.

Each rule is a small function that raises; the row ``_RULES`` is the order. The gaps of aiohttp's
own parser it closes are listed in style-and-reliability.md 2.3.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote, urlsplit

from aiohttp import HttpVersion10, HttpVersion11, web

from proxy.errors import (
    BadRequestError,
    ForbiddenError,
    MisdirectedError,
    TooLargeError,
    UnauthorizedError,
    UnsupportedMediaError,
    UpgradeRefusedError,
)

OWN = "/_slotkeeper"
_API = f"{OWN}/api/"
OPEN = frozenset({f"{OWN}/healthz", f"{OWN}/readyz"})
_SAFE = frozenset({"GET", "HEAD"})
_OUR_SITE = frozenset({"same-origin", "none"})  # none: the user's own doing
# What changes the backend's state behind the scheduler's back (llama-server.md 1), also behind a
# prefix (--api-prefix).
_STATEFUL = re.compile(
    r"(^|/)(slots/[^/]+|props|lora-adapters|models(/load|/unload)?|v1/streams?(/.*)?)$"
)
# Decoded, without empty and '.' segments: no spelling gets around a rule.
_PLAIN_PATH = web.RequestKey("plain_path", str)
_KEY_TAKEN = web.RequestKey("key_taken", bool)
_KEY_HEADERS = frozenset({"authorization", "x-api-key"})
_REMEMBERED = 64  # paths and hosts that were looked at before


@dataclass(frozen=True, slots=True)
class GateRules:
    """What the gate has to know of the settings; see ``config.example.toml`` for each."""

    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str = field(default="", repr=False)
    max_body: int = 64 * 1024**2
    open: frozenset[str] = frozenset()  # paths of our own that hold no data (the dashboard's files)
    names: frozenset[str] = field(init=False)  # hosts it answers to

    def __post_init__(self) -> None:
        names = map(_host_name, ("localhost", self.host, *self.allowed_hosts))
        object.__setattr__(self, "names", frozenset(names))


def check(request: web.Request, rules: GateRules) -> None:
    """To be asked right inside the envelope, before anything of the body is read."""
    for rule in _RULES:
        rule(request, rules)


def client_headers(request: web.Request, drop: Iterable[str] = ()) -> list[tuple[str, str]]:
    """The client's headers without a key that was meant for the proxy itself.

    ``drop``: names, in lower case, of others to leave out.
    """
    drop = {*drop, *_KEY_HEADERS} if request.get(_KEY_TAKEN) else {*drop}
    return [(name, value) for name, value in request.headers.items() if name.lower() not in drop]


def _framing(request: web.Request, _rules: GateRules) -> None:
    if request.version not in {HttpVersion10, HttpVersion11}:
        raise BadRequestError("Only HTTP/1.0 and HTTP/1.1 are spoken here.")
    if request.version == HttpVersion10 and "Transfer-Encoding" in request.headers:
        raise BadRequestError("HTTP/1.0 knows no Transfer-Encoding.")


def _target(request: web.Request, _rules: GateRules) -> None:
    if not request.raw_path.startswith("/"):
        raise BadRequestError("The request target must be a path.")
    request[_PLAIN_PATH] = _plain(request.raw_path.partition("?")[0])


@lru_cache(_REMEMBERED)
def _plain(path: str) -> str:
    segments = unquote(path).split("/")  # as the backend reads it
    if ".." in segments:
        raise BadRequestError("The path must not contain '..'.")
    return "/".join([part for part in segments if part not in {"", "."}])


def _host(request: web.Request, rules: GateRules) -> None:
    """Against DNS rebinding: a web page reaches us by a name of its own, never by one of ours."""
    header = request.headers.get("Host")
    if header is None:
        return  # HTTP/1.0 without Host: no browser. aiohttp demands it of HTTP/1.1
    name = _host_name(header)
    if name in rules.names:
        return
    address = _address(name)
    anywhere = _address(rules.host)
    if address and (address.is_loopback or (anywhere and anywhere.is_unspecified)):
        return
    raise MisdirectedError(
        "This proxy does not answer to the host name of this request.",
        hint="Add the name to server.allowed_hosts.",
    )


@lru_cache(_REMEMBERED)
def _host_name(header: str) -> str:
    """Without port, brackets and trailing dot, in lower case."""
    match = re.fullmatch(
        r"\[([0-9A-Fa-f:.]+)\](?::\d*)?|([^:/@\[\]]+?)\.?(?::\d*)?", header.strip()
    )
    return ((match[1] or match[2]) if match else header).lower()


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _upgrade(request: web.Request, _rules: GateRules) -> None:
    """``h2c`` alone is only an offer (every Java client makes it), and is ignored."""
    offered = request.headers.get("Upgrade")
    if offered is not None and offered.strip().lower() not in {"", "h2c"}:
        raise UpgradeRefusedError("WebSocket and other upgrades are not proxied.")


def _body(request: web.Request, rules: GateRules) -> None:
    encodings = ",".join(request.headers.getall("Content-Encoding", ()))
    if encodings and any(
        name.strip().lower() not in {"", "identity"} for name in encodings.split(",")
    ):
        raise UnsupportedMediaError(
            "Compressed request bodies are not read.", hint="Send it without Content-Encoding."
        )
    if (request.content_length or 0) > rules.max_body:
        raise TooLargeError(
            f"The body is larger than {rules.max_body} bytes.", hint="Raise server.max_body."
        )


def _cross_site(request: web.Request, _rules: GateRules) -> None:
    """Other routes leave Origin to the backend, which has its own rules for browsers.

    A page on another port of this machine has an Origin like ours; ``Sec-Fetch-Site`` tells it.
    Reads of the own API are refused too: what a page may not see would still take a listener's
    place.
    """
    if not _is_own(request) or (request.method in _SAFE and not request.path.startswith(_API)):
        return
    if request.headers.get("Sec-Fetch-Site", "none") not in _OUR_SITE:
        raise ForbiddenError("A web page of another site may not do this.")
    origin = request.headers.get("Origin")
    if origin is None:
        return
    try:
        url = urlsplit(origin)
        address = _address(url.hostname or "")
    except ValueError:
        url, address = urlsplit(""), None
    loopback = url.hostname == "localhost" or bool(address and address.is_loopback)
    if not loopback and (not url.netloc or url.netloc != request.headers.get("Host")):
        raise ForbiddenError("A web page of another site may not do this.")


def _is_own(request: web.Request) -> bool:
    return request[_PLAIN_PATH].partition("/")[0] == OWN.strip("/")


def _keys(request: web.Request, rules: GateRules) -> None:
    """Whose request is it, and may they? Notes whether the key was ours."""
    stateful = request.method not in {*_SAFE, "OPTIONS"} and _STATEFUL.search(request[_PLAIN_PATH])
    request[_KEY_TAKEN] = bool(rules.keys or stateful)
    if _is_own(request):
        request[_KEY_TAKEN] = True
        if request.raw_path.partition("?")[0] not in OPEN | rules.open:
            _admin(request, rules)
    elif stateful:
        _need_admin_key(request, rules)
    elif request.method != "OPTIONS":  # a browser's preflight never carries a key
        _client(request, rules)


def _admin(request: web.Request, rules: GateRules) -> None:
    if rules.admin_key:
        _need_admin_key(request, rules)
        return
    peer = _address(request.remote or "")
    relayed = any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP"))
    if peer is None or not peer.is_loopback or relayed:
        raise ForbiddenError(
            "These pages are open to this machine only.",
            hint="Set server.admin_key and send it as 'Authorization: Bearer'.",
        )


def _need_admin_key(request: web.Request, rules: GateRules) -> None:
    if not rules.admin_key:
        raise ForbiddenError(
            "This request changes the backend's state, and no admin key is configured.",
            hint="Set server.admin_key and send it as 'Authorization: Bearer'.",
        )
    if not _one_of(_bearers(request), [rules.admin_key]):
        raise UnauthorizedError("The admin key is needed here, as 'Authorization: Bearer'.")


def _client(request: web.Request, rules: GateRules) -> None:
    if rules.keys:
        sent = [*_bearers(request), *request.headers.getall("X-Api-Key", [])]
        if not _one_of(sent, rules.keys):
            raise UnauthorizedError(
                "A key is needed, and this is none of server.keys.",
                hint="Send it as 'Authorization: Bearer' or 'X-Api-Key'.",
            )


def _bearers(request: web.Request) -> list[str]:
    schemes = (value.partition(" ") for value in request.headers.getall("Authorization", []))
    return [key.strip() for scheme, _, key in schemes if scheme.lower() == "bearer"]


def _one_of(sent: Iterable[str], keys: Iterable[str]) -> bool:
    """Compares all with all, so that the time taken says nothing about a key."""
    wanted = [key.encode() for key in keys]
    hits = [
        hmac.compare_digest(candidate.encode("utf-8", "surrogateescape"), key)
        for candidate in sent
        for key in wanted
    ]
    return any(hits)


_RULES: tuple[Callable[[web.Request, GateRules], None], ...] = (
    _framing,
    _target,
    _host,
    _upgrade,
    _body,
    _cross_site,
    _keys,
)
