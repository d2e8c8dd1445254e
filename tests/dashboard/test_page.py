"""The page in a real browser, before the fake API: what is shown, and what follows the events."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.dashboard import sample
from tests.dashboard.cdp import Page
from tests.dashboard.fake_api import FakeApi

LIVE = "document.querySelector('#link.live')"


async def opened(page: Page, api: FakeApi) -> None:
    """The page is there and follows the events."""
    await page.open(api.url)
    await page.until(LIVE)


async def test_the_figures(page: Page, api: FakeApi) -> None:
    """The headline says what was saved, how fast it is, and how full the disk is."""
    await opened(page, api)
    await page.sees("92 %", "#figure-reused")
    await page.sees("1 h 52 min", "#figure-saved")
    await page.sees("0.21 s", "#figure-first")
    await page.sees("1.4 s", "#figure-first")
    await page.sees("14.2 GiB", "#figure-disk")
    await page.sees("Caching in full", "#banner")


async def test_slots_and_running_requests(page: Page, api: FakeApi) -> None:
    """Each slot says what it holds; a prompt being read shows how far it is."""
    await opened(page, api)
    states = "[...document.querySelectorAll('#slots .state')].map((one) => one.innerText).join()"
    assert await page.run(states) == "answering,warm,restoring,free"
    await page.sees("12,411 tokens", "#slots")
    bar = "document.querySelector('[role=progressbar]')"
    assert await page.run(f"{bar}.ariaValueText") == "9,800 of 12,411 tokens"
    row = sample.running(time.time())[0] | {"processed": 12_000}
    api.push("running", {"running": [row]})
    await page.until(f"{bar}.ariaValueNow === '12000'")
    api.push("running", {"running": []})
    await page.sees("Nothing is running", "#running")


async def test_a_finished_request_shows_up(page: Page, api: FakeApi) -> None:
    """A request that ends becomes the first row, and the figures follow, without a reload."""
    await opened(page, api)
    status = sample.status(time.time())
    status["totals"]["prompt_tokens"] = {"slot": 1, "snapshot": 0, "computed": 1}
    api.push("status", status)
    api.push("request", sample.request(0, time.time() + 60, request_id="new", title="Brand new"))
    await page.until(
        "document.querySelector('#requests tbody tr').dataset.request === 'new'"
        " && document.querySelector('#requests tbody tr').innerText.includes('Brand new')"
    )
    await page.sees("50 %", "#figure-reused")


async def test_reusing_little_looks_so(page: Page, api: FakeApi) -> None:
    """The reason's colour goes by the share; who has no conversation shows the path."""
    await opened(page, api)
    unknown = {"title": None, "conversation": "", "client": "", "path": "/v1/rerank"}
    few = {"reason": "slot-hit", "reused": 31, "prompt": 1032}
    row = sample.request(0, time.time() + 60, request_id="few", **few)
    api.push("request", row | unknown)
    word = "document.querySelector('[data-request=few] .reason')"
    await page.until(f"{word}?.classList.contains('cold')")
    await page.sees("slot-hit", "[data-request=few] .reason")
    await page.sees("3 %", "[data-request=few]")
    await page.sees("/v1/rerank", "[data-request=few] .title")
    api.push("request", row | {"request_id": "much", "reused": 952})
    hot = "document.querySelector('[data-request=much] .reason')"
    await page.until(f"{hot}?.classList.contains('slot-hit')")


async def test_a_failure_looks_so(page: Page, api: FakeApi) -> None:
    """A request without an answer is no hit, whatever the slot held; why is beside it."""
    await opened(page, api)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"status": 400, "note": "the prompt has 9 tokens"}, "failed|the prompt has 9 tokens"),
        ({"status": 499}, "client left|"),
        ({"status": 404, "prompt": None, "conversation": ""}, "unknown path|"),
    )
    for number, (row, words) in enumerate(cases):
        name = f"failed-{number}"
        api.push(
            "request", sample.request(0, time.time() + 60, request_id=name, seq=900 + number, **row)
        )
        found = f"document.querySelector('[data-request={name}]')"
        await page.until(f"{found} !== null")
        shown = f"({found}.querySelector('.because')?.innerText ?? '')"
        assert (
            await page.run(f"{found}.querySelector('.reason').innerText + '|' + {shown}") == words
        )


async def test_two_requests_of_one_id(page: Page, api: FakeApi) -> None:
    """A client may give all its requests the same id: each is a row that opens by itself."""
    await opened(page, api)
    for seq in (1, 2):
        twin = sample.request(0, time.time() + 60 + seq, request_id="twin", seq=seq)
        api.push("request", twin)
    rows = "document.querySelectorAll('[data-request=twin]')"
    await page.until(f"{rows}.length === 2")
    await page.run(f"{rows}[0].querySelector('button').click()")
    await page.until("document.querySelectorAll('#requests tr.detail').length === 1")


