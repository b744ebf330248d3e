"""The images' health check finds what serves by itself, wherever that listens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferq import healthcheck

#: Listens at HOST with a check of /livez that gives PROBLEM, or nowhere; then says so.
PROGRAM = """\
import asyncio, sys
from inferq.runtime.health import HealthServer

async def main(command, host, problem):
    if host == "nowhere":
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    async with (
        HealthServer({"/livez": lambda: problem or None}, port=0, host=host or None),
        HealthServer({}, port=0, host="127.0.0.1"),
    ):
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a stand-in for `inferq COMMAND`; return its id once it listens."""
    (tmp_path / "inferq").write_text(PROGRAM)
    started: list[subprocess.Popen[bytes]] = []

    def call(
        command: str = "worker", host: str = "127.0.0.1", problem: str = "", starter: str = ""
    ) -> int:
        process = subprocess.Popen(
            [*starter.split(), sys.executable, "-P", tmp_path / "inferq", command, host, problem],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process.pid

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", ""])
def test_a_process_that_answers_is_healthy_wherever_it_listens(start: Start, host: str) -> None:
    assert healthcheck.main([str(start(host=host))]) == 0


def test_a_process_that_says_what_is_wrong_is_not_healthy(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = start(problem="stuck")
    assert healthcheck.main([str(pid)]) == 1
    assert f"process {pid} does not answer: port " in (said := capsys.readouterr().out)
    assert "status 503" in said


def test_one_that_is_ill_makes_the_container_ill(start: Start) -> None:
    assert healthcheck.main([str(start()), str(start(problem="stuck"))]) == 1


def test_a_process_without_a_port_is_healthy_and_one_that_is_gone_is_not(start: Start) -> None:
    assert healthcheck.main([str(start("worker", host="nowhere"))]) == 0
    assert healthcheck.main([str(start("tasks", host="nowhere"))]) == 0
    assert healthcheck.main([str(2**22 + 1)]) == 1  # beyond the highest id of Linux


def test_a_gateway_that_does_not_listen_is_not_healthy(start: Start) -> None:
    assert healthcheck.main([str(start("gateway", host="nowhere"))]) == 1


@pytest.mark.parametrize(
    ("command", "is_asked"),
    [("gateway", True), ("worker", True), ("tasks", True), ("submit", False)],
)
def test_what_serves_is_found_by_its_command(start: Start, command: str, is_asked: bool) -> None:
    assert (start(command) in healthcheck.serving_processes()) == is_asked


def test_what_starts_a_gateway_is_not_asked_in_its_place(start: Start) -> None:
    pid = start("gateway", starter="timeout 100")
    [child] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    found = healthcheck.serving_processes()
    assert (pid in found, child in found) == (False, True)


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("stuck", 1)])
def test_the_program_asks_whatever_serves_and_no_proxy(
    start: Start, monkeypatch: pytest.MonkeyPatch, problem: str, code: int
) -> None:
    pid = start(problem=problem)
    monkeypatch.setattr(healthcheck, "serving_processes", lambda: [pid])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert healthcheck.main([]) == code
