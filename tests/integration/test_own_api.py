"""The proxy's own API over real sockets: what it shows, what it does, who may have it done.

About proxy.server.admin, actions, view, status, running, events, pages, proxy.server.warm and
proxy.curator; the contract of dashboard and command line.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.core.records import Mode
from proxy.core.retention import Limits
from proxy.server import events
from proxy.server.sampler import Sampler
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, Answer, Proxy, chat, posts, until

JSON = {"Content-Type": "application/json"}
ADMIN = {"Authorization": "Bearer boss"}
CANARY = "canary-5d1c"


async def act(proxy: Proxy, name: str, body: Any = None, method: str = "POST") -> Answer:
    """An action; an empty object where it needs no more."""
    return await proxy.ask(f"/_slotkeeper/{name}", body or {}, method=method, headers=JSON)


async def saved(proxy: Proxy, text: str) -> dict[str, Any]:
    """A conversation that is on disk; its snapshot's row."""
    assert (await proxy.chat(text)).status == 200
    await proxy.look()
    rows: list[dict[str, Any]] = (await proxy.page("api/snapshots"))["snapshots"]
    return rows[0]


@asynccontextmanager
async def watching(proxy: Proxy) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The events of a listener, as kind and data."""
    async with proxy.open("/_slotkeeper/api/events", method="GET") as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        yield told(answer)


async def told(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """One event after the other."""
    while True:
        raw = await answer.content.readuntil(b"\n\n")
        if not raw:
            return
        if not raw.startswith(b":"):
            kind, data = raw.strip().split(b"\n")
            yield kind.decode().removeprefix("event: "), orjson.loads(data.removeprefix(b"data: "))


async def drained(news: AsyncIterator[tuple[str, Any]]) -> list[str]:
    """The kinds of all events up to the end."""
    return [kind async for kind, _ in news]


async def test_status(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The headline has every field of the contract, and its figures are those of the requests."""
    await saved(proxy, f"one {LONG}")
    await proxy.chat(f"one {LONG}", stream=True)
    told = await proxy.page("api/status")
    backend, store, totals = told["backend"], told["store"], told["totals"]
    assert (told["mode"], told["ready"], told["paused"], told["draining"]) == (
        "exclusive", True, False, False,
    )  # fmt: skip
    assert told["restores"] == "in use"
    assert told["started"] <= told["now"]
    assert backend == {
        "kind": "llama-server", "url": fake.url, "up": True, "model": "fake-model", "n_ctx": 8192,
        "total_slots": 2, "version": "b0-fake", "restarts": 0,
    }  # fmt: skip
    assert (store["snapshots"], store["path"]) == (1, str(proxy.app.store._shelf._root))  # type: ignore[union-attr]
    assert store["slot_dir"] == str(proxy.app._config.slot_dir)
    assert 0 < store["used"] < store["limit"] < store["free"]
    assert told["queue"] == {"waiting": 0, "running": 0}
    assert (totals["requests"], totals["saves"]) == (2, 1)
    assert totals["prompt_tokens"]["slot"] > 300
    assert totals["prompt_tokens"]["computed"] > 300
    assert told["first_token"]["count"] == 1
    assert told["first_token"]["p50"] == told["first_token"]["p95"] > 0


async def test_slots_and_titles(proxy: Proxy, serve: Serve) -> None:
    """A slot names its conversation by the first words; where titles are hidden, nothing does."""
    await saved(proxy, f"{CANARY} {LONG}")
    slots = (await proxy.page("api/slots"))["slots"]
    (row,) = [slot for slot in slots if slot["tokens"]]
    (empty,) = [slot for slot in slots if not slot["tokens"]]
    assert row["title"].startswith(CANARY)
    assert len(row["title"]) <= 60
    assert row["saved_tokens"] == row["tokens"]
    assert row["conversation"] == (await proxy.page("api/conversations"))["conversations"][0]["id"]
    assert (empty["conversation"], empty["title"], empty["tokens"]) == (None, None, None)
    (request,) = (await proxy.page("api/requests"))["requests"]
    assert request["title"] == row["title"]
    assert request["computed"] == request["prompt"] - request["reused"]
    await proxy.stop()
    hiding = await serve(hide_titles=True)
    await hiding.chat(f"{CANARY} {LONG}")
    for page in ("slots", "snapshots", "conversations", "requests", "running", "status"):
        assert CANARY not in str(await hiding.page(f"api/{page}")), page


