"""Prometheus and Grafana: names and labels exist in the proxy, rules and dashboard are sound."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.records import Reason
from proxy.server.gate import OWN
from proxy.telemetry.metrics import Metrics, PathClass
from tests.deploy.files import DEPLOY, read, read_yaml, tool

DASHBOARD: dict[str, Any] = orjson.loads(read("grafana/slotkeeper.json"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
DRAWN = [panel for panel in PANELS if panel["type"] != "row"]
ALERTS: list[dict[str, Any]] = read_yaml("prometheus/alerts.yml")["groups"][0]["rules"]
COLUMNS = 24  # of Grafana's grid
ADDED = {"instance", "job", "le"}  # by Prometheus and by histograms


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression with where it is from."""
    for alert in ALERTS:
        yield alert["alert"], alert["expr"]
    for panel in DRAWN:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


QUERIES = [pytest.param(expr, id=f"{where}-{n}") for n, (where, expr) in enumerate(queries())]


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, set[str]]]:
    """Each sample's labels with their values, everything used once."""
    metrics = Metrics()
    for path_class in PathClass:
        for reason in Reason:
            for status in (200, 400, 500):
                metrics.request(path_class, reason, status, total=1.0, queued=1.0, first_token=1.0)
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def promtool(*arguments: str | Path, given: str = "") -> str:
    """The output of a run that must succeed."""
    result = subprocess.run(
        [tool("promtool", "prometheus"), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = result.stdout + result.stderr
    assert result.returncode == 0, told
    return told


@pytest.mark.parametrize("expr", QUERIES)
def test_every_series_exists(expr: str, known: dict[str, dict[str, set[str]]]) -> None:
    """Each metric is one of the proxy's, selected by labels and values that it has."""
    for name, selector in re.findall(r"(slotkeeper_\w+)(?:\{([^}]*)\})?", expr):
        assert name in known, name
        for label, value in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', selector):
            if label not in ADDED:
                assert set(value.split("|")) <= known[name].get(label, set()), (label, value)


@pytest.mark.parametrize("expr", QUERIES)
def test_every_grouping_exists(expr: str, known: dict[str, dict[str, set[str]]]) -> None:
    """What is grouped by is a label of every metric in that aggregation."""
    for group, inside in re.findall(r"by \(([^)]*)\)\s*\(((?:[^()]|\([^()]*\))*)\)", expr):
        for name in re.findall(r"slotkeeper_\w+", inside):
            assert set(re.split(r",\s*", group)) <= {*known[name], *ADDED}, (name, group)


def test_legends_are_labels() -> None:
    """A legend names labels that its expression leaves."""
    for panel in DRAWN:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_the_rows_that_were_asked_for() -> None:
    """Each thing an operator wants to see has a panel of its own."""
    shown = " ".join(expr for _, expr in queries())
    for name in (
        "prompt_tokens_total", "saved_seconds_total", "first_token_seconds_bucket",
        "queue_seconds_bucket", "queue_length", "requests_total", "cold_total", "saves_total",
        "restores_total", "evictions_total", "store_bytes", "disk_free_bytes", "slots", "mode",
        "faults_total", "rules_total", "ineffective_restores_total", "restores_retired",
    ):  # fmt: skip
        assert re.search(rf"slotkeeper_{name}\b", shown), name


def test_panels_fit_together() -> None:
    """Ids are unique, every panel has its place and overlaps no other."""
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= COLUMNS
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert cells
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_can_be_drawn() -> None:
    """Each has a title, says what it shows, asks the chosen source, and numbers its queries."""
    titles = [panel["title"] for panel in DRAWN]
    assert len(set(titles)) == len(titles)
    for panel in DRAWN:
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == [chr(ord("A") + n) for n in range(len(refs))]
        assert refs
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert target["instant"] is not target["range"]


def test_colours_are_of_series_that_exist(known: dict[str, dict[str, set[str]]]) -> None:
    """A colour that is fixed for a series names a value of the label it is drawn by."""
    for panel in DRAWN:
        for override in panel["fieldConfig"]["overrides"]:
            assert (
                override["matcher"]["options"] in known["slotkeeper_prompt_tokens_total"]["source"]
            )


def test_the_dashboard_is_one_that_can_be_imported() -> None:
    """It has a fixed address, no id of somebody's database, and its variables are defined."""
    assert DASHBOARD["uid"] == "slotkeeper"
    assert "id" not in DASHBOARD
    assert DASHBOARD["schemaVersion"] >= 36, "older ones know no datasource objects"
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", read("grafana/slotkeeper.json")))
    assert {name for name in used if not name.startswith("__")} == names


def test_provisioning_finds_it() -> None:
    """Grafana in compose.yaml gets the source that Prometheus is, and the folder it looks into."""
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = read_yaml("grafana/provisioning/dashboards/slotkeeper.yml")["providers"]
    mounts = read_yaml("docker/compose.yaml")["services"]["grafana"]["volumes"]
    assert any(f":{provider['options']['path']}/slotkeeper.json" in mount for mount in mounts)


def test_alerts_say_what_to_do() -> None:
    """Each has a name of its own, how bad it is, what happened and what to do about it."""
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    for alert in ALERTS:
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert set(alert["annotations"]) == {"summary", "description"}


def test_promtool_accepts_the_metrics() -> None:
    """Names, units and help are as Prometheus wants them."""
    assert promtool("check", "metrics", given=Metrics().render()[0].decode()) == ""


def test_promtool_accepts_the_rules() -> None:
    """Prometheus's own checker finds nothing wrong."""
    told = promtool(
        "check", "rules", "--lint=all", "--lint-fatal", DEPLOY / "prometheus/alerts.yml"
    )
    assert f"{len(ALERTS)} rules found" in told


def test_promtool_accepts_the_configuration() -> None:
    """The same for the scrape configuration, which asks for the page that there is."""
    promtool("check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml")
    (job,) = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    assert job["metrics_path"] == f"{OWN}/metrics"


def test_alerts_come_when_they_should(tmp_path: Path) -> None:
    """On made-up days (alerts.yml beside this file) a good one is quiet, in a bad one all come."""
    days = (Path(__file__).parent / "alerts.yml").read_text(encoding="utf-8")
    assert all(f'"{alert["alert"]}"' in days for alert in ALERTS)
    file = tmp_path / "days.yml"
    file.write_text(days.replace("[ALERTS]", f"['{DEPLOY / 'prometheus/alerts.yml'}']"))
    assert "SUCCESS" in promtool("test", "rules", file)


def test_promtool_accepts_the_panels(tmp_path: Path) -> None:
    """Each expression of the dashboard is PromQL, its variables filled in."""
    rules = [
        {
            "record": f"panel:{n}",
            "expr": expr.replace("$instance", ".*")
            .replace("$__rate_interval", "1m")
            .replace("$__range", "6h"),
        }
        for n, (_, expr) in enumerate(queries())
        if not expr.startswith("label_values")
    ]
    file = tmp_path / "panels.yml"
    file.write_bytes(orjson.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", "--lint=none", file)