async def test_a_model_without_an_alias(page: Page, api: FakeApi) -> None:
    """The head of the page has its file's name, not where that lies."""
    status = sample.status(time.time())
    status["backend"]["model"] = "/srv/models/qwen3-8b.gguf"
    api.state["status"] = status
    await opened(page, api)
    name = "document.querySelector('.top-backend b').innerText"
    assert await page.run(name) == "qwen3-8b.gguf"


async def test_why_it_was_cold(page: Page, api: FakeApi) -> None:
    """A row says why in its sentence; opened by keyboard, it shows both sides, costs and rules."""
    await opened(page, api)
    await page.sees("cold because system prompt changed at character 118", "#requests")
    await page.run("document.querySelector('[data-request=\"7f3a0002\"] button').focus()")
    await page.press("Enter", 13)
    await page.sees("This time", ".why")
    marks = "[...document.querySelectorAll('.why mark')].map((one) => one.innerText).join()"
    assert await page.run(marks) == "13:58,14:01"
    await page.sees("restore snapshot 5d0c77e1 into slot 1", ".why .best")
    await page.sees("Rules applied", ".why")
    await page.press("Enter", 13)
    await page.until("!document.querySelector('.why')")


async def test_only_cold_ones(page: Page, api: FakeApi) -> None:
    """The filter leaves the requests that were colder than expected."""
    await opened(page, api)
    await page.run("document.querySelector('#requests input').click()")
    await page.until("document.querySelectorAll('#requests tbody tr').length === 6")


async def test_charts(page: Page, api: FakeApi) -> None:
    """Six charts are drawn over an hour, and over a day when asked."""
    await opened(page, api)
    await page.until("document.querySelectorAll('.charts[data-span=\"1h\"] canvas').length === 6")
    await page.click("24 h", "#charts")
    await page.until("document.querySelector('.charts[data-span=\"24h\"]')")
    assert [url for url in page.requests if url.endswith("api/history?span=24h")]
    label = await page.run("document.querySelector('.charts [role=img]').ariaLabel")
    assert "not recomputed" in label
    painted = (
        "(() => { const c = document.querySelector('.charts canvas');"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v); })()"
    )
    assert await page.run(painted)


async def test_the_log(page: Page, api: FakeApi) -> None:
    """The log is filtered by level and words, follows, and stands still when held."""
    await opened(page, api)
    shown = "document.querySelectorAll('.log li').length"
    await page.until(f"{shown} === 20")
    choose = (
        "const s = document.querySelector('#log-level'); s.value = 'error';"
        " s.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    await page.run(f"{{ {choose} }}")
    await page.until(f"{shown} === 4")
    await page.run("document.querySelector('#log-search').focus()")
    await page.type("moon")
    await page.sees("No line fits", "#log")
    line = {"at": time.time(), "level": "error", "event": "full moon", "fields": {}}
    api.push("log", line | {"seq": 100})
    await page.until(f"{shown} === 1")
    await page.click("Stop following", "#log")
    api.push("log", line | {"seq": 101})
    api.push("running", {"running": []})
    await page.sees("Nothing is running", "#running")  # so the line before it has arrived
    assert await page.run(shown) == 1
    await page.click("Follow", "#log")
    await page.until(f"{shown} === 2")


async def test_it_follows_again_after_a_break(page: Page, api: FakeApi) -> None:
    """A lost stream is said, and made good by itself: what happened meanwhile is shown."""
    await opened(page, api)
    api.state["status"] = sample.status(time.time(), advice="Restarted meanwhile.")
    api.state["requests"].append(sample.request(0, time.time() + 9, request_id="missed"))
    api.hang_up()
    await page.sees("Disconnected", "#link")
    await page.sees("these figures are old", "#banner")
    assert await page.run("document.querySelector('#pause').disabled")
    await page.click("Try now")
    await page.until(LIVE)
    await page.sees("Restarted meanwhile.", "#banner")
    await page.until("document.querySelector('[data-request=missed]')")
    assert api.listeners == 1


async def test_another_proxy_begins_anew(page: Page, api: FakeApi) -> None:
    """After a restart of the proxy, rows it does not know any more are gone."""
    await opened(page, api)
    await page.until("document.querySelector('[data-request=\"7f3a0001\"]')")
    api.state["status"] = sample.status(time.time(), started=time.time())
    api.state["requests"] = [sample.request(0, time.time(), request_id="second-life")]
    api.hang_up()
    await page.click("Try now")
    await page.until("document.querySelector('[data-request=\"second-life\"]')")
    await page.until("!document.querySelector('[data-request=\"7f3a0001\"]')")


async def test_a_newcomer_is_told_what_to_do(page: Page, api: FakeApi) -> None:
    """Without requests, slots or a store, each section says what is missing and what helps."""
    advice = "Start llama-server with --slot-save-path."
    none = {"slot": 0, "snapshot": 0, "computed": 0}
    totals = {"requests": 0, "prompt_tokens": none, "seconds_saved": 0.0}
    changes = {
        "mode": "forward", "why": "no slot actions", "advice": advice, "store": None,
        "totals": totals, "first_token": {"p50": None, "p95": None, "count": 0},
    }  # fmt: skip
    api.state["status"] = sample.status(time.time(), **changes)
    for name in ("slots", "running", "requests", "snapshots", "conversations", "logs"):
        api.state[name] = []
    await opened(page, api)
    await page.sees("Forwarding only", "#banner")
    for place in ("#banner", "#slots", "#snapshots"):
        await page.sees(advice, place)
    await page.sees(f"http://{urlsplit(api.url).netloc}/v1", "#requests")
    await page.sees("No prompt yet", "#figure-reused")


STORE_FULL = sample.status()["store"] | {"advice": "unpin some"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"paused": True}, "Caching is paused"),
        ({"draining": True}, "Shutting down"),
        ({"restores": "retired"}, "not restored any more"),
        ({"mode": "routed"}, "Placing requests"),
        ({"store": STORE_FULL, "advice": "unpin some"}, "unpin some"),
        ({"store": STORE_FULL, "advice": "", "mode": "forward"}, "Forwarding only"),
        ({"store": STORE_FULL, "advice": "set backend.key"}, "set backend.key"),
        ({"backend": sample.status()["backend"] | {"up": False}}, "does not answer"),
    ],
)
async def test_the_mode_in_words(
    page: Page, api: FakeApi, changes: dict[str, object], said: str
) -> None:
    """What is not as usual is said in a sentence."""
    await opened(page, api)
    api.push("status", sample.status(time.time(), **changes))
    await page.sees(said, "#banner")


