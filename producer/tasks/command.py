"""The command line of a tasks process: one flag per setting, and `--burst`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from typing import Any, Final

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.tasks.batches import open_storage
from inferq.producer.tasks.conductor import Conductor
from inferq.producer.tasks.metrics import TasksMetrics
from inferq.producer.tasks.rq_connection import rq_connection
from inferq.producer.tasks.settings import TasksSettings
from inferq.producer.tasks.workers import WorkerProcesses, perform_tasks
from inferq.protocol.servers import ServerUrl
from inferq.runtime.banner import log_start
from inferq.runtime.flags import settings_parser
from inferq.runtime.health import HealthServer
from inferq.runtime.logs import configure_logging
from inferq.runtime.settings import load_settings
from inferq.runtime.tracing import check_tracing

logger = structlog.get_logger("inferq.tasks")

EPILOG: Final = """\
Every flag can be given as an environment variable too: its name stands in brackets.

Examples:
  inferq tasks --webhook-secrets-file secrets.json
  inferq tasks --redis-url redis://queue:6379/0 --queues chat,code --health-port 8001
  inferq tasks --burst    # do what is due now, and end

Several may run for the same queues. SIGTERM (or Ctrl-C): tasks under way get --shutdown-timeout-s.

Exit codes: 0 ended in order; 2 bad settings; 3 the server cannot be reached at the start.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `inferq tasks`."""
    parser = settings_parser(
        "inferq tasks",
        TasksSettings,
        description="Deliver webhooks and look after queues.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--burst", action="store_true", default=False, help="do what is due now, and end"
    )
    return parser


def read_settings(given: Mapping[str, Any]) -> TasksSettings:
    """Read the settings, and the secrets once; raise `InvalidRequestError` for what is wrong.

    Raises `MissingExtraError` for a storage that needs one.
    """
    settings = load_settings(TasksSettings, given)
    settings.read_secrets()
    if settings.batch_storage is not None:
        open_storage(settings)
    return settings


def main(argv: Sequence[str]) -> int:
    """Do tasks until told to stop; return the exit code.

    Raises `InvalidRequestError` for a setting and `ServerLost` for a server that is not there,
    which the command line gives their messages and codes.
    """
    given = vars(build_parser().parse_args(argv))
    burst = given.pop("burst")
    settings = read_settings(given)
    configure_logging(settings.log_level, settings.log_format, show_prompts=settings.log_prompts)
    log_start("tasks", settings, queues=list(settings.queues))
    check_tracing("inferq-tasks", settings.tracing_endpoint)
    if burst:
        run_burst(settings)
    else:
        asyncio.run(_serve(settings))
    return os.EX_OK


def run_burst(settings: TasksSettings) -> None:
    """Do what is due now, in this process and its main thread."""
    asyncio.run(_greet(settings))
    while asyncio.run(_conduct_once(settings)):
        perform_tasks(settings, burst=True)


async def _greet(settings: TasksSettings) -> None:
    """Raise `ServerLost` unless the server is there and lets us in.

    Raises `InvalidRequestError` for a storage that can never be written.
    """
    if settings.batch_storage is not None:
        with closing(open_storage(settings)) as storage:
            await storage.check_at_start()
    url = settings.redis_url.get_secret_value()
    async with AsyncClient(url, settings.queues[0], partitions=settings.partitions) as client:
        await client.ping()


async def _conduct_once(settings: TasksSettings) -> bool:
    """Give out the tasks that are due; return whether there are any."""
    with rq_connection(ServerUrl.parse(settings.redis_url.get_secret_value())) as connection:
        conductor = Conductor(settings, connection)
        try:
            await conductor.run_once()
            return await conductor.has_tasks()
        finally:
            await conductor.aclose()


async def _serve(settings: TasksSettings) -> None:
    await _greet(settings)
    stop = asyncio.Event()

    def on_signal(name: str) -> None:
        logger.info("signal received", signal=name)
        stop.set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum.name)
    async with AsyncExitStack() as stack:
        connection = rq_connection(ServerUrl.parse(settings.redis_url.get_secret_value()))
        stack.callback(connection.close)
        conductor = Conductor(settings, connection)
        stack.push_async_callback(conductor.aclose)
        processes = WorkerProcesses(settings)
        metrics = TasksMetrics(settings, processes)
        stack.push_async_callback(metrics.aclose)
        if settings.health_port:
            checks = {"/livez": conductor.check_live, "/readyz": conductor.check_ready}
            await stack.enter_async_context(
                HealthServer(
                    checks,
                    port=settings.health_port,
                    host=settings.health_host,
                    pages={"/metrics": metrics.page.answer},
                )
            )
        logger.info("doing tasks", queues=list(settings.queues), workers=settings.workers)
        async with asyncio.TaskGroup() as group:
            group.create_task(processes.run(stop))
            group.create_task(conductor.run(stop))
    logger.info("ended")
