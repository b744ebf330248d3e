"""The queue's scripts as bytes on a socket: as fast as the server takes them, without the SDK.

A call is recorded once through `QueueScripts`, so that it is the real one, and then sent many
times with other arguments.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import msgpack
import redis.asyncio
from redis.exceptions import NoScriptError

from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Event, Job, TokenPrompt
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import PublishItem
from inferq.protocol.scripts import QueueScripts

QUEUE_LIMIT = 10_000_000
RETENTION_MS = 600_000
LEASE_MS = 600_000
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
#: What one token looks like to the server.
EVENT = Event(offset=1000, token_ids=(12_345,), text=" word", text_ends=(5,)).encode()
_MARK = b"+PONG\r\n"


class _Recorder(redis.asyncio.Redis):
    """Takes down one call, and the text of each script, instead of sending it."""

    def __init__(self) -> None:
        super().__init__()
        self.command: tuple[Any, ...] = ()
        self.texts: dict[str, str] = {}

    async def evalsha(self, sha: str, *args: Any) -> Any:
        """See `redis.asyncio.Redis`."""
        self.command = ("EVALSHA", sha, *args)
        if sha not in self.texts:
            raise NoScriptError
        raise InterruptedError

    async def eval(self, text: str, *_: Any) -> Any:
        """See `redis.asyncio.Redis`."""
        self.texts[self.command[1]] = text
        raise InterruptedError


def jobs_of(count: int, prompt_tokens: int = 128) -> list[tuple[str, bytes]]:
    """Return jobs of as many prompt tokens, as id and payload."""
    params = SamplingParams(max_tokens=128, ignore_eos=True, seed=1)
    job = Job(new_job_id(), TokenPrompt(tuple(range(10_000, 10_000 + prompt_tokens))), params)
    template = job.encode()
    old = job.id.encode()
    ids = [new_job_id() for _ in range(count)]
    return [(job_id, template.replace(old, job_id.encode())) for job_id in ids]


class RawCommands:
    """A socket to the server, and the recorded calls; a context manager."""

    def __init__(self, url: str, keys: QueueKeys) -> None:
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._recorder = _Recorder()
        self._scripts = QueueScripts(self._recorder, keys)
        self._keys = keys
        self.queue = keys.queue
        self._enqueue: tuple[Any, ...] = ()
        self._publish: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, commands: Iterable[bytes]) -> int:
        """Send commands one after the other and wait for all replies; return their bytes."""
        data = b"".join(commands) + b"PING\r\n"
        received = 0
        tail = b""
        view = memoryview(data)
        self._socket.setblocking(True)
        # In parts, reading in between: neither side's buffer may fill while both wait.
        for start in range(0, len(data), 65_536):
            self._socket.sendall(view[start : start + 65_536])
        while not tail.endswith(_MARK):
            chunk = self._socket.recv(1 << 20)
            if not chunk:
                raise ConnectionError("the server closed the connection")
            if chunk.startswith(b"-") or b"\r\n-" in chunk:
                raise RuntimeError(f"the server refuses: {chunk[:200]!r}")
            received += len(chunk)
            tail = (tail + chunk)[-len(_MARK) :]
        return received - len(_MARK)

    def enqueue(self, job_id: str, payload: bytes) -> bytes:
        """Return the call that puts a job into the normal lane."""
        if not self._enqueue:
            self._enqueue = self._record(
                self._scripts.enqueue_payload(
                    job_id,
                    payload,
                    digest="0" * 40,
                    lane=Lane.NORMAL,
                    prompt_tokens=128,
                    budget=128,
                    queue_limit=QUEUE_LIMIT,
                    retention_ms=RETENTION_MS,
                )
            )
        at = 3 + int(self._enqueue[2])  # behind the command, the script, and its keys
        return resp((*self._enqueue[:at], job_id, payload, *self._enqueue[at + 2 :]))

    def claim(self, worker: str, most: int) -> bytes:
        """Return the call that claims up to so many jobs."""
        return resp(
            self._record(
                self._scripts.claim(
                    worker,
                    free_tokens=2**40,
                    idle=True,
                    max_jobs=most,
                    max_model_len=MAX_MODEL_LEN,
                    block_size=BLOCK_SIZE,
                    lease_ms=LEASE_MS,
                    max_crashes=3,
                    retention_ms=RETENTION_MS,
                )
            )
        )

    def publish(self, worker: str, items: Sequence[PublishItem]) -> bytes:
        """Return the call that publishes items of running jobs."""
        call = self._scripts.publish(worker, items, lease_ms=LEASE_MS, retention_ms=RETENTION_MS)
        return resp(self._record(call))

    def publish_tokens(self, worker: str, job_ids: Sequence[str], before: int) -> bytes:
        """Return the call that publishes one more token of each job."""
        if not self._publish:
            item = PublishItem(job_ids[0], 1, before, ((before + 1, EVENT),))
            call = self._scripts.publish(
                worker, [item], lease_ms=LEASE_MS, retention_ms=RETENTION_MS
            )
            self._publish = self._record(call)
        events = ((before + 1, EVENT),)
        wire = msgpack.packb([(i, 1, before, "", events) for i in job_ids], use_bin_type=False)
        return resp((*self._publish[:-4], worker, *self._publish[-3:-1], wire))

    def read(self, job_ids: Sequence[str], after: int) -> bytes:
        """Return the call of a reader that follows these jobs, with `after` tokens seen."""
        streams = [self._keys.out(job_id) for job_id in job_ids]
        cursors = [f"{after}-0"] * len(streams)
        return resp(("XREAD", "COUNT", 64, "STREAMS", *streams, *cursors))

    def _record(self, call: Any) -> tuple[Any, ...]:
        known = len(self._recorder.texts)
        try:
            asyncio.run(call)
        except InterruptedError:
            for text in list(self._recorder.texts.values())[known:]:
                self.send([resp(("SCRIPT", "LOAD", text))])
            return self._recorder.command
        raise RuntimeError("the call was not recorded")


def resp(command: Sequence[Any]) -> bytes:
    """Return a command in the server's protocol."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    body = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n" % len(parts) + body
