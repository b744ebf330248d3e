"""Helm itself installs, upgrades, rolls back, tests and uninstalls the chart in a small cluster."""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_api
import pytest
import yaml

NAMESPACE = "llm"
VALUES = {
    "pools": {
        "chat": {
            "model": "Qwen/Qwen3-8B",
            "autoscaling": {"type": "keda", "minReplicas": 0},
            "modelCache": {"type": "persistentVolumeClaim"},
        },
        "small": {"model": "Qwen/Qwen3-0.6B", "extraEnv": [{"name": "OLD", "value": "1"}]},
    },
    "networkPolicy": {"enabled": True},
}


class Release:
    """A release in a cluster, and the Helm that made it."""

    def __init__(self, helm: Any, cluster: Any, url: str, folder: Path) -> None:
        self.cluster = cluster
        self._program = helm.program
        self._folder = folder
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "small",
            "clusters": [{"name": "small", "cluster": {"server": url}}],
            "contexts": [{"name": "small", "context": {"cluster": "small", "user": "me"}}],
            "users": [{"name": "me", "user": {}}],
        }
        (folder / "config").write_text(json.dumps(configuration))

    def run(self, *arguments: str | Path, succeeds: bool = True) -> str:
        """Run Helm and return what it says."""
        done = subprocess.run(
            [self._program, *arguments, "--namespace", NAMESPACE, "--timeout", "60s"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self._folder),
                "KUBECONFIG": str(self._folder / "config"),
            },
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
        return done.stdout + done.stderr

    def put(
        self, verb: str, chart: Path, values: dict[str, Any], *more: str, succeeds: bool = True
    ) -> str:
        """Install or upgrade with these values."""
        (self._folder / "values.yaml").write_text(yaml.safe_dump(values))
        self.cluster.journal.clear()
        given = ("--values", self._folder / "values.yaml")
        return self.run(verb, "release", chart, *given, *more, succeeds=succeeds)

    @property
    def changes(self) -> set[tuple[str, str, str]]:
        """What the last command did, as (verb, kind, name's end)."""
        return {
            (verb, kind, name.removeprefix("release-inferq").removeprefix("-"))
            for verb, kind, name in self.cluster.journal
        }

    def passwords(self) -> dict[str, str]:
        """The bundled server's passwords."""
        data = self.cluster.get("Secret", "release-inferq-valkey")["data"]
        return {name: base64.b64decode(value).decode() for name, value in data.items()}

    def specifications(self) -> dict[tuple[str, str], Any]:
        """What is wanted of every object."""
        kinds = {kind for kind, _ in self.cluster.everything()}
        return {
            (found["kind"], found["metadata"]["name"]): copy.deepcopy(
                {name: found[name] for name in ("spec", "data") if name in found}
            )
            for found in self.cluster.of_kind(*kinds)
        }


@pytest.fixture
def release(helm: Any, tmp_path: Path) -> Iterator[Release]:
    """A cluster with nothing in it, before each Helm."""
    cluster = kubernetes_api.Cluster()
    with kubernetes_api.serving(cluster) as url:
        yield Release(helm, cluster, url, tmp_path)


#: For what Helm does not decide.
only_helm4 = pytest.mark.parametrize("helm", ["4"], indirect=True)


def changed(path: str, value: Any) -> dict[str, Any]:
    """VALUES with another value."""
    values = copy.deepcopy(VALUES)
    at: Any = values
    *parents, last = path.split(".")
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    return values


def test_it_makes_what_it_renders_and_first_what_pods_refer_to(release, chart, helm) -> None:
    said = release.put("install", chart, VALUES, "--create-namespace")
    assert "STATUS: deployed" in said
    rendered = helm.values(VALUES).manifests
    wanted = {(m["kind"], m["metadata"]["name"]) for m in rendered} - {
        ("Pod", "release-inferq-test")
    }
    assert release.cluster.everything() == wanted
    order = [(kind, name) for verb, kind, name in release.cluster.journal if verb == "create"]
    for manifest in release.cluster.of_kind("Deployment", "StatefulSet"):
        at = order.index((manifest["kind"], manifest["metadata"]["name"]))
        for kind, name in references(manifest["spec"]["template"]["spec"]):
            if (kind, name) in wanted:
                assert order.index((kind, name)) < at
    assert len(set(release.passwords().values())) == 4


