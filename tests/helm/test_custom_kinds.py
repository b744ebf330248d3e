"""What the chart renders for KEDA, the Prometheus operator and the Gateway API, field by field.

No schema of Kubernetes has these kinds, and a strict API server refuses what they do not define.
`custom_kinds/` says which fields a chart may use; unknown ones are faults.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_discovery import BUILT_IN

FILES = sorted((Path(__file__).parent / "custom_kinds").glob("*.yaml"))


def closed(schema: Any) -> Any:
    """The schema, whose objects with named fields take no others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        inner["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        inner |= {"type": "object", "additionalProperties": False}
    return inner


@pytest.fixture(scope="module")
def schemas() -> dict[str, tuple[str, Any]]:
    """The apiVersion and the schema of each kind, by its name in small letters."""
    known = {}
    for path in FILES:
        described = yaml.safe_load(path.read_text())
        schema = {
            "definitions": closed(described.get("definitions", {})),
            "type": "object",
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "additionalProperties": False,
            "properties": {
                "apiVersion": {"const": described["apiVersion"]},
                "kind": {"type": "string"},
                "metadata": {"type": "object"},
                "spec": closed(described["spec"]),
            },
        }
        jsonschema.Draft7Validator.check_schema(schema)
        known[path.stem] = described["apiVersion"], jsonschema.Draft7Validator(schema)
    return known


def test_every_custom_object_has_fields_that_its_kind_defines(rendering, schemas) -> None:
    for manifest in rendering.manifests:
        if manifest["apiVersion"] not in BUILT_IN:
            _, validator = schemas[manifest["kind"].lower()]
            faults = [f"{e.json_path}: {e.message}" for e in validator.iter_errors(manifest)]
            assert faults == [], manifest["metadata"]["name"]


def test_every_custom_kind_is_in_a_scenario(helm4, schemas) -> None:
    rendered = {
        manifest["kind"].lower(): manifest
        for name in ("metrics", "tls-acl", "every-option")
        for manifest in helm4.scenario(name).manifests
        if manifest["apiVersion"] not in BUILT_IN
    }
    assert rendered.keys() == schemas.keys()
    for kind, manifest in rendered.items():
        misspelt = copy.deepcopy(manifest)
        name = next(iter(misspelt["spec"]))
        misspelt["spec"][f"{name}x"] = misspelt["spec"].pop(name)
        assert not schemas[kind][1].is_valid(misspelt)
