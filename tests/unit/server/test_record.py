"""What a request's header, log row and metrics say, at each moment of its life."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from proxy.core.placement import Option
from proxy.core.queue import Kind, Lease
from proxy.core.records import Prompt, Reason
from proxy.dialects import DIALECTS
from proxy.server.envelope import REQUEST_ID
from proxy.server.record import CLIENT_LEFT, Exchange, Recorder
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
     ("/v1/completions", "completion"), ("/infill", "infill")],
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
        "first_token": None, "note": "",
    }  # fmt: skip
    assert {name: value for name, value in row.as_json().items() if name != "costs"} == wanted
    assert [cost["slot"] for cost in row.costs] == [1]
    line = f'path_class="{kind}",reason="slot-hit",status_class="2xx"'
    assert f"slotkeeper_requests_total{{{line}}} 1.0" in metrics.render()[0].decode()


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
