"""What a request's header, log row and metrics say, at each moment of its life."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from proxy.core.ledger import Conversation
from proxy.core.normalise.base import Change
from proxy.core.normalise.clients import Side
from proxy.core.placement import Option
from proxy.core.queue import Kind, Lease
from proxy.core.records import Prompt, Reason
from proxy.core.why import Cold, Why
from proxy.dialects import DIALECTS
from proxy.server.envelope import REQUEST_ID
from proxy.server.normaliser import Turn
from proxy.server.record import CLIENT_LEFT, FIRST, Exchange, Recorder, why_refused
from proxy.telemetry.history import History
from proxy.telemetry.metrics import Metrics
from tests.unit.doubles import Clock

PATH = "/v1/chat/completions"


def lease(reason: Reason, kind: Kind = Kind.NARROW) -> Lease:
    """A lease of slot 1, its reuse not known yet."""
    option = Option(slot=1, reason=reason, hit=0, n_tokens=9)
    prompt = Prompt(seed=b"", chain=(), ends=(), size=0)
    return Lease(option, kind, prompt, reason, queued=0.5, started=0.0, weighed=(option,))


async def exchange(path: str = PATH) -> Exchange:
    """A request that has just come."""
    request = make_mocked_request("POST", path)
    request[REQUEST_ID] = "id-1"
    dialect = DIALECTS[path]
    call = dialect.parse(orjson.dumps({"messages": [], "prompt": "x", "input_prefix": "x"}))
    return Exchange(request, dialect, call, 1000.0)


@pytest.mark.parametrize(
    ("reason", "kind", "reuse", "said"),
    [
        (Reason.COLD, Kind.NARROW, None, "pending; slot=1"),
        (Reason.SLOT_HIT, Kind.NARROW, None, "pending; slot=1"),
        (Reason.RESTORED, Kind.NARROW, None, "pending; slot=1"),
        (Reason.PINNED, Kind.NARROW, None, "pinned; slot=1"),
        (Reason.FORWARD, Kind.PERMIT, None, "forward"),
        (Reason.WIDE, Kind.WIDE, None, "wide"),
        (Reason.COLD, Kind.NARROW, (0, 9), "cold; slot=1; reused=0; prompt=9"),
        (Reason.COLD, Kind.NARROW, (8, 9), "slot-hit; slot=1; reused=8; prompt=9"),
        (Reason.SLOT_HIT, Kind.NARROW, (0, 9), "cold; slot=1; reused=0; prompt=9"),
        (Reason.RESTORED, Kind.NARROW, (8, 9), "restored; slot=1; reused=8; prompt=9"),
        (Reason.RESTORED, Kind.NARROW, (0, 9), "cold; slot=1; reused=0; prompt=9"),
        (Reason.FORWARD, Kind.PERMIT, (8, 9), "forward; reused=8; prompt=9"),
    ],
)
async def test_the_header(
    reason: Reason, kind: Kind, reuse: tuple[int, int] | None, said: str
) -> None:
    """Reason, slot and real reuse as far as they are known: a guess is called pending."""
    one = await exchange()
    assert one.note() == "pending"
    one.lease = lease(reason, kind)
    if reuse is not None:
        one.lease.observed(*reuse)
    assert one.note() == said


@pytest.mark.parametrize(
    ("path", "kind"),
    [(PATH, "chat"), ("/chat/completions", "chat"), ("/completion", "completion"),
     ("/v1/completions", "completion"), ("/infill", "infill"), ("/v1/messages", "chat")],
)  # fmt: skip
async def test_a_row_for_each_request(path: str, kind: str) -> None:
    """Figures of the lease and of the clock go into the log row and the counters."""
    metrics, history, clock = Metrics(), History(), Clock()
    one = await exchange(path)
    one.lease, one.status = lease(Reason.COLD), 200
    one.lease.observed(8, 9)
    clock.now += 2.0
    Recorder(metrics, history, clock).request(one)
    (row,) = history.recent(5)
    wanted: dict[str, Any] = {
        "request_id": "id-1", "at": 1000.0, "path": path, "reason": Reason.SLOT_HIT,
        "status": 200, "total": 2.0, "queued": 0.5, "slot": 1, "reused": 8, "prompt": 9,
        "first_token": None, "note": "", "conversation": "", "client": "", "side": "", "rules": (),
        "cold": None, "title": "", "computed": 1, "seq": 1,
    }  # fmt: skip
    assert {name: value for name, value in row.as_json().items() if name != "costs"} == wanted
    assert [cost["slot"] for cost in row.costs] == [1]
    line = f'path_class="{kind}",reason="slot-hit",status_class="2xx"'
    assert f"slotkeeper_requests_total{{{line}}} 1.0" in metrics.render()[0].decode()


async def test_what_is_known_of_the_conversation() -> None:
    """Id, client, kind of side request, rules and cause are in the row; no quote in the line."""
    history = History()
    one = await exchange()
    one.turn = Turn(
        one.call,
        client="claude-code",
        side=Side.TITLE,
        row=Conversation(id="c1", namespace=b"n"),
        changes=(Change("clock", "messages[0].content"), Change("clock", "messages[1].content")),
    )
    one.why = Why(Cold.SYSTEM, "system prompt changed at character 9", "14:02", "14:03", "Take out")
    Recorder(Metrics(), history, Clock()).request(one)
    one.turn.shadow, one.turn.row, one.turn.side, one.why = True, None, Side.MAIN, None
    Recorder(Metrics(), history, Clock()).request(one)
    shadow, applied = (row.as_json() for row in history.recent(2))
    assert [applied[name] for name in ("conversation", "client", "side", "rules")] == [
        "c1",
        "claude-code",
        "title",
        ["clock"],
    ]
    assert applied["cold"] == {
        "cause": "system",
        "sentence": "system prompt changed at character 9",
        "before": "14:02",
        "after": "14:03",
        "advice": "Take out",
        "text": "system prompt changed at character 9: `14:02` → `14:03`",
    }
    assert [shadow[name] for name in ("conversation", "side", "rules", "cold")] == [
        "",
        "",
        ["clock (shadow)"],
        None,
    ]
    line = history.recent(2)[1].for_log()
    assert (line["cold"], line["rules"]) == ("system", ["clock"])
    assert "14:0" not in repr(line)


@pytest.mark.parametrize(
    ("known", "reused", "note"),
    [(False, 0, FIRST), (True, 0, ""), (False, 9, "")],
)
async def test_the_first_request_of_a_conversation(known: bool, reused: int, note: str) -> None:
    """That is why it is cold: there was nothing to compare it with."""
    history = History()
    one = await exchange()
    row = Conversation(id="c1", namespace=b"n")
    one.turn = Turn(one.call, row=row, before=row if known else None)
    one.lease = lease(Reason.COLD)
    one.lease.observed(reused, 10)
    Recorder(Metrics(), history, Clock()).request(one)
    assert history.recent(1)[0].note == note


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error":{"type":"exceed_context_size_error","n_prompt_tokens":9031,"n_ctx":8192}}',
            "the prompt has 9,031 tokens, its slot room for 8,192",
        ),
        (b'{"error":{"type":"invalid_request_error"}}', "refused it: invalid_request_error"),
        (b'{"error":{"type":"my secret prompt"}}', "refused it"),
        (b'{"error":{"type":5,"n_ctx":"1"}}', "refused it"),
        (b'{"error":"no"}', "refused it"),
        (b"[1]", "refused it"),
        (b"<html>", "refused it"),
    ],
)
async def test_why_it_was_refused(body: bytes, said: str) -> None:
    """In a sentence of ours: what the backend writes may quote the prompt."""
    assert why_refused(body).endswith(said)
    one, history = await exchange(), History()
    one.status, one.failure = 400, why_refused(body)
    Recorder(Metrics(), history, Clock()).request(one)
    assert history.recent(1)[0].note == why_refused(body)


async def test_it_knows_its_row() -> None:
    """By number: its id may be the client's, who may give it twice."""
    history = History()
    first, second = await exchange(), await exchange()
    for one in (first, second):
        Recorder(Metrics(), history, Clock()).request(one)
    assert [row.seq for row in history.recent(2)] == [second.seq, first.seq]


