"""LoRA sets that meet."""

from __future__ import annotations

from dataclasses import replace

from proxy.core.adapters import Adapters
from tests.unit.factories import chat, content

NONE, ONE = b"null", b'[{"id":0,"scale":1.0}]'


def test_one_set_is_never_doubtful() -> None:
    """Whatever it is, and whatever is known of the slot."""
    for named in (NONE, ONE):
        adapters = Adapters(lambda: True)
        assert not adapters.doubtful(named, None)
        assert not adapters.doubtful(named, None)


def test_from_the_second_set_on_only_what_is_known_is_reused() -> None:
    """A slot that holds KV of the same set is good; another, or an unknown one, is not."""
    adapters, prompt = Adapters(lambda: True), chat("a")
    with_one = content(replace(prompt, adapters=ONE), 5)
    without = content(prompt, 5)
    adapters.doubtful(NONE, None)
    assert adapters.doubtful(ONE, without)
    assert adapters.doubtful(NONE, None)
    assert adapters.doubtful(NONE, with_one)
    assert not adapters.doubtful(NONE, without)
    assert not adapters.doubtful(ONE, with_one)


def test_a_backend_without_adapters_has_no_doubts() -> None:
    """What requests name is then of no account."""
    adapters = Adapters(lambda: False)
    assert not any(adapters.doubtful(named, None) for named in (NONE, ONE, NONE))
