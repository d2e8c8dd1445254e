"""Normalisation over real sockets: what the backend gets, what is remembered, what a fault does.

About proxy.server.normaliser and what proxy.server.chat, proxy.server.view and proxy.app do for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.core import normalise as rules
from proxy.core.normalise.book import Book
from proxy.store.files import StoreError
from proxy.store.ledger import LedgerStore
from tests.integration.conftest import Serve
from tests.integration.fake_faults import Seen
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.mangler import MESSAGES, Mangler, extends, listed, says, says_more
from tests.integration.proxies import CHAT, LONG, Answer, Proxy, chat, event, posts, until, whole

OFF = {"X-Slotkeeper-Normalise": "off"}
NO_STORE = {"X-Slotkeeper-No-Store": "1"}
JSON = {"Content-Type": "application/json"}
CANARY = "canary-5d1e"


def asked(fake: FakeLlamaServer) -> list[Seen]:
    """The completions the fake was asked for."""
    return [seen for seen in posts(fake) if seen.target == CHAT]


def user(content: Any) -> dict[str, Any]:
    """A person's message."""
    return {"role": "user", "content": content}


def part(text: str) -> list[dict[str, Any]]:
    """A text as a list of one part."""
    return [{"type": "text", "text": text}]


def text(seen: Seen, number: int) -> str:
    """The content of one message the backend got."""
    found: str = seen.json["messages"][number]["content"]
    return found


async def turns(
    proxy: Proxy,
    fake: FakeLlamaServer,
    talk: Mangler,
    numbers: Sequence[int],
    *,
    apis: Sequence[str] = (CHAT,),
    stream: bool = False,
    **more: Any,
) -> list[Seen]:
    """Requests of a mangling client: every even one is answered with a tool call."""
    fake.requests.clear()
    for number in numbers:
        said = says(number, tool=number % 2 == 0)
        if number % 2 == 0:
            talk.user(f"Question {number}: what does the file say?")
        fake.script = lambda _body, said=said: said
        api = apis[number % len(apis)]
        got = await proxy.ask(api, talk.body(api, stream=stream), **more)
        assert got.status == 200, got.raw
        talk.heard(said)
        if number % 2 == 0:
            talk.result(f'{{"line": {number}}}', f"call{number}")
    return asked(fake)


# A history that is written anew


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("apis", [(CHAT,), (MESSAGES,), (CHAT, MESSAGES), (CHAT, CHAT, MESSAGES)])
async def test_the_next_request_extends_the_last(
    proxy: Proxy, fake: FakeLlamaServer, apis: Sequence[str], stream: bool
) -> None:
    """Byte for byte, through either API or both in turn, whatever the client makes of it."""
    seen = await turns(proxy, fake, Mangler(), range(6), apis=apis, stream=stream)
    assert len(seen) == 6
    for number, (before, after) in enumerate(pairwise(seen)):
        assert extends(before, after) if len(apis) == 1 else says_more(before, after)
        said = says(number, tool=number % 2 == 0)
        if number % 2:  # a finished tool loop: templates drop its reasoning, so it is not put back
            said.pop("reasoning_content")
        assert after.json["messages"][len(before.json["messages"])] == said
    rows = (await proxy.page("api/conversations"))["conversations"]
    assert [row["messages"] for row in rows] == [len(seen[-1].json["messages"])]


