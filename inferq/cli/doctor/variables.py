"""The environment's variables: known to the processes that read them, and with possible values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from inferq.cli.doctor.findings import Area, Finding
from inferq.cli.extras import load_extra
from inferq.protocol.errors import InvalidRequestError, MissingExtraError
from inferq.runtime.variables import ENV_PREFIX, GATEWAY_PREFIX, TASKS_PREFIX, check_variables

_AREA: Final = Area("settings")
#: What each process's own variables begin with.
_PREFIXES: Final[Mapping[str, str]] = MappingProxyType(
    {"worker": ENV_PREFIX, "gateway": GATEWAY_PREFIX, "tasks": TASKS_PREFIX}
)
#: What a worker cannot be without, and need not have been given here.
_ANY_MODEL: Final = "any"


def examine() -> list[Finding]:
    """Check the variables as each kind of process would at its start."""
    number = sum(name.startswith(ENV_PREFIX) for name in os.environ)
    return [_judge(process, number) for process in _PREFIXES]


def _judge(process: str, number: int) -> Finding:
    try:
        _load(process)
    except MissingExtraError as error:
        # the names need no extra, and misspelt ones may be meant for the command line too
        try:
            check_variables(os.environ, prefix=_PREFIXES[process])
        except InvalidRequestError as misspelt:
            return _failure(process, misspelt)
        return _AREA.skipped(process, str(error))
    except InvalidRequestError as error:
        return _failure(process, error)
    return _AREA.ok(process, f"none of {number} {ENV_PREFIX} variables is wrong")


def _failure(process: str, error: InvalidRequestError) -> Finding:
    return _AREA.failure(
        process,
        str(error),
        f"mend or unset what is named; `inferq {process} --help` lists all with their meaning",
    )


def _load(process: str) -> None:
    """Read the settings of one kind of process; raise `InvalidRequestError` for a wrong one."""
    match process:
        case "worker":
            given = {} if f"{ENV_PREFIX}MODEL" in os.environ else {"model": _ANY_MODEL}
            load_extra("inferq.worker.settings", extra="worker").load_settings(given)
        case "gateway":
            kind = load_extra("inferq.producer.gateway.settings", extra="gateway").GatewaySettings
            _from_environment(kind)
        case "tasks":
            kind = load_extra("inferq.producer.tasks.settings", extra="tasks").TasksSettings
            _from_environment(kind).read_secrets()


def _from_environment(kind: Any) -> Any:
    return load_extra("inferq.runtime.settings", extra="gateway").load_settings(kind, {})


def similar_names() -> Iterator[Finding]:
    """Find variables that nobody reads, since they lack our prefix by a letter."""
    for name in sorted(os.environ):
        start = name.upper().replace("-", "_")
        if start.startswith(("INFERQ", "INFER_Q", "INFERENCEQ")) and not name.startswith(
            ENV_PREFIX
        ):
            yield _AREA.warning(
                name,
                "is read by nobody",
                f"all variables begin with {ENV_PREFIX}: rename or unset it",
            )
