"""Why a request was cold, over real sockets: on the page, in the metric, as a cause in the log.

About proxy.server.explainer, and what proxy.server.record, proxy.traits and proxy.telemetry.history
do for it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from proxy.core.records import Mode
from proxy.server import explainer
from tests.integration.conftest import Serve
from tests.integration.fake_llama_server import FakeLlamaServer
from tests.integration.proxies import CHAT, LONG, Proxy, chat, until
from tests.unit.doubles import Clock

NOTHING_SAVED = {"daily_write": 0, "prewarm": False}
DAY = 86_400.0
CANARY = "canary-91be"


def user(text: str) -> dict[str, Any]:
    """A person's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """A model's message."""
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


def tool(name: str) -> dict[str, Any]:
    """A definition."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


async def say(proxy: Proxy, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One request; its row in the decision log."""
    answer = await proxy.ask(CHAT, {"messages": list(messages), "max_tokens": 4, **more})
    assert answer.status == 200
    row: dict[str, Any] = (await proxy.page("api/requests?limit=1"))["requests"][0]
    return row


async def explained(proxy: Proxy) -> dict[str, str]:
    """The explanation of the newest request, once there is one."""
    await until(lambda: proxy.app.history.recent(1)[0].cold is not None)
    cold: dict[str, str] = (await proxy.page("api/requests"))["requests"][0]["cold"]
    return cold


def counted(proxy: Proxy) -> dict[str, int]:
    """The causes counted so far."""
    text = proxy.app.metrics.render()[0].decode()
    lines = [line for line in text.splitlines() if line.startswith("slotkeeper_cold_total{")]
    found = {line.split('"')[1]: int(float(line.rsplit(" ", 1)[1])) for line in lines}
    return {cause: count for cause, count in found.items() if count}


def logged(log: io.StringIO) -> list[str]:
    """The causes in the structured log; no line of it may quote a prompt."""
    assert CANARY not in log.getvalue()
    rows = [orjson.loads(line) for line in log.getvalue().splitlines()]
    return [
        row.get("cold") or row.get("cause") for row in rows if row.get("cold") or "cause" in row
    ]


ONE, TWO = (
    [tool(name) for name in ("read", "bash", "grep")],
    [tool(name) for name in ("bash", "grep", "read")],
)
TALK = [user(f"one {LONG}"), assistant("I see, and will look."), user(f"two {CANARY}-old {LONG}")]


@pytest.mark.parametrize(
    ("rules", "before", "after", "cause", "sentence", "sides"),
    [
        (
            (),
            {"messages": [system(f"You are {CANARY}-a. {LONG}"), user("hello there")]},
            {
                "messages": [
                    system(f"You are {CANARY}-b. {LONG}"),
                    user("hello there"),
                    assistant("Hello to you, too, my friend."),
                    user("go on"),
                ]
            },
            "system",
            "system prompt changed at character 21",
            (f"{CANARY}-a", f"{CANARY}-b"),
        ),
        (
            ("-tool-order",),
            {"messages": TALK[:1], "tools": ONE},
            {"messages": TALK, "tools": TWO},
            "tool-moved",
            "tool `read` moved from place 1 to 3",
            ("", ""),
        ),
        (
            (),
            {"messages": [*TALK, assistant("Fine, done with it all."), user("three")]},
            {
                "messages": [
                    TALK[0],
                    TALK[1],
                    user(f"two {CANARY}-new"),
                    assistant("Fine, done with it all."),
                    user("three"),
                    assistant("More."),
                    user("four"),
                ]
            },
            "history",
            "history was rewritten at message 3",
            (f"{CANARY}-old", f"{CANARY}-new"),
        ),
    ],
)
async def test_what_the_client_changed(
    serve: Serve,
    log: io.StringIO,
    rules: Sequence[str],
    before: dict[str, Any],
    after: dict[str, Any],
    cause: str,
    sentence: str,
    sides: tuple[str, str],
) -> None:
    """The first difference in one sentence, both sides cut short, and what could be done."""
    proxy = await serve(normalise={"rules": rules}, **NOTHING_SAVED)
    for body in (before, after):
        row = await say(proxy, *body["messages"], tools=body.get("tools", []))
    cold = row["cold"]
    assert cold["cause"] == cause
    assert sentence in cold["sentence"]
    for side, shown in zip(sides, (cold["before"], cold["after"]), strict=True):
        assert side in shown
        assert len(shown) <= 60
    assert cold["advice"]
    assert counted(proxy) == {cause: 1}
    assert logged(log) == [cause]


async def test_the_date_rolled_over(
    serve: Serve, fake: FakeLlamaServer, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that writes the date itself: the messages are the same, the day is not."""
    clock = Clock(1_790_000_000.0)
    monkeypatch.setattr("proxy.app.time", SimpleNamespace(time=clock))
    fake.date = "21 Sep 2026"
    proxy = await serve(**NOTHING_SAVED)
    assert proxy.app.served.traits.writes_date
    assert (await say(proxy, *TALK[:1]))["cold"] is None
    clock.now, fake.date = clock.now + DAY, "22 Sep 2026"
    await say(proxy, *TALK)
    cold = await explained(proxy)
    assert (cold["cause"], cold["sentence"]) == ("date", "the template's date rolled over")
    assert "template-date" in cold["advice"]
    assert counted(proxy) == {"date": 1}
    assert logged(log) == ["date"]


async def test_the_backend_restarted(serve: Serve, fake: FakeLlamaServer, log: io.StringIO) -> None:
    """Nothing was saved, and the slot is gone."""
    proxy = await serve(**NOTHING_SAVED)
    await say(proxy, *TALK[:1])
    await fake.restart()
    await proxy.look(Mode.EXCLUSIVE)
    await say(proxy, *TALK)
    cold = await explained(proxy)
    assert cold["sentence"] == "slot was lost: the backend restarted"
    assert counted(proxy) == {"restarted": 1}
    assert logged(log) == ["restarted"]
    await say(proxy, *TALK, assistant("Yes."), user("go on"))
    assert counted(proxy) == {"restarted": 1}, "it is told once"


async def test_displaced(serve: Serve, log: io.StringIO) -> None:
    """Two slots, three conversations, nothing on disk."""
    proxy = await serve(**NOTHING_SAVED)
    await say(proxy, *TALK[:1])
    for name in ("left", "right"):
        await say(proxy, user(f"{name} {LONG}"))
    await say(proxy, *TALK)
    assert (await explained(proxy))["cause"] == "displaced"
    assert counted(proxy) == {"displaced": 1}
    assert logged(log) == ["displaced"]


async def test_forward(serve: Serve, fake: FakeLlamaServer, log: io.StringIO) -> None:
    """A backend that is not driven chose another slot, or lost it."""
    proxy = await serve(slot_dir=None)
    assert proxy.app.scheduler.mode is Mode.FORWARD
    await say(proxy, *TALK[:1])
    for slot in fake.engine.slots:
        slot.tokens = []
    await say(proxy, *TALK)
    cold = await explained(proxy)
    assert (cold["cause"], cold["sentence"]) == (
        "forward",
        "mode forward: the backend chose the slot",
    )
    assert counted(proxy) == {"forward": 1}
    assert logged(log) == ["forward"]


async def test_the_template_changed_its_mind(serve: Serve, fake: FakeLlamaServer) -> None:
    """The same messages, rendered otherwise in a longer conversation."""
    proxy = await serve(**NOTHING_SAVED)
    whole = fake._render

    def render(body: dict[str, Any]) -> str:
        first = "short" if len(body["messages"]) == 1 else "long"
        return f"<|im_start|>{first}\n{whole(body)}"

    fake._render = render  # type: ignore[method-assign]
    await say(proxy, *TALK[:1])
    await say(proxy, *TALK)
    cold = await explained(proxy)
    assert cold["cause"] == "template"
    assert cold["before"].startswith("<|im_start|>short") or "short" in cold["before"]


async def test_nothing_to_explain(proxy: Proxy, fake: FakeLlamaServer, log: io.StringIO) -> None:
    """A new conversation, a warm one, a retry, one that wants no cache: none is called cold."""
    await say(proxy, *TALK[:1])
    await say(proxy, *TALK)
    await say(proxy, *TALK)
    await say(proxy, user(f"another {LONG}"))
    await say(proxy, *TALK, assistant("Yes."), user("go on"))
    row = await say(proxy, *TALK, assistant("Yes."), user("go on"), cache_prompt=False)
    assert row["reused"] == 0
    for name in ("left", "right"):
        await say(proxy, user(f"{name} {LONG}"))
    await proxy.quiet()
    await until(lambda: not len(proxy.app.scheduler._tasks))
    assert [row["cold"] for row in (await proxy.page("api/requests"))["requests"]] == [None] * 8
    assert counted(proxy) == {}
    assert logged(log) == []


async def test_another_slot_by_the_clients_own_wish(proxy: Proxy, fake: FakeLlamaServer) -> None:
    """Who names a slot that holds something else is not told that a slot was lost."""
    first = await say(proxy, *TALK[:1])
    await say(proxy, *TALK, id_slot=1 - first["slot"])
    assert (await explained(proxy))["cause"] == "unknown"


async def test_in_shadow_the_client_is_explained(serve: Serve, fake: FakeLlamaServer) -> None:
    """What was sent is compared, not what would have been: here the clock is the cause."""
    proxy = await serve(normalise={"mode": "shadow"}, **NOTHING_SAVED)
    for time in ("14:02", "14:03"):
        row = await say(proxy, system(f"The time is {time}.\n{LONG}"), *TALK[:1])
    assert row["rules"] == ["clock (shadow)", "tail-note (shadow)"]
    assert row["cold"]["sentence"] == "system prompt changed at character 17"
    assert ("14:02" in row["cold"]["before"], "14:03" in row["cold"]["after"]) == (True, True)


async def test_through_the_other_api(serve: Serve) -> None:
    """The same words for a client of /v1/messages."""
    proxy = await serve(**NOTHING_SAVED)
    for name in ("a", "b"):
        body = chat(LONG, system=f"You are {name}. {LONG}")
        body["messages"] += [assistant("I see, and will look at it."), user("go on")]
        assert (await proxy.ask("/v1/messages", body)).status == 200
    newest = (await proxy.page("api/requests"))["requests"][0]
    assert (newest["path"], newest["cold"]["cause"]) == ("/v1/messages", "system")


# Faults


@pytest.mark.parametrize("what", ["first_difference", "rendered_difference"])
async def test_an_explainer_that_raises(
    serve: Serve, log: io.StringIO, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The answer is not touched, the fault is counted, and the log quotes nothing."""

    def boom(*_: Any) -> None:
        raise ValueError(CANARY)

    monkeypatch.setattr(explainer, what, boom)
    proxy = await serve(**NOTHING_SAVED)
    await say(proxy, *TALK[:1])
    for name in ("left", "right"):
        await say(proxy, user(f"{name} {LONG}"))
    await say(proxy, *TALK)
    await until(lambda: proxy.metric('faults_total{where="explain"}') == 1)
    assert CANARY not in log.getvalue()
    assert counted(proxy) == ({} if what == "first_difference" else {"displaced": 1})


async def test_a_backend_that_does_not_render(serve: Serve, fake: FakeLlamaServer) -> None:
    """The closer look fails: what is known of the slot is told."""
    proxy = await serve(slot_dir=None)
    await say(proxy, *TALK[:1])
    for slot in fake.engine.slots:
        slot.tokens = []
    fake.fail("error", on="/apply-template", times=9)
    await say(proxy, *TALK)
    assert (await explained(proxy))["cause"] == "forward"
    assert proxy.metric('faults_total{where="explain"}') == 1


async def test_the_row_is_gone_before_the_cause_is_found(
    serve: Serve, fake: FakeLlamaServer
) -> None:
    """The decision log has dropped the request meanwhile: the cause is counted all the same."""
    proxy = await serve(slot_dir=None)
    await say(proxy, *TALK[:1])
    for slot in fake.engine.slots:
        slot.tokens = []
    stall = fake.fail("stall", on="/apply-template")
    await say(proxy, *TALK)
    await stall.hit.wait()
    proxy.app.history._decisions.clear()
    stall.release.set()
    await until(lambda: counted(proxy) == {"forward": 1})
    assert proxy.app.history.recent(9) == []
