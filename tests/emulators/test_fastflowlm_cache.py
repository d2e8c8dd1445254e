"""The acceptance table, run against the emulator."""

from __future__ import annotations

import asyncio

import pytest

from tests.emulators.fastflowlm import Answer, Emulator, Options, Record, acceptance
from tests.emulators.fastflowlm.acceptance import CKPT, HIST, Ask, Row
from tests.emulators.fastflowlm.client import Reply, ask

CHAT = "/v1/chat/completions"


async def send(emu: Emulator, model: str, line: Ask) -> tuple[Reply, Record]:
    """Make one request of a row, end it as the row says, and wait for what follows."""
    emu.answers.append(Answer(tuple(line.answer.split("|"))))
    body = {"model": line.model or model, "stream": True, "request_id": "r", **line.body()}
    if line.path != CHAT:
        body["stream"] = False
    cancels = line.end.startswith("cancel")
    if cancels:
        hold = emu.hold("decode" if line.end.endswith("decode") else "prefill")
        running = asyncio.create_task(ask(emu.url, line.path, body))
        await hold.reached.wait()
        stopped = await ask(emu.url, "/api/cancel", {"request_id": "r"})
        assert (stopped.status, stopped.body) == acceptance.WIRE["cancelled"]
        hold.release.set()
        reply = await running
    else:
        reply = await ask(emu.url, line.path, body)
    await emu.settled()
    emu.answers.clear()
    return reply, next(r for r in reversed(emu.records) if r.path == line.path)


def judge(line: Ask, reply: Reply, record: Record, emu: Emulator) -> None:
    """Compare with the row."""
    if line.layer1:
        assert record.layer1 == line.layer1, record.reason
    if line.matched is not None:
        assert record.matched == line.matched
    if line.layer2:
        assert record.layer2 == line.layer2, record.diverged
    if line.end == "error 400":
        assert (reply.status, reply.body) == acceptance.WIRE["overflow"]
    elif line.end == "crash":
        assert (reply.status, emu.crashed) == (0, True)
    else:
        assert reply.status == 200
    if line.end.startswith("cancel"):
        assert (reply.finish, reply.complete) == ("cancel", True)


async def play(row: Row, profile: str = "0.9.45", *, warm: bool = True) -> list[Record]:
    """Run a row, its model having answered something before."""
    options = Options(model=row.model, ctx_len=4096, profile=profile)
    async with Emulator(options) as emu:
        if warm:
            await ask(emu.url, CHAT, {"model": row.model, "messages": [{"role": "user"}]})
        records = []
        for line in row.asks:
            reply, record = await send(emu, row.model, line)
            judge(line, reply, record, emu)
            records.append(record)
        return records


@pytest.mark.parametrize("row", acceptance.DECISIONS, ids=lambda row: row.situation)
@pytest.mark.parametrize("profile", ["0.9.45", "1.0.6", "1.0.8"])
async def test_decisions(row: Row, profile: str) -> None:
    """Every line of the decision table holds in the releases it is about."""
    await play(row, profile)


@pytest.mark.parametrize("row", acceptance.SCENES, ids=lambda row: row.situation)
async def test_scenes(row: Row) -> None:
    """What section 6 wants accepted and the cache decides."""
    await play(row)


@pytest.mark.parametrize("row", acceptance.LEGACY, ids=lambda row: row.situation)
async def test_legacy(row: Row) -> None:
    """Era B adds contents up, looks at nothing else, and inserts the last message alone."""
    records = await play(row, "0.9.42", warm=False)
    if records[-1].layer1 == "hit":
        assert records[-1].kept == records[0].prompt + records[0].completion


