"""``slotkeeper explain``: what the proxy would do with a request, without doing it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from proxy.commands import tables, words
from proxy.commands.act import CHAT, RequestFile, RequestPath, request_of
from proxy.commands.common import AsJson, ConfigFile, Key, Url, show, talking

Found = Mapping[str, Any]


def explain(
    request: RequestFile,
    *,
    path: RequestPath = CHAT,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """What would be changed about a request, what of it is held, and where it would go.

    Changes nothing.
    """
    body = request_of(request, path)
    with talking(url, key, config) as api:
        found = api.post("api/explain", body)
    show(found, as_json, lambda: drawn(found))


def drawn(found: Found) -> RenderableType:
    """The whole explanation."""
    parts: list[RenderableType] = [
        tables.pairs(
            [
                ("client", _client(found)),
                ("conversation", _conversation(found)),
                ("prompt", f"{words.number(found['prompt_tokens'])} tokens"),
                ("held", _held(found["prefix"])),
            ]
        ),
        "",
        *_changes(found),
    ]
    if found["options"]:
        parts += ["", Text("What it would cost, in seconds", style="bold")]
        parts.append(tables.costs(found["options"], found["choice"]))
    elif not found["choice"]:
        parts += ["", "The backend would choose the slot (mode forward)."]
    if found["cold"]:
        parts += ["", Text("Why it would be cold", style="bold"), tables.record(found["cold"])]
    return Group(*parts)


def _client(found: Found) -> str:
    side = f" (beside the conversation: {words.plain(found['side'])})" if found["side"] else ""
    return f"{words.plain(found['client'] or 'not recognised')}{side}"


def _conversation(found: Found) -> str:
    if not found["conversation"]:
        return "a new one"
    return f"{words.short(found['conversation'])}, {found['known']} messages are known"


def _held(prefix: Found) -> str:
    if not prefix["tokens"]:
        return "nothing of it"
    where = "slot " + str(prefix["slot"]) if prefix["slot"] is not None else "a snapshot"
    if prefix["snapshot"]:
        where += f" ({words.short(prefix['snapshot'])})"
    return f"{words.number(prefix['tokens'])} tokens, by {where}"


def _changes(found: Found) -> Iterator[RenderableType]:
    yield Text("What would be changed", style="bold")
    if not found["rules"]:
        yield "nothing: the client's own bytes go out"
        return
    yield tables.pairs((rule["rule"], rule["where"]) for rule in found["rules"])
    yield ""
    yield from difference(found["before"], found["after"])


def _lines(text: str) -> list[str]:
    r"""JSON, line by line, strings too: broken behind each ``\n`` in them."""
    return re.sub(r"(?<!\\)((?:\\\\)*\\n)", r"\1\n", text).splitlines()


def difference(before: str, after: str) -> Iterator[Text]:
    """Lines that differ, red and green, with three around them."""
    styles = {"+": tables.GOOD, "-": tables.BAD, "@": tables.FAINT}
    for line in difflib.unified_diff(
        _lines(before), _lines(after), "what came", "what would go out", lineterm=""
    ):
        yield Text(words.plain(line), style=styles.get(line[:1], "default"))
