"""What an API server says of itself: its version, its kinds, and that it checks fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
VERSION = "1.34"
#: Kinds by group and version, with their names in paths.
KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "namespaces": "Namespace",
        "pods": "Pod",
        "services": "Service",
        "secrets": "Secret",
        "configmaps": "ConfigMap",
        "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "gateway.networking.k8s.io/v1": {"httproutes": "HTTPRoute"},
    "keda.sh/v1alpha1": {
        "scaledobjects": "ScaledObject",
        "triggerauthentications": "TriggerAuthentication",
    },
    "monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
    },
}
#: Groups of the kinds that an API server has by itself.
BUILT_IN = {"v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1"}
WITHOUT_NAMESPACE = {"Namespace"}


def answer(path: str) -> Object | None:
    """Return what the server says of itself at a path."""
    match path.strip("/").split("/"):
        case ["version"]:
            return {"major": "1", "minor": VERSION[2:], "gitVersion": f"v{VERSION}.0"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(known) for known in KINDS if "/" in known],
            }
        case ["openapi", "v3"]:
            paths = {known: {"serverRelativeURL": f"/openapi/v3/{_root(known)}"} for known in KINDS}
            return {"paths": {_root(known): entry for known, entry in paths.items()}}
        case ["openapi", "v3", *rest] if (group := _of_root("/".join(rest))) in KINDS:
            return {
                "openapi": "3.0.0",
                "info": {"title": "Kubernetes", "version": VERSION},
                "paths": dict(_operations(group)),
            }
        case _ if (group := _of_root(path.strip("/"))) in KINDS:
            return {
                "kind": "APIResourceList",
                "groupVersion": group,
                "resources": [
                    {
                        "name": plural,
                        "singularName": kind.lower(),
                        "kind": kind,
                        "namespaced": kind not in WITHOUT_NAMESPACE,
                        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
                    }
                    for plural, kind in KINDS[group].items()
                ],
            }
    return None


def _operations(group: str) -> Iterator[tuple[str, Object]]:
    """Yield the paths of a group, each of which lets the server find misspelt fields."""
    name, _, version = group.rpartition("/")
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    for plural, kind in KINDS[group].items():
        operation = {
            "parameters": [parameter],
            "responses": {},
            "x-kubernetes-group-version-kind": {"group": name, "version": version, "kind": kind},
        }
        yield f"/{_root(group)}/namespaces/{{namespace}}/{plural}/{{name}}", {"patch": operation}


def _group(group: str) -> Object:
    version = {"groupVersion": group, "version": group.partition("/")[2]}
    return {
        "name": group.partition("/")[0],
        "versions": [version],
        "preferredVersion": version,
    }


def _root(group: str) -> str:
    return f"apis/{group}" if "/" in group else f"api/{group}"


def _of_root(path: str) -> str:
    return path.removeprefix("apis/").removeprefix("api/")
