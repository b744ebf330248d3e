"""The ranks beside rank 0: processes that it starts, commands and watches."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from torch._C._distributed_c10d import TCPStore

from inferq.protocol.errors import InferqError, ModelError
from inferq.worker.model.ranks.parallel_group import LOOPBACK, RankGroup
from inferq.worker.model.ranks.parallel_steps import Command, encode
from inferq.worker.model.ranks.rank_logs import relay

_log = logging.getLogger(__name__)

#: What each of them runs; the number of its end of the pipe is put behind it.
_COMMAND: Final = (sys.executable, "-m", "inferq.worker.model.ranks.rank_process")
#: Seconds to let a process end by itself before it is killed.
_STOP_TIMEOUT_S: Final = 2.0
#: Seconds that the end of a process may come after the errors that it causes.
_DEATH_TIMEOUT_S: Final = 0.5
#: Seconds that its last words get: what it started may still hold its standard error.
_RELAY_TIMEOUT_S: Final = 0.5


class RankLost(InferqError):
    """A rank of the model is gone, or is somewhere else than the others: none can go on."""


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    #: Says what the process says, until that ends.
    relay: threading.Thread


@dataclass(slots=True)
class _State:
    """What the watching threads and the owner share."""

    #: Why the ranks cannot go on.
    lost: str | None = None
    is_ending: bool = False
    #: Entered again where a thread that holds it collects the owner as garbage.
    lock: threading.RLock = field(default_factory=threading.RLock)


class RankProcesses:
    """Ranks 1 to `group.size` - 1; they end with this object, and with this process.

    `options` are what `rank_process.RankOptions` needs beside the rank and the port. `on_lost` is
    called on a thread when a rank ends by itself; then, and after a failed call, `check` raises.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        group: RankGroup,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._group = group
        self._on_lost = on_lost or group.abort
        self._state = _State()
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._members: list[_Member] = []
        self._end = weakref.finalize(self, _end, self._members, self._state, group)
        for rank in range(1, group.size):
            member = _launch(rank)
            self._members.append(member)
            told = {**options, "rank": rank, "size": group.size, "port": port}
            member.connection.send_bytes(json.dumps(told, default=str).encode())

    def connect(self) -> None:
        """Wait until all ranks have loaded their shares, join them, and begin to watch them.

        Raises `ModelError` for what a rank could not load.
        """
        self.answers()
        with self.together():
            self.send(encode(Command.CONNECT))
            self._group.connect(self._store)
        for member in self._members:
            threading.Thread(
                target=_watch,
                args=(member, self._state, self._on_lost),
                name=f"rank {member.rank}",
                daemon=True,
            ).start()

    def check(self) -> None:
        """Raise `RankLost` if the ranks cannot go on."""
        if self._state.lost is not None:
            raise RankLost(self._state.lost)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make calls that all ranks make; when one fails here, no other may follow."""
        self.check()
        try:
            yield
        except (OSError, RuntimeError) as error:
            # Whose end it was that the error comes from says more than the error.
            self.stop(self._death() or f"a step of several ranks failed: {error}")
            raise RankLost(self._state.lost) from error
        except BaseException as error:
            self.stop(f"a step of several ranks was cut off: {type(error).__name__}")
            raise

    def send(self, command: bytes) -> None:
        """Send all ranks a command."""
        for member in self._members:
            member.connection.send_bytes(command)

    def answers(self) -> list[list[int]]:
        """Return each rank's answer; raises `ModelError` if it is a failure, or a rank is gone."""
        return [_answer(member) for member in self._members]

    def _death(self) -> str | None:
        """Return which rank has ended, if one does within a moment."""
        deadline = time.monotonic() + _DEATH_TIMEOUT_S
        while time.monotonic() < deadline:
            for member in self._members:
                if (status := member.process.poll()) is not None:
                    return f"rank {member.rank} ended with status {status}"
            time.sleep(_DEATH_TIMEOUT_S / 20)
        return None

    def stop(self, reason: str) -> None:
        """End all ranks."""
        with self._state.lock:
            self._state.lost = self._state.lost or reason
        self._end()


def _launch(rank: int) -> _Member:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*_COMMAND, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,  # no lock that a thread in the middle of reading holds when we end
            start_new_session=True,  # a Ctrl-C is for rank 0, whose end ends the others
        )
    words = threading.Thread(
        target=relay, args=(process.stderr, rank), name=f"words of rank {rank}", daemon=True
    )
    words.start()
    return _Member(rank, process, Connection(ours.detach()), words)


def _answer(member: _Member) -> list[int]:
    try:
        answer = json.loads(member.connection.recv_bytes())
    except (EOFError, OSError):
        status = member.process.wait()
        member.relay.join(_RELAY_TIMEOUT_S)
        raise ModelError(
            f"rank {member.rank} ended with status {status} while the model was loaded",
            field="tensor_parallel_size",
        ) from None
    if "failed" in answer:
        raise ModelError(f"rank {member.rank}: {answer['failed']}", field=answer["field"])
    numbers: list[int] = answer["numbers"]
    return numbers


def _watch(member: _Member, state: _State, on_lost: Callable[[], None]) -> None:
    status = member.process.wait()
    member.relay.join(_RELAY_TIMEOUT_S)  # its last words say why
    with state.lock:
        if state.is_ending:
            return
        state.lost = state.lost or f"rank {member.rank} ended with status {status}"
    _log.error("rank %d ended with status %d", member.rank, status)
    on_lost()


def _end(members: list[_Member], state: _State, group: RankGroup) -> None:
    """End the processes: each ends when its pipe closes, in the middle of a step too."""
    with state.lock:
        state.is_ending = True
    group.abort()
    for member in members:
        member.connection.close()
    for member in members:
        try:
            member.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