async def test_what_was_generated() -> None:
    """The message of an answer that ran to its end; None of half a one, and of what is none."""
    one = await exchange()
    assert one.generated() is None
    message = {"role": "assistant", "content": " hi "}
    one.payloads = [orjson.dumps({"choices": [{"message": message}]})]
    assert orjson.loads(one.generated() or b"") == message
    for odd in (b"{}", b"[]", b"x", b'{"choices": ["x"]}', b'{"choices": [{"message": "x"}]}'):
        one.payloads = [odd]
        assert one.generated() is None
    delta = {"choices": [{"index": 0, "delta": {"content": "h"}, "finish_reason": None}]}
    one.payloads = [orjson.dumps(delta), orjson.dumps(delta)]
    assert one.generated() is None
    one.payloads = [orjson.dumps({"choices": ["no object"]}), b"[DONE]"]
    assert one.generated() is None


async def test_without_a_lease() -> None:
    """Who never got one was refused; the time was spent in the queue."""
    metrics, history, clock = Metrics(), History(), Clock()
    one = await exchange()
    one.status = CLIENT_LEFT
    clock.now += 3.0
    recorder = Recorder(metrics, history, clock)
    recorder.request(one)
    recorder.ping()
    recorder.fault(ValueError("secret"))
    (row,) = history.recent(5)
    assert (row.reason, row.queued, row.slot, row.costs) == (Reason.REFUSED, 3.0, None, ())
    text = metrics.render()[0].decode()
    assert "slotkeeper_disconnects_total 1.0" in text
    assert "slotkeeper_pings_total 1.0" in text
    assert 'slotkeeper_faults_total{where="prompt"} 1.0' in text
