"""Every value of values.yaml changes one of these releases: none is accepted and dead."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

POOL = {"model": "Qwen/Qwen3-8B"}
#: Values that turn on what others shape. They come on top of the defaults.
RELEASES: dict[str, dict[str, Any]] = {
    "bundled": {
        "pools": {"chat": {**POOL, "autoscaling": {"type": "keda"}}},
        "gateway": {
            "resources": {"requests": {"cpu": "1"}},
            "ingress": {"enabled": True, "hosts": ["a"]},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]},
            "autoscaling": {"enabled": True},
            "apiKeys": {"existingSecret": "keys"},
        },
        "tasks": {"enabled": True, "webhooks": {"existingSecret": "webhooks"}},
        "worker": {
            "modelCache": {"type": "persistentVolumeClaim"},
            "huggingFace": {"tokenSecret": {"name": "token"}},
        },
        "batches": {"enabled": True},
        "metrics": {name: {"enabled": True} for name in ("podMonitor", "alerts", "dashboard")},
        "networkPolicy": {"enabled": True, "metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    },
    "sentinel": {
        "pools": {"chat": {**POOL, "autoscaling": {"type": "hpa"}}, "keda": {}},
        "worker": {
            **POOL,
            "queue": "q",
            "modelCache": {"type": "hostPath", "hostPath": "/a"},
            "autoscaling": {"type": "keda", "hpa": {"metrics": [{"type": "Resource"}]}},
        },
        "gateway": {"enabled": True},
        "tasks": {"enabled": True},
        "batches": {"enabled": True, "storage": "s3", "s3": {"url": "s3://bucket"}},
        "valkey": {"enabled": False},
        "redis": {
            "mode": "sentinel",
            "addresses": ["a:1"],
            "sentinelService": "s",
            "tls": {"enabled": True, "caSecret": {"name": "ca"}},
            "auth": {"existingSecret": "pw", "sentinelPasswordKey": "k"},
        },
    },
    "server": {
        "pools": {"chat": POOL},
        "valkey": {"enabled": False},
        "redis": {"addresses": ["a:1"]},
    },
    "plain": {
        "pools": {"chat": {}},
        "worker": {**POOL, "autoscaling": {"type": "hpa"}},
        "networkPolicy": {"enabled": True},
    },
}
#: Other values for those of which a letter or number more would not do.
OTHERS: dict[str, Any] = {
    "digest": "sha256:" + "1" * 64,
    "pullPolicy": "Always",
    "size": "3Gi",
    "sizeLimit": "3Gi",
    "hostPath": "/other",
    "maxmemory": "2gb",
    "memory": "2Gi",
    "resourceName": "amd.com/gpu",
    "accessModes": ["ReadOnlyMany"],
    "addresses": ["other:2"],
    "hosts": ["other"],
    "cors_origins": ["https://other"],
    "adapters": {"polite": "/adapters/polite"},
    "affinity": {"nodeAffinity": {}},
    "nodeSelector": {"other": "node"},
    "resources": {"requests": {"cpu": "2"}},
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 1}},
    "tolerations": [{"key": "other"}],
    "metrics": [{"type": "Other"}],
    "topologySpreadConstraints": [{"topologyKey": "other"}],
    "parentRefs": [{"name": "other"}],
    "tls": [{"secretName": "other"}],
    "webhookPorts": [8443],
    "gatewayFrom": [{"podSelector": {}}],
    "metricsFrom": [{"podSelector": {}}],
    "url": "s3://other",
    "endpoint": "http://other:1",
    "interval": "7s",
    "scrapeTimeout": "7s",
    "gatewayErrorShare": 0.5,
    "gateway.port": 8123,
    "extraEgress": [{"ports": []}],
    "extraEnv": [{"name": "OTHER", "value": "x"}],
    "extraEnvFrom": [{"secretRef": {"name": "other"}}],
    "extraObjects": [{"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "other"}}],
    "hostnames": ["other"],
    "worker.settings": {"max_model_len": 2048},
    "gateway.settings": {"max_prompts": 7},
    "tasks.settings": {"workers": 7},
    "countDelayed": True,
    "modelCache.type": "persistentVolumeClaim",
    "redis.mode": "cluster",
    "strategy.type": "Recreate",
    "service.type": "NodePort",
    "autoscaling.type": "none",
}
#: Not the chart's to read, what every release gives, and what changes with others only.
LEFT_OUT = {"global", "pools", "valkey.enabled", "batches.storage"}


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, (*path, name))
    else:
        yield path, values


def other_value(path: tuple[str, ...], default: Any) -> Any:
    for name in (".".join(path[:1] + path[-1:]), ".".join(path[-2:]), path[-1]):
        if name in OTHERS:
            return OTHERS[name]
    match default:
        case bool():
            return not default
        case int():
            return default + 1
        case str():
            return f"{default}x"
        case list():
            return [{"name": "other"}]
        case _:
            return {"example.com/other": "x"}


def changed(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(values)
    at = result
    for name in path[:-1]:
        at = at.setdefault(name, {})
    at[path[-1]] = value
    return result


def current(values: dict[str, Any], path: tuple[str, ...], default: Any) -> Any:
    at: Any = values
    for name in path:
        if name not in at:
            return default
        at = at[name]
    return at


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_value_changes_a_release(helm4, chart) -> None:
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    before = {name: without_secrets(helm4.values(values)) for name, values in RELEASES.items()}
    dead = []
    for path, default in leaves(defaults):
        if ".".join(path) in LEFT_OUT:
            continue
        for name, values in RELEASES.items():
            other = other_value(path, current(values, path, default))
            try:
                after = helm4.values(changed(values, path, other))
            except AssertionError:
                continue  # refused there: another release must show it
            if without_secrets(after) != before[name]:
                break
        else:
            dead.append(".".join(path))
    assert dead == []


def without_secrets(rendering: Any) -> list[Any]:
    """The manifests without passwords, which every rendering makes anew."""
    manifests = copy.deepcopy(rendering.manifests)
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            manifest["data"] = sorted(manifest["data"])
    return manifests


@pytest.mark.parametrize("release", RELEASES)
def test_the_releases_render(helm4, release: str) -> None:
    assert helm4.values(RELEASES[release]).manifests
