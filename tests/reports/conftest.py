"""The wire reports use the fixtures of the integration tests."""

from __future__ import annotations

from tests.integration.conftest import client, fake, log, proxy, serve, slot_dir

__all__ = ["client", "fake", "log", "proxy", "serve", "slot_dir"]
