"""The page's pure modules, run where they run: how figures are spelled and series are joined."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.dashboard.cdp import Page
from tests.dashboard.fake_api import FakeApi
from tests.dashboard.test_page import opened

NONE = "\u2013"
SPELLED = [
    ("seconds(0)", "0 s"),
    ("seconds(0.0172)", "17 ms"),
    ("seconds(0.0001)", "< 1 ms"),
    ("seconds(0.18)", "0.18 s"),
    ("seconds(4)", "4 s"),
    ("seconds(0.999)", "1.0 s"),
    ("seconds(9.96)", "10 s"),
    ("seconds(59.7)", "1 min"),
    ("seconds(250)", "4 min 10 s"),
    ("seconds(6735)", "1 h 52 min"),
    ("seconds(3600)", "1 h"),
    ("seconds(273600)", "3 d 4 h"),
    ("seconds(null)", NONE),
    ("bytes(0)", "0 bytes"),
    ("bytes(1023)", "1023 bytes"),
    ("bytes(1536)", "1.5 KiB"),
    ("bytes(15247000000)", "14.2 GiB"),
    ("bytes(undefined)", NONE),
    ("percent(0, 10)", "0 %"),
    ("percent(1, 1000)", "< 1 %"),
    ("percent(999, 1000)", "> 99 %"),
    ("percent(10, 10)", "100 %"),
    ("percent(0, 0)", NONE),
    ("plural(1, 'slot')", "1 slot"),
    ("plural(12411, 'token')", "12,411 tokens"),
    ("ago(100, 103)", "just now"),
    ("ago(100, 90)", "just now"),
    ("ago(0, 59)", "59 s ago"),
    ("ago(0, 3599)", "59 min ago"),
    ("ago(0, 90000)", "1 d ago"),
    ("compact(4100000)", "4.1M"),
    ("name({title: null, conversation: 'abcdefghij'})", "Conversation abcdefgh"),
    ("name({title: '', conversation: '', client: 'goose'})", "goose"),
    ("name({title: null, conversation: null, client: null})", NONE),
    ("name({title: null, conversation: '', client: '', path: '/v1/rerank'})", "/v1/rerank"),
    ("field('total', 0.16332411766052246)", "0.16 s"),
    ("field('tokens', 1)", "1 token"),
    ("field('share', 0.123456)", "0.1235"),
    ("field('port', 8088)", "8088"),
    ("field('rules', [])", ""),
    ("field('rules', ['clock', 'replay'])", "clock, replay"),
    ("field('stored', false)", "no"),
    ("field('id', '0123456789abcdef01234567')", "01234567"),
    ("field('why', null)", ""),
    ("model('/models/a\\\\b/qwen.gguf')", "qwen.gguf"),
    ("model('org/qwen')", "org/qwen"),
    ("model(null)", None),
]


async def ask(page: Page, module: str, expression: str) -> Any:
    """An expression with everything a module exports."""
    names = f"(await import('./{module}.js'))"
    return await page.run(f"(async () => {{ const m = {names}; return m.{expression}; }})()")


async def test_figures_are_spelled(page: Page, api: FakeApi) -> None:
    """Each kind of figure reads well at every size, and says so when it is not known."""
    await opened(page, api)
    for expression, wanted in SPELLED:
        assert await ask(page, "format", expression) == wanted, expression


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("at 13:58. You", "at 14:01. You", ["at ", "13:58", "14:01", ". You"]),
        ("same", "same", ["", "same", "same", ""]),
        ("a tool", "a tool more", ["a ", "tool", "tool more", ""]),
        ("", "new", ["", "", "new", ""]),
        ("one two", "one two two", ["one ", "two", "two two", ""]),
    ],
)
async def test_a_difference_is_whole_words(
    page: Page, api: FakeApi, before: str, after: str, wanted: list[str]
) -> None:
    """What differs is marked by whole words, and both sides are still what they were."""
    await opened(page, api)
    sides = ", ".join(orjson.dumps(side).decode() for side in (before, after))
    parts = await ask(page, "why", f"parted({sides})")
    assert parts == wanted
    assert parts[0] + parts[1] + parts[3] == before
    assert parts[0] + parts[2] + parts[3] == after


async def test_minutes_are_joined(page: Page, api: FakeApi) -> None:
    """Over a day, minutes become points: amounts add up, a gap is none, the disk's is the last."""
    await opened(page, api)
    names = '["t", "requests", "first_token_p95", "disk"]'
    rows = "[[60, 9, 9, 9], [86280, 3, null, 6], [86340, 2, 1.5, 7]]"
    history = f"{{step: 60, columns: {names}, rows: {rows}}}"
    made = await ask(page, "series", f"columns({history}, 7200, 86399)")
    assert len(made["t"]) == 120
    assert made["t"][-1] == 86340
    assert (sum(made["requests"]), made["requests"][-1]) == (5, 2)
    assert made["first_token_p95"][-2:] == [None, 1.5]
    day = await ask(page, "series", f"columns({history}, 86400, 86399)")
    assert day["t"][1] - day["t"][0] == 720
    assert (day["requests"][-1], day["disk"][-1], day["requests"][0]) == (5, 7, 9)


@pytest.mark.parametrize(
    ("values", "dots"),
    [("[null, 2, null, 3]", True), ("[null, null]", False), ("Array(60).fill(1)", False)],
)
async def test_few_points_are_dots(page: Page, api: FakeApi, values: str, dots: bool) -> None:
    """Of a minute alone no line can be seen; where there is a line, dots would only hide it."""
    await opened(page, api)
    assert await ask(page, "charts", f"lonely({values})") is dots


async def test_events_are_parsed(page: Page, api: FakeApi) -> None:
    """An event has a kind and JSON; a comment is none."""
    await opened(page, api)
    event = r"parse('event: log\ndata: {\"a\":\ndata: 1}')"
    assert await ask(page, "events", event) == {"kind": "log", "data": {"a": 1}}
    assert await ask(page, "events", "parse(': alive')") is None
