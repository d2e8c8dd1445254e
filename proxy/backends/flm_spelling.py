"""Tool arguments as the model wrote them, learned by what the server finds again (3.3).

FastFlowLM tells them with sorted keys and no blanks. A model that goes on from what it generated
needs its own text back. How a model writes is guessed first: most saw a blank behind each colon
and comma, and the keys in the order of the tool's schema. Whether the guess was right, the next
step of a tool loop shows. The value stays the same; a wrong guess costs what no guess would. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]|[:,]|[^"\[\]{}:,]+')
_OPEN, _CLOSED = "[{", "]}"
_DIGEST = 16
_MOST = 3  # how much a spelling can be ahead or behind: a model may be exchanged
_CALLS = 20_000  # whose spelling is remembered


class Spelling(StrEnum):
    """How a call's arguments are written; the first is tried first."""

    SCHEMA = "spaced, in the schema's order"
    TOLD = "as told"
    SORTED = "spaced, sorted"
    TIGHT = "compact, in the schema's order"


Alike = frozenset[Spelling]  # spellings that give a call the same text, the one sent among them
ALL: Alike = frozenset(Spelling)
AS_TOLD: Alike = frozenset({Spelling.TOLD})


@dataclass(slots=True)
class Spellings:
    """What was sent for each call, and how far each spelling proved right, by model.

    What went out for a call stays with it, whatever is learned later: another text for it would
    cost the prefix that holds it.
    """

    _sent: dict[bytes, Alike] = field(default_factory=dict)  # the oldest use first
    _marks: dict[str, dict[Spelling, int]] = field(default_factory=dict)

    def guess(self, model: str) -> Spelling:
        """For new calls. One that was found again is ahead; if all have failed, it is as told."""
        marks = self._marks.get(model, {})
        best = max(marks.values(), default=0)
        leading = [one for one in Spelling if marks.get(one, 0) == best]
        return Spelling.TOLD if best < 0 and Spelling.TOLD in leading else leading[0]

    def of(self, mark: bytes) -> Alike | None:
        """How a call (``mark_of``) went out before; None: it is a new one."""
        return self._sent.get(mark)

    def sent(self, calls: Mapping[bytes, Alike]) -> None:
        """These go out now."""
        for mark, alike in calls.items():
            self._sent.pop(mark, None)
            self._sent[mark] = alike
        for mark in list(self._sent)[: max(0, len(self._sent) - _CALLS)]:
            del self._sent[mark]

    def judge(self, model: str, calls: Iterable[Mapping[str, Any]], *, hit: bool) -> None:
        """Whether an answer with ``calls``, as told, was found again in what was sent for it.

        A hit is for all spellings that would have given the same text, and against the others;
        a miss is against the former, and says nothing of the others.
        """
        alike = ALL.intersection(*(self._sent.get(mark_of(call), ()) for call in calls))
        if not alike or alike == ALL:
            return  # not sent as they were told, or it made no difference
        marks = self._marks.setdefault(model, dict.fromkeys(Spelling, 0))
        for one, mark in marks.items():
            if one in alike:
                marks[one] = min(mark + 1, _MOST) if hit else max(mark - 1, -_MOST)
            elif hit:
                marks[one] = min(mark, max(mark - 1, -1))  # it never failed itself


def mark_of(call: Mapping[str, Any]) -> bytes:
    """What a call is known by: its id, and its arguments as told, for not all ids are unique."""
    digest = blake2b(digest_size=_DIGEST)
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    for part in (call.get("id"), arguments):
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


def schema_orders(tools: Any) -> dict[str, tuple[str, ...]]:
    """The order of the parameters of each tool, by its name."""
    orders: dict[str, tuple[str, ...]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool["function"]
        parameters = function.get("parameters")
        known = parameters.get("properties") if isinstance(parameters, dict) else None
        orders[function["name"]] = tuple(known) if isinstance(known, dict) else ()
    return orders


def replayed(
    messages: Sequence[dict[str, Any]],
    orders: Mapping[str, Sequence[str]],
    spellings: Spellings,
    guess: Spelling | None,
) -> tuple[list[dict[str, Any]], dict[bytes, Alike]]:
    """Messages with their tool calls as they go out, and how each call is spelled there.

    As it went out before, else by ``guess``; None: it makes no difference, so it stays as told.
    """
    sent: list[dict[str, Any]] = []
    spelled: dict[bytes, Alike] = {}
    for message in messages:
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and calls:
            made = [_replayed(call, orders, spellings, guess) for call in calls]
            spelled |= {mark_of(c): how for c, (_, how) in zip(calls, made, strict=True) if how}
            sent.append({**message, "tool_calls": [call for call, _ in made]})
        else:
            sent.append(message)
    return sent, spelled


def _replayed(
    call: Any, orders: Mapping[str, Sequence[str]], spellings: Spellings, guess: Spelling | None
) -> tuple[Any, Alike]:
    """The call, and which spellings are alike; none where there is no text of arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str) or not isinstance(function, dict):
        return call, frozenset()
    how = spellings.of(mark_of(call)) or (AS_TOLD if guess is None else frozenset())
    if Spelling.TOLD in how:
        return call, how
    texts = _texts(text, orders.get(str(function.get("name")), ()))
    if guess is not None and not how:
        how = frozenset(one for one in Spelling if texts[one] == texts[guess])
    return {**call, "function": {**function, "arguments": texts[min(how)]}}, how


def _texts(text: str, order: Sequence[str]) -> dict[Spelling, str]:
    """Each spelling; all the same unless it is a compact object whose every byte is known."""
    tokens = _TOKEN.findall(text)
    blank = any(token[0] != '"' and any(map(str.isspace, token)) for token in tokens)
    if blank or "".join(tokens) != text or not (text.startswith("{") and text.endswith("}")):
        return dict.fromkeys(Spelling, text)
    told = _pairs(tokens[1:-1])
    known = {f'"{name}"': place for place, name in enumerate(order)}
    ordered = sorted(told, key=lambda pair: known.get(pair[0], len(known)))
    return {
        Spelling.SCHEMA: _joined(ordered, " "),
        Spelling.TOLD: text,
        Spelling.SORTED: _joined(told, " "),
        Spelling.TIGHT: _joined(ordered, ""),
    }


def _pairs(tokens: Sequence[str]) -> list[list[str]]:
    """The tokens of each top-level pair."""
    found: list[list[str]] = [[]] if tokens else []
    depth = 0
    for piece in tokens:
        depth += (piece in _OPEN) - (piece in _CLOSED)
        if piece == "," and not depth:
            found.append([])
        else:
            found[-1].append(piece)
    return found


def _joined(pairs: Iterable[Sequence[str]], blank: str) -> str:
    """``blank``: what stands behind each colon and comma."""
    told = (
        "".join(piece + blank if piece in {":", ","} else piece for piece in pair) for pair in pairs
    )
    return "{" + f",{blank}".join(told) + "}"
