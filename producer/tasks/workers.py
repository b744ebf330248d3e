"""The processes that perform tasks: started, started again when they end, ended in order."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Final

import structlog

from inferq.producer.tasks.counts import TaskCounts
from inferq.producer.tasks.duties import Duties
from inferq.producer.tasks.rq_connection import rq_connection
from inferq.producer.tasks.safe_rq import task_worker
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.servers import ServerUrl
from inferq.runtime.logs import configure_logging
from inferq.runtime.tracing import start_tracing

logger = structlog.get_logger("inferq.tasks")

#: Seconds between two looks at the processes, and before one that ended is started again.
LOOK_S: Final = 0.5
RESTART_S: Final = 2.0


def quiet_rq() -> None:
    """Let RQ say what is wrong and no more: what is performed, we say."""
    for name in ("rq.worker", "rq.job", "rq.queue"):
        logging.getLogger(name).setLevel(logging.WARNING)


def perform_tasks(
    settings: TasksSettings, *, burst: bool = False, counts: TaskCounts | None = None
) -> None:
    """Perform tasks in this process, in its main thread, until SIGTERM, or until none is left.

    What is done is added to `counts`.
    """
    counts = counts or TaskCounts()
    quiet_rq()
    connection = rq_connection(ServerUrl.parse(settings.redis_url.get_secret_value()))
    stopping = threading.Event()
    tracing = start_tracing("inferq-tasks", settings.tracing_endpoint)
    duties = Duties(settings, stopping.is_set, counts, tracing)
    try:
        worker = task_worker(
            connection,
            settings.queues,
            counts.around(duties.tasks),
            on_stop=stopping.set,
            on_refused=counts.refused,
        )
        worker.work(burst=burst, logging_level=None)
    finally:
        connection.close()
        if tracing is not None:
            tracing.close()


def _worker_process(settings: TasksSettings, counts: TaskCounts) -> None:
    configure_logging(settings.log_level, settings.log_format, show_prompts=settings.log_prompts)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    perform_tasks(settings, counts=counts)


class WorkerProcesses:
    """Keeps the processes of the settings running, until told to stop."""

    def __init__(self, settings: TasksSettings) -> None:
        self._settings = settings
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        #: What the process in each place, and those before it there, did.
        self.counts = [TaskCounts.shared(self._context) for _ in range(settings.workers)]
        self.num_restarts = 0

    @property
    def num_alive(self) -> int:
        """How many processes live."""
        return sum(process.is_alive() for process in self._processes)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep them running until `stop` is set, then give tasks under way their time."""
        try:
            self._processes = [self._start(counts) for counts in self.counts]
            while not await _is_set_within(stop, LOOK_S):
                await self._restart_ended(stop)
        finally:
            await self._end()

    def _start(self, counts: TaskCounts) -> BaseProcess:
        process = self._context.Process(target=_worker_process, args=(self._settings, counts))
        process.start()
        return process

    async def _restart_ended(self, stop: asyncio.Event) -> None:
        for place, process in enumerate(self._processes):
            if process.is_alive():
                continue
            logger.warning("worker process ended", exit_code=process.exitcode)
            if await _is_set_within(stop, RESTART_S):
                return
            self._processes[place] = self._start(self.counts[place])
            self.num_restarts += 1

    async def _end(self) -> None:
        give_up_at = time.monotonic() + self._settings.shutdown_timeout_s
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            await asyncio.to_thread(process.join, max(0.0, give_up_at - time.monotonic()))
            if process.is_alive():
                logger.warning("worker process killed: its task goes on after its lease")
                process.kill()
                await asyncio.to_thread(process.join)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
