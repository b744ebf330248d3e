"""Asks what serves in this container whether it lives: `python -m inferq.healthcheck [PID …]`.

The images' HEALTHCHECK. Ends with 0 if every gateway, worker or tasks process of this user (or each
PID) answers /livez, else with 1 and why. A worker or tasks process that listens nowhere, as without
`--health-port`, is healthy while it runs. Linux only: a flag, a variable or a default may have
chosen the port, so where a process listens is read from /proc.
"""

from __future__ import annotations

import http.client
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_GATEWAY: Final = "gateway"
_SERVING: Final = frozenset({_GATEWAY, "worker", "tasks"})
#: Seconds that an answer may take, below what the images grant the whole check.
_TIMEOUT_S: Final = 2.0
#: Addresses that stand for all, and where this machine then reaches itself; not all have ::1.
_WILDCARDS: Final = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1")}  # noqa: S104
#: What /proc/net calls a socket that listens.
_LISTEN: Final = "0A"


def ask(host: str, port: int, path: str, *, timeout_s: float) -> int:
    """Return the status with which an address of ours answers GET `path` over HTTP.

    Heeds no `http_proxy`, which is not for what runs here. Raises `OSError` or
    `http.client.HTTPException` where there is no answer within `timeout_s`.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def serving_processes() -> list[int]:
    """Return the ids of this user's processes that run `inferq gateway`, `worker` or `tasks`."""
    return sorted(int(each.name) for each in _PROC.glob("[0-9]*") if _is_serving(each))


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """Return hosts and ports at which a process listens, as it is reached from here.

    Raises `OSError` for a process that is gone, or another user's.
    """
    sockets = {_target(each) for each in (_PROC / str(pid) / "fd").iterdir()}
    found = {
        (reached, port)
        for host, port, inode in _listening()
        if f"socket:[{inode}]" in sockets
        for reached in _WILDCARDS.get(host, (host,))
    }
    return sorted(found)


def main(argv: Sequence[str]) -> int:
    """Ask each process, print what is wrong, and return the exit code."""
    pids = [int(each) for each in argv] or serving_processes()
    problems = [problem for pid in pids if (problem := _problem(pid)) is not None]
    print(*(problems or ["healthy"]), sep="\n")  # noqa: T201 - what it is run for
    return 1 if problems else 0


def _is_serving(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.getuid() and _command_of(process) in _SERVING
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended meanwhile


def _command_of(process: Path) -> str | None:
    """Return the command of `inferq` that a process runs, None for other programs."""
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    names = [word.rpartition("/")[2] for word in words]
    if not names[0].startswith("python"):
        return None  # what starts it, such as an init, has the same words
    return next((command for name, command in pairwise(names) if name == "inferq"), None)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""  # closed meanwhile


def _listening() -> Iterator[tuple[str, int, str]]:
    """Yield host, port and inode of every socket that listens in this network namespace."""
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        table = _PROC / "net" / name
        if not table.exists():
            continue  # a kernel without IPv6
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                yield _host(family, address), int(port, 16), fields[9]


def _host(family: socket.AddressFamily, digits: str) -> str:
    """Return an address of /proc/net, whose words of 32 bits are numbers of this machine."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


def _problem(pid: int) -> str | None:
    """Return why a process is not healthy; of several ports, only one need answer /livez."""
    try:
        addresses = listening_addresses(pid)
        if not addresses and _command_of(_PROC / str(pid)) == _GATEWAY:
            return f"process {pid} does not listen"
    except OSError as error:
        return f"process {pid} cannot be looked at: {error}"
    answers: list[str] = []
    for host, port in addresses:
        try:
            status = ask(host, port, "/livez", timeout_s=_TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            answers.append(f"port {port}: {error!r}")
            continue
        if status == http.HTTPStatus.OK:
            return None
        answers.append(f"port {port}: status {status}")
    return f"process {pid} does not answer: {', '.join(answers)}" if answers else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
