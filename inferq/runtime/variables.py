"""The names of all variables that any part of inferq reads; a misspelt one is told.

All parts may be started from one environment, so each must know the variables of all others, also
of those that are not installed here: hence a list. A test holds it against every settings model,
against what the code reads by itself, and against the documentation.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from inferq.protocol.errors import InvalidRequestError

ENV_PREFIX: Final = "INFERQ_"
GATEWAY_PREFIX: Final = "INFERQ_GATEWAY_"
TASKS_PREFIX: Final = "INFERQ_TASKS_"
#: What the variables of one process begin with, which are that process's to check.
PROCESS_PREFIXES: Final = (GATEWAY_PREFIX, TASKS_PREFIX)

#: Of several parts, for which they mean the same.
_SHARED: Final = """
    BATCH_FILE_AGE_S BATCH_STORAGE BATCH_STORAGE_ENDPOINT LOG_FORMAT LOG_LEVEL LOG_PROMPTS
    PARTITIONS QUEUE QUEUE_LIMIT REDIS_URL TRACING_ENDPOINT
"""
#: Of workers alone.
_WORKER: Final = """
    ASYNC_SCHEDULING BLOCK_SIZE DEVICE DRAIN_TIMEOUT_S DTYPE ENABLE_PREFIX_CACHING ENFORCE_EAGER
    GENERATION_CONFIG GPU_MEMORY_UTILIZATION HEALTH_HOST HEALTH_PORT KV_CACHE_DTYPE
    KV_CACHE_MEMORY LEASE_S LONG_PREFILL_TOKEN_THRESHOLD LORA_ADAPTERS MAX_CRASHES MAX_JOBS
    MAX_LORA_RANK MAX_MODEL_LEN MAX_NUM_BATCHED_TOKENS MAX_NUM_SEQS MAX_PREFILL_DELAY_MS MODEL
    NUM_KV_BLOCKS NUM_SWAP_BLOCKS PARTITION PREEMPTION_MODE QUANTIZATION REPORT_INTERVAL_S
    RETENTION_S REVISION SERVED_MODEL_NAME STARVE_S STEP_TIMEOUT_S SWAP_SPACE
    TENSOR_PARALLEL_SIZE WORKER_NAME
"""
_GATEWAY: Final = """
    ACCEPT_WEBHOOKS ACCEPT_WITHOUT_WORKERS API_KEYS_FILE CORS_ORIGINS DEFAULT_MAX_TOKENS HOST
    KEEP_ALIVE_S MAX_BODIES_BYTES MAX_BODY_BYTES MAX_CONCURRENT_REQUESTS MAX_OUTPUTS MAX_PROMPTS
    METRICS_HOST METRICS_PORT MODELS POLL_INTERVAL_S PORT QUEUES REQUEST_TIMEOUT_S RETENTION_S
    SHUTDOWN_DELAY_S SHUTDOWN_TIMEOUT_S TOOL_FORMAT
"""
_TASKS: Final = """
    BATCH_LEASE_S BATCH_WINDOW DEAD_LETTER_AGE_S HEALTH_HOST HEALTH_PORT POLL_INTERVAL_S
    PROMOTE_INTERVAL_S QUEUES SHUTDOWN_TIMEOUT_S SWEEP_INTERVAL_S WEBHOOK_ALLOWED_NETWORKS
    WEBHOOK_ALLOW_HTTP WEBHOOK_HOST_RATE WEBHOOK_RETRY_DELAYS_S WEBHOOK_SECRETS
    WEBHOOK_SECRETS_FILE WEBHOOK_TIMEOUT_S WORKERS
"""
#: Of no settings model: the key of `inferq serve`, the cache, the kernels for the CPU.
_OTHERS: Final = """
    API_KEY CACHE NATIVE_KERNELS
"""
#: Every variable.
VARIABLES: Final = frozenset(
    prefix + name
    for prefix, names in (
        (ENV_PREFIX, f"{_SHARED} {_WORKER} {_OTHERS}"),
        (GATEWAY_PREFIX, _GATEWAY),
        (TASKS_PREFIX, _TASKS),
    )
    for name in names.split()
)

#: Names that Kubernetes gives the variables of a Service, and the values of those without a mark.
_LINK_NAME: Final = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$"
)
_LINK_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")


def misspelt(
    environment: Mapping[str, str],
    *,
    prefix: str = ENV_PREFIX,
    own: frozenset[str] = frozenset(),
) -> list[tuple[str, str]]:
    """Return the variables with our prefix that no part reads, by name, and what is wrong.

    Those of other processes are left to them: names that begin with a process's prefix which is
    not `prefix`. `own` are names besides `VARIABLES` that count.
    """
    foreign = tuple(other for other in PROCESS_PREFIXES if other != prefix)
    known = VARIABLES | own
    return [
        (name, f"no such setting{_hint(name, known)}")
        for name, value in sorted(environment.items())
        if name.startswith(ENV_PREFIX)
        and not name.startswith(foreign)
        and name not in known
        and not is_service_link(name, value)
    ]


def check_variables(environment: Mapping[str, str], *, prefix: str = ENV_PREFIX) -> None:
    """Raise `InvalidRequestError` that names every misspelt variable (see `misspelt`)."""
    refuse(misspelt(environment, prefix=prefix))


def joined(texts: Iterable[str]) -> str:
    """Return several texts as one line."""
    return "; ".join(texts).replace("?; ", "? ")


def refuse(problems: Sequence[tuple[str, str]]) -> None:
    """Raise one `InvalidRequestError` for all problems, each a name and what is wrong, if any."""
    if not problems:
        return
    if len(problems) == 1:
        [(name, text)] = problems
        raise InvalidRequestError(text, field=name)
    raise InvalidRequestError(
        joined(f"{name}: {text}" for name, text in problems), field="settings"
    )


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes made it: a Service `inferq-gateway` makes INFERQ_GATEWAY_PORT."""
    return bool(_LINK_NAME.search(name) or _LINK_VALUE.match(value))


def _hint(name: str, known: frozenset[str]) -> str:
    # without the prefix, which would make all names look alike
    rests = [each.removeprefix(ENV_PREFIX) for each in known]
    close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), rests, n=1)
    return f"; did you mean {ENV_PREFIX}{close[0]}?" if close else ""
