"""Tool arguments as the model wrote them (fastflowlm.md 3.3).

FastFlowLM tells them with sorted keys and no blanks. A model that goes on from what it generated
needs its own text back. How it wrote is known from how many tokens it took, where the model's
tokenizer is at hand (``flm_scribe``). Else it is guessed: most models saw a blank behind each colon
and comma, and the keys in the order of the tool's schema; whether that was right, the next step of
a tool loop shows. The value stays the same; a wrong guess costs what no guess would. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import orjson

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]|[:,]|[^"\[\]{}:,]+')
_OPEN, _CLOSED = "[{", "]}"
_DIGEST = 16
_MOST = 3  # how much a spelling can be ahead or behind: a model may be exchanged
_DOUBTED = 6  # misses in a row, as told, after which another spelling is tried again
_CALLS = 20_000  # whose spelling is remembered
_MODELS = 100


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
class Habit:
    """How one model writes, as far as its answers were found again.

    A model may write now so, now so. As told is what goes out without a proxy, and the proxy may
    not do worse. So once that was found, another spelling must have earned its ``credit``: finds
    that as told would have missed, less its own misses. ``doubt``: misses as told, in a row.
    """

    marks: dict[Spelling, int] = field(default_factory=lambda: dict.fromkeys(Spelling, 0))
    credit: int = 1
    found: bool = False  # as told, ever
    doubt: int = 0
    trust: int = 1

    def guess(self, counted: Alike) -> Spelling:
        """Of those: one that was found again is ahead; if all have failed, it is as told."""
        possible = counted if self.trust >= 0 else ALL
        best = max(self.marks[one] for one in possible)
        leading = [one for one in Spelling if one in possible and self.marks[one] == best]
        if Spelling.TOLD not in possible or self._may(leading[0], best):
            return leading[0]
        return Spelling.TOLD

    def _may(self, one: Spelling, mark: int) -> bool:
        """Whether it may go out in place of the call as told."""
        if mark < 0 and self.marks[Spelling.TOLD] == mark:
            return False
        new = mark >= 0 and not self.found
        return one is Spelling.TOLD or new or self.credit > 0 or self.doubt >= _DOUBTED

    def judge(self, alike: Alike, counted: Alike, *, hit: bool) -> None:
        """An answer went out like that, and was found again or not.

        A hit is for all spellings that would have given the same text, and against the others; a
        miss is against the former, and says nothing of the others.
        """
        for one, mark in self.marks.items():
            if one in alike:
                self.marks[one] = min(mark + 1, _MOST) if hit else max(mark - 1, -_MOST)
            elif hit:
                self.marks[one] = min(mark, max(mark - 1, -1))  # it never failed itself
        if counted != ALL and (hit or alike & counted):
            right = hit and bool(alike & counted)
            self.trust = max(-_MOST, min(self.trust + (1 if right else -1), _MOST))
        if Spelling.TOLD in alike:
            self.found = self.found or hit
            self.doubt = 0 if hit else min(self.doubt + 1, _DOUBTED)
        elif hit:
            self.credit = min(self.credit + 1, _MOST)
        elif self.credit:
            self.credit -= 1
        else:
            self.doubt = 0  # that was the try


@dataclass(slots=True)
class Spellings:
    """What was sent for each call, and how each model writes; ``last``: the model heard last.

    What went out for a call stays with it, whatever is learned later: another text for it would
    cost the prefix that holds it.
    """

    _sent: dict[bytes, Alike] = field(default_factory=dict)  # the oldest use first
    _possible: dict[bytes, Alike] = field(default_factory=dict)  # of calls that were counted
    _habits: dict[str, Habit] = field(default_factory=dict)
    last: str = ""

    def guess(self, model: str, mark: bytes = b"") -> Spelling:
        """For a call that is new (``mark_of`` it)."""
        return self._habits.get(model, Habit()).guess(self._possible.get(mark, ALL))

    def of(self, mark: bytes) -> Alike | None:
        """How a call (``mark_of``) went out before; None: it is a new one."""
        return self._sent.get(mark)

    def sent(self, calls: Mapping[bytes, Alike]) -> None:
        """These go out now."""
        _remember(self._sent, calls)

    def counted(self, calls: Iterable[Mapping[str, Any]], possible: Alike) -> None:
        """An answer with ``calls`` took as many tokens as these spellings of them do."""
        _remember(self._possible, {mark_of(call): possible for call in calls})

    def judge(self, model: str, calls: Iterable[Mapping[str, Any]], *, hit: bool) -> None:
        """Whether an answer with ``calls``, as told, was found again in what was sent for it."""
        marks = [mark_of(call) for call in calls]
        alike = ALL.intersection(*(self._sent.get(mark, ()) for mark in marks))
        counted = ALL.intersection(*(self._possible.get(mark, ALL) for mark in marks))
        if not alike or alike == ALL:
            return  # not sent as they were told, or it made no difference
        if model in self._habits or len(self._habits) < _MODELS:
            self._habits.setdefault(model, Habit()).judge(alike, counted, hit=hit)

    def habits(self, last: str | None = None) -> bytes:
        """What is known of models, for the next start; nothing of what was said.

        ``last``: as if that were the model heard last.
        """
        models = {
            model: {
                "marks": [habit.marks[one] for one in Spelling],
                "credit": habit.credit,
                "found": habit.found,
                "doubt": habit.doubt,
                "trust": habit.trust,
            }
            for model, habit in self._habits.items()
        }
        return orjson.dumps({"last": self.last if last is None else last, "models": models})

    def recall(self, habits: bytes) -> None:
        """Go on from ``habits``. Raises ``ValueError`` for anything else."""
        try:
            told = orjson.loads(habits)
            known = {model: _habit(row) for model, row in told["models"].items()}
            self.last = str(told["last"])
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError("not what was learned of models") from error
        self._habits = dict(list(known.items())[:_MODELS])


def _habit(row: Mapping[str, Any]) -> Habit:
    marks = {
        one: _within(mark, -_MOST, _MOST) for one, mark in zip(Spelling, row["marks"], strict=True)
    }
    credit, doubt = _within(row["credit"], 0, _MOST), _within(row["doubt"], 0, _DOUBTED)
    return Habit(marks, credit, bool(row["found"]), doubt, _within(row["trust"], -_MOST, _MOST))


def _within(value: Any, least: int, most: int) -> int:
    """As far as a habit can go: what is kept may be damaged, or of another release."""
    return max(least, min(int(value), most))


def _remember(known: dict[bytes, Alike], new: Mapping[bytes, Alike]) -> None:
    for mark, alike in new.items():
        known.pop(mark, None)
        known[mark] = alike
    for mark in list(known)[: max(0, len(known) - _CALLS)]:
        del known[mark]


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
    model: str | None,
) -> tuple[list[dict[str, Any]], dict[bytes, Alike]]:
    """Messages with their tool calls as they go out, and how each call is spelled there.

    As it went out before, else as ``model`` is thought to have written it; None: it makes no
    difference, so it stays as told.
    """
    sent: list[dict[str, Any]] = []
    spelled: dict[bytes, Alike] = {}
    for message in messages:
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and calls:
            made = [_replayed(call, orders, spellings, model) for call in calls]
            spelled |= {mark_of(c): how for c, (_, how) in zip(calls, made, strict=True) if how}
            sent.append({**message, "tool_calls": [call for call, _ in made]})
        else:
            sent.append(message)
    return sent, spelled


def _replayed(
    call: Any, orders: Mapping[str, Sequence[str]], spellings: Spellings, model: str | None
) -> tuple[Any, Alike]:
    """The call, and which spellings are alike; none where there is no text of arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str) or not isinstance(function, dict):
        return call, frozenset()
    mark = mark_of(call)
    how = spellings.of(mark) or (AS_TOLD if model is None else frozenset())
    if Spelling.TOLD in how:
        return call, how
    texts = _texts(text, orders.get(str(function.get("name")), ()))
    if model is not None and not how:
        guess = spellings.guess(model, mark)
        how = frozenset(one for one in Spelling if texts[one] == texts[guess])
    return {**call, "function": {**function, "arguments": texts[min(how)]}}, how


def written(calls: Sequence[Any], orders: Mapping[str, Sequence[str]]) -> dict[Spelling, list[str]]:
    """The text a model generates for each of ``calls``, by spelling; empty if one is no call.

    In the form that the templates of Qwen's families show, which are all that go on from their own
    text and are shown tools, gemma4 apart.
    """
    found: dict[Spelling, list[str]] = {one: [] for one in Spelling}
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return {}
        name = orjson.dumps(str(function.get("name"))).decode()
        texts = _texts(function["arguments"], orders.get(str(function.get("name")), ()))
        for one, text in texts.items():
            call_text = f'{{"name": {name}, "arguments": {text}}}'
            found[one].append(f"<tool_call>\n{call_text}\n</tool_call>")
    return found


def _texts(text: str, order: Sequence[str]) -> dict[Spelling, str]:
    """Each spelling; all the same unless it is a compact object whose every byte is known."""
    tokens = _TOKEN.findall(text) if _is_json(text) else []  # else the search is quadratic
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


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


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
