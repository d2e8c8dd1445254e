"""``check-config``, ``config show`` and ``config schema``."""

from __future__ import annotations

import os
from typing import Any

import typer
from pydantic import SecretStr

from proxy import words
from proxy.commands import tables
from proxy.commands.common import (
    USAGE,
    AsJson,
    ConfigFile,
    console,
    print_json,
    settings,
    show,
)
from proxy.config import Config, load_with_places
from proxy.errors import ConfigError

HIDDEN = "(set, not shown)"
SIZES = ("max_body", "max_bytes", "keep_free", "daily_write")  # bytes


def check_config(*, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Find everything that is wrong with the settings. Exit status 2 if anything is."""
    if not as_json:
        report(settings(config))
        return
    try:
        warnings, problems = load_with_places(config, {}, os.environ)[0].warnings(), []
    except ConfigError as error:
        warnings, problems = [], error.problems
    print_json({"valid": not problems, "problems": problems, "warnings": warnings})
    if problems:
        raise typer.Exit(USAGE)


def report(found: Config) -> None:
    """Say of a valid configuration that it is, and what is odd about it."""
    out = console()
    out.print("configuration is valid")
    for warning in found.warnings():
        out.print(f"warning: {warning}")


def show_config(*, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Every setting's value, and where it comes from."""
    settings(config)  # says what is wrong
    found, places = load_with_places(config, {}, os.environ)
    rows = [
        {
            "setting": f"{section}.{name}",
            "value": _shown(value),
            "from": places.get(f"{section}.{name}", "default"),
        }
        for section, part in found
        for name, value in part
    ]
    show(
        {"settings": rows},
        as_json,
        lambda: tables.table(
            ("SETTING", "VALUE", "FROM"),
            ((row["setting"], _spelled(row["setting"], row["value"]), row["from"]) for row in rows),
        ),
    )


def schema() -> None:
    """The JSON schema of the TOML file, for editors that check it."""
    print_json(Config.model_json_schema())


def _shown(value: Any) -> Any:
    """As JSON, and never a key."""
    if isinstance(value, SecretStr):
        return HIDDEN if value.get_secret_value() else ""
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    return value


def _spelled(setting: str, value: Any) -> str:
    """With its unit; the settings that are fractions are seconds, all of them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g} s" if value < words.MINUTE else words.seconds(value)
    if isinstance(value, int) and setting.endswith(SIZES):
        return words.size(value)
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return '""' if value == "" else "auto" if value is None else f"{value}"
