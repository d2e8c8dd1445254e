"""What is asked of a dry run; its answers are tested over sockets (test_own_api.py)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.errors import BadRequestError
from proxy.server.dry_run import question

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


def test_keys_are_kept_apart() -> None:
    """The namespace is the client's key's; the body is sent as it was given."""
    request = {"messages": [{"role": "user", "content": "hi"}]}
    asked = [
        question({"path": CHAT, "request": request, "headers": headers})
        for headers in ({}, {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"})
    ]
    assert len({one.namespace for one in asked}) == 3
    assert all(orjson.loads(one.raw) == request for one in asked)
