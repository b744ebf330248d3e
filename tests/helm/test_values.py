"""Values: a misspelt one is refused, those that cannot work together get a sentence, all count."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

POOL = {"pools.chat.model": "Qwen/Qwen3-8B"}


@pytest.fixture(scope="module")
def schema(chart) -> Any:
    return json.loads((chart / "values.schema.json").read_text())


@pytest.fixture(scope="module")
def defaults(chart) -> Any:
    return yaml.safe_load((chart / "values.yaml").read_text())


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values that are no maps, and of the empty maps."""
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, (*path, name))
    else:
        yield path


def put(values: Any, path: tuple[str, ...], value: Any) -> Any:
    changed = copy.deepcopy(values)
    at = changed
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return changed


def test_generated_files_are_current() -> None:
    from pathlib import Path

    script = Path(__file__).resolve().parents[2] / "scripts" / "chart_files.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_value_is_described(chart, chart_files, defaults) -> None:
    described = [
        path for path, _ in chart_files.described_values((chart / "values.yaml").read_text())
    ]
    assert len(described) == len(set(described))
    whole = (
        *("worker.tolerations", "gateway.topologySpreadConstraints", "valkey.resources"),
        *("metrics.alerts.alertLabels", "metrics.dashboard.labels"),
    )
    for path in leaves(defaults):
        name = ".".join(path)
        assert name in described or name.startswith(whole), f"{name} has no description"


def test_the_schema_and_the_values_know_the_same_names(schema, defaults) -> None:
    def names(part: Any) -> Any:
        part = schema["definitions"][part["$ref"].split("/")[-1]] if "$ref" in part else part
        known = part.get("properties")
        return {name: names(inner) for name, inner in known.items()} if known else None

    def compare(known: Any, values: Any, path: str) -> None:
        if known is None or not isinstance(values, dict):
            return
        assert set(values) <= set(known), path
        missing = set(known) - set(values)
        # what is open in a way that Kubernetes knows, or left to the settings models
        assert (
            not missing
            or path.endswith(("settings", "resources", "behavior"))
            or (path == "" and missing == {"enabled"})
        ), f"{path}: {missing}"
        for name, value in values.items():
            compare(known[name], value, f"{path}.{name}")

    compare(names(schema), defaults, "")


def test_the_defaults_pass_the_schema(schema, defaults) -> None:
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(defaults)


def test_a_misspelt_name_is_refused_at_every_level(schema, defaults) -> None:
    validator = jsonschema.Draft7Validator(schema)
    open_maps = {"annotations", "podAnnotations", "labels", "podLabels", "commonLabels", "global"}
    open_maps |= {
        "alertLabels",
        "nodeSelector",
        "affinity",
        "adapters",
        "pools",
        "requests",
        "limits",
    }
    checked = 0
    for path in leaves(defaults):
        for depth in range(1, len(path) + 1):
            if open_maps & set(path[: depth - 1]):
                continue
            misspelt = put(defaults, (*path[: depth - 1], f"{path[depth - 1]}x"), {})
            assert not validator.is_valid(misspelt), path[:depth]
            checked += 1
    assert checked > 200


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("worker", "shm", "size"), "1Gib"),
        (("worker", "tensorParallelSize"), 0.5),
        (("worker", "podLabels"), {"team": "not a label!"}),
        (("worker", "gracePeriodMarginSeconds"), 10),
        (("worker", "settings"), {"max_model_length": 4096}),
        (("worker", "settings"), {"max_model_len": "long"}),
        (("worker", "settings"), {"max_model_len": 0}),
        (("worker", "settings"), {"redis_url": "redis://elsewhere"}),
        (("gateway", "settings"), {"host": "127.0.0.1"}),
        (("gateway", "settings"), {"accept_webhooks": True}),
        (("tasks", "settings"), {"webhook_secrets": "default=whsec_c2VjcmV0"}),
        (("tasks", "settings"), {"webhook_host_rate": 0}),
        (("worker", "autoscaling", "keda", "countDelayed"), "never"),
        (("networkPolicy", "webhookPorts"), [0]),
        (("worker", "resources"), {"limits": {"memory": "16 GB"}}),
        (("worker", "queue"), "no spaces"),
        (("redis", "addresses"), ["redis://user:secret@host"]),
        (("pools",), {"Upper": {"model": "m"}}),
        (("pools",), {"chat": {"modle": "m"}}),
        (("worker", "autoscaling", "type"), "vpa"),
        (("valkey", "maxmemory"), "1Gi"),
        (("partitions",), 0),
        (("batches", "storage"), "emptyDir"),
        (("batches", "s3", "url"), "https://bucket.example.com"),
        (("batches", "s3", "endpoint"), "http://user:secret@minio:9000"),
        (("gateway", "settings"), {"batch_storage": "/tmp"}),
        (("tasks", "settings"), {"tracing_endpoint": "http://collector"}),
        (("tracing", "endpoint"), "collector:4317"),
        (("metrics", "podMonitor", "interval"), "15"),
        (("metrics", "alerts", "gatewayErrorShare"), 5),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_schema(schema, defaults, path, value) -> None:
    assert not jsonschema.Draft7Validator(schema).is_valid(put(defaults, path, value))


