"""The command line of a worker: one flag per setting, made from the settings model itself."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from inferq.runtime.banner import log_start
from inferq.runtime.flags import settings_parser
from inferq.runtime.logs import configure_logging
from inferq.worker.daemon_executor import is_at_work
from inferq.worker.service import WorkerService
from inferq.worker.settings import WorkerSettings, load_settings

EPILOG: Final = """\
Every flag can be given as an environment variable too: --max-model-len is INFERQ_MAX_MODEL_LEN.

Examples:
  inferq worker --model ./my-model
  inferq worker --model HuggingFaceTB/SmolLM2-135M-Instruct --redis-url redis://queue:6379/0
  inferq worker --model ./my-model --lora polite=./polite --lora terse=./terse
  inferq worker --model ./my-model --queue chat --max-model-len 4096 --kv-cache-memory 2147483648

SIGTERM (or Ctrl-C) drains: no new jobs, unstarted ones go back, running ones finish or are handed
over within --drain-timeout-s. A second signal hands over at once.

Exit codes: 0 drained; 1 the engine failed, or jobs were left for their leases to run out; 2 bad
settings or model; 3 Redis cannot be reached.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `inferq worker`."""
    return settings_parser(
        "inferq worker",
        WorkerSettings,
        description="Serve a model: pull jobs from the queue and stream their tokens back.",
        epilog=EPILOG,
    )


def main(argv: Sequence[str]) -> int:
    """Run a worker until it is told to stop; return the exit code.

    Ends the process itself if it was told to in the middle of a download or of long prompts.
    Raises `InvalidRequestError` for a setting, `ModelError` for a model, and `ServerLost` for a
    server that cannot be used; the command line gives each its message and exit code.
    """
    settings = load_settings(vars(build_parser().parse_args(argv)))
    configure_logging(settings.log_level, settings.log_format, show_prompts=settings.log_prompts)
    log_start("worker", settings, model=settings.model_name, queue=settings.queue)
    code = asyncio.run(WorkerService(settings).run())
    if is_at_work():
        _end_process(code)
    return code


def _end_process(code: int) -> NoReturn:
    """End at once: Python would wait for threads that those at work have started."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