async def test_legacy_sees_only_the_last_message() -> None:
    """A request of era B that is not streamed may hit, and then the model is shown one message."""
    async with Emulator(Options(model=HIST, profile="0.9.42")) as emu:
        await send(emu, HIST, acceptance.FIRST)
        body = {"model": HIST, **Ask("s u1 a1 u2").body()}
        await ask(emu.url, CHAT, body)
        record = emu.records[-1]
        assert (record.layer1, record.last_only, record.kept) == ("hit", True, 0)
        assert record.prefilled < emu.records[0].prefilled
        await ask(emu.url, CHAT, {**body, **Ask("s u1 a1 u2 a2 u3").body()})
        assert emu.records[-1].layer1 == "miss"  # the sum was spoilt afterwards


@pytest.mark.parametrize(("profile", "rule"), acceptance.USAGE.items(), ids=lambda v: str(v)[:6])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_kept_and_counted(profile: str, rule: acceptance.Usage, stream: bool) -> None:
    """Usage counts what the release counts, and a second turn finds what the release keeps."""
    async with Emulator(Options(model=CKPT, profile=profile)) as emu:
        for names in ("s u1", "s u1 a1 u2"):
            if not stream and names == "s u1":
                emu.answers.append(Answer("one two three"))
            body = {"model": CKPT, "stream": stream, **Ask(names).body()}
            body["stream_options"] = {"include_usage": True}
            reply = await ask(emu.url, CHAT, body)
        record = emu.records[-1]
        keeps = rule.keeps if stream else rule.keeps_unstreamed
        assert bool(record.kept) == keeps
        used = reply.usage if stream else reply.json["usage"]
        want = record.prefilled if rule.prompt_tokens == "prefilled" else record.prompt
        assert used["prompt_tokens"] == want
        assert used["total_tokens"] == want + record.completion
        details = {"prompt_tokens_details": {"cached_tokens": record.kept}}
        assert ("prompt_tokens_details" in used) == rule.cached_tokens
        if rule.cached_tokens:
            assert used["prompt_tokens_details"] == details["prompt_tokens_details"]
        left_out = () if stream else acceptance.NOT_IN_PLAIN_USAGE
        names_seen = tuple(name for name in used if name != "prompt_tokens_details")
        assert names_seen == tuple(k for k in acceptance.STREAM_USAGE_KEYS if k not in left_out)


@pytest.mark.parametrize(("profile", "rule"), acceptance.USAGE.items(), ids=lambda v: str(v)[:6])
async def test_usage_on_request(profile: str, rule: acceptance.Usage) -> None:
    """Era E counts only if asked, and then says null on every other chunk."""
    async with Emulator(Options(model=CKPT, profile=profile)) as emu:
        body = {"model": CKPT, "stream": True, **Ask("s u1").body()}
        quiet = await ask(emu.url, CHAT, body)
        assert bool(quiet.usage) != rule.only_if_asked
        loud = await ask(emu.url, CHAT, {**body, "stream_options": {"include_usage": True}})
        assert loud.usage
        if rule.only_if_asked:
            assert loud.events[-1]["choices"] == []
            assert all(event["usage"] is None for event in loud.events[:-1])


async def test_active_tokens_give_the_true_total() -> None:
    """Kept, prefilled and generated tokens add up to ``active_kv_tokens``."""
    async with Emulator(Options(model=CKPT)) as emu:
        for names in ("s u1", "s u1 a1 u2"):
            reply, record = await send(emu, CKPT, Ask(names))
        used = reply.usage
        assert record.kept > 0
        assert used["active_kv_tokens"] == record.prompt + used["completion_tokens"]
        assert used["max_kv_token_capacity"] == 32768


async def test_strict_restore() -> None:
    """Read to the letter, 3.2 and 3.3 refuse the conversation after a cancelled prefill."""
    async with Emulator(Options(model=CKPT, strict_restore=True)) as emu:
        await send(emu, CKPT, acceptance.TURN1)
        await send(emu, CKPT, Ask("s u1 a1 u2", end="cancel in prefill"))
        reply, record = await send(emu, CKPT, Ask("s u1 a1 u2"))
        assert (record.layer1, record.matched) == ("hit", 0)
        assert (reply.status, reply.body) == acceptance.WIRE["overflow"]
        await send(emu, CKPT, Ask("title"))  # a flush of one message makes a checkpoint again
        reply, record = await send(emu, CKPT, Ask("s u1 a1 u2"))
        assert (reply.status, record.layer1) == (200, "miss")