@pytest.mark.parametrize(
    "path",
    [
        ("commonLabels",),
        *((part, "podLabels") for part in ("worker", "gateway", "tasks", "valkey")),
        *(("metrics", part, "labels") for part in ("podMonitor", "alerts", "dashboard")),
    ],
)
def test_the_labels_that_the_chart_gives_are_not_for_values(schema, defaults, helm4, path) -> None:
    validator = jsonschema.Draft7Validator(schema)
    # `ours` are all that the chart gives; a selector may ask for any of them
    manifests = helm4.values(POOL).manifests
    ours = {
        name for each in manifests for name in each["metadata"].get("labels", {}) | _selector(each)
    }
    assert {"app.kubernetes.io/component", "inferq-pool", "inferq-partition"} <= ours
    for name in ours:
        assert not validator.is_valid(put(defaults, path, {name: "x"})), name
    assert validator.is_valid(put(defaults, path, {"app.kubernetes.io/part-of": "x"}))
    assert validator.is_valid(put(defaults, ("worker", "nodeSelector"), dict.fromkeys(ours, "x")))


def _selector(manifest: dict[str, Any]) -> dict[str, str]:
    selector = manifest.get("spec", {}).get("selector", {})
    found: dict[str, str] = selector.get("matchLabels", {})
    return found


def test_a_label_that_is_given_twice_is_there_once(helm4) -> None:
    parts = ("worker", "gateway", "tasks", "valkey")
    monitors = ("podMonitor", "alerts", "dashboard")
    values = {
        **POOL,
        "commonLabels": {"team": "all", "site": "here"},
        "tasks.enabled": True,
        **{f"{part}.podLabels": {"team": part} for part in parts},
        **{f"metrics.{part}": {"enabled": True, "labels": {"team": part}} for part in monitors},
    }
    rendering = helm4.values(values)
    for document in rendering.text.split("\n---\n"):
        keys = re.findall(r"^( +)(team|site): ", document, flags=re.MULTILINE)
        assert len(keys) == len(set(keys)), document
    for pod in rendering.of_kind("Deployment", "StatefulSet"):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        labels = pod["spec"]["template"]["metadata"]["labels"]
        assert (labels["team"], labels["site"]) == (component, "here")
        assert labels.items() >= pod["spec"]["selector"]["matchLabels"].items()


def test_the_annotation_that_restarts_the_server_is_there_once(helm4) -> None:
    given = {"inferq/config": "mine", "team": "data"}
    rendering = helm4.values({**POOL, "valkey.podAnnotations": given})
    assert rendering.text.count("inferq/config: ") == 1
    [server] = rendering.of_kind("StatefulSet")
    annotations = server["spec"]["template"]["metadata"]["annotations"]
    assert annotations["team"] == "data"
    assert annotations["inferq/config"] != "mine"


def test_both_helms_ask_the_schema(helm) -> None:
    message = helm.refusal({**POOL, "pools.chat.settings": {"max_model_length": 1}})
    assert "max_model_length" in message
    assert "gatway" in helm.refusal({**POOL, "gatway": {}})