async def test_one_request(proxy: Proxy) -> None:
    """A row of the decision log by its id, rows after one, and 404 for a stranger's."""
    await proxy.chat("one")
    await proxy.chat("two")
    newest, oldest = (await proxy.page("api/requests"))["requests"]
    assert await proxy.page(f"api/requests/{oldest['request_id']}") == oldest
    later = await proxy.page(f"api/requests?after={oldest['request_id']}")
    assert later["requests"] == [newest]
    assert len((await proxy.page("api/requests?after=gone"))["requests"]) == 2
    missing = await proxy.ask("/_slotkeeper/api/requests/gone", method="GET")
    assert missing.status == 404
    assert "api/requests" in missing.json["error"]["hint"]


async def test_an_id_of_the_clients_own_given_twice(proxy: Proxy) -> None:
    """Both are rows of the log under it; asked for, the newest is told, and that there are 2."""
    mine = {"X-Request-Id": "mine"}
    for text in ("one", "two"):
        answer = await proxy.ask(CHAT, chat(text), headers=mine)
        assert answer.headers["x-request-id"] == "mine"
    newest, oldest = (await proxy.page("api/requests"))["requests"]
    assert (newest["request_id"], oldest["request_id"]) == ("mine", "mine")
    assert newest["seq"] > oldest["seq"]
    found = await proxy.page("api/requests/mine")
    assert found == newest
    assert "one of 2 requests with this id" in found["note"]
    assert (await proxy.page("api/requests?after=mine"))["requests"] == [newest]


