"""Every scenario renders, by both Helms alike, into manifests that an API server would take."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest
from kubernetes_discovery import BUILT_IN

#: Versions of Kubernetes whose schemas are asked: the oldest that the chart allows, and a new one.
KUBERNETES = ("1.29", "1.34")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")


def test_a_scenario_passes_lint(helm, chart, scenario: str) -> None:
    values = chart / "ci" / f"{scenario}-values.yaml"
    done = helm.run("lint", "--strict", chart, "--values", values)
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_helms_render_the_same(helm_of, scenario: str) -> None:
    three, four = (
        sorted(
            (m for m in helm_of(major).scenario(scenario).manifests if m["kind"] != "Secret"),
            key=lambda m: (m["kind"], m["metadata"]["name"]),
        )
        for major in ("3", "4")
    )
    assert three == four


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_passes_a_strict_schema(rendering, version: str) -> None:
    built_in = [each for each in rendering.manifests if each["apiVersion"] in BUILT_IN]
    assert built_in
    for manifest in built_in:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_names_and_labels_are_what_an_api_server_takes(rendering) -> None:
    for manifest in rendering.manifests:
        assert NAME.fullmatch(manifest["metadata"]["name"])
        for value in manifest["metadata"].get("labels", {}).values():
            assert isinstance(value, str)
            assert LABEL_VALUE.fullmatch(value), value


def test_no_two_objects_have_one_name(rendering) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in rendering.manifests]
    assert len(names) == len(set(names))


def test_every_mount_has_its_volume_and_every_volume_a_mount(rendering) -> None:
    for pod in rendering.pods:
        volumes = [volume["name"] for volume in pod.spec.get("volumes", ())]
        claims = pod.owner["spec"].get("volumeClaimTemplates", ())
        volumes += [claim["metadata"]["name"] for claim in claims]
        mounted = [mount["name"] for mount in pod.main.get("volumeMounts", ())]
        assert len(volumes) == len(set(volumes))
        assert set(mounted) == set(volumes), pod.name
        paths = [mount["mountPath"] for mount in pod.main.get("volumeMounts", ())]
        assert len(paths) == len(set(paths))


def test_port_names_are_short_and_probes_and_services_use_them(rendering) -> None:
    ports_of = {}
    for pod in rendering.pods:
        ports = {port["name"]: port["containerPort"] for port in pod.main.get("ports", ())}
        ports_of[pod.component] = ports
        assert all(len(name) <= 15 for name in ports)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if get := pod.main.get(probe, {}).get("httpGet"):
                assert get["port"] in ports
    for service in rendering.of_kind("Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of[component]
    for policy in rendering.of_kind("NetworkPolicy"):
        component = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        for rule in policy["spec"]["ingress"]:
            assert all(port["port"] in ports_of[component] for port in rule["ports"])


def test_quantities_are_text_of_a_known_form_and_gpus_are_whole(rendering) -> None:
    for pod in rendering.pods:
        resources = pod.main.get("resources", {})
        for quantities in resources.values():
            for name, quantity in quantities.items():
                assert QUANTITY.fullmatch(quantity), quantity
                assert "/" not in name or quantity.isdigit()
        for volume in pod.spec.get("volumes", ()):
            limit = volume.get("emptyDir", {}).get("sizeLimit", "1")
            assert QUANTITY.fullmatch(limit)
    for claim in rendering.of_kind("PersistentVolumeClaim"):
        assert QUANTITY.fullmatch(claim["spec"]["resources"]["requests"]["storage"])


def test_selectors_match_the_pods_that_they_mean_and_no_others(rendering) -> None:
    workloads = [m for m in rendering.manifests if m["kind"] in ("Deployment", "StatefulSet")]
    labels = {m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"] for m in workloads}

    def matched(selector: dict[str, str]) -> set[str]:
        return {name for name, has in labels.items() if selector.items() <= has.items()}

    for workload in workloads:
        selector = workload["spec"]["selector"]["matchLabels"]
        assert matched(selector) == {workload["metadata"]["name"]}
        for spread in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert spread["labelSelector"]["matchLabels"] == selector
    for budget in rendering.of_kind("PodDisruptionBudget"):
        name = budget["metadata"]["name"]
        assert matched(budget["spec"]["selector"]["matchLabels"]) == {name}
    for service in rendering.of_kind("Service"):
        assert matched(service["spec"]["selector"]) == {service["metadata"]["name"]}


def test_what_refers_to_an_object_of_the_chart_names_one_that_is_there(rendering) -> None:
    names = {(m["kind"], m["metadata"]["name"]) for m in rendering.manifests}
    for scaler in rendering.of_kind("ScaledObject", "HorizontalPodAutoscaler"):
        assert ("Deployment", scaler["spec"]["scaleTargetRef"]["name"]) in names
    for trigger in (t for m in rendering.of_kind("ScaledObject") for t in m["spec"]["triggers"]):
        if reference := trigger.get("authenticationRef"):
            assert ("TriggerAuthentication", reference["name"]) in names
    for ingress in rendering.of_kind("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                assert ("Service", path["backend"]["service"]["name"]) in names
    for pod in rendering.pods:
        account = pod.spec["serviceAccountName"]
        assert ("ServiceAccount", account) in names


def test_what_is_scaled_has_no_fixed_number_of_replicas(rendering) -> None:
    scaled = {
        scaler["spec"]["scaleTargetRef"]["name"]
        for scaler in rendering.of_kind("ScaledObject", "HorizontalPodAutoscaler")
    }
    for deployment in rendering.of_kind("Deployment"):
        is_scaled = deployment["metadata"]["name"] in scaled
        assert ("replicas" not in deployment["spec"]) == is_scaled


def test_a_name_that_looks_like_a_number_or_a_truth_stays_text(helm4) -> None:
    pool = {
        "model": "m",
        "queue": "42",
        "runtimeClassName": "1e3",
        "priorityClassName": "0",
        "huggingFace": {"tokenSecret": {"name": "7", "key": "8"}},
        "modelCache": {"type": "persistentVolumeClaim", "storageClassName": "9"},
        "autoscaling": {"type": "keda"},
    }
    rendering = helm4.values(
        {
            "pools.true": pool,
            "pools.1e3": {**pool, "queue": "null", "servedModelName": "n"},
            "nameOverride": "0x1",
            "fullnameOverride": "007",
            "serviceAccount.name": "1",
            "gateway.ingress": {"enabled": True, "hosts": ["1.2"], "className": "3"},
            "gateway.apiKeys": {"existingSecret": "4", "key": "5"},
            "tasks": {"enabled": True, "webhooks": {"existingSecret": "6"}},
            "batches": {"enabled": True, "persistentVolumeClaim": {"existingClaim": "10"}},
            "valkey.enabled": False,
            "redis.addresses": ["1:1"],
            "redis.tls": {"enabled": True, "caSecret": {"name": "11", "key": "12"}},
            "redis.auth": {"existingSecret": "13", "worker": {"username": "14"}},
            "networkPolicy": {"enabled": True, "kedaNamespace": "15"},
            "metrics.alerts.enabled": True,
        }
    )
    for manifest in rendering.manifests:
        if manifest["apiVersion"] in BUILT_IN:
            kubernetes_validate.validate(manifest, KUBERNETES[1], strict=True)
        assert isinstance(manifest["metadata"]["name"], str)
        labels = manifest["metadata"]["labels"]
        assert all(isinstance(value, str) for value in labels.values())
    names = {m["metadata"]["name"] for m in rendering.of_kind("Deployment")}
    assert {"007-worker-true", "007-worker-1e3"} < names


def test_a_digest_of_digits_alone_stays_text(chart) -> None:
    text = (chart / "templates" / "valkey" / "statefulset.yaml").read_text()
    assert (
        'inferq/config: {{ include "inferq.valkeyConfig" $ | sha256sum | trunc 16 | quote }}'
        in text
    )
