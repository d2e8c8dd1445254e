"""The two pages for supervisors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from proxy.server.health import healthz, readyz


class Fixed:
    """Somebody who always says the same."""

    def __init__(self, *, ready: bool) -> None:
        """``ready``: what is said."""
        self._ready = ready

    def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """Always the same."""
        return self._ready, {"mode": "forward", "why": "not probed"}


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_health(ready: bool, status: int) -> None:
    """Readyz follows the verdict and says why; healthz is content to be asked."""
    app = web.Application()
    app.router.add_get("/h", healthz)
    app.router.add_get("/r", readyz(Fixed(ready=ready)))
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/r")
        assert answer.status == status
        assert orjson.loads(await answer.read()) == {
            "ready": ready, "mode": "forward", "why": "not probed",
        }  # fmt: skip
        answer = await client.get("/h")
        assert (answer.status, await answer.read()) == (200, b'{"alive":true}')
