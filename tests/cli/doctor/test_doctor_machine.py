"""`inferq doctor` looks at variables, libraries and this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from inferq.cli.doctor.findings import Finding, Status
from inferq.cli.doctor.machine import Requirement, System, examine, read_requirements
from inferq.protocol.errors import MissingExtraError

Doctor = Callable[..., tuple[int, dict[tuple[str, str], dict[str, Any]]]]
GIB = 2**30
SYSTEM = System(
    python=(3, 11, 7),
    open_files=65536,
    shm_bytes=GIB,
    requirements={"": [Requirement("redis", ">=5.2", "6.0.1")]},
)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_variables_that_are_right_are_ok(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_MODEL", "m")
    monkeypatch.setenv("INFERQ_GATEWAY_PORT", "8000")
    code, findings = doctor("--only", "settings")
    assert code == 0
    assert {(check, each["status"]) for (_, check), each in findings.items()} == {
        ("worker", "ok"),
        ("gateway", "ok"),
        ("tasks", "ok"),
    }


@pytest.mark.parametrize(
    ("name", "value", "process", "message"),
    [
        ("INFERQ_REDIS_ULR", "x", "worker", "did you mean INFERQ_REDIS_URL?"),
        ("INFERQ_GATEWAY_PROT", "1", "gateway", "did you mean INFERQ_GATEWAY_PORT?"),
        ("INFERQ_TASKS_WORKERS", "none", "tasks", "--workers (INFERQ_TASKS_WORKERS)"),
        ("INFERQ_LEASE_S", "0", "worker", "--lease-s (INFERQ_LEASE_S)"),
    ],
)
def test_a_variable_that_is_misspelt_or_impossible_is_named(
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    process: str,
    message: str,
) -> None:
    monkeypatch.setenv(name, value)
    code, findings = doctor("--only", "settings")
    assert code == 1
    assert message in findings["settings", process]["message"]
    assert f"inferq {process} --help" in findings["settings", process]["advice"]


def test_every_wrong_variable_is_in_one_report(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ("INFERQ_REDIS_ULR", "INFERQ_QEUE", "INFERQ_GATEWAY_PROT", "INFERQ_GATEWAY_HSOT")
    for name in (*wrong, "INFERQ_GATEWAY_PORT", "INFERQ_LEASE_S", "INFERQ_NATIVE_KERNELS"):
        monkeypatch.setenv(name, "x")
    code, findings = doctor("--only", "settings")
    assert code == 1
    said = {check: each["message"] for (_, check), each in findings.items()}
    for process in ("worker", "gateway", "tasks"):
        assert "INFERQ_REDIS_ULR" in said[process]
        assert "INFERQ_QEUE" in said[process]
    assert all(name in said["gateway"] for name in (*wrong, "INFERQ_GATEWAY_PORT"))
    assert "INFERQ_LEASE_S" in said["worker"]
    assert "INFERQ_NATIVE_KERNELS" in said["worker"]


def test_an_empty_model_is_what_a_worker_says_of_it(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_MODEL", "")
    code, findings = doctor("--only", "settings")
    assert code == 1
    assert "--model (INFERQ_MODEL)" in findings["settings", "worker"]["message"]


def test_a_misspelt_variable_is_found_without_the_extra_that_reads_it(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_module: str, *, extra: str) -> Any:
        raise MissingExtraError(extra, "pydantic")

    monkeypatch.setattr("inferq.cli.doctor.variables.load_extra", missing)
    monkeypatch.setenv("INFERQ_GATEWAY_PROT", "1")
    code, findings = doctor("--only", "settings")
    assert code == 1
    assert {check: each["status"] for (_, check), each in findings.items()} == {
        "worker": "skipped",
        "gateway": "failure",
        "tasks": "skipped",
    }


def test_a_variable_with_half_our_prefix_is_doubted(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_Q_REDIS_URL", "redis://:secret@h")
    code, findings = doctor("--only", "settings")
    assert code == 0
    assert findings["settings", "INFER_Q_REDIS_URL"]["status"] == "warning"
    assert "secret" not in str(findings)


def test_an_extra_that_is_absent_is_said_and_is_no_failure() -> None:
    """In a process where neither pydantic nor torch can be found."""
    program = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.split('.')[0] == 'pydantic':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "        return None\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.modules['torch'] = None\n"
        "from inferq.cli import main\n"
        "sys.exit(main(['doctor', '--only', 'settings', '--only', 'worker', '--json']))\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={name: value for name, value in os.environ.items() if not name.startswith("INFERQ_")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    findings = [json.loads(line) for line in run.stdout.splitlines()]
    assert {each["status"] for each in findings} == {"skipped"}
    assert [each["check"] for each in findings] == ["worker", "gateway", "tasks", "worker"]
    assert findings[0]["message"] == str(MissingExtraError("worker", "pydantic"))
    assert findings[-1]["message"] == str(MissingExtraError("worker", "torch"))


def test_a_healthy_machine_is_ok(doctor: Doctor) -> None:
    assert {f.status for f in examine(SYSTEM, tensor_parallel_size=2)} == {Status.OK}
    code, findings = doctor("--only", "machine")
    assert code == 0
    assert "redis " in findings["machine", "libraries"]["message"]


@pytest.mark.parametrize(
    ("change", "check", "status", "message", "advice"),
    [
        ({"python": (3, 9, 1)}, "python", "failure", "3.9.1 is too old", "3.11"),
        ({"open_files": 1024}, "open files", "warning", "at most 1024", "ulimit -n"),
        ({"shm_bytes": 64 * 2**20}, "shared memory", "warning", "64 MiB", "--shm-size"),
        (
            {"requirements": {"": [Requirement("redis", ">=5.2", "4.6.0")]}},
            *("libraries", "failure", "redis 4.6.0 is not >=5.2", "pip install --upgrade 'inferq'"),
        ),
        (
            {"requirements": {"tasks": [Requirement("rq", ">=3.0,<4", "4.0")]}},
            *("extra tasks", "failure", "rq 4.0 is not", "pip install --upgrade 'inferq[tasks]'"),
        ),
        (
            {"requirements": {"": [Requirement("msgpack", ">=1", None)]}},
            *("libraries", "failure", "msgpack: not installed", "pip install"),
        ),
    ],
)
def test_what_is_wrong_with_a_machine_is_told(
    change: dict[str, Any], check: str, status: str, message: str, advice: str
) -> None:
    system = dataclasses.replace(SYSTEM, **change)
    found = by_check(examine(system, tensor_parallel_size=2))[check]
    assert found.status == status
    assert message in found.message
    assert advice in (found.advice or "")


def test_requirements_are_read_by_extra_and_platform() -> None:
    found = read_requirements(
        [
            "redis>=5.2",
            'rq<4,>=3.0; extra == "tasks"',
            'no-such-thing>=1; platform_system == "Plan9" and extra == "worker"',
            'ruff>=0.8; extra == "dev"',
        ]
    )
    assert list(found) == ["", "tasks"]
    assert [each.name for each in found[""]] == ["redis"]
    assert found["tasks"][0].is_met
