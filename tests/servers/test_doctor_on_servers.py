"""`inferq doctor` on servers of other kinds: a Cluster, Sentinels, Redis beside Valkey."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferq.cli import main


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the doctor on a server; return its exit code and its findings by area and check."""

    def call(url: str, *arguments: str) -> tuple[int, dict[tuple[str, str], Any]]:
        areas = ("--only", "redis", "--only", "rights", "--only", "queue")
        code = main(["doctor", "--json", *areas, "--redis-url", url, *arguments])
        found = map(json.loads, capsys.readouterr().out.splitlines())
        return code, {(each["area"], each["check"]): each for each in found}

    return call


def test_a_cluster_is_looked_at_through_its_url(cluster: Any, doctor: Any, queue: str) -> None:
    code, findings = doctor(cluster.url, "--queue", queue, "--partitions", "3")
    assert code == 0
    assert findings["redis", "part"]["message"] == "cluster, a primary"
    assert findings["rights", "enough for"]["message"] == "producer, gateway, worker, tasks"
    assert "partitions 0, 1, 2" in findings["queue", "workers"]["message"]


def test_a_node_of_a_cluster_as_a_plain_url_is_told_how_to_be_named(
    cluster: Any, doctor: Any, queue: str
) -> None:
    code, findings = doctor(cluster.nodes[0].url, "--queue", queue)
    assert code == 1
    assert "redis+cluster://" in findings["redis", "part"]["advice"]


def test_the_primary_of_sentinels_is_found(sentinels: Any, doctor: Any, queue: str) -> None:
    code, findings = doctor(sentinels.url, "--queue", queue)
    assert code == 0
    assert findings["redis", "part"]["message"] == "sentinel, a primary"
    assert findings["redis", "replicas"]["status"] == "warning"
    assert sentinels.password not in json.dumps(list(findings.values()))


def test_rights_are_told_by_both_kinds_of_server(server: Any, doctor: Any, queue: str) -> None:
    code, findings = doctor(server.url, "--queue", queue)
    assert code == 0
    assert findings["redis", "version"]["status"] == "ok"
    assert findings["rights", "enough for"]["message"] == "producer, gateway, worker, tasks"


def test_tls_is_told_with_and_without_a_checked_certificate(
    tls_url: str, certificate: Path, doctor: Any, queue: str
) -> None:
    ours = f"ssl_ca_certs={certificate / 'cert.pem'}"
    for option, status in ((ours, "ok"), ("ssl_cert_reqs=none", "warning")):
        code, findings = doctor(f"{tls_url}?{option}", "--queue", queue)
        assert code == 0
        assert findings["redis", "encryption"]["status"] == status
    code, findings = doctor(tls_url, "--queue", queue)
    assert code == 1
    assert "ssl_ca_certs" in findings["redis", "connection"]["advice"]
