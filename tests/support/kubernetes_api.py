"""An API server in miniature: as much of Kubernetes as Helm asks for, with its refusals.

Objects of the built-in kinds must pass the strict schemas, and no field may change that must not.
Whatever is written is ready at once; a pod that ends, ends as `pod_phase` says.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_discovery as discovery
import kubernetes_objects as objects
import kubernetes_validate
import yaml

Object = dict[str, Any]


class RefusedError(Exception):
    """An answer that is no success: its HTTP status, Kubernetes' reason, and a sentence."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


@dataclass(frozen=True)
class Address:
    """Where an object, or all of a kind, are."""

    group: str
    kind: str
    namespace: str = ""
    name: str = ""
    part: str = ""


@dataclass
class Cluster:
    """The objects, and what was done to them, in order."""

    pod_phase: str = "Succeeded"
    journal: list[tuple[str, str, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False
    _objects: dict[Address, Object] = field(default_factory=dict)
    _applied: dict[Address, Object] = field(default_factory=dict)
    _events: list[tuple[Address, Object]] = field(default_factory=list)

    def get(self, kind: str, name: str) -> Object:
        """Return the one object of that kind and name."""
        [found] = [value for value in self.of_kind(kind) if value["metadata"]["name"] == name]
        return found

    def of_kind(self, *kinds: str) -> list[Object]:
        """Return all objects of some kinds, without Helm's own records."""
        return [
            value
            for at, value in self._objects.items()
            if at.kind in kinds and not value.get("type", "").startswith("helm.sh/")
        ]

    def everything(self) -> set[tuple[str, str]]:
        """Return kind and name of all objects in namespaces, without Helm's own records."""
        kinds = {
            kind for known in discovery.KINDS.values() for kind in known.values()
        } - discovery.WITHOUT_NAMESPACE
        return {(found["kind"], found["metadata"]["name"]) for found in self.of_kind(*kinds)}

    def read(self, at: Address) -> Object:
        """Return an object as a client sees it."""
        if at not in self._objects:
            raise RefusedError(404, "NotFound", f'{at.kind} "{at.name}" not found')
        return self._objects[at]

    def listed(self, of: Address, query: dict[str, str]) -> Object:
        """Return the list of a kind's objects."""
        return {
            "kind": f"{of.kind}List",
            "apiVersion": of.group,
            "metadata": {"resourceVersion": str(len(self._events))},
            "items": [
                found for at, found in self._objects.items() if _is_meant(at, found, of, query)
            ],
        }

    def create(self, of: Address, new: Object, dry: bool) -> Object:
        """Write an object that is not there yet."""
        at = Address(of.group, of.kind, of.namespace, new["metadata"]["name"])
        if at in self._objects:
            raise RefusedError(409, "AlreadyExists", f'{at.kind} "{at.name}" already exists')
        return self._write("create", at, new, dry)

    def replace(self, at: Address, new: Object, dry: bool) -> Object:
        """Write an object over another."""
        self.read(at)
        return self._write("update", at, new, dry)

    def patch(self, at: Address, how: str, patch: Object, dry: bool) -> Object:
        """Change an object by a patch of the media type `how`."""
        if how == "application/apply-patch+yaml":
            old = self._objects.get(at)
            new = objects.applied(old, self._applied.get(at), patch)
            written = self._write("update" if old else "create", at, new, dry)
            if not dry:
                self._applied[at] = patch
            return written
        if how == "application/strategic-merge-patch+json":
            return self._write("update", at, objects.strategic_patch(self.read(at), patch), dry)
        if how == "application/merge-patch+json":
            return self._write("update", at, objects.merge_patch(self.read(at), patch), dry)
        raise RefusedError(415, "UnsupportedMediaType", how)

    def delete(self, at: Address) -> Object:
        """Take an object away."""
        gone = self.read(at)
        del self._objects[at]
        self._applied.pop(at, None)
        self._record("delete", at, gone)
        return gone

    def events_after(self, revision: int) -> list[tuple[Address, Object]]:
        """Wait a second at most and return what was written after a revision."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self._events) > revision, 1)
            return self._events[revision:]

    def _write(self, verb: str, at: Address, new: Object, dry: bool) -> Object:
        new = copy.deepcopy(new) | {"apiVersion": at.group, "kind": at.kind}
        old = self._objects.get(at)
        self._check(at, old, new)
        if at.namespace:
            new["metadata"]["namespace"] = at.namespace
        if dry or old == new:
            return new
        new["metadata"].setdefault("uid", str(uuid.uuid4()))
        new["metadata"].setdefault("creationTimestamp", "2030-01-01T00:00:00Z")
        new["metadata"]["generation"] = new["metadata"].get("generation", 0) + 1
        new["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        if at.kind == "Pod":
            new["status"] = {"phase": self.pod_phase}
        self._objects[at] = new
        self._record(verb, at, new)
        return new

    def _check(self, at: Address, old: Object | None, new: Object) -> None:
        fault = objects.fault_of_change(old, new) if old else None
        if fault is None and at.group in discovery.BUILT_IN:
            plain = {name: value for name, value in new.items() if name != "status"}
            try:
                kubernetes_validate.validate(plain, discovery.VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                fault = error.message
        if fault:
            raise RefusedError(422, "Invalid", f'{at.kind} "{at.name}" is invalid: {fault}')

    def _record(self, verb: str, at: Address, value: Object) -> None:
        if not value.get("type", "").startswith("helm.sh/"):
            self.journal.append((verb, at.kind, at.name))
        kind = {"create": "ADDED", "update": "MODIFIED", "delete": "DELETED"}[verb]
        self._events.append((at, {"type": kind, "object": copy.deepcopy(value)}))
        self.changed.notify_all()


def _is_meant(at: Address, value: Object, of: Address, query: dict[str, str]) -> bool:
    if (at.group, at.kind) != (of.group, of.kind) or of.namespace not in ("", at.namespace):
        return False
    labels = value["metadata"].get("labels") or {}
    wanted = _pairs(query.get("labelSelector", ""))
    fields = _pairs(query.get("fieldSelector", ""))
    return wanted.items() <= labels.items() and fields.get("metadata.name", at.name) == at.name


def _pairs(selector: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in selector.split(",") if part)


def _address(path: str) -> Address:
    """Return what a path means; raise `RefusedError` where it means nothing here."""
    parts = path.strip("/").split("/")
    group, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    kind = discovery.KINDS.get(group, {}).get(rest[0] if rest else "")
    if kind is None or len(rest) > 3:
        raise RefusedError(404, "NotFound", f"there is no {path}")
    name, part = (*rest[1:], "", "")[:2]
    return Address(group, kind, namespace, name, part)


class Handler(BaseHTTPRequestHandler):
    """Requests and answers of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: Server

    def log_message(self, *_: Any) -> None:
        """Say nothing: the journal has it."""

    def answer(self) -> None:
        """Do what a request asks."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            known = discovery.answer(url.path) if self.command == "GET" else None
            if known is not None:
                return self._send(200, known)
            at = _address(url.path)
            if "watch" in query:
                return self._watch(at, query)
            if at.part == "log":
                return self._send_text(b"answered\n")
            with self.server.cluster.changed:
                self._send(*self._do(at, query, raw))
        except RefusedError as refused:
            self._send(refused.body["code"], refused.body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

    def _do(self, at: Address, query: dict[str, str], raw: bytes) -> tuple[int, Object]:
        cluster, dry = self.server.cluster, "dryRun" in query
        match self.command:
            case "GET" if at.name:
                return 200, cluster.read(at)
            case "GET":
                return 200, cluster.listed(at, query)
            case "POST":
                return 201, cluster.create(at, _body(raw), dry)
            case "PUT":
                return 200, cluster.replace(at, _body(raw), dry)
            case "PATCH":
                return 200, cluster.patch(at, self.headers["Content-Type"], _body(raw), dry)
            case _:
                return 200, cluster.delete(at)

    def _watch(self, of: Address, query: dict[str, str]) -> None:
        if "sendInitialEvents" in query:  # a list, then a watch, do as well
            raise RefusedError(422, "Invalid", "sendInitialEvents is not served here")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            self._send_events(of, query)

    def _send_events(self, of: Address, query: dict[str, str]) -> None:
        cluster, revision = self.server.cluster, int(query.get("resourceVersion") or 0)
        while not cluster.closed:
            for at, event in cluster.events_after(revision):
                revision += 1
                if _is_meant(at, event["object"], of, query):
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                    self.wfile.flush()

    def _send(self, code: int, body: Object) -> None:
        self._send_text(json.dumps(body).encode(), code, "application/json")

    def _send_text(self, text: bytes, code: int = 200, kind: str = "text/plain") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _body(raw: bytes) -> Object:
    if raw.startswith(b"k8s\0"):
        return objects.read_protobuf(raw)
    body: Object = yaml.load(raw, Loader=yaml.CSafeLoader)
    return body


class Server(ThreadingHTTPServer):
    """The server of a cluster, on a free port of this machine."""

    daemon_threads = True

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cluster = cluster

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """Serve a cluster; gives its URL."""
    with Server(cluster) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.url
        finally:
            with cluster.changed:
                cluster.closed = True
                cluster.changed.notify_all()
            server.shutdown()
            thread.join()
