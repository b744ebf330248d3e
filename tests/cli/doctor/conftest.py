"""`inferq doctor` in this process, and servers that are not as they should be."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO

import pytest

from inferq.embedded import EmbeddedServer

Doctor = Callable[..., tuple[int, dict[tuple[str, str], dict[str, Any]]]]


@pytest.fixture
def doctor(
    run_here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Run the doctor with arguments; return its exit code and its findings by area and check."""
    for name in [name for name in os.environ if name.startswith("INFERQ_")]:
        if name not in ("INFERQ_REDIS_URL", "INFERQ_QUEUE"):
            monkeypatch.delenv(name)

    def call(*arguments: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
        code, output, errors = run_here("doctor", "--json", *arguments)
        assert not errors, errors
        findings = [json.loads(line) for line in output.splitlines()]
        for finding in findings:
            is_bad = finding["status"] in ("warning", "failure")
            assert is_bad == (finding["advice"] is not None), finding
        return code, {(each["area"], each["check"]): each for each in findings}

    return call


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _value(stream: BinaryIO) -> bytes:
    """Read one value of RESP2, as it came."""
    line = _line(stream)
    kind, count = line[:1], line[1:-2]
    if kind == b"$" and int(count) >= 0:
        return line + stream.read(int(count) + 2)
    if kind == b"*":
        return line + b"".join(_value(stream) for _ in range(int(count)))
    return line


def _command(raw: bytes) -> str:
    parts = raw.split(b"\r\n")[2::2]
    return b" ".join(parts).decode(errors="replace").strip().upper()


class Impostor(socketserver.ThreadingTCPServer):
    """Answers some commands by itself, by how they begin, all others as the server behind it."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, answers: Mapping[str, bytes]) -> None:
        self.behind = port
        self.answers = answers
        super().__init__(("127.0.0.1", 0), _Conversation)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"


class _Conversation(socketserver.StreamRequestHandler):
    server: Impostor

    def handle(self) -> None:
        with (
            socket.create_connection(("127.0.0.1", self.server.behind)) as connection,
            connection.makefile("rwb") as behind,
        ):
            try:
                while True:
                    self._answer(_value(self.rfile), behind)
            except (EOFError, ConnectionError):
                return

    def _answer(self, raw: bytes, behind: Any) -> None:
        command = _command(raw)
        for start, answer in self.server.answers.items():
            if command.startswith(start):
                self.wfile.write(answer)
                return
        behind.write(raw)
        behind.flush()
        self.wfile.write(_value(behind))


def bulk(text: str) -> bytes:
    """One text of RESP2."""
    return f"${len(text.encode())}\r\n{text}\r\n".encode()


def array(*texts: str) -> bytes:
    """A list of texts of RESP2."""
    return f"*{len(texts)}\r\n".encode() + b"".join(map(bulk, texts))


@pytest.fixture(name="bulk")
def bulk_fixture() -> Callable[[str], bytes]:
    return bulk


@pytest.fixture(name="array")
def array_fixture() -> Callable[..., bytes]:
    return array


@pytest.fixture
def impostor(valkey_server: EmbeddedServer) -> Iterator[Callable[[Mapping[str, bytes]], str]]:
    """URLs of servers that answer some commands otherwise than the embedded one behind them."""
    with ExitStack() as stack:

        def start(answers: Mapping[str, bytes]) -> str:
            server = stack.enter_context(Impostor(valkey_server.port, answers))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.url

        yield start
