"""What a reload changes, and what it leaves until the next start."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from proxy.config import Config
from proxy.reload import LIVE, changes, effective

SETTINGS = {f"{s}.{name}" for s, part in Config() for name in type(part).model_fields}


def changed(base: Config, **values: Any) -> Config:
    """``base`` with some settings, ``server__port=1`` for ``server.port``."""
    for name, value in values.items():
        section, _, setting = name.partition("__")
        part = getattr(base, section).model_copy(update={setting: value})
        base = base.model_copy(update={section: part})
    return base


def test_live_settings_exist() -> None:
    """Each is a setting; what binds an address, a folder or a connection is none of them."""
    assert LIVE <= SETTINGS
    assert not LIVE & {
        "server.host", "server.port", "server.max_body", "backend.url", "backend.key",
        "backend.slot_save_path", "cache.enabled", "cache.store", "normalise.ledger",
    }  # fmt: skip


def test_nothing_changed() -> None:
    """An equal configuration is no change, keys included."""
    one = changed(Config(), server__keys=(SecretStr("a"),))
    assert changes(one, changed(Config(), server__keys=(SecretStr("a"),))) == ((), ())


def test_both_kinds() -> None:
    """What can change now is told apart from what cannot, in the order of the configuration."""
    new = changed(
        Config(),
        server__port=1,
        server__keys=(SecretStr("b"),),
        server__log_level="debug",
        backend__url="http://h:1",
        cache__max_files=3,
        normalise__mode="off",
    )
    found = changes(Config(), new)
    assert found.live == ("server.keys", "server.log_level", "cache.max_files")
    assert found.restart == ("server.port", "backend.url", "normalise.mode")


def test_what_a_running_proxy_works_by() -> None:
    """The live settings are the new ones, all others stay: also over several reloads."""
    first = changed(Config(), server__port=1, server__max_queue=2)
    now = effective(Config(), first)
    assert now == changed(Config(), server__max_queue=2)
    assert changes(now, first) == ((), ("server.port",)), "it still needs a restart"
    assert effective(now, Config()) == Config()


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_every_setting_is_one_or_the_other(setting: str) -> None:
    """Each setting that differs is named once, and taken over exactly if it is live."""
    section, _, name = setting.partition(".")
    new = changed(Config(), **{f"{section}__{name}": "something else"})
    found = changes(Config(), new)
    assert found == (((setting,), ()) if setting in LIVE else ((), (setting,)))
    assert effective(Config(), new) == (new if setting in LIVE else Config())


@given(st.sets(st.sampled_from(sorted(SETTINGS))))
def test_taking_over_is_complete(names: set[str]) -> None:
    """After a reload only what needs a restart differs; reloading again changes nothing."""
    new = changed(Config(), **{name.replace(".", "__"): object() for name in names})
    now = effective(Config(), new)
    assert changes(now, new) == ((), changes(Config(), new).restart)
    assert effective(now, new) == now
