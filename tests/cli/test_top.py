"""`inferq top`: once and as JSON against a server, on a terminal, and what may be missing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from inferq.cli import main
from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient
from inferq.protocol.acl import Role, acl_rules
from inferq.protocol.keys import QueueKeys
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import QueueScripts

TIMEOUT_S = 60.0
REPORT: dict[str, Any] = {
    "model": "m",
    "version": "1.2.3",
    "blocks": 100,
    "free": 40,
    "cached": 15,
    "running": 3,
    "waiting": 1,
    "swapped": 2,
    "rates": [7.5, 12.25],
    "every": 3_600_000,
}


@pytest.fixture
def busy_queue(valkey_url: str, queue: str) -> None:
    """A job in each of two lanes and one worker that has reported."""

    async def fill() -> None:
        async with (
            redis.asyncio.Redis.from_url(valkey_url) as connection,
            AsyncClient(valkey_url, queue) as client,
        ):
            await client.submit("x", SamplingParams(max_tokens=10))
            await client.submit("x", SamplingParams(max_tokens=10), lane="low")
            await QueueScripts(connection, QueueKeys(queue)).register("pod-1", REPORT)

    asyncio.run(fill())


@pytest.fixture
def url_of(valkey_url: str, queue: str) -> Iterator[Callable[[str], str]]:
    """URLs of users with the rights that are given."""
    names: list[str] = []
    port = valkey_url.rpartition(":")[2]
    with redis.Redis.from_url(valkey_url) as admin:

        def make(rules: str) -> str:
            names.append(f"{queue}-{len(names)}")
            admin.execute_command("ACL", "SETUSER", names[-1], "on", ">secret", *rules.split())
            return f"redis://{names[-1]}:secret@127.0.0.1:{port}"

        yield make
        for name in names:
            admin.execute_command("ACL", "DELUSER", name)


@pytest.mark.usefixtures("busy_queue")
def test_once_as_json_is_one_object_with_all_there_is(run: Any, queue: str) -> None:
    done = run("top", "--once", "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    seen = json.loads(done.stdout)
    assert (seen["queue"], seen["partitions"], seen["dead_letters"]) == (queue, 1, 0)
    assert [seen["lanes"][lane]["waiting"] for lane in ("high", "normal", "low")] == [0, 1, 1]
    assert 0 <= seen["oldest_s"] < TIMEOUT_S
    assert seen["load"]["queued"] == 2
    assert seen["load"]["budget_tokens"] == 20
    assert (seen["tokens_per_second"], seen["prompt_tokens_per_second"]) == (12.25, 7.5)
    [worker] = seen["workers"]
    assert (worker["name"], worker["state"], worker["model"]) == ("pod-1", "serving", "m")
    assert (worker["total_blocks"], worker["free_blocks"], worker["cached_blocks"]) == (100, 40, 15)
    assert (worker["running"], worker["waiting"], worker["swapped"]) == (3, 1, 2)


@pytest.mark.usefixtures("busy_queue")
def test_once_is_text_for_people_without_a_terminals_codes(run: Any, queue: str) -> None:
    done = run("top", "--once")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert "\x1b" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["low", "1", "0"] in [line[:3] for line in lines]
    [worker] = [line for line in lines if line[:2] == ["pod-1", "serving"]]
    assert worker[5:8] == ["3", "1", "2"]
    assert worker[8:] == ["█" * 12 + "▒" * 3 + "·" * 5, "60/100", "15", "12.2", "m", "1.2.3"]
    assert f"queue {queue}" in text
    assert "tokens per second: 12.2 generated, 7.5 of prompts" in text


def test_a_queue_without_workers_says_so(run: Any) -> None:
    done = run("top", "--once")
    assert done.returncode == 0
    assert b"no worker serves this queue" in done.stdout
    assert json.loads(run("top", "--once", "--json").stdout)["oldest_s"] is None


@pytest.mark.usefixtures("busy_queue")
def test_where_no_terminal_is_it_looks_once(run: Any) -> None:
    assert b"pod-1" in run("top").stdout


@pytest.mark.usefixtures("busy_queue")
def test_json_goes_on_line_by_line_until_ctrl_c(start: Any) -> None:
    process = start("top", "--json", "--interval", "0.2")
    seen = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert len({each["time"] for each in seen}) == 3
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (0, b"")


@pytest.mark.usefixtures("busy_queue")
def test_a_producers_rights_are_enough_and_a_missing_one_is_named(
    run: Any, url_of: Callable[[str], str], queue: str
) -> None:
    rules = acl_rules(Role.PRODUCER, queue)
    done = run("top", "--once", "--json", "--redis-url", url_of(rules))
    assert (done.returncode, done.stderr) == (0, b"")
    done = run("top", "--once", "--redis-url", url_of(rules + " -hgetall"))
    assert done.returncode == 3
    assert b"lacks a permission" in done.stderr
    assert b"hgetall" in done.stderr


def test_a_server_out_of_reach_and_a_bad_interval_are_said(run: Any) -> None:
    done = run("top", "--redis-url", "redis://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (3, b"")
    done = run("top", "--interval", "0")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--interval: 0 s is not in [0.2, 3600]" in done.stderr


def test_without_its_extra_it_says_how_to_install_it_and_json_still_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], valkey_url: str, queue: str
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "rich" or n.endswith("top_screen")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    server = ["--redis-url", valkey_url, "--queue", queue]
    assert main(["top", "--once", *server]) == 2
    assert "pip install 'inferq[cli]'" in capsys.readouterr().err
    assert main(["top", "--once", "--json", *server]) == 0


class Terminal:
    """`inferq top` on a terminal of its own; `text` is all that it wrote there."""

    def __init__(self, environment: dict[str, str], *arguments: str, width: int = 160) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inferq", "top", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._theirs = theirs

    def read_until(self, wanted: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while wanted not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            self._read(0.2)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(TIMEOUT_S)
        self._read(0)
        self.after = termios.tcgetattr(self._theirs)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for end in (self._ours, self._theirs):
            os.close(end)

    def _read(self, timeout_s: float) -> None:
        while select.select([self._ours], [], [], timeout_s)[0]:
            self.text += os.read(self._ours, 65536).decode(errors="replace")
            timeout_s = 0


@pytest.fixture
def open_terminal(environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, width: int = 160) -> Terminal:
            terminal = Terminal(environment, *arguments, width=width)
            stack.callback(terminal.close)
            return terminal

        yield start


@pytest.mark.usefixtures("busy_queue")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_it_follows_and_leaves_the_screen_as_it_was(
    open_terminal: Callable[..., Terminal], valkey_url: str, queue: str, signum: signal.Signals
) -> None:
    terminal = open_terminal("--interval", "0.2")
    terminal.read_until("pod-1")
    with redis.Redis.from_url(valkey_url) as server:
        server.hset(QueueKeys(queue).workers, "pod-2", b"\x80")
        terminal.read_until("pod-2")
    terminal.process.send_signal(signum)
    assert terminal.end() == 0
    assert terminal.text.count("\x1b[?1049h") == terminal.text.count("\x1b[?1049l") == 1
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")  # the cursor
    assert terminal.after == terminal.before
    assert "Traceback" not in terminal.text


@pytest.mark.usefixtures("busy_queue")
def test_a_narrow_terminal_shows_the_numbers_and_the_whole_name(
    open_terminal: Callable[..., Terminal],
) -> None:
    terminal = open_terminal("--once", width=80)
    assert terminal.end() == 0
    [row] = [line.split() for line in terminal.text.splitlines() if "60/100" in line]
    assert (row[0], row[-3:]) == ("pod-1", ["60/100", "15", "12.2"])


@pytest.mark.slow
def test_a_server_that_goes_away_is_waited_for(
    open_terminal: Callable[..., Terminal],
) -> None:
    with EmbeddedServer() as server:
        terminal = open_terminal("--interval", "0.2", "--redis-url", server.url)
        terminal.read_until("no worker serves this queue")
    terminal.read_until("cannot reach")
    assert terminal.process.poll() is None
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
