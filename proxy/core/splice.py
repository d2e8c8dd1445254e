"""Changes a JSON object without touching a byte of what stays."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

_SPACE = b" \t\r\n"
# One match per bracket, strings skipped; one per mark, for the little text between brackets. What
# is skipped is never given back (``++``), and there is always a match: a text without a bracket
# costs linear time.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+.?", re.DOTALL)
_MARK = re.compile(_STRING + rb"|[,:]", re.DOTALL)


def splice(raw: bytes, fields: Mapping[str, Any]) -> bytes:
    """Put ``fields`` before the closing brace of ``raw``, the bytes of a valid JSON object.

    A name that ``raw`` has already is overridden: of duplicate names llama-server's parser takes
    the last (``tests/real/test_equality.py``). Without fields, ``raw`` itself is returned. Raises
    ``ValueError`` when ``raw`` is no object.
    """
    if not fields:
        return raw
    head = raw.rstrip(_SPACE)
    if not head.endswith(b"}"):
        raise ValueError("not a JSON object")
    head = head[:-1].rstrip(_SPACE)
    # Only an empty object can end in an opening brace here.
    comma = b"" if head.endswith(b"{") else b","
    return head + comma + orjson.dumps(fields)[1:]


def rebuild(
    raw: bytes,
    body: Mapping[str, Any],
    lists: Mapping[str, Sequence[tuple[int | None, bytes]]],
    drop: Collection[str] = (),
    fields: Mapping[str, Any] | None = None,
) -> bytes:
    """The object ``raw`` (parsed: ``body``) with other elements in some of its arrays.

    ``lists``: by member name, the new elements as canonical JSON; beside it the place in the
    member's own array of one that stays, its bytes untouched, None for a new one. ``drop``: members
    to leave out. ``fields``: members to add (see ``splice``) or to replace.
    Raises ``ValueError`` when ``raw`` has no such array.
    """
    drop = {*drop, *(fields or ())}
    compact = orjson.dumps(body) == raw  # as most clients write it: nothing to look for
    values = dict.fromkeys(body, b"") if compact else dict(members(raw))
    out: list[bytes] = []
    for name, value in values.items():
        if name in drop:
            continue
        if name in lists:
            own = body[name] if compact else elements(value)
            if not isinstance(own, list):
                raise ValueError("not a JSON array")
            parts = [
                data if compact or place is None else own[place] for place, data in lists[name]
            ]
            value = b"[" + b",".join(parts) + b"]"  # noqa: PLW2901 - the member's new value
        elif compact:
            value = orjson.dumps(body[name])  # noqa: PLW2901 - its own bytes
        out.append(orjson.dumps(name) + b":" + value)
    if lists.keys() - values.keys():
        raise ValueError("no such array")
    return splice(b"{" + b",".join(out) + b"}", fields or {})


def members(raw: bytes) -> list[tuple[str, bytes]]:
    """Name and value of every member of the object ``raw``, in order."""
    found: list[tuple[str, bytes]] = []
    for part in _parts(raw):
        name = _MARK.match(part)
        if name is None:
            raise ValueError("not a JSON object")
        value = part[name.end() :].lstrip(_SPACE)
        found.append((orjson.loads(name[0]), value[1:].lstrip(_SPACE)))
    return found


def elements(raw: bytes) -> list[bytes]:
    """Every element of the array ``raw``. Raises ``ValueError`` when it is none."""
    if raw[:1] != b"[":
        raise ValueError("not a JSON array")
    return _parts(raw)


def _parts(raw: bytes) -> list[bytes]:
    """What stands between the commas of the outermost brackets, without space around it."""
    found: list[bytes] = []
    depth, start, at = 0, 0, 0
    for token in _BRACKET.finditer(raw):
        stop = token.end()
        if stop == token.start() or raw[stop - 1] not in b"{}[]":
            break
        if depth == 1:  # only here a comma parts two members
            for mark in _MARK.finditer(raw, at, stop - 1):
                if mark[0] == b",":
                    found.append(raw[start : mark.start()].strip(_SPACE))
                    start = mark.end()
        if raw[stop - 1] in b"{[":
            depth += 1
            start = stop if depth == 1 else start
        else:
            depth -= 1
            if depth == 0 and (rest := raw[start : stop - 1].strip(_SPACE)):
                found.append(rest)
        at = stop
    return found
