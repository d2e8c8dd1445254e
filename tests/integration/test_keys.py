"""Which key goes where, and that neither keys nor prompts are seen anywhere else.

About proxy.server.keys and the gate.
"""

from __future__ import annotations

import io
from typing import Any

import orjson
import pytest

from tests.integration.conftest import Serve
from tests.integration.fake_faults import Kind
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, chat, posts
from tests.integration.raw import chunked, raw_server

OURS, BACKEND, OTHER, ADMIN = "key-ours-1", "key-backend-2", "key-other-3", "key-admin-4"
SENT = {"Authorization": f"Bearer {OURS}"}
ALSO = {"X-Api-Key": OURS}
CANARY = "canary-7f3a"
FAILURES: tuple[Kind, ...] = ("error", "bad-json", "reset")


@pytest.mark.parametrize("target", [CHAT, "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize(
    ("server", "backend", "arrives"),
    [
        ([], "", OURS),
        ([], BACKEND, BACKEND),
        ([OURS], "", None),
        ([OURS], BACKEND, BACKEND),
    ],
)
@pytest.mark.parametrize("header", [SENT, ALSO])
async def test_table(
    serve: Serve,
    fake: FakeLlamaServer,
    server: list[str],
    backend: str,
    arrives: str | None,
    header: dict[str, str],
    target: str,
) -> None:
    """A key that is checked here ends here; backend.key replaces every other."""
    proxy = await serve(keys=server, key=backend)
    fake.requests.clear()
    body = {**chat("x"), "input": "x", "content": "x"}
    assert (await proxy.ask(target, body, headers=header)).status == 200
    for seen in posts(fake):
        found = {
            n.lower(): v for n, v in seen.headers if n.lower() in {"authorization", "x-api-key"}
        }
        own = not seen.target.startswith(target)  # the proxy's own questions
        if arrives is None or (own and not backend):
            assert found == {}
        elif arrives == BACKEND:
            assert found == {"authorization": f"Bearer {BACKEND}"}
        else:
            assert found == {name.lower(): value for name, value in header.items()}


async def test_keys_are_asked_for(serve: Serve, fake: FakeLlamaServer) -> None:
    """With server.keys set nobody gets through without, and no refusal quotes what was sent."""
    proxy = await serve(keys=[OURS])
    fake.requests.clear()
    for header in ({}, {"Authorization": f"Bearer {OTHER}"}, {"X-Api-Key": OTHER}):
        for target in (CHAT, "/v1/embeddings", "/tokenize"):
            answer = await proxy.ask(target, chat("x"), headers=header)
            assert answer.status == 401
            assert OTHER.encode() not in answer.raw
    assert posts(fake) == []


async def test_backend_with_a_key(serve: Serve, fake: FakeLlamaServer) -> None:
    """With backend.key it is proved as usual; without, clients that have the key are served."""
    fake.key = BACKEND
    assert (await (await serve(key=BACKEND)).page("readyz"))["mode"] == "exclusive"
    without = await serve(slot_dir=None)
    ready = await without.page("readyz")
    assert (ready["ready"], ready["mode"], ready["advice"]) == (True, "forward", "set backend.key")
    assert (await without.chat("x")).status == 401
    good = await without.ask(CHAT, chat("x"), headers={"Authorization": f"Bearer {BACKEND}"})
    assert good.status == 200


async def test_conversations_do_not_cross_keys(serve: Serve, fake: FakeLlamaServer) -> None:
    """What one key's conversation left on disk is not restored for another key."""
    proxy = await serve()
    for key in (OURS, OTHER):
        await proxy.ask(CHAT, chat(LONG), headers={"Authorization": f"Bearer {key}"})
    await proxy.look()
    assert len((await proxy.page("api/snapshots"))["snapshots"]) == 2
    for word in ("x", "y"):
        await proxy.chat(f"{word} {LONG}")
    restores = len(fake.seen("restore"))
    third = await proxy.ask(CHAT, chat(LONG), headers={"Authorization": "Bearer third"})
    assert third.reason != "restored"
    assert len(fake.seen("restore")) == restores
    again = await proxy.ask(CHAT, chat(LONG), headers=SENT)
    assert again.reason == "restored"


async def test_admin_pages(serve: Serve) -> None:
    """With an admin key the pages need it and a client's key is not enough; health is open."""
    proxy = await serve(keys=[OURS], admin_key=ADMIN)
    for page in ("metrics", "api/slots", "api/snapshots", "api/requests"):
        for key, status in ((OURS, 401), (OTHER, 401), (ADMIN, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await proxy.ask(f"/_slotkeeper/{page}", method="GET", headers=headers)
            assert answer.status == status
    for page in ("healthz", "readyz"):
        assert (await proxy.ask(f"/_slotkeeper/{page}", method="GET")).status == 200


async def test_state_of_the_backend(serve: Serve, fake: FakeLlamaServer) -> None:
    """What changes the backend behind the scheduler's back needs the admin key, which ends here."""
    proxy = await serve(keys=[OURS], admin_key=ADMIN)
    fake.requests.clear()
    target = "/slots/0?action=erase"
    assert (await proxy.ask(target, {}, headers=SENT)).status == 401
    assert posts(fake) == []
    admin = {"Authorization": f"Bearer {ADMIN}"}
    answer = await proxy.ask(target, {}, headers=admin)
    assert answer.status == 200
    (seen,) = fake.seen("erase")
    assert ADMIN not in str(seen.headers)
    plain = await serve(slot_dir=None)
    assert (await plain.ask(target, {})).status == 403


@pytest.mark.parametrize("level", ["good", "bad"])
async def test_nothing_private_is_told(
    serve: Serve, fake: FakeLlamaServer, log: io.StringIO, level: str
) -> None:
    """Logs at debug level, metrics, pages and file names hold neither prompt text nor keys.

    Titles, which the pages show unless a setting hides them, are all there is of a prompt.
    """
    proxy = await serve(keys=[OURS], key=BACKEND, ping_interval=0.005, hide_titles=True)
    text = f"{CANARY} {LONG} {CANARY}"
    fake.script = lambda body: [f" {CANARY}", " answer"]
    bodies: list[Any] = [
        chat(text), chat(text, stream=True), chat(text, n=2), {"messages": CANARY}, CANARY.encode(),
        chat(text, id_slot=99), orjson.dumps(chat(text))[:-1], chat(text, model=CANARY),
    ]  # fmt: skip
    if level == "bad":
        for on in ("/apply-template", "/tokenize", "save", "restore", CHAT):
            for kind in FAILURES:
                fake.fail(kind, on=on)
    for _ in range(3):
        for body in bodies:
            await proxy.ask(CHAT, body, headers=SENT)
        await proxy.ask("/v1/embeddings", {"input": text}, headers=SENT)
        await proxy.ask(f"/page?key={OTHER}&q={CANARY}", method="GET", headers=SENT)
        await proxy.look()
    await proxy.quiet()
    told = [log.getvalue(), proxy.app.metrics.render()[0].decode()]
    told += [str(proxy.app.history.recent(99)), repr(proxy.app.scheduler)]
    view = ("api/slots", "api/snapshots", "api/requests", "readyz")
    told += [str(await proxy.ask(f"/_slotkeeper/{page}", method="GET")) for page in view]
    assert fake.slot_dir is not None
    names = [str(path.relative_to(fake.slot_dir)) for path in fake.slot_dir.rglob("*")]
    assert len(log.getvalue().splitlines()) > 20
    for place in (*told, *names):
        for secret in (CANARY, OURS, BACKEND, OTHER, ADMIN):
            assert secret not in place


async def test_own_errors_quote_nobody(serve: Serve) -> None:
    """The proxy's own words about a broken answer repeat neither question nor answer."""
    async with raw_server([chunked(f"data: {CANARY}\n\n".encode())]) as raw:
        proxy = await serve(url=raw.url, slot_dir=None)
        answer = await proxy.chat(CANARY)
    assert answer.status == 502
    assert CANARY.encode() not in answer.raw
