"""What Prometheus and Grafana get: ports with metrics, and queries for metrics that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
#: Labels that Prometheus gives what it finds by a PodMonitor of the chart.
TARGET = {"namespace", "pod", "container", "job", "instance", "inferq_pool", "inferq_partition"}
COMMON = {"Worker": {"queue", "model_name"}, "Queue": {"queue"}}
FUNCTIONS = {
    *("sum", "max", "by", "rate", "increase", "delta", "histogram_quantile", "and", "on"),
    *("group_left", "label_values"),
}


@dataclass(frozen=True)
class Metric:
    """A metric as docs/metrics.md describes it."""

    type: str
    labels: frozenset[str]


def described() -> Iterator[tuple[str, Metric]]:
    """Yield the name of every series that docs/metrics.md tells of."""
    section = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 4 or cells[1] not in ("gauge", "counter", "histogram"):
            continue
        labels = set(re.findall(r"`(\w+)`", cells[2].partition(":")[0]))
        labels |= COMMON.get(section, set())
        for name in re.findall(r"`(\w+)`", cells[0]):
            metric = Metric(cells[1], frozenset(labels))
            if metric.type != "histogram":
                yield name, metric
                continue
            yield f"{name}_bucket", Metric("histogram", metric.labels | {"le"})
            yield f"{name}_sum", metric
            yield f"{name}_count", metric


METRICS = dict(described())


def faults_of(query: str) -> list[str]:
    """What is wrong with a query: names, labels, and what is asked of them."""
    faults = []
    if query.count("(") != query.count(")") or query.count("{") != query.count("}"):
        faults.append("its brackets")
    words = re.sub(r'"[^"]*"|\[[^\]]*\]', "", query)
    names = set(re.findall(r"\b(?:inferq|process)_\w+\b", words)) - TARGET
    faults += sorted(names - METRICS.keys())
    labels = TARGET.union(*(METRICS[name].labels for name in names & METRICS.keys()))
    groups = re.findall(r"(?:by|on) \(([^)]*)\)|\{([^}]*)\}", words)
    for group in groups:
        given = re.findall(r"\w+", re.sub(r"[=!~]+", " ", ",".join(group)))
        faults += sorted(set(given) - labels)
    faults += sorted(set(re.findall(r"\b([a-z_]+) ?\(", words)) - FUNCTIONS)
    for function, name in re.findall(r"(rate|increase|delta)\((\w+)", words):
        kind = METRICS[name].type if name in METRICS else ""
        if (kind == "gauge") != (function == "delta"):
            faults.append(f"{function} of a {kind}")
    return faults


@pytest.fixture(scope="module")
def dashboard(helm_of: Any) -> Any:
    data = helm_of("4").scenario("metrics").named("ConfigMap", "-dashboard")["data"]
    [(name, text)] = data.items()
    assert name.endswith(".json")
    return json.loads(text)


def test_the_document_names_metrics_with_their_labels() -> None:
    assert METRICS["inferq_queue_depth"] == Metric("gauge", frozenset({"queue", "lane"}))
    assert "le" in METRICS["inferq_step_duration_seconds_bucket"].labels
    assert len(METRICS) > 60


def test_a_query_for_what_there_is_not_is_noticed() -> None:
    for query in (
        "max by (queue) (inferq_queue_depths)",
        "max by (tenant) (inferq_queue_depth)",
        'inferq_queue_depth{kind="high"}',
        "rate(inferq_queue_depth[5m])",
        "delta(inferq_generation_tokens_total[5m])",
        "max by (queue) (inferq_queue_depth",
    ):
        assert faults_of(query) != [], query


def test_the_dashboard_asks_for_metrics_that_there_are(dashboard) -> None:
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [
        variable["definition"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert len(queries) > 50
    assert {query: faults for query in queries if (faults := faults_of(query))} == {}


def test_the_dashboard_shows_every_metric_of_ours(dashboard) -> None:
    text = json.dumps(dashboard["panels"])
    shown = set(re.findall(r"\binferq_\w+", text))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in METRICS}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    left_out = {name for name in families - shown if name.startswith("inferq_")}
    assert left_out == {
        *("inferq_queue_taken", "inferq_queue_left_behind", "inferq_queue_jobs_ended_total"),
        *("inferq_job_deliveries_total", "inferq_jobs_held", "inferq_kv_tokens_reserved"),
    }


def test_the_dashboard_is_one_that_grafana_takes(dashboard) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    assert {"datasource", "namespace", "queue"} == {
        v["name"] for v in dashboard["templating"]["list"]
    }


def test_alerts_ask_for_metrics_that_there_are(helm4) -> None:
    [rule] = helm4.scenario("metrics").of_kind("PrometheusRule")
    [group] = rule["spec"]["groups"]
    names = [alert["alert"] for alert in group["rules"]]
    assert len(names) == len(set(names)) > 5
    for alert in group["rules"]:
        assert faults_of(alert["expr"]) == [], alert["alert"]
        assert 'namespace="llm"' in alert["expr"]
        assert alert["labels"] == {"severity": "page"}
        given = re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])
        grouped = re.findall(r"by \(([^)]*)\)", alert["expr"])
        assert set(given) <= {name for part in grouped[:1] for name in part.split(", ")}


def test_pod_monitors_ask_each_component_at_a_port_that_has_metrics(helm4) -> None:
    rendering = helm4.scenario("metrics")
    monitored = {}
    for monitor in rendering.of_kind("PodMonitor"):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == "/metrics"
        for pod in rendering.pods:
            labels = pod.owner["spec"].get("template", pod.owner)["metadata"]["labels"]
            if selector <= labels.items():
                [port] = [p for p in pod.main["ports"] if p["name"] == endpoint["port"]]
                monitored.setdefault(pod.component, set()).add(port["containerPort"])
    assert monitored == {"worker": {8081, 9001}, "gateway": {9002}, "tasks": {8081}}


def test_nothing_of_it_is_there_unless_it_is_asked_for(helm4) -> None:
    rendering = helm4.scenario("minimal")
    assert rendering.of_kind("PodMonitor", "PrometheusRule") == []
    assert not any(m["metadata"]["name"].endswith("-dashboard") for m in rendering.manifests)


def test_workers_scale_on_the_outstanding_tokens_of_their_queue(helm4) -> None:
    [scaler] = helm4.scenario("metrics").of_kind("HorizontalPodAutoscaler")
    [metric] = scaler["spec"]["metrics"]
    given = metric["external"]["metric"]
    assert METRICS[given["name"]].labels >= given["selector"]["matchLabels"].keys()
    assert given["selector"]["matchLabels"] == {"queue": "chat"}
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "30000"}


def test_the_documented_rule_of_an_adapter_brings_that_metric() -> None:
    text = (DOCUMENT.parent / "kubernetes.md").read_text()
    [series] = re.findall(r"seriesQuery: '(\w+)\{", text)
    [query] = re.findall(r"metricsQuery: '(.+)'$", text, flags=re.MULTILINE)
    assert series == "inferq_queue_outstanding_tokens"
    assert series in query
    assert faults_of(query.replace("<<.LabelMatchers>>", 'queue="chat"')) == []


def test_the_target_of_a_partition_is_of_its_share_of_the_queues_tokens(helm4) -> None:
    rendering = helm4.values(
        {
            "pools.chat": {"model": "m", "autoscaling": {"type": "hpa"}},
            "partitions": 3,
        }
    )
    scalers = rendering.of_kind("HorizontalPodAutoscaler")
    targets = [s["spec"]["metrics"][0]["external"]["target"]["averageValue"] for s in scalers]
    assert targets == ["150000"] * 3


def test_no_deployment_has_two_autoscalers(rendering) -> None:
    scaled = [
        scaler["spec"]["scaleTargetRef"]["name"]
        for scaler in rendering.of_kind("ScaledObject", "HorizontalPodAutoscaler")
    ]
    assert len(scaled) == len(set(scaled))
