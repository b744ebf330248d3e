"""The command line of a worker: one flag per setting, made from the settings model itself."""

from __future__ import annotations

import argparse
import asyncio
import typing
from collections.abc import Sequence
from typing import Any, Final

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from inferq.worker.logs import configure_logging
from inferq.worker.service import WorkerService
from inferq.worker.settings import ENV_PREFIX, WorkerSettings, load_settings

#: Flags with a second name, and those that may be given several times.
_OTHER_FLAGS: Final = {"lora_adapters": ("--lora",)}
_REPEATED: Final = ("lora_adapters",)

EPILOG = """\
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
    parser = argparse.ArgumentParser(
        prog="inferq worker",
        description="Serve a model: pull jobs from the queue and stream their tokens back.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in WorkerSettings.model_fields.items():
        flags = ["--" + name.replace("_", "-"), *_OTHER_FLAGS.get(name, ())]
        text = f"{field.description}{_shown_default(field.default)} [{ENV_PREFIX}{name.upper()}]"
        options: dict[str, Any] = {"dest": name, "help": text.replace("%", "%%")}
        if field.annotation in (bool, bool | None):
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
            continue
        if typing.get_origin(field.annotation) is typing.Literal:
            options["choices"] = typing.get_args(field.annotation)
        else:
            options["metavar"] = "VALUE"
        if name in _REPEATED:
            options["action"] = "append"
        parser.add_argument(*flags, **options)
    return parser


def _shown_default(default: Any) -> str:
    if default is PydanticUndefined or default is None:
        return ""
    # A default is no secret.
    plain = default.get_secret_value() if isinstance(default, SecretStr) else default
    return f" (default: {plain})"


def main(argv: Sequence[str]) -> int:
    """Run a worker until it is told to stop; return the exit code.

    Raises `InvalidRequestError` for a setting, `ModelError` for a model, and `ServerLost` for a
    server that cannot be used; the command line gives each its message and exit code.
    """
    settings = load_settings(vars(build_parser().parse_args(argv)))
    configure_logging(settings.log_level, settings.log_format)
    return asyncio.run(WorkerService(settings).run())
