"""How settings may be written."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from proxy.values import Addresses, Keys, Names, Seconds, Size, size_or_auto

KINDS: dict[str, TypeAdapter[Any]] = {
    "addresses": TypeAdapter(Addresses),
    "keys": TypeAdapter(Keys),
    "names": TypeAdapter(Names),
    "seconds": TypeAdapter(Seconds),
    "size": TypeAdapter(Size),
}


@pytest.mark.parametrize(
    ("kind", "written", "meant"),
    [
        ("size", "20GiB", 20 * 1024**3),
        ("size", "1.5 kB", None),  # units as they are defined, no others
        ("size", "1.5 KB", 1500),
        ("size", 7, 7),
        ("seconds", "30d", 30 * 86_400),
        ("seconds", True, None),
        ("names", "a, b", ("a", "b")),
        ("names", ["a"], ("a",)),
        ("keys", "a,", None),
        ("keys", '["a"]', None),  # its quotes and brackets would become part of the keys
        ("addresses", "http://a/, https://b:2", "http://a,https://b:2"),
        ("addresses", ["http://a", "http://b"], "http://a,http://b"),
        ("addresses", ["http://a", "http://a/"], None),
        ("addresses", "http://a,", None),
        ("addresses", "http://[::1", None),
        ("addresses", 5, None),
    ],
)
def test_written(kind: str, written: object, meant: object) -> None:
    """What it becomes; None: it is refused."""
    if meant is None:
        with pytest.raises(ValidationError):
            KINDS[kind].validate_python(written)
        return
    found = KINDS[kind].validate_python(written)
    shown = tuple(key.get_secret_value() for key in found) if kind == "keys" else found
    assert shown == meant


def test_auto() -> None:
    """No size yet."""
    assert (size_or_auto("auto"), size_or_auto(None), size_or_auto("1KiB")) == (None, None, 1024)
