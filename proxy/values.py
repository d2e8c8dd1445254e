"""How settings are written: sizes, times, lists, keys, addresses, switches of rules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr

from proxy.core.normalise import RULES

_DAY = 86_400
_SIZE_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_TIME_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": _DAY}


def _with_unit(value: Any, units: Mapping[str, int], expected: str) -> float:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2] in units:
            return float(match[1]) * units[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63:
        return float(value)
    raise ValueError(expected)


def _size(value: Any) -> int:
    return int(_with_unit(value, _SIZE_UNITS, 'expected a size in bytes, or like "20GiB"'))


def size_or_auto(value: Any) -> int | None:
    """Bytes; None for ``"auto"``."""
    return None if value is None or value == "auto" else _size(value)


def _seconds(value: Any) -> float:
    return _with_unit(value, _TIME_UNITS, 'expected seconds, or like "10m" or "30d"')


def _listed(value: Any) -> Any:
    """A list out of one string: how an environment variable spells it."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        raise ValueError('expected values with commas between them, like "a, b", and no brackets')
    return [part.strip() for part in value.split(",")]


def _key(value: SecretStr) -> SecretStr:
    if re.fullmatch(r"[!-+\--~]*", value.get_secret_value()) is None:
        raise ValueError("a key is printable ASCII without blanks and commas")
    return value


def _some_key(value: SecretStr) -> SecretStr:
    if not value.get_secret_value():
        raise ValueError("an empty key would let everybody in; an empty list asks for none")
    return value


def _joined(value: Any) -> Any:
    """One string out of a list: how a file may spell several addresses."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    return value


def _urls(value: str) -> str:
    found = [_url(part.strip()) for part in value.split(",")]
    if len(set(found)) < len(found):
        raise ValueError("an address is named twice")
    return ",".join(found)


def _url(value: str) -> str:
    try:
        url = urlsplit(value)
        good = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        good = False
    if not good:
        raise ValueError('expected an address like "http://127.0.0.1:8080"')
    if url.username is not None or url.query or url.fragment:
        raise ValueError("no user, query or fragment in it; a key goes into backend.key")
    return value.rstrip("/")


def _switch(value: str) -> str:
    names = [rule.name for rule in RULES]
    if value[:1] in {"+", "-"} and value[1:] in names:
        return value
    near = difflib.get_close_matches(value.lstrip("+-"), names, 1)
    sign = value[:1] if value.startswith("+") else "-"
    wanted = f'like "{sign}{near[0]}"' if near else f"one of {', '.join(names)}"
    raise ValueError(f'expected "+" or "-" and the name of a rule, {wanted}')


# json_schema_input_type: how a file may spell it (`config schema`).
Size = Annotated[int, BeforeValidator(_size, json_schema_input_type=int | str)]
Seconds = Annotated[float, BeforeValidator(_seconds, json_schema_input_type=float | str)]
Key = Annotated[SecretStr, AfterValidator(_key)]
Keys = Annotated[tuple[Annotated[Key, AfterValidator(_some_key)], ...], BeforeValidator(_listed)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Addresses = Annotated[
    str,
    BeforeValidator(_joined, json_schema_input_type=str | list[str]),
    AfterValidator(_urls),
]
Switches = Annotated[tuple[Annotated[str, AfterValidator(_switch)], ...], BeforeValidator(_listed)]
