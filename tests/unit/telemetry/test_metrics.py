"""The Prometheus series."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.normalise import RULES
from proxy.core.normalise.clients import Side
from proxy.core.records import Mode, Reason
from proxy.core.slots import SlotState
from proxy.core.why import Cold
from proxy.telemetry.metrics import Cause, Metrics, Outcome, PathClass, RuleOutcome, Where


def series(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        " ".join(
            [sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))]
        ): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_all_series_exist_from_the_start() -> None:
    """Each metric asked for is there before its first event, under the prefix."""
    found = series(Metrics())
    assert all(name.startswith("slotkeeper_") for name in found)
    names = {name.split(" ")[0].removeprefix("slotkeeper_") for name in found}
    assert names >= {
        "request_seconds_sum", "first_token_seconds_sum", "prompt_tokens_total", "saves_total",
        "save_seconds_sum", "save_bytes_total", "restores_total", "restore_seconds_sum",
        "ineffective_restores_total", "evictions_total", "store_bytes", "store_files",
        "queue_length", "slots", "leases_active", "backend_up", "backend_restarts_total", "mode",
        "faults_total", "pings_total", "disconnects_total", "rules_total", "cold_total",
        "side_requests_total", "conversations", "saved_seconds_total", "queue_seconds_sum",
        "restore_bytes_total", "restores_retired", "store_limit_bytes", "disk_free_bytes",
        "moved_total",
    }  # fmt: skip


def test_two_of_them_share_nothing() -> None:
    """Metrics live in an object, not in the process."""
    one, other = Metrics(), Metrics()
    one.pings.inc()
    assert series(one)["slotkeeper_pings_total"] == 1
    assert series(other)["slotkeeper_pings_total"] == 0


@pytest.mark.parametrize(
    ("status", "label"), [(200, "2xx"), (404, "4xx"), (599, "5xx"), (0, "other"), (1000, "other")]
)
def test_request(status: int, label: str) -> None:
    """A request counts by what it was, why, and the class of its status."""
    metrics = Metrics()
    metrics.request(PathClass.CHAT, Reason.COLD, status, total=2.0, queued=0.5, first_token=1.0)
    found = series(metrics)
    key = f"slotkeeper_requests_total path_class=chat reason=cold status_class={label}"
    assert found[key] == 1
    assert found["slotkeeper_request_seconds_sum"] == 2
    assert found["slotkeeper_queue_seconds_sum"] == 0.5
    assert found["slotkeeper_first_token_seconds_sum reason=cold"] == 1


def test_request_without_a_token() -> None:
    """What got no token has no time to the first one, what wanted no slot did not queue."""
    metrics = Metrics()
    metrics.request(PathClass.PLAIN, Reason.PASS, 200, total=1.0)
    found = series(metrics)
    assert found["slotkeeper_first_token_seconds_count reason=pass"] == 0
    assert found["slotkeeper_queue_seconds_count"] == 0


def test_saves_and_restores() -> None:
    """Only what went well counts its time and size."""
    metrics = Metrics()
    metrics.saved(Outcome.OK, seconds=2.0, size=100)
    metrics.saved(Outcome.FAILED, seconds=9.0, size=900)
    metrics.restored(Outcome.OK, seconds=3.0, size=200)
    metrics.restored(Outcome.REFUSED, seconds=9.0, size=900)
    found = series(metrics)
    assert found["slotkeeper_saves_total outcome=ok"] == 1
    assert found["slotkeeper_saves_total outcome=failed"] == 1
    assert found["slotkeeper_save_seconds_sum"] == 2
    assert found["slotkeeper_save_bytes_total"] == 100
    assert found["slotkeeper_restores_total outcome=refused"] == 1
    assert found["slotkeeper_restore_seconds_sum"] == 3
    assert found["slotkeeper_restore_bytes_total"] == 200


def test_states_replace_each_other() -> None:
    """Modes and slot states that are no longer true become 0."""
    metrics = Metrics()
    metrics.mode(Mode.FORWARD)
    metrics.mode(Mode.EXCLUSIVE)
    metrics.slots({SlotState.LEASED: 2})
    metrics.slots({SlotState.FREE: 1})
    found = series(metrics)
    assert found["slotkeeper_mode mode=exclusive"] == 1
    assert found["slotkeeper_mode mode=forward"] == 0
    assert found["slotkeeper_slots state=free"] == 1
    assert found["slotkeeper_slots state=leased"] == 0


def test_the_rest() -> None:
    """Tokens, evictions and faults count under their labels."""
    metrics = Metrics()
    metrics.prompt(reused=90, computed=10, restored=False, saved=2.5)
    metrics.prompt(reused=70, computed=30, restored=True, saved=1.5)
    metrics.prompt(reused=0, computed=0, restored=False, saved=-1.0)
    metrics.evicted(Cause.SPACE)
    metrics.fault(Where.STORE)
    found = series(metrics)
    assert found["slotkeeper_prompt_tokens_total source=slot"] == 90
    assert found["slotkeeper_prompt_tokens_total source=snapshot"] == 70
    assert found["slotkeeper_prompt_tokens_total source=computed"] == 40
    assert found["slotkeeper_saved_seconds_total"] == 4
    assert found["slotkeeper_evictions_total cause=space"] == 1
    assert found["slotkeeper_faults_total where=store"] == 1


def test_rules_cold_and_side_requests() -> None:
    """Each rule, cause and kind has its series from the start; the main request is no side one."""
    metrics = Metrics()
    metrics.side_request(Side.TITLE)
    metrics.side_request(Side.MAIN)
    metrics.rule("clock", RuleOutcome.SHADOW)
    metrics.cold(Cold.SYSTEM)
    metrics.conversations.set(3)
    found = series(metrics)
    assert found["slotkeeper_rules_total outcome=shadow rule=clock"] == 1
    assert found["slotkeeper_cold_total cause=system"] == 1
    assert found["slotkeeper_conversations"] == 3
    for rule in RULES:
        for outcome in RuleOutcome:
            assert f"slotkeeper_rules_total outcome={outcome} rule={rule.name}" in found
    assert {f"slotkeeper_cold_total cause={cause}" for cause in Cold} <= found.keys()
    sides = {name for name in found if name.startswith("slotkeeper_side_requests_total")}
    kinds = {str(kind) for kind in Side if kind is not Side.MAIN}
    assert sides == {f"slotkeeper_side_requests_total kind={kind}" for kind in kinds}
    assert found["slotkeeper_side_requests_total kind=title"] == 1


def test_number_of_series_is_bounded() -> None:
    """With every combination used there are fewer than 1,300 series."""
    metrics = Metrics()
    for path_class in PathClass:
        for reason in Reason:
            for status in (0, 100, 200, 300, 400, 500):
                metrics.request(path_class, reason, status, total=1.0, first_token=1.0)
    assert len(series(metrics)) < 1300