EXTERNAL = {"valkey.enabled": False, "redis.addresses": ["redis:6379"]}
B = {"model": "Qwen/Qwen3-8B", "queue": "chat"}
TASKS = {"tasks.enabled": True, "batches.enabled": True}
KEDA = {"pools.chat.autoscaling": {"type": "keda", "minReplicas": 0}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "pools: name at least one pool"),
        ({"pools.chat": {}}, "pools.chat.model: say which model"),
        ({**POOL, "redis.addresses": ["redis:6379"]}, "set valkey.enabled=false"),
        ({**POOL, "valkey.enabled": False}, "redis.addresses must say where"),
        ({**POOL, **EXTERNAL, "redis.addresses": ["a:1", "b:1"]}, "has one address"),
        ({**POOL, **EXTERNAL, "redis.mode": "sentinel"}, "needs redis.sentinelService"),
        ({**POOL, **EXTERNAL, "redis.mode": "cluster", "redis.database": 1}, "database 0 only"),
        ({**POOL, **EXTERNAL, "redis.tls.caSecret.name": "ca"}, "needs redis.tls.enabled"),
        ({**POOL, **EXTERNAL, "redis.auth.sentinelPasswordKey": "p"}, "needs redis.mode=sentinel"),
        ({**POOL, **KEDA, "gateway.acceptWithoutWorkers": False}, "nothing would ever start it"),
        ({**POOL, "pools.chat.autoscaling": {"type": "hpa", "minReplicas": 0}}, "only keda scales"),
        (
            {**POOL, "pools.chat.autoscaling": {"type": "hpa"}, "gateway.enabled": False},
            "gateways or tasks tell the outstanding tokens",
        ),
        (
            {
                **POOL,
                "pools.chat.autoscaling": {"type": "hpa"},
                "pools.b": {**B, "autoscaling": {"type": "keda"}},
            },
            "scaled by keda and by hpa on outstanding tokens at once",
        ),
        (
            {**POOL, "pools.chat.autoscaling": {"type": "keda", "minReplicas": 9}},
            "minReplicas is more than maxReplicas",
        ),
        ({**POOL, "pools.b": {"model": "other", "queue": "chat"}}, "a queue serves one model"),
        ({**POOL, "pools.b": {"model": "Qwen/Qwen3-8B"}}, "another servedModelName"),
        ({**POOL, "pools.chat.adapters": {"Qwen3-8B": "/a"}}, "the name of the model itself"),
        ({**POOL, "pools.chat.modelCache": {"type": "hostPath"}}, "which folder of the node"),
        (
            {
                **POOL,
                "pools.chat.replicas": 2,
                "pools.chat.modelCache": {
                    "type": "persistentVolumeClaim",
                    "accessModes": ["ReadWriteOncePod"],
                },
            },
            "only one of the workers could start",
        ),
        ({**POOL, "pools.chat.strategy": {"maxUnavailable": 0}}, "cannot both be 0"),
        ({**POOL, "gateway.ingress.enabled": True}, "needs gateway.ingress.hosts"),
        ({**POOL, "gateway.httpRoute.enabled": True}, "needs gateway.httpRoute.parentRefs"),
        (
            {**POOL, "gateway.enabled": False, "gateway.autoscaling.enabled": True},
            "must be off too",
        ),
        (
            {**POOL, "gateway.enabled": False, "gateway.acceptWebhooks": True},
            "must be off too",
        ),
        ({**POOL, "gateway.acceptWebhooks": True}, "gateway.acceptWebhooks needs tasks.enabled"),
        (
            {**POOL, "gateway.acceptWebhooks": True, "tasks.enabled": True},
            "gateway.acceptWebhooks needs tasks.webhooks.existingSecret",
        ),
        (
            {**POOL, "tasks.webhooks.existingSecret": "webhooks"},
            "tasks.webhooks.existingSecret needs tasks.enabled",
        ),
        ({**POOL, "batches.enabled": True}, "batches.enabled needs gateway.enabled and tasks"),
        ({**POOL, **TASKS, "gateway.enabled": False}, "batches.enabled needs gateway.enabled and"),
        ({**POOL, "batches.s3.url": "s3://bucket"}, "set batches.enabled=true and"),
        ({**POOL, **TASKS, "batches.storage": "s3"}, "batches.storage=s3 needs batches.s3.url"),
        (
            {**POOL, **TASKS, "batches.persistentVolumeClaim.accessModes": ["ReadWriteOncePod"]},
            "ReadWriteOncePod lets one pod in",
        ),
        (
            {**POOL, "metrics.podMonitor.enabled": True, "networkPolicy.enabled": True},
            "networkPolicy.metricsFrom: say where Prometheus is",
        ),
        (
            {**POOL, "metrics.alerts.enabled": True, "gateway.enabled": False},
            "metrics.alerts: gateways or tasks tell",
        ),
        ({**POOL, "gateway.metricsPort": 8000}, "must be another one than gateway.port"),
        ({**POOL, "gateway.autoscaling.enabled": True}, "gateway.resources.requests.cpu: set it"),
        (
            {"pools.a-pool-of-29-letters-in-all-ab.model": "m", "fullnameOverride": "n" * 40},
            "give a shorter fullnameOverride",
        ),
    ],
)
def test_values_that_cannot_work_together_get_a_sentence(helm4, values, sentence: str) -> None:
    assert sentence in helm4.refusal(values)


def test_a_pool_changes_what_it_names_and_keeps_the_rest(helm4) -> None:
    rendering = helm4.scenario("several-pools")
    graces = {
        pod.name.rpartition("worker-")[2]: pod.spec["terminationGracePeriodSeconds"]
        for pod in rendering.workers()
    }
    assert graces == {"chat": 85, "chat-spot": 35, "small": 85}
    tolerations = {pod.name: pod.spec.get("tolerations", []) for pod in rendering.workers()}
    assert [len(given) for given in tolerations.values()] == [1, 2, 0]


def test_a_pool_of_none_is_no_pool(helm4) -> None:
    rendering = helm4.values({**POOL, "pools.old": None})
    assert len(list(rendering.workers())) == 1
