"""What is asked of a dry run; its answers are tested over sockets (test_own_api.py)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.placement import Option
from proxy.core.queue import Kind, Lease
from proxy.core.records import Reason
from proxy.errors import BadRequestError
from proxy.server.dry_run import DryRun, question, worded
from tests.unit.factories import chat

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "'path'"),
        ({"path": ["x"], "request": {}}, "'path'"),
        ({"path": "/v1/embeddings", "request": {}}, "'path'"),
        ({"path": CHAT}, "'request'"),
        ({"path": CHAT, "request": []}, "'request'"),
        ({"path": CHAT, "request": {}, "headers": []}, "'headers'"),
        ({"path": CHAT, "request": {}, "headers": {"a": 1}}, "'headers'"),
        ({"path": CHAT, "request": {}, "headers": {"a": "b\r\nc: d"}}, "HTTP does not allow"),
        ({"path": CHAT, "request": {}, "headers": {"a\n": "b"}}, "HTTP does not allow"),
        ({"path": CHAT, "request": {}, "headers": {"": "b"}}, "HTTP does not allow"),
    ],
)
def test_refused(body: dict[str, Any], said: str) -> None:
    """What cannot be asked is refused by the name of the field."""
    with pytest.raises(BadRequestError, match=said):
        question(body)


@pytest.mark.parametrize(
    ("reason", "hit", "prompt", "word"),
    [
        (Reason.SLOT_HIT, 952, 1032, "slot-hit"),
        (Reason.SLOT_HIT, 31, 1032, "cold"),
        (Reason.SLOT_HIT, 20, 30, "slot-hit"),
        (Reason.COLD, 40, 1032, "slot-hit"),
        (Reason.RESTORED, 1000, 1032, "restored"),
        (Reason.RESTORED, 9, 1032, "cold"),
        (Reason.PINNED, 0, 1032, "pinned"),
    ],
)
def test_an_option_has_the_word_of_the_header(
    reason: Reason, hit: int, prompt: int, word: str
) -> None:
    """It goes by what would be reused, as the answer's own word does."""
    option = Option(1, reason, hit, prompt)
    told = worded(option)
    lease = Lease(option, Kind.NARROW, chat("q"), reason, queued=0.0, started=0.0)
    lease.observed(hit, prompt)
    assert told["reason"] == str(lease.reason) == word


async def test_what_the_proxy_answers_by_itself() -> None:
    """Nothing is sent, so nothing is computed: nobody is asked, and it is said."""

    class Lacking:
        async def lacks(self) -> frozenset[str]:
            return frozenset({"/api/chat"})

    nobody: Any = None
    backend: Any = Lacking()
    run = DryRun(nobody, backend, nobody, nobody, nobody, nobody, nobody)
    asked = question({"path": "/api/chat", "request": {"model": "m", "messages": []}})
    told = await run.explain(asked)
    assert (told["prompt_tokens"], told["options"], told["choice"]) == (0, [], None)
    assert "by itself" in told["note"]
    assert told["before"] == told["after"]
    assert orjson.loads(orjson.dumps(told)) == told


def test_keys_are_kept_apart() -> None:
    """The namespace is the client's key's; the body is sent as it was given."""
    request = {"messages": [{"role": "user", "content": "hi"}]}
    asked = [
        question({"path": CHAT, "request": request, "headers": headers})
        for headers in ({}, {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"})
    ]
    assert len({one.namespace for one in asked}) == 3
    assert all(orjson.loads(one.raw) == request for one in asked)