async def test_text_of_others_is_only_text(page: Page, api: FakeApi) -> None:
    """Markup in a title is shown as it is and makes no element."""
    title = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    api.state["requests"] = [sample.request(2, time.time(), title=title)]
    api.state["conversations"][0]["title"] = title
    await opened(page, api)
    await page.sees(title, "#requests")
    await page.sees(title, "#conversations")
    assert await page.run("document.querySelectorAll('#app img, #app script').length") == 0


async def test_hidden_titles(page: Page, api: FakeApi) -> None:
    """Without titles, rows are told apart by the beginning of their ids."""
    api.state["status"] = sample.status(time.time(), hide_titles=True)
    for name in ("slots", "running", "requests", "snapshots", "conversations"):
        api.state[name] = [row | {"title": None} for row in api.state[name]]
    await opened(page, api)
    await page.sees("Conversation c0aa4f21", "#requests")
    await page.sees("server.hide_titles", "#conversations")


async def test_the_theme_is_kept(page: Page, api: FakeApi) -> None:
    """A chosen theme wins over the browser's, also after a reload, and the charts follow it."""
    await opened(page, api)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await page.run(ground)
    for _ in range(2):
        await page.run("document.querySelector('#theme').click()")
    await page.until(f"{ground} !== '{light}'")
    dark = await page.run(ground)
    await page.open(api.url)
    await page.until(LIVE)
    assert await page.run(ground) == dark


@pytest.mark.parametrize("width", [360, 820, 1440])
async def test_it_fits(page: Page, api: FakeApi, width: int) -> None:
    """Nothing sticks out of the window, a decision and a question open."""
    await page.look(width)
    await opened(page, api)
    await page.run("document.querySelector('[data-request=\"7f3a0002\"] button').click()")
    await page.click(f"Delete {sample.TITLES[0]}", "#snapshots")
    await page.until("document.querySelector('.why') && document.querySelector('.confirm')")
    assert await page.run("document.scrollingElement.scrollWidth") == width


async def test_a_violation_would_be_noticed(loud: Page, api: FakeApi) -> None:
    """An inline script is refused by the policy and logged, so a quiet page proves something."""
    await opened(loud, api)
    await loud.run("document.head.append(Object.assign(document.createElement('script'),"
                   " {textContent: 'window.ran = true'}))")  # fmt: skip
    assert await loud.run("window.ran === undefined")
    assert any("Content Security Policy" in line for line in loud.console)
