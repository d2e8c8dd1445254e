"""Backends without slots refuse what needs one."""

from __future__ import annotations

import pytest

from proxy.backends.undriven import Undriven
from proxy.errors import BackendRefusedError


@pytest.mark.parametrize(
    ("what", "given"),
    [
        ("slots", ()), ("save", (0, "a.kv")), ("restore", (0, "a.kv")), ("erase", (0,)),
        ("render", ({},)), ("tokenize", ("x",)),
    ],
)  # fmt: skip
async def test_everything_is_refused(what: str, given: tuple[object, ...]) -> None:
    """With a status no template's refusal has, so it is never taken for one."""
    with pytest.raises(BackendRefusedError, match="this server cannot") as caught:
        await getattr(Undriven(), what)(*given)
    assert caught.value.answer == 501
