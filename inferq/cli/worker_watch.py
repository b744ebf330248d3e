"""Says it where a job waits because nobody serves its queue."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

from inferq.producer import Client, JobHandle
from inferq.protocol.errors import InferqError
from inferq.protocol.replies import JobState

#: Seconds of waiting after which we look for workers.
LOOK_AFTER_S: Final = 2.0


@contextlib.contextmanager
def tell_if_no_worker(client: Client, queue: str, job: JobHandle) -> Iterator[None]:
    """While the body waits for `job`: say on standard error, once, if no worker is alive."""
    is_over = threading.Event()
    threading.Thread(
        target=_look, args=(client, queue, job, is_over), name="worker-watch", daemon=True
    ).start()
    try:
        yield
    finally:
        is_over.set()


def _look(client: Client, queue: str, job: JobHandle, is_over: threading.Event) -> None:
    if is_over.wait(LOOK_AFTER_S):
        return
    # what is wrong with the server or the job, the one who waits finds out and says
    with contextlib.suppress(InferqError):
        if any(worker.is_alive for worker in client.workers()):
            return
        is_waiting = job.status().state not in (JobState.RUNNING, JobState.DONE)
        if is_waiting and not is_over.is_set():
            print(f"inferq: no worker serves queue {queue!r}; waiting", file=sys.stderr)
