"""``slotkeeper explain``: what the proxy would do with a request, without doing it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from proxy import words
from proxy.client import Client
from proxy.commands import decisions, tables
from proxy.commands.act import CHAT, Headers, RequestFile, RequestPath, request_of
from proxy.commands.common import AsJson, asking, show
from proxy.core.normalise import RULES
from proxy.telemetry.lines import BAD, FAINT, GOOD

Found = Mapping[str, Any]
AT_ONCE = 0.005  # seconds
WHAT = {rule.name: rule.what for rule in RULES}


@asking
def explain(
    api: Client,
    request: RequestFile,
    *,
    path: RequestPath = CHAT,
    header: Headers = None,
    as_json: AsJson = False,
) -> None:
    """What would be changed about a request, what of it is held, and where it would go.

    Changes nothing.
    """
    found = api.post("api/explain", request_of(request, path, header))
    show(found, as_json, lambda: drawn(found))


def drawn(found: Found) -> RenderableType:
    """The whole explanation."""
    parts: list[RenderableType] = [
        Text(_verdict(found["choice"]), style="bold"),
        "",
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
        parts += ["", Text("What each way would cost", style="bold")]
        parts.append(decisions.costs(found["options"], found["choice"]))
        parts.append(Text(decisions.LEGEND, style=FAINT))
    if found["cold"]:
        parts += [
            "",
            Text("Why it would be cold", style="bold"),
            tables.pairs(decisions.cold(found["cold"])),
        ]
    return Group(*parts)


def _verdict(choice: Found | None) -> str:
    """What it would get, in a line."""
    if choice is None:
        return "the backend would choose the slot (mode forward)"
    seconds = choice["wait"] + choice["prefill"] + choice["transfer"]
    soon = f"about {words.seconds(seconds)} to" if seconds >= AT_ONCE else "next to no wait for"
    return (
        f"it would {decisions.how(choice)}: {words.number(choice['hit'])} of"
        f" {words.many(choice['prompt'], 'token')} reused, {soon} the first token"
    )


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
    if found.get("note"):
        yield words.plain(found["note"])
    if not found["rules"]:
        yield "nothing: the client's own bytes go out"
        return
    yield tables.pairs((rule["rule"], _rule(rule)) for rule in found["rules"])
    yield ""
    yield from difference(found["before"], found["after"])


def _rule(rule: Found) -> str:
    """Where it changed something, and what it does; a newer proxy may have others."""
    what = WHAT.get(rule["rule"])
    return f"{rule['where']}: {what}" if what else str(rule["where"])


def _lines(text: str) -> list[str]:
    r"""JSON, line by line, strings too: broken behind each ``\n`` in them."""
    return re.sub(r"(?<!\\)((?:\\\\)*\\n)", r"\1\n", text).splitlines()


def difference(before: str, after: str) -> Iterator[Text]:
    """Lines that differ, red and green, with three around them."""
    styles = {"+": GOOD, "-": BAD, "@": FAINT}
    for line in difflib.unified_diff(
        _lines(before), _lines(after), "what came", "what would go out", lineterm=""
    ):
        yield Text(words.plain(line), style=styles.get(line[:1], "default"))
