"""For every test: nothing is written into the home of whoever runs them; the longest begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

LONGEST = "test_three_conversations_share_two_slots_and_survive_every_restart"  # a minute or two


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side with the others: begun at the end it would run alone."""
    items.sort(key=lambda item: item.name != LONGEST)
