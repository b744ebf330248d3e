"""What an API server does with objects: three kinds of changes, and fields that must not change."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping
from typing import Any

Object = dict[str, Any]

#: Key by which the items of a list are told apart in a strategic merge patch; other lists are
#: replaced as a whole. Kubernetes' API reference names it for each list as its "patch merge key".
MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "topologySpreadConstraints": ("topologyKey",),
}
#: What may change of a StatefulSet's specification, and of a claim's.
CHANGEABLE = {
    "StatefulSet": {
        *("replicas", "ordinals", "template", "updateStrategy", "minReadySeconds"),
        *("persistentVolumeClaimRetentionPolicy", "revisionHistoryLimit"),
    },
    "PersistentVolumeClaim": {"resources", "volumeAttributesClassName"},
    "Pod": {"activeDeadlineSeconds", "tolerations"},
}


def merge_patch(old: Any, patch: Any) -> Any:
    """Return the object after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def strategic_patch(old: Any, patch: Any) -> Any:
    """Return the object after a strategic merge patch, which changes some lists by their items."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(old) if isinstance(old, dict) else {}
    if patch.get("$patch") == "replace":
        return {name: copy.deepcopy(value) for name, value in patch.items() if name != "$patch"}
    if (kept := patch.get("$retainKeys")) is not None:
        merged = {name: value for name, value in merged.items() if name in kept}
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, list) and (key := _merge_key(name, value, merged.get(name))):
            merged[name] = _merge_items(merged.get(name) or [], value, key)
        else:
            merged[name] = strategic_patch(merged.get(name), value)
    for name, order in patch.items():
        if name.startswith("$setElementOrder/"):
            _sort_items(merged, name.partition("/")[2], order)
    return merged


def _merge_key(name: str, *lists: list[Any] | None) -> str | None:
    items = [item for items in lists for item in items or () if isinstance(item, dict)]
    for key in MERGE_KEYS.get(name, ()):
        if any(key in item for item in items):
            return key
    return None


def _merge_items(old: list[Object], patch: list[Object], key: str) -> list[Object]:
    items = {item[key]: item for item in copy.deepcopy(old)}
    for item in patch:
        if item.get("$patch") == "delete":
            items.pop(item[key], None)
        else:
            items[item[key]] = strategic_patch(items.get(item[key]), item)
    return list(items.values())


def _sort_items(merged: Object, name: str, order: list[Any]) -> None:
    key = _merge_key(name, merged.get(name), order)
    if key is not None and name in merged:
        places = [item[key] for item in order]
        merged[name].sort(key=lambda item: places.index(item[key]))


def applied(old: Any, before: Any, now: Any) -> Any:
    """Return the object after a server-side apply of `now` by whoever applied `before`.

    What `before` had and `now` lacks goes; what others have set stays. Lists belong to one applier.
    """
    if not isinstance(now, dict):
        return copy.deepcopy(now)
    merged = copy.deepcopy(old) if isinstance(old, dict) else {}
    earlier = before if isinstance(before, dict) else {}
    for name in earlier.keys() - now.keys():
        merged.pop(name, None)
    for name, value in now.items():
        merged[name] = applied(merged.get(name), earlier.get(name), value)
    return merged


def fault_of_change(old: Object, new: Object) -> str | None:
    """Return why an API server would refuse the change, or None."""
    kind = old["kind"]
    was, now = old.get("spec", {}), new.get("spec", {})
    if kind in ("Deployment", "StatefulSet") and was["selector"] != now["selector"]:
        return "spec.selector: field is immutable"
    if kind in CHANGEABLE:
        for name in (was.keys() | now.keys()) - CHANGEABLE[kind]:
            if was.get(name) != now.get(name):
                return f"spec.{name}: field is immutable"
    return None


def read_protobuf(raw: bytes) -> Object:
    """Return the Secret of a request in Kubernetes' protobuf form, in which Helm keeps releases.

    The form is in apimachinery's runtime.Unknown (a type, then the object), meta/v1's ObjectMeta
    and core/v1's Secret.
    """
    unknown = dict(_fields(raw.removeprefix(b"k8s\0")))
    kind = dict(_fields(unknown[1]))
    made: Object = {
        "apiVersion": kind[1].decode(),
        "kind": kind[2].decode(),
        "metadata": {},
        "data": {},
    }
    if made["kind"] != "Secret":
        return made
    for number, value in _fields(unknown[2]):
        if number == 1:
            made["metadata"] = _metadata(value)
        elif number == 2:
            entry = dict(_fields(value))
            made["data"][entry[1].decode()] = base64.b64encode(entry.get(2, b"")).decode()
        elif number == 3:
            made["type"] = value.decode()
    return made


def _metadata(raw: bytes) -> Object:
    names = {1: "name", 3: "namespace", 5: "uid", 6: "resourceVersion"}
    found: Object = {"labels": {}}
    for number, value in _fields(raw):
        if number in names and value:
            found[names[number]] = value.decode()
        elif number == 11:
            label = dict(_fields(value))
            found["labels"][label[1].decode()] = label.get(2, b"").decode()
    return found


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a message: numbers, and bytes of known length."""
    at = 0
    while at < len(raw):
        tag, at = _number(raw, at)
        value, at = _number(raw, at)
        if tag & 7 == 2:
            yield tag >> 3, raw[at : at + value]
            at += value
        elif tag & 7 == 0:
            yield tag >> 3, value
        else:
            raise ValueError(f"wire type {tag & 7}")


def _number(raw: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = raw[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