async def test_thinking_makes_gemma_forget_the_answer() -> None:
    """With ``think`` gemma4 takes its checkpoint after the prefill: the answer may differ."""
    model = acceptance.CKPT_END
    async with Emulator(Options(model=model)) as emu:
        for names in ("s u1", "s, u1, a1 other, u2"):
            body = {"model": model, "stream": True, "think": True, **Ask(names).body()}
            await ask(emu.url, CHAT, body)
        assert (emu.records[-1].layer1, emu.records[-1].layer2) == ("hit", "hit")


async def test_effort_is_in_the_system_part() -> None:
    """Another ``reasoning_effort`` is another prompt from the first line on (gpt-oss)."""
    model = "gpt-oss:20b"
    async with Emulator(Options(model=model)) as emu:
        for names, effort in (("s u1", "low"), ("s u1 a1 u2", "low"), ("s u1 a1 u2 a2 u3", "high")):
            body = {"model": model, "stream": True, "reasoning_effort": effort}
            await ask(emu.url, CHAT, {**body, **Ask(names).body()})
        assert [r.layer2 for r in emu.records] == ["empty", "hit", "miss"]


async def test_tool_arguments_are_written_again() -> None:
    """A HIST model generated other bytes than it reports, so a tool turn misses (3.3)."""
    model = "qwen3-it:4b"
    async with Emulator(Options(model=model)) as emu:
        emu.answers.append(Answer("", calls=(("read", '{"b": 1, "a": 2}'),)))
        body = {"model": model, "stream": True, **Ask("s u1", tools=("read",)).body()}
        reply = await ask(emu.url, CHAT, body)
        call = reply.deltas[-2]["tool_calls"][0]
        assert call["function"] == {"name": "read", "arguments": '{"a":2,"b":1}'}
        assert reply.finish == "tool_calls"
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "text"}
        await ask(emu.url, CHAT, {**body, "messages": [*body["messages"], turn, result]})
        assert (emu.records[-1].layer1, emu.records[-1].layer2) == ("hit", "miss")


async def test_another_image_is_not_noticed() -> None:
    """Images are not hashed, and each is the same soft tokens: the old one stays in the cache."""
    model = CKPT
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}
        for name in ("AAAA", "BBBB")
    ]
    async with Emulator(Options(model=model)) as emu:
        for picture, rest in ((pictures[0], []), (pictures[1], Ask("a1 u2").body()["messages"])):
            seen = {"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}
            body = {"model": model, "stream": True, "messages": [seen, *rest]}
            await ask(emu.url, CHAT, body)
        assert emu.records[0].prefilled > 256
        assert (emu.records[-1].layer2, emu.records[-1].kept > 256) == ("hit", True)


async def test_flash_models_pin_the_system_prompt() -> None:
    """Single-turn models keep the system part between requests, and refuse a history."""
    model = "gemma4e-flash:e2b"
    async with Emulator(Options(model=model, profile="1.0.6")) as emu:
        for names in ("s u1", "s u2"):
            reply, record = await send(emu, model, Ask(names))
            assert reply.status == 200
        assert 0 < record.kept < record.prompt
        reply, _ = await send(emu, model, Ask("s u1 a1 u2"))
        assert "single-turn" in reply.json["error"]


async def test_a_resend_never_hits() -> None:
    """The #733 loop: a client that gives up and repeats pays the whole prefill every time."""
    async with Emulator(Options(model=CKPT)) as emu:
        await send(emu, CKPT, acceptance.TURN1)
        await send(emu, CKPT, acceptance.TURN2)
        first = emu.records[-1]
        for _ in range(3):
            _, record = await send(emu, CKPT, Ask("s u1 a1 u2", "miss"))
            assert (record.layer1, record.kept, record.prefilled) == ("miss", 0, first.prompt)
