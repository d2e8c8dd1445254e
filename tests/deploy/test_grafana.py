"""Grafana's dashboard against Grafana's own schema, as the types that Grafana makes from it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

import orjson
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.files import read

FILE: dict[str, Any] = orjson.loads(read("grafana/slotkeeper.json"))


def parsed(raw: dict[str, Any]) -> Dashboard:
    """A dashboard as Grafana's types, panels and queries of its plugins included."""
    register_default_plugins()
    return Dashboard.from_json(raw)


def lost(raw: Any, known: Any, place: str = "") -> Iterator[str]:
    """Places of a file that the schema has no room for, or reads otherwise."""
    if isinstance(raw, dict) and isinstance(known, dict):
        for name, value in raw.items():
            if name in known:
                yield from lost(value, known[name], f"{place}.{name}")
            else:
                yield f"{place}.{name}"
    elif isinstance(raw, list) and isinstance(known, list) and len(raw) == len(known):
        for number, (value, other) in enumerate(zip(raw, known, strict=True)):
            yield from lost(value, other, f"{place}[{number}]")
    elif raw != known:
        yield place


def misfits(value: Any, hint: Any, place: str = "") -> Iterator[str]:
    """Places where a value is not of the type the schema says."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        yield from min((list(misfits(value, one, place)) for one in inner), key=len)
    elif not fits(value, hint):
        yield place
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from misfits(item, inner[0] if inner else Any, f"{place}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from misfits(item, inner[1] if inner else Any, f"{place}.{name}")
    elif type(value).__module__.startswith("grafana_foundation_sdk"):
        for name, one in typing.get_type_hints(type(value)).items():
            yield from misfits(getattr(value, name), one, f"{place}.{name}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type that is no union, whatever is in it."""
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if issubclass(kind, Enum):
        return value in {one.value for one in kind}
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def test_the_schema_knows_all_of_it() -> None:
    """No field is one that Grafana would silently ignore."""
    known = orjson.loads(JSONEncoder(sort_keys=True).encode(parsed(FILE)))
    assert list(lost(FILE, known)) == []


def test_all_of_it_is_of_the_right_type() -> None:
    """Every value, options of panels and queries included, is of the type Grafana expects."""
    assert list(misfits(parsed(FILE), Dashboard)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schemaVersion",), "39"),
        (("graphTooltip",), 7),
        (("panels", 1, "gridPos", "w"), "6"),
        (("panels", 1, "options", "textMode"), "sometimes"),
        (("panels", 1, "targets", 0, "expr"), 3),
    ],
)
def test_a_wrong_type_is_found(path: tuple[str | int, ...], value: Any) -> None:
    """The two tests above could fail."""
    raw: Any = orjson.loads(read("grafana/slotkeeper.json"))
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert list(misfits(parsed(raw), Dashboard))


def test_an_unknown_field_is_found() -> None:
    """A field the schema does not have does not get through."""
    raw = {**FILE, "panels": [{**FILE["panels"][1], "repaet": "x"}]}
    known = orjson.loads(JSONEncoder(sort_keys=True).encode(parsed(raw)))
    assert list(lost(raw, known)) == [".panels[0].repaet"]