def references(pod: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a pod needs before it can start."""
    yield "ServiceAccount", pod["serviceAccountName"]
    for volume in pod.get("volumes", ()):
        for kind, source, key in (
            ("Secret", "secret", "secretName"),
            ("ConfigMap", "configMap", "name"),
            ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
        ):
            if source in volume:
                yield kind, volume[source][key]
    for variable in pod["containers"][0]["env"]:
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            yield "Secret", reference["name"]


def test_an_upgrade_touches_what_changed_and_nothing_else(release, chart, helm) -> None:
    release.put("install", chart, VALUES, "--create-namespace")
    before = release.specifications()
    release.put("upgrade", chart, VALUES)
    assert release.changes == set()
    release.put("upgrade", chart, changed("gateway.settings", {"max_prompts": 7}))
    assert release.changes == {("update", "Deployment", "gateway")}
    small = {"model": "Qwen/Qwen3-0.6B", "extraEnv": [{"name": "NEW", "value": "1"}]}
    values = changed("pools.small", small)
    release.put("upgrade", chart, values)
    assert ("update", "Deployment", "worker-small") in release.changes
    assert ("update", "Deployment", "worker-chat") not in release.changes
    after = release.specifications()
    [fresh] = [pod for pod in helm.values(values).workers() if pod.name.endswith("-small")]
    worker = after["Deployment", "release-inferq-worker-small"]
    assert worker["spec"] == fresh.owner["spec"]
    assert without(before, "gateway", "worker-small") == without(after, "gateway", "worker-small")


def without(specifications: dict[tuple[str, str], Any], *endings: str) -> dict[Any, Any]:
    return {at: value for at, value in specifications.items() if not at[1].endswith(endings)}


@only_helm4
def test_an_upgrade_keeps_passwords_selectors_and_the_autoscalers_number(release, chart) -> None:
    release.put("install", chart, VALUES, "--create-namespace")
    passwords, before = release.passwords(), release.specifications()
    worker = release.cluster.get("Deployment", "release-inferq-worker-chat")
    worker["spec"]["replicas"] = 5
    release.put("upgrade", chart, changed("tasks", {"enabled": True}))
    assert {("create", "Deployment", "tasks"), ("update", "Secret", "valkey")} < release.changes
    assert release.passwords().items() > passwords.items()
    assert release.passwords().keys() - passwords.keys() == {"tasks-password"}
    release.put("upgrade", chart, changed("worker.drainTimeoutSeconds", 90))
    worker = release.cluster.get("Deployment", "release-inferq-worker-chat")
    assert worker["spec"]["replicas"] == 5
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 115
    for at, value in release.specifications().items():
        assert value.get("spec", {}).get("selector") == before[at].get("spec", {}).get("selector")


@only_helm4
def test_a_new_version_of_the_chart_alone_restarts_no_pod(release, chart, tmp_path: Path) -> None:
    release.put("install", chart, VALUES, "--create-namespace")
    before = release.specifications()
    newer = tmp_path / "newer"
    shutil.copytree(chart, newer)
    text = (newer / "Chart.yaml").read_text()
    assert "\nversion: 0.1.0\n" in text
    (newer / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0\n", "\nversion: 0.9.9\n"))
    release.put("upgrade", newer, VALUES)
    assert ("update", "Deployment", "gateway") in release.changes  # its labels
    assert release.specifications() == before


def test_a_rollback_brings_back_what_was(release, chart) -> None:
    release.put("install", chart, VALUES, "--create-namespace")
    before = release.specifications()
    values = changed("gateway", {"enabled": False})
    values["pools"]["small"] = {"model": "Qwen/Qwen3-0.6B", "nodeSelector": {"a": "b"}}
    release.put("upgrade", chart, values)
    assert ("delete", "Deployment", "gateway") in release.changes
    assert ("delete", "Service", "gateway") in release.changes
    assert ("delete", "PersistentVolumeClaim", "models-chat") not in release.changes
    release.cluster.journal.clear()
    release.run("rollback", "release", "1")
    assert ("create", "Deployment", "gateway") in release.changes
    assert release.specifications() == before


def test_its_test_is_a_pod_that_only_it_starts_each_time_anew(release, chart) -> None:
    release.put("install", chart, VALUES, "--create-namespace")
    assert release.cluster.of_kind("Pod") == []
    for verbs in (["create"], ["delete", "create"]):
        release.cluster.journal.clear()
        said = release.run("test", "release", "--logs")
        assert "Succeeded" in said
        assert "answered" in said
        assert [verb for verb, kind, _ in release.cluster.journal if kind == "Pod"] == verbs
    release.cluster.pod_phase = "Failed"
    release.run("test", "release", succeeds=False)


def test_uninstalling_leaves_downloaded_models_and_nothing_else(release, chart) -> None:
    release.put("install", chart, VALUES, "--create-namespace")
    release.run("uninstall", "release")
    assert release.cluster.everything() == {("PersistentVolumeClaim", "release-inferq-models-chat")}


@only_helm4
def test_what_an_api_server_refuses_stops_an_upgrade_and_changes_no_pod(release, chart) -> None:
    release.put("install", chart, VALUES, "--create-namespace")
    before = release.specifications()
    larger = changed("valkey.persistence", {"size": "16Gi"})
    said = release.put("upgrade", chart, larger, succeeds=False)
    assert "spec.volumeClaimTemplates: field is immutable" in said
    assert release.specifications() == before