async def test_running(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """A prefill shows how far it is, an answer that it is one; who waits, that it waits."""
    stall = fake.fail("stall", on=CHAT, at="progress")
    async with proxy.open(CHAT, chat(f"{CANARY} {LONG}", stream=True)):
        await stall.hit.wait()
        (row,) = (await proxy.page("api/running"))["running"]
        assert (row["state"], row["path"], row["slot"]) == ("prefill", CHAT, 0)
        assert row["title"].startswith(CANARY)
        assert row["processed"] is None or row["processed"] <= row["prompt"]
        waiting = asyncio.create_task(proxy.chat("two", id_slot=0))
        await until(lambda: proxy.queued() == 1)
        rows = (await proxy.page("api/running"))["running"]
        assert [one["state"] for one in rows] == ["prefill", "waiting"]
        assert rows[1]["slot"] is None
        stall.release.set()
        await waiting
    await proxy.quiet()
    assert (await proxy.page("api/running"))["running"] == []


async def test_what_is_not_cached_runs_too(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Embeddings take every slot, so they are shown; what only reads is not."""
    stall = fake.fail("stall", on="/v1/embeddings", at="headers")
    asked = asyncio.create_task(proxy.ask("/v1/embeddings", {"input": CANARY}))
    await stall.hit.wait()
    (row,) = (await proxy.page("api/running"))["running"]
    assert (row["path"], row["reason"], row["slot"]) == ("/v1/embeddings", "wide", None)
    assert CANARY not in str(row)
    stall.release.set()
    await asked


async def test_a_slot_that_is_made_ready(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """While a snapshot is restored for it, a request is being prepared."""
    await saved(proxy, f"one {LONG}")
    for slot in fake.engine.slots:
        slot.tokens = []
    proxy.app.scheduler.table.forget()
    stall = fake.fail("stall", on="restore", at="headers")
    asked = asyncio.create_task(proxy.chat(f"one {LONG}"))
    await stall.hit.wait()
    (row,) = (await proxy.page("api/running"))["running"]
    assert (row["state"], row["reason"]) == ("preparing", "restored")
    stall.release.set()
    assert (await asked).reason == "restored"


async def test_pin_and_remove(proxy: Proxy, serve: Serve) -> None:
    """A pinned snapshot outlives limits and a restart, until it is unpinned or removed by hand."""
    row = await saved(proxy, f"one {LONG}")
    assert (row["pinned"], row["title"][:3]) == (False, "one")
    assert (await act(proxy, f"api/snapshots/{row['id']}/pin", {"pinned": True})).status == 200
    await proxy.stop()
    again = await serve(max_bytes=row["bytes"] + 10, prewarm=False)
    (kept,) = (await again.page("api/snapshots"))["snapshots"]
    assert (kept["id"], kept["pinned"]) == (row["id"], True)
    assert (await again.chat(f"two {LONG}")).status == 200
    await again.look()
    (kept,) = (await again.page("api/snapshots"))["snapshots"]
    assert kept["id"] == row["id"], "what is new goes before what is pinned"
    assert (await act(again, f"api/snapshots/{row['id']}", method="DELETE")).json == {
        "removed": True
    }
    assert (await again.page("api/snapshots"))["snapshots"] == []
    assert again.metric('evictions_total{cause="removed"}') == 1
    for name, method in ((f"{row['id']}/pin", "POST"), (row["id"], "DELETE")):
        gone = await act(again, f"api/snapshots/{name}", {"pinned": True}, method)
        assert gone.status == 404
        assert "api/snapshots" in gone.json["error"]["hint"]


async def test_verify_and_prune(proxy: Proxy, slot_dir: Path) -> None:
    """A damaged file is told by its id; what the limits do not allow is removed."""
    good, bad = await saved(proxy, f"one {LONG}"), await saved(proxy, f"two {LONG}")
    assert (await act(proxy, "api/snapshots/verify")).json == {"checked": 2, "bad": []}
    (path,) = await asyncio.to_thread(lambda: list(slot_dir.rglob(f"{bad['id']}.kv")))
    data = await asyncio.to_thread(path.read_bytes)
    await asyncio.to_thread(path.write_bytes, data[:-1] + bytes([data[-1] ^ 1]))
    assert (await act(proxy, "api/snapshots/verify")).json == {"checked": 2, "bad": [bad["id"]]}
    assert (await act(proxy, "api/snapshots/prune")).json == {"removed": [], "bytes": 0}
    transfer = proxy.app.transfer
    assert transfer is not None
    transfer.limits = Limits(good["bytes"], 9, 1e9)
    pruned = (await act(proxy, "api/snapshots/prune")).json
    assert len(pruned["removed"]) == 1
    assert len((await proxy.page("api/snapshots"))["snapshots"]) == 1


@pytest.mark.parametrize("way", ["rm", "prune"])
async def test_a_slot_is_unsaved_without_its_snapshot(proxy: Proxy, serve: Serve, way: str) -> None:
    """It is not written back while it idles on, but not lost at the drain either."""
    row = await saved(proxy, f"one {LONG}")
    transfer = proxy.app.transfer
    assert transfer is not None
    before = transfer.limits
    if way == "rm":
        await act(proxy, f"api/snapshots/{row['id']}", method="DELETE")
    else:
        transfer.limits = Limits(before.max_bytes, before.max_files, max_age=-1.0)
        assert (await act(proxy, "api/snapshots/prune")).json["removed"] == [row["id"]]
        transfer.limits = before
    await proxy.look()
    slots = (await proxy.page("api/slots"))["slots"]
    assert [slot["saved_tokens"] for slot in slots if slot["tokens"]] == [0]
    assert (await proxy.page("api/snapshots"))["snapshots"] == []
    await proxy.stop()
    again = await serve(prewarm=False)
    (found,) = (await again.page("api/snapshots"))["snapshots"]
    assert found["tokens"] == row["tokens"]


async def test_forgetting_one_of_two_branches(proxy: Proxy) -> None:
    """What the other had saved in its snapshot is not saved any more."""
    await saved(proxy, f"one {LONG}")
    table = proxy.app.scheduler.table
    (slot,) = [row for row in table if row.content]
    assert slot.content is not None
    branch = replace(slot.content, prompt=replace(slot.content.prompt, conversation="branch"))
    table.hold(slot.index, branch)
    one = slot.content.prompt.conversation
    assert (await act(proxy, f"api/conversations/{one}/forget")).json["snapshots"] == 1
    held = table[slot.index].content
    assert held is not None
    assert (held.n_saved, held.storable) == (0, True)


async def test_pins_that_fill_the_store(proxy: Proxy) -> None:
    """Nothing can be saved any more: the status says why, and what to do; then it does not."""
    row = await saved(proxy, f"one {LONG}")
    assert (await act(proxy, f"api/snapshots/{row['id']}/pin", {"pinned": True})).status == 200
    transfer = proxy.app.transfer
    assert transfer is not None
    transfer.limits = Limits(row["bytes"] + 10, 9, 1e9)
    await saved(proxy, f"two {LONG}")
    told = await proxy.page("api/status")
    assert told["store"]["refused"] == "pins-full"
    assert told["advice"] == told["store"]["advice"]
    assert "cache pin --off" in told["advice"]
    assert (await act(proxy, f"api/snapshots/{row['id']}/pin", {"pinned": False})).status == 200
    assert (await proxy.page("api/status"))["advice"] == ""


async def test_without_a_store(serve: Serve) -> None:
    """Where nothing is saved, the store's actions say so."""
    proxy = await serve(slot_dir=None)
    assert (await proxy.page("api/status"))["store"] is None
    assert (await proxy.page("api/snapshots")) == {"snapshots": []}
    for name in ("api/snapshots/verify", "api/snapshots/prune"):
        answer = await act(proxy, name)
        assert answer.status == 404
        assert "readyz" in answer.json["error"]["hint"]


async def test_pause_and_resume(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Paused, requests go on as they came and nothing is saved; resumed, all is as before."""
    assert (await act(proxy, "api/pause")).json == {"paused": True}
    fake.requests.clear()
    part = {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}
    answer = await proxy.ask(CHAT, {**part, "max_tokens": 4, "id_slot": 1})
    assert answer.reason == "forward"
    (seen,) = posts(fake)
    assert seen.json["messages"] == part["messages"], "the rules rest too"
    assert seen.json["id_slot"] == -1
    await proxy.look(Mode.FORWARD)
    status = await proxy.page("api/status")
    assert (status["paused"], status["mode"], status["ready"]) == (True, "forward", True)
    assert "paused" in status["why"]
    assert (await proxy.page("api/snapshots"))["snapshots"] == []
    assert (await act(proxy, "api/resume")).json == {"paused": False}
    await proxy.look(Mode.EXCLUSIVE)
    assert (await proxy.page("api/status"))["paused"] is False
    await saved(proxy, f"one {LONG}")


async def test_paused_over_a_restart_of_the_backend(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """A new process of the backend is not proved either, as long as caching is paused."""
    await act(proxy, "api/pause")
    await fake.restart()
    await proxy.look(Mode.FORWARD)
    assert "paused" in (await proxy.page("readyz"))["why"]
    await act(proxy, "api/resume")
    await proxy.look(Mode.EXCLUSIVE)


async def test_drain(proxy: Proxy) -> None:
    """No new request is taken, and whoever runs the process hears of it."""
    ended: list[bool] = []
    proxy.app.on_drain = lambda: ended.append(True)
    assert (await act(proxy, "api/drain")).json == {"draining": True}
    assert ended == [True]
    assert (await proxy.chat("late")).status == 503
    assert (await proxy.page("api/status"))["draining"] is True


async def test_explain_changes_nothing(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """What would be changed, reused and chosen is told; ledger, metrics, slots, log stay."""
    await saved(proxy, f"one {LONG}")
    request = chat(f"one {LONG}")
    request["messages"] += [
        {"role": "assistant", "content": "w0"},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
    ]
    before = [await proxy.page(f"api/{name}") for name in ("slots", "requests", "conversations")]
    metrics = proxy.app.metrics.read("requests_total", "rules_total", "cold_total")
    fake.requests.clear()
    answer = await act(proxy, "api/explain", {"path": CHAT, "request": request})
    assert answer.status == 200
    told = answer.json
    assert {seen.target for seen in posts(fake)} <= {"/apply-template", "/tokenize"}
    after = [await proxy.page(f"api/{name}") for name in ("slots", "requests", "conversations")]
    assert after == before
    found = proxy.app.metrics.read("requests_total", "rules_total", "cold_total")
    ours = {key for key in found if key[1] == "own"}
    assert {k: v for k, v in found.items() if k not in ours} == {
        k: v for k, v in metrics.items() if k not in ours
    }
    assert told["conversation"] == before[2]["conversations"][0]["id"]
    assert told["known"] == 1
    assert told["rules"] == [{"rule": "single-part", "where": "messages[2]"}]
    assert '"type": "text"' in told["before"]
    assert '"type": "text"' not in told["after"]
    assert told["prompt_tokens"] > 300
    assert told["choice"] == told["options"][0]
    assert told["choice"]["reason"] == "slot-hit"
    assert told["prefix"]["slot"] == told["choice"]["slot"]
    assert told["prefix"]["tokens"] >= told["choice"]["hit"] > 300
    assert told["cold"] is None


async def test_explain_while_caching_is_paused(proxy: Proxy) -> None:
    """What would happen now: nothing is changed, nothing restored; and that is said in words."""
    await saved(proxy, f"one {LONG}")
    await act(proxy, "api/pause")
    part = {"role": "user", "content": [{"type": "text", "text": f"one {LONG}"}]}
    told = (await act(proxy, "api/explain", {"path": CHAT, "request": {"messages": [part]}})).json
    assert (told["rules"], told["before"]) == ([], told["after"])
    assert told["note"].startswith("caching is paused")
    assert (told["options"], told["prefix"]["snapshot"]) == ([], None)


async def test_explain_says_what_breaks_a_prefix(proxy: Proxy) -> None:
    """A system prompt that changed is named, with both sides."""
    first = {"role": "system", "content": f"alpha {LONG}"}
    user = {"role": "user", "content": "hello"}
    assert (await proxy.ask(CHAT, {"messages": [first, user], "max_tokens": 4})).status == 200
    changed = {"role": "system", "content": f"omega {LONG}"}
    history = [changed, user, {"role": "assistant", "content": "w0 w1 w2 w3"}, user]
    told = (await act(proxy, "api/explain", {"path": CHAT, "request": {"messages": history}})).json
    assert told["cold"]["cause"] == "system"
    assert told["prefix"]["tokens"] < 32


async def test_explain_a_plain_prompt_from_disk(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Without messages there are no rules; a snapshot that no slot holds any more is named."""
    asked = {"path": "/completion", "request": {"prompt": LONG, "n_predict": 4}}
    assert (await proxy.ask("/completion", asked["request"])).status == 200
    await proxy.look()
    proxy.app.scheduler.table.forget()
    told = (await act(proxy, "api/explain", asked)).json
    (row,) = (await proxy.page("api/snapshots"))["snapshots"]
    assert (told["client"], told["conversation"], told["rules"]) == (None, None, [])
    assert told["prefix"]["snapshot"] == row["id"]
    assert told["choice"]["snapshot"] == row["id"]
    fake.fail("error", on="/tokenize", at="headers")
    blind = (await act(proxy, "api/explain", asked)).json
    assert (blind["prompt_tokens"], blind["prefix"]["tokens"]) == (None, 0)


async def test_explain_what_the_template_makes_of_it(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Equal messages that were computed anew: what is rendered tells, if the backend renders."""
    request = chat(f"one {LONG}")
    await proxy.ask(CHAT, request)
    proxy.app.scheduler.table.forget()
    asked = {"path": CHAT, "request": request}
    assert (await act(proxy, "api/explain", asked)).json["cold"] is None
    fake.fail("error", on="/apply-template", at="headers", times=3)
    assert (await act(proxy, "api/explain", asked)).json["cold"] is None


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "path"),
        ({"path": "/v1/embeddings", "request": {}}, "path"),
        ({"path": CHAT}, "request"),
        ({"path": CHAT, "request": []}, "request"),
        ({"path": CHAT, "request": {}}, "messages"),
        ({"path": CHAT, "request": {"messages": []}, "headers": {"a": 1}}, "headers"),
        ({"path": "/api/generate", "request": {"prompt": "x"}}, "itself"),
    ],
)
async def test_odd_questions(proxy: Proxy, body: dict[str, Any], word: str) -> None:
    """What cannot be explained is refused in words."""
    answer = await act(proxy, "api/explain", body)
    assert answer.status == 400
    assert word in answer.json["error"]["message"]


async def test_explain_for_a_client_of_another_key(serve: Serve) -> None:
    """Conversations belong to keys: the question names the client's, and it is not logged."""
    proxy = await serve(keys=["alice"])
    key = {"Authorization": "Bearer alice"}
    text = f"one {LONG}"
    assert (await proxy.ask(CHAT, chat(text), headers=key)).status == 200
    asked = {"path": CHAT, "request": chat(text)}
    assert (await act(proxy, "api/explain", asked)).json["conversation"] is None
    told = (await act(proxy, "api/explain", {**asked, "headers": key})).json
    assert told["conversation"] is not None
    assert told["prefix"]["tokens"] > 300


async def test_warm(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """A prompt is computed once, saved, and reused by the first client that sends it."""
    request = chat(f"one {LONG}", stream=True)
    answer = await act(proxy, "api/warm", {"path": CHAT, "request": request})
    assert answer.status == 200
    told = answer.json
    assert (told["cached"], told["computed"]) == (0, told["prompt"])
    (row,) = (await proxy.page("api/snapshots"))["snapshots"]
    assert told["snapshot"] == row["id"]
    assert fake.seen(CHAT)[-1].json["max_tokens"] == 1
    (logged,) = (await proxy.page("api/requests"))["requests"]
    assert (logged["path"], logged["status"], logged["prompt"]) == (CHAT, 200, told["prompt"])
    again = (await act(proxy, "api/warm", {"path": CHAT, "request": request})).json
    assert again["snapshot"] == row["id"]
    assert again["computed"] <= 1
    assert (await proxy.chat(f"one {LONG}")).reason == "slot-hit"


async def test_warm_is_refused_where_it_cannot_be(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Another path, a broken request, a backend that says no."""
    for body in (
        {"path": "/api/chat", "request": {"messages": []}},
        {"path": CHAT, "request": {"messages": 1}},
    ):
        assert (await act(proxy, "api/warm", body)).status == 400
    fake.fail("error", on=CHAT, at="headers", status=418)
    answer = await act(proxy, "api/warm", {"path": CHAT, "request": chat("x")})
    assert answer.status == 502
    assert "418" in answer.json["error"]["message"]


async def test_history_outlives_the_process(proxy: Proxy, serve: Serve, slot_dir: Path) -> None:
    """The minutes of the last run are there again; nobody else may read the file."""
    await proxy.chat(f"one {LONG}", stream=True)
    told = await proxy.page("api/history?span=1h")
    assert told["step"] == 60
    rows = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    assert sum(row["requests"] for row in rows) == 1
    assert sum(row["computed"] for row in rows) > 300
    assert rows[-1]["first_token_p50"] > 0
    await proxy.stop()
    path = slot_dir / "slotkeeper" / "history.json"
    assert (path.stat().st_mode & 0o777) == 0o600
    data = orjson.loads(await asyncio.to_thread(path.read_bytes))
    data["rows"] = [[row[0] - 600, *row[1:]] for row in data["rows"]]
    await asyncio.to_thread(path.write_bytes, orjson.dumps(data))
    again = await serve()
    rows = (await again.page("api/history?span=6h"))["rows"]
    assert sum(row[1] for row in rows) == 1
    for span in ("2h", "", "1"):
        wrong = await again.ask(f"/_slotkeeper/api/history?span={span}", method="GET")
        assert wrong.status == 400


async def test_logs(proxy: Proxy, log: io.StringIO) -> None:
    """The log of this process by number and level, without a word of a prompt."""
    await proxy.chat(CANARY)
    rows = (await proxy.page("api/logs?limit=1000"))["logs"]
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    (line,) = [row for row in rows if row["event"] == "request"]
    assert line["level"] == "info"
    assert line["fields"]["path"] == CHAT
    assert CANARY not in str(rows)
    newer = (await proxy.page(f"api/logs?after={line['seq'] - 1}&level=info"))["logs"]
    assert newer[0] == line
    assert (await proxy.page("api/logs?level=error"))["logs"] == []
    for query in ("limit=0", "limit=x", "level=loud", "after=-1"):
        wrong = await proxy.ask(f"/_slotkeeper/api/logs?{query}", method="GET")
        assert wrong.status == 400, query


async def test_events(proxy: Proxy, fake: FakeLlamaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener is told everything at once, then what changes as it does, to a clean end."""
    monkeypatch.setattr(events, "BEAT", 0)
    await proxy.chat("before")
    stall = fake.fail("stall", on=CHAT, at="progress")
    async with watching(proxy) as news:
        first = [await anext(news) for _ in range(5)]
        assert [kind for kind, _ in first] == ["status", "slots", "running", "snapshots", "request"]
        asked = asyncio.create_task(proxy.chat(f"one {LONG}"))
        running = await news_of(news, "running", lambda data: bool(data["running"]))
        assert running["running"][0]["title"].startswith("one")
        stall.release.set()
        row = await news_of(news, "request", lambda data: data["title"].startswith("one"))
        assert row == await proxy.page(f"api/requests/{row['request_id']}")
        status = await news_of(news, "status", lambda data: data["totals"]["requests"] == 2)
        assert status["mode"] == "exclusive"
        await asked
        await proxy.stop()
        assert set(await drained(news)) <= {"status", "slots", "running", "log", "snapshots"}


async def news_of(
    news: AsyncIterator[tuple[str, Any]], kind: str, wanted: Callable[[Any], bool]
) -> Any:
    """The next event of this kind that is wanted."""
    async for name, data in news:
        if name == kind and wanted(data):
            return data
    raise AssertionError(kind)


async def test_too_many_listeners(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there may be is refused; when one leaves, there is room again."""
    monkeypatch.setattr(events, "LISTENERS", 1)
    async with watching(proxy):
        refused = await proxy.ask("/_slotkeeper/api/events", method="GET")
        assert (refused.status, refused.headers["retry-after"]) == (503, "30")
    assert proxy.app._hub is not None
    hub = proxy.app._hub
    await until(lambda: not hub._listeners)
    async with watching(proxy) as news:
        assert (await anext(news))[0] == "status"


ACTIONS = [
    ("POST", "api/pause"), ("POST", "api/resume"), ("POST", "api/drain"), ("POST", "api/explain"),
    ("POST", "api/warm"), ("POST", "api/snapshots/verify"), ("POST", "api/snapshots/prune"),
    ("POST", "api/snapshots/x/pin"), ("DELETE", "api/snapshots/x"),
    ("POST", "api/conversations/x/forget"),
]  # fmt: skip


async def test_who_may_act(serve: Serve) -> None:
    """Without the key, from a page of another site, or as a form sends it: nothing is done."""
    proxy = await serve(admin_key="boss")
    for method, name in ACTIONS:
        path = f"/_slotkeeper/{name}"
        anybody = await proxy.ask(path, {}, method=method, headers=JSON)
        assert anybody.status == 401, name
        form = await proxy.ask(
            path, b"a=b", method=method, headers={**ADMIN, "Content-Type": "text/plain"}
        )
        assert form.status == 415, name
        for sent in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
            site = await proxy.ask(path, {}, method=method, headers={**JSON, **ADMIN, **sent})
            assert site.status == 403, (name, sent)
        broken = await proxy.ask(path, b"[]", method=method, headers={**JSON, **ADMIN})
        assert broken.status == 400, name
    assert proxy.app.keeper.paused is proxy.app.scheduler.draining is False


async def test_only_reading_needs_no_more_than_the_key(serve: Serve) -> None:
    """Every page but the dashboard's files wants the key."""
    proxy = await serve(admin_key="boss")
    for name in ("status", "slots", "running", "snapshots", "requests", "requests/x", "history",
                 "logs", "events", "conversations"):  # fmt: skip
        path = f"/_slotkeeper/api/{name}"
        assert (await proxy.ask(path, method="GET")).status == 401, name
    answer = await proxy.ask("/_slotkeeper/api/status", method="GET", headers=ADMIN)
    assert answer.status == 200


async def test_sampler_of_a_disk_that_refuses(proxy: Proxy, log: io.StringIO) -> None:
    """The charts are lost, and nothing else; the log says so."""
    sampler: Sampler = proxy.app.sampler
    sampler._path = Path("/proc/no/such/place")
    await sampler.write()
    assert "history.unwritten" in log.getvalue()
    await sampler.look()
