"""Commands that change something: ``forget``, ``warm``, ``pause``, ``resume``, ``drain``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from proxy import words
from proxy.client import RUN_SECONDS, Client, segment
from proxy.commands.common import (
    USAGE,
    AsJson,
    Yes,
    asking,
    console,
    fail,
    one_of,
    print_json,
    sure,
    working,
)

CHAT = "/v1/chat/completions"
RequestFile = Annotated[
    Path, typer.Argument(metavar="REQUEST.json", help="What a client would send; - is stdin.")
]
RequestPath = Annotated[str, typer.Option("--path", metavar="PATH", help="Where it would send it.")]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="NAME:VALUE",
        help="A header the client would send, such as its key; may be given several times.",
    ),
]


def request_of(file: Path, path: str, headers: list[str] | None) -> dict[str, Any]:
    """The file as the API wants it; ends with a message when it holds no JSON object."""
    pairs = [header.partition(":") for header in headers or []]
    if not all(name and colon for name, colon, _ in pairs):
        fail("--header: expected NAME:VALUE", "", USAGE)
    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        request = orjson.loads(raw)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}", "", USAGE)
    except orjson.JSONDecodeError as error:
        fail(f"{file}: not JSON: line {error.lineno}, column {error.colno}", "", USAGE)
    if not isinstance(request, dict):
        fail(f"{file}: a request is a JSON object", "", USAGE)
    said = {name.strip(): value.strip() for name, _, value in pairs}
    return {"path": path, "request": request, **({"headers": said} if said else {})}


@asking
def forget(
    api: Client,
    conversation: Annotated[
        str, typer.Argument(metavar="CONVERSATION", help="Its id, or how that begins.")
    ],
    *,
    yes: Yes = False,
) -> None:
    """Remove a conversation and its snapshots for good."""
    rows = api.get("api/conversations")["conversations"]
    identity = one_of("conversation", conversation, [str(row["id"]) for row in rows])
    sure(f"Forget {identity} and its snapshots?", yes)
    found = api.post(f"api/conversations/{segment(identity)}/forget")
    console().print(
        f"{identity} is forgotten, {words.many(found['snapshots'], 'snapshot')} with it"
    )


@asking
def warm(
    api: Client,
    request: RequestFile,
    *,
    path: RequestPath = CHAT,
    header: Headers = None,
    as_json: AsJson = False,
) -> None:
    """Compute a prompt now and save it, so that requests that begin like it start warm."""
    body = request_of(request, path, header)
    with working("computing the prompt"):
        found = api.post("api/warm", body, seconds=RUN_SECONDS)
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(
        f"{words.many(found['prompt'], 'token')}: {words.number(found['cached'])} reused,"
        f" {words.number(found['computed'])} computed in {words.seconds(found['seconds'])}"
    )
    saved = found["snapshot"]
    out.print(f"saved as snapshot {words.plain(saved)}" if saved else "in a slot, not saved")


@asking
def pause(api: Client) -> None:
    """Stop caching: requests are forwarded, nothing is pinned, saved or restored."""
    api.post("api/pause")
    console().print("caching is paused; requests are forwarded (slotkeeper resume)")


@asking
def resume(api: Client) -> None:
    """Go on caching."""
    api.post("api/resume")
    console().print("caching goes on")


@asking
def drain(api: Client) -> None:
    """Have the proxy refuse new requests, finish those it has, save its slots, and end."""
    api.post("api/drain")
    console().print("the proxy finishes what it has, saves its slots and ends")