async def test_without_the_proxy_it_would_not(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The same client with its own bytes: no request extends the one before."""
    seen = await turns(proxy, fake, Mangler(), range(4), headers=OFF)
    assert not any(extends(before, after) for before, after in pairwise(seen))


async def test_untouched_bytes_stay(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """No rule has anything to do: the client's own bytes go on, spaces, floats and all."""
    raw = b'{ "messages" : [ {"role":"user", "content":"hello"} ],\n "max_tokens": 4, "x": 1.50 }'
    fake.requests.clear()
    assert (await proxy.ask(CHAT, raw)).status == 200
    assert asked(fake)[0].body.startswith(raw.rstrip(b" }"))


# Clocks


def home(time: str, question: str, **more: Any) -> dict[str, Any]:
    """What Home Assistant sends: the time in the first line, a new conversation each time."""
    system = f"Current time is {time}. Today's date is 2026-10-09.\n"
    system += f"You are a voice assistant for Home Assistant.\n{LONG}"
    messages = [{"role": "system", "content": system}, user(question)]
    return {"messages": messages, "max_tokens": 4, **more}


async def test_a_frozen_clock_never_lies(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The prefix is stale and reused; the newest message says what time it is."""
    fake.requests.clear()
    await proxy.ask(CHAT, home("14:02:07", "What time is it?"))
    answer = await proxy.ask(CHAT, home("14:03:11", "And what time is it now?"))
    first, second = asked(fake)
    assert "14:02:07" in text(first, 0)
    assert listed(first)[0] == listed(second)[0]
    assert text(first, 1) == "What time is it?"
    newest = text(second, 1)
    assert newest.startswith("And what time is it now?\n\n<system-reminder>\n")
    assert "14:03:11" in newest
    assert answer.reason == "slot-hit"
    assert answer.json["timings"]["cache_n"] > 300


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (("key-a", "m"), ("key-a", "m"), True),
        (("key-a", "m"), ("key-b", "m"), False),
        (("key-a", "m"), ("key-a", "n"), False),
    ],
)
async def test_a_clock_is_shared_within_one_key_and_model(
    serve: Serve,
    fake: FakeLlamaServer,
    one: tuple[str, str],
    other: tuple[str, str],
    shared: bool,
) -> None:
    """Nothing of one key's or model's system text ever reaches another's prompt."""
    proxy = await serve(keys=["key-a", "key-b"])
    fake.requests.clear()
    for time, (key, model) in (("14:02:07", one), ("14:03:11", other)):
        headers = {"Authorization": f"Bearer {key}"}
        answer = await proxy.ask(CHAT, home(time, "hello", model=model), headers=headers)
        assert answer.status == 200
    first, second = asked(fake)
    assert (listed(first)[0] == listed(second)[0]) is shared
    assert (b"14:02:07" in second.body) is shared
    assert b"14:03:11" in second.body


async def test_a_note_stays_where_it_was_put(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """In every later request of the conversation, byte for byte."""
    fake.script = lambda _body: [" It", " is", " late."]
    fake.requests.clear()
    await proxy.ask(CHAT, home("14:02:07", "first"))
    for time in ("14:03:11", "14:04:12", "14:05:00"):
        body = home(time, "first")
        body["messages"][0]["content"] += ""
        sent = asked(fake)[-1].json["messages"]
        answered = [{"role": "assistant", "content": "It is late."}, user(f"at {time}?")]
        own = body["messages"][:1] + [_bare(one) for one in sent[1:]] + answered
        assert (await proxy.ask(CHAT, {**body, "messages": own})).status == 200
    seen = asked(fake)
    assert all(extends(before, after) for before, after in pairwise(seen))
    assert "14:05:00" in text(seen[-1], -1)
    assert "14:04:12" not in text(seen[-1], -1)


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    """As the client has it: without our note."""
    return {**message, "content": message["content"].partition("\n\n<system-reminder>")[0]}


# Switched off, on, shadow


async def test_one_request_off(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """The header sends that request's own bytes; the next one is normalised again."""
    fake.requests.clear()
    raw = orjson.dumps({"messages": [user(part("hello"))], "max_tokens": 4})
    await proxy.ask(CHAT, raw, headers=OFF)
    await proxy.ask(CHAT, {"messages": [user(part("hello again"))]})
    off, on = asked(fake)
    assert off.body.startswith(raw[:-1])
    assert on.json["messages"] == [user("hello again")]
    newest, before = (await proxy.page("api/requests"))["requests"][:2]
    assert (newest["rules"], before["rules"]) == (["single-part"], [])


async def test_mode_off(serve: Serve, fake: FakeLlamaServer, tmp_path: Path) -> None:
    """All requests go on as they came, and no ledger is written."""
    ledger = tmp_path / "own-ledger"
    proxy = await serve(normalise={"mode": "off", "ledger": str(ledger)})
    fake.requests.clear()
    raw = orjson.dumps({"messages": [user(part("hello"))], "max_tokens": 4})
    for _ in range(2):
        assert (await proxy.ask(CHAT, raw)).status == 200
    await proxy.stop()
    assert all(seen.body.startswith(raw[:-1]) for seen in asked(fake))
    assert not ledger.exists()


async def test_shadow(serve: Serve, fake: FakeLlamaServer) -> None:
    """What would be changed is reported and counted; nothing is changed."""
    proxy = await serve(normalise={"mode": "shadow"})
    fake.requests.clear()
    bodies = [home(time, "hello") for time in ("14:02:07", "14:03:11", "14:04:12")]
    for body in bodies:
        assert (await proxy.ask(CHAT, body)).status == 200
    assert [seen.json["messages"] for seen in asked(fake)] == [b["messages"] for b in bodies]
    rows = (await proxy.page("api/requests"))["requests"]
    assert [row["rules"] for row in rows[:2]] == [
        ["known-clocks (shadow)", "tail-note (shadow)"]
    ] * 2
    assert proxy.metric('rules_total{outcome="shadow",rule="known-clocks"}') == 2
    assert proxy.metric('rules_total{outcome="applied",rule="known-clocks"}') == 0


async def test_switches(serve: Serve, fake: FakeLlamaServer) -> None:
    """A rule can be switched off by name, and another one on."""
    proxy = await serve(normalise={"rules": ["-single-part", "+preserve-thinking"]})
    fake.requests.clear()
    assert (await proxy.ask(CHAT, {"messages": [user(part("hello"))]})).status == 200
    (seen,) = asked(fake)
    assert seen.json["messages"] == [user(part("hello"))]
    assert seen.json["chat_template_kwargs"] == {"preserve_thinking": True}


# What is remembered


async def kept(slot_dir: Path) -> bytes:
    """Everything the ledger of a stopped proxy has, unpacked."""
    ledger = LedgerStore(slot_dir / "slotkeeper" / "ledger")
    rows = await ledger.open()
    await ledger.close()
    return repr(rows).encode()


async def test_what_is_remembered_is_on_disk(
    proxy: Proxy, fake: FakeLlamaServer, slot_dir: Path
) -> None:
    """The ledger has the conversation after a stop (else the next test proves nothing)."""
    fake.script = lambda _body: [f" {CANARY}-answer"]
    await proxy.chat(f"{CANARY}-question")
    await proxy.stop()
    found = await kept(slot_dir)
    assert f"{CANARY}-question".encode() in found
    assert f"{CANARY}-answer".encode() in found


async def test_no_store(proxy: Proxy, fake: FakeLlamaServer, slot_dir: Path) -> None:
    """Nothing of such a request is remembered, in memory or on disk, nor of its answer."""
    fake.script = lambda _body: [f" {CANARY}-answer"]
    await proxy.ask(CHAT, chat(f"{CANARY}-question"), headers=NO_STORE)
    assert (await proxy.page("api/conversations"))["conversations"] == []
    await proxy.look()
    assert (await proxy.page("api/snapshots"))["snapshots"] == []
    await proxy.stop()
    assert CANARY.encode() not in await kept(slot_dir)


@pytest.mark.parametrize("refused", [False, True])
async def test_no_store_in_a_conversation_that_is_kept(
    proxy: Proxy, fake: FakeLlamaServer, slot_dir: Path, refused: bool
) -> None:
    """The turn that must not be remembered is not, though the conversation it continues is."""
    fake.script = lambda _body: [" A first answer."]
    first = user("the first question")
    await proxy.ask(CHAT, {"messages": [first]})
    (row,) = proxy.app._book
    if refused:
        fake.fail("error", on=CHAT, status=400)
    fake.script = lambda _body: [f" {CANARY}-answer"]
    said = {"role": "assistant", "content": "A first answer."}
    body = {"messages": [first, said, user(part(f"{CANARY}-question"))]}
    answer = await proxy.ask(CHAT, body, headers=NO_STORE)
    assert answer.status == 200
    assert list(proxy.app._book) == [row]
    await proxy.stop()
    assert CANARY.encode() not in await kept(slot_dir)


# Faults


async def test_a_rule_that_raises(
    proxy: Proxy, fake: FakeLlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original goes out, which is counted; the next request is normalised again."""

    def boom(*_: Any) -> None:
        raise ValueError(CANARY)

    broken = tuple(
        replace(rule, apply=boom) if rule.name == "tail-note" else rule for rule in rules._LEDGER
    )
    raw = orjson.dumps({"messages": [user(part("hello"))], "max_tokens": 4})
    fake.requests.clear()
    with monkeypatch.context() as patch:
        patch.setattr(rules, "_LEDGER", broken)
        assert (await proxy.ask(CHAT, raw)).status == 200
    assert asked(fake)[0].body.startswith(raw[:-1])
    assert proxy.metric('faults_total{where="normalise"}') == 1
    assert proxy.metric('rules_total{outcome="fault",rule="tail-note"}') == 1
    assert (await proxy.ask(CHAT, {"messages": [user(part("again"))]})).status == 200
    assert asked(fake)[1].json["messages"] == [user("again")]


@pytest.mark.parametrize("method", ["find", "keep"])
async def test_a_book_that_raises(
    proxy: Proxy, fake: FakeLlamaServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The request succeeds as if nothing were known."""

    def boom(*_: Any) -> None:
        raise KeyError(CANARY)

    monkeypatch.setattr(Book, method, boom)
    fake.requests.clear()
    answer = await proxy.chat("hello")
    assert (answer.status, len(asked(fake))) == (200, 1)
    assert proxy.metric('faults_total{where="normalise"}') >= 1


@pytest.mark.parametrize("error", [StoreError("no"), OSError("full"), ValueError("ours")])
async def test_a_ledger_that_cannot_be_written(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Requests never see it; it is counted."""

    async def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(LedgerStore, "write", fails)
    assert (await proxy.chat("hello")).status == 200
    assert proxy.app._written is not None
    assert not await proxy.app._written.flush()
    assert (await proxy.chat("hello again")).status == 200
    assert proxy.metric('faults_total{where="store"}') == 1
    assert len((await proxy.page("api/conversations"))["conversations"]) == 2


async def test_a_ledger_that_cannot_be_opened(
    serve: Serve, fake: FakeLlamaServer, tmp_path: Path
) -> None:
    """Conversations are remembered in memory alone."""
    (tmp_path / "file").write_bytes(b"")
    proxy = await serve(normalise={"ledger": str(tmp_path / "file" / "ledger")})
    seen = await turns(proxy, fake, Mangler(), range(3))
    assert all(extends(before, after) for before, after in pairwise(seen))


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_backend_refuses_is_sent_as_it_came(
    proxy: Proxy, fake: FakeLlamaServer, stream: bool, status: int
) -> None:
    """Once, and the client gets that answer; the ledger knows what was sent."""
    raw = orjson.dumps({"messages": [user(part("hello"))], "max_tokens": 4, "stream": stream})
    fake.requests.clear()
    fake.fail("error", on=CHAT, status=status)
    answer = await proxy.ask(CHAT, raw)
    altered, original = asked(fake)
    assert altered.json["messages"] == [user("hello")]
    assert original.body.startswith(raw[:-1])
    assert answer.status == 200
    assert (answer.events[-1] == b"[DONE]") if stream else answer.json["choices"]
    assert proxy.metric('faults_total{where="normalise"}') == 1
    assert (await proxy.page("api/requests"))["requests"][0]["rules"] == []


@pytest.mark.parametrize("api", [CHAT, MESSAGES])
async def test_the_refusal_of_the_original_is_the_clients(
    proxy: Proxy, fake: FakeLlamaServer, api: str
) -> None:
    """Both are refused: the client sees the second refusal, in its own API's shape."""
    fake.requests.clear()
    fake.fail("error", on=CHAT, status=500)
    fake.fail("error", on=CHAT, status=400)
    marked = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    marked[0]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
    body = {"messages": [user(marked if api == CHAT else part("hi"))], "max_tokens": 4}
    if api == MESSAGES:
        body["system"] = "x-anthropic-billing-header: cc_version=1; cch=00001;\nBe brief."
    answer = await proxy.ask(api, body)
    assert len(asked(fake)) == 2
    assert answer.status == 400
    assert answer.json["error"]["message"] == "it broke"
    assert ("type" in answer.json) is (api == MESSAGES)


async def test_a_refusal_of_both_costs_no_frozen_text(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """It was not the rules' doing: the clock, its note and the figures stay as they were."""
    clock = "You are nice.\nCurrent time is 14:0{}:00."

    def system(minute: int) -> dict[str, Any]:
        return {"role": "system", "content": clock.format(minute)}

    first = [system(1), user("one")]
    answer = await proxy.ask(CHAT, {"messages": first})
    said = answer.json["choices"][0]["message"]
    second = [system(2), *first[1:], said, user("two")]
    await proxy.ask(CHAT, {"messages": second})
    noted = text(asked(fake)[-1], 3)
    fake.fail("error", on=CHAT, status=400, times=2)
    third = [system(3), *second[1:], said, user("three")]
    assert (await proxy.ask(CHAT, {"messages": third})).status == 400
    assert proxy.metric('faults_total{where="normalise"}') == 0
    fake.requests.clear()
    assert (await proxy.ask(CHAT, {"messages": third})).status == 200
    (sent,) = asked(fake)
    assert text(sent, 0) == clock.format(1)
    assert text(sent, 3) == noted


async def test_a_prompt_that_is_too_long_is_refused_once(
    proxy: Proxy, fake: FakeLlamaServer
) -> None:
    """The rules are not why: the same prompt would be computed, and refused, again."""
    fake.requests.clear()
    answer = await proxy.ask(CHAT, {"messages": [user(part("hello " * fake.engine.n_ctx))]})
    assert answer.status == 400
    assert answer.json["error"]["type"] == "exceed_context_size_error"
    assert len(asked(fake)) == 1


async def test_an_unaltered_request_is_sent_once(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Nothing was changed, so its refusal is the client's at once."""
    fake.requests.clear()
    fake.fail("error", on=CHAT, status=400)
    assert (await proxy.chat("hello")).status == 400
    assert len(asked(fake)) == 1


async def test_refused_after_a_ping(serve: Serve, fake: FakeLlamaServer) -> None:
    """The headers have left: the answer to the original follows the ping all the same."""
    proxy = await serve(ping_interval=0.005)
    for refusals in (1, 2):
        messages = [user(part(f"hello {refusals}"))]
        body = {"messages": messages, "max_tokens": 4, "stream": True}
        stall = fake.fail("stall", on="/apply-template")
        fake.requests.clear()
        async with proxy.open(CHAT, body) as answer:
            await event(answer)
            fake.fail("error", on=CHAT, status=400, times=refusals)
            stall.release.set()
            got = await whole(answer)
        assert len(asked(fake)) == 2
        assert got.status == 200
        if refusals == 1:
            assert got.events[-1] == b"[DONE]"
        else:
            assert got.events[-1]["error"]["message"] == "it broke"


async def test_an_answer_nobody_can_read(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """A stream of events that are no chat is passed on; nothing is learned from it."""
    fake.script = lambda _body: {"content": "x", "tool_calls": [{"function": ["no", "object"]}]}
    answer = await proxy.ask(CHAT, {"messages": [user("hello")], "stream": True})
    assert (answer.status, answer.broken, answer.events[-1]) == (200, False, b"[DONE]")
    assert [row.answers for row in proxy.app._book] == [()]
    assert (await proxy.page("api/requests"))["requests"][0]["status"] == 200


# A restart of the proxy


async def test_a_restart_changes_no_byte(
    serve: Serve, fake: FakeLlamaServer, tmp_path: Path
) -> None:
    """Notes, repairs and the order of tools are what they would have been without it."""
    last: list[list[bytes]] = []
    for name, restarts in (("one", False), ("two", True)):
        settings = {"store": str(tmp_path / name)}
        proxy = await serve(**settings)
        talk = Mangler(system=f"Today's date: 2026-10-09\n{LONG}")
        sent = await turns(proxy, fake, talk, range(3))
        talk.system = f"Today's date: 2026-10-10\n{LONG}"
        sent += await turns(proxy, fake, talk, range(3, 5))
        if restarts:
            await proxy.stop()
            proxy = await serve(**settings)
            assert proxy.metric("conversations") == 1
        talk.system = f"Today's date: 2026-10-11\n{LONG}"
        sent += await turns(proxy, fake, talk, range(5, 7))
        assert all(extends(before, after) for before, after in pairwise(sent))
        assert b"2026-10-10" in sent[-1].body
        assert b"2026-10-11" in sent[-1].body
        last.append([*listed(sent[-1]), *listed(sent[-1], "tools")])
        await proxy.stop()
    assert last[0] == last[1]


async def test_a_killed_proxy_loses_time_only(
    serve: Serve, fake: FakeLlamaServer, tmp_path: Path
) -> None:
    """What was not written yet is a new conversation afterwards, and grows from there."""
    settings = {"store": str(tmp_path / "store")}
    proxy = await serve(**settings)
    talk = Mangler()
    await turns(proxy, fake, talk, range(3))
    await proxy.kill()
    proxy = await serve(**settings)
    assert (await proxy.page("api/conversations"))["conversations"] == []
    seen = await turns(proxy, fake, talk, range(3, 6))
    assert all(extends(before, after) for before, after in pairwise(seen))


# Forgetting


async def forget(proxy: Proxy, conversation: str, **more: Any) -> Answer:
    """Ask for it to be forgotten."""
    target = f"/_slotkeeper/api/conversations/{conversation}/forget"
    return await proxy.ask(target, b"{}", headers={**JSON, **more})


async def test_forget(serve: Serve, fake: FakeLlamaServer, slot_dir: Path) -> None:
    """A conversation goes with its snapshots; the same history is a new one afterwards."""
    proxy = await serve()
    fake.script = lambda _body: [f" {CANARY}-answer, long enough to know it again"]
    talk = [user(f"{CANARY}-question {LONG}")]
    await proxy.ask(CHAT, {"messages": talk})
    fake.script = None
    await proxy.chat(f"another {LONG}")
    await proxy.look()
    rows = (await proxy.page("api/conversations"))["conversations"]
    assert len((await proxy.page("api/snapshots"))["snapshots"]) == 2
    mine = rows[1]["id"]
    assert (await forget(proxy, mine)).json == {"forgotten": True, "snapshots": 1}
    assert (await forget(proxy, mine)).status == 404
    left = (await proxy.page("api/snapshots"))["snapshots"]
    assert [snapshot["conversation"] for snapshot in left] == [rows[0]["id"]]
    talk += [{"role": "assistant", "content": f"{CANARY}-answer, long enough to know it again"}]
    fake.requests.clear()
    await proxy.ask(CHAT, {"messages": [*talk, user("go on")]}, headers=NO_STORE)
    assert asked(fake)[0].json["messages"][1] == talk[1], "its answer is not known any more"
    await proxy.ask(CHAT, {"messages": [*talk, user("go on")]})
    newest = (await proxy.page("api/conversations"))["conversations"][0]
    assert newest["id"] != mine
    assert (await forget(proxy, newest["id"])).status == 200
    await proxy.stop()
    assert CANARY.encode() not in await kept(slot_dir)


async def test_forget_while_it_runs(serve: Serve, fake: FakeLlamaServer) -> None:
    """A conversation forgotten in mid-answer does not come back with its end, nor is it saved."""
    proxy = await serve()
    stall = fake.fail("stall", on=CHAT, at="stream")
    task = asyncio.create_task(proxy.chat(LONG))
    await stall.hit.wait()
    (row,) = (await proxy.page("api/conversations"))["conversations"]
    assert (await forget(proxy, row["id"])).status == 200
    stall.release.set()
    assert (await task).status == 200
    assert (await proxy.page("api/conversations"))["conversations"] == []
    await proxy.look()
    assert (await proxy.page("api/snapshots"))["snapshots"] == []


# Who may see


async def test_pages_are_the_admins(serve: Serve, fake: FakeLlamaServer) -> None:
    """Titles, explanations and forgetting need the admin key where there is one."""
    proxy = await serve(admin_key="key-admin", keys=["key-a"])
    mine = {"Authorization": "Bearer key-a"}
    await proxy.ask(CHAT, chat(f"{CANARY} question"), headers=mine)
    (row,) = proxy.app._book
    for headers in ({}, mine, {"X-Api-Key": "key-admin"}):
        for page in ("conversations", "requests"):
            got = await proxy.ask(f"/_slotkeeper/api/{page}", method="GET", headers=headers)
            assert got.status == 401
            assert CANARY.encode() not in got.raw
        assert (await forget(proxy, row.id, **headers)).status == 401
    admin = {"Authorization": "Bearer key-admin"}
    got = await proxy.ask("/_slotkeeper/api/conversations", method="GET", headers=admin)
    assert got.json["conversations"][0]["title"] == f"{CANARY} question"
    assert (await forget(proxy, row.id, **admin)).status == 200


async def test_pages_are_not_for_who_is_relayed(proxy: Proxy) -> None:
    """Without an admin key they are for this machine; a request through a relay is not from it."""
    await proxy.chat(f"{CANARY} question")
    for page in ("conversations", "requests"):
        headers = {"X-Forwarded-For": "192.0.2.7"}
        got = await proxy.ask(f"/_slotkeeper/api/{page}", method="GET", headers=headers)
        assert got.status == 403
        assert CANARY.encode() not in got.raw


# Odd requests, and several at once


async def test_two_at_once(serve: Serve, fake: FakeLlamaServer) -> None:
    """Two requests of one conversation: both are answered, both answers are known later."""
    proxy = await serve()
    history = [user("a question"), {"role": "assistant", "content": "an answer"}]
    fake.script = lambda body: [f"  to {body['messages'][-1]['content']}  "]
    fake.go.clear()
    bodies = [{"messages": [*history, user(name)]} for name in ("left", "right")]
    tasks = [asyncio.create_task(proxy.ask(CHAT, body)) for body in bodies]
    await until(lambda: len(proxy.app._book) == 2 or len(asked(fake)) == 2)
    fake.go.set()
    assert [(await task).status for task in tasks] == [200, 200]
    for body, name in zip(bodies, ("left", "right"), strict=True):
        said = {"role": "assistant", "content": f"to {name}"}
        fake.requests.clear()
        await proxy.ask(CHAT, {"messages": [*body["messages"], said, user("go on")]})
        assert text(asked(fake)[0], 3) == f"  to {name}  "


async def test_the_same_request_twice_at_once(serve: Serve, fake: FakeLlamaServer) -> None:
    """A client that retries: one conversation, and whichever answer it goes on with is known."""
    proxy = await serve()
    answers = iter(("  one  ", "  two  "))
    fake.script = lambda _body: [next(answers)]
    fake.go.clear()
    tasks = [asyncio.create_task(proxy.chat("hello")) for _ in range(2)]
    await until(lambda: len(proxy.app._book) == 1)
    fake.go.set()
    assert [(await task).status for task in tasks] == [200, 200]
    (row,) = proxy.app._book
    assert sorted(orjson.loads(one.message)["content"] for one in row.answers) == [
        "  one  ",
        "  two  ",
    ]


async def test_a_client_that_leaves(
    proxy: Proxy, fake: FakeLlamaServer, client: aiohttp.ClientSession
) -> None:
    """Half an answer is not remembered; the conversation goes on with what the client has."""
    stall = fake.fail("stall", on=CHAT, at="stream")
    body = chat(LONG, stream=True)
    async with client.post(proxy.url + CHAT, data=orjson.dumps(body)):
        await stall.hit.wait()
    await proxy.quiet()
    (row,) = proxy.app._book
    assert (row.answers, row.prompt_n) == ((), None)
    said = {"role": "assistant", "content": "half an"}
    fake.requests.clear()
    more = {"messages": [*body["messages"], said, user("go on")], "max_tokens": 4}
    assert (await proxy.ask(CHAT, more)).status == 200
    assert asked(fake)[0].json["messages"] == more["messages"]
    assert [one.id for one in proxy.app._book] == [row.id]


@pytest.mark.parametrize("api", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("hello"), {"role": "assistant", "content": "The answer is "}],
        [{"role": "system", "content": ""}, user("")],
        [user([]), user(None), {"role": "assistant", "content": None}],
    ],
)
async def test_odd_messages(
    proxy: Proxy, fake: FakeLlamaServer, api: str, messages: list[Any]
) -> None:
    """None, a prefill, empty ones: as without the proxy, and no fault is counted."""
    for _ in range(2):
        answer = await proxy.ask(api, {"messages": messages, "max_tokens": 4})
        assert answer.status in {200, 400}
    assert proxy.metric('faults_total{where="normalise"}') == 0
    assert len(proxy.app._book) <= 1


@pytest.mark.parametrize("messages", [[None], ["text"], [[]], [{"role": 5, "content": 7}], [{}]])
async def test_messages_that_are_none(proxy: Proxy, fake: FakeLlamaServer, messages: Any) -> None:
    """What is no message is the backend's to judge; it gets the very bytes."""
    fake.requests.clear()
    fake.fail("error", on=CHAT, status=400)
    raw = orjson.dumps({"messages": messages, "max_tokens": 4})
    answer = await proxy.ask(CHAT, raw)
    assert (answer.status, answer.json["error"]["message"]) == (400, "it broke")
    assert asked(fake)[0].body.startswith(raw[:-1])


async def test_several_answers(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """With n > 1 the request is normalised, and no answer is taken for the conversation's."""
    fake.requests.clear()
    answer = await proxy.ask(CHAT, {"messages": [user(part("hello"))], "n": 2, "max_tokens": 4})
    assert len(answer.json["choices"]) == 2
    assert asked(fake)[0].json["messages"] == [user("hello")]
    assert [row.answers for row in proxy.app._book] == [()]
