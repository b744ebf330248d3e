"""Message-queue-driven LLM inference: a producer's client, and the engine behind it.

The names below load on first use, so that `import inferq` is cheap and a producer needs no torch.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from inferq.version import __version__

if TYPE_CHECKING:
    from inferq.producer import (
        AsyncClient,
        AsyncJobHandle,
        Client,
        JobHandle,
        JobOutput,
        JobResult,
        JobStream,
        PromptOptions,
        QueueAdmin,
        StreamEvent,
        TokenizedPrompt,
        TokenStream,
        WorkerInfo,
    )
    from inferq.protocol.errors import (
        DecodeError,
        ErrorCode,
        ErrorInfo,
        IdempotencyConflict,
        InferqError,
        InvalidRequestError,
        JobCancelled,
        JobError,
        JobExpired,
        JobFailed,
        JobNotFound,
        MissingExtraError,
        ModelError,
        ProtocolVersionError,
        QueueFull,
        ResultTimeout,
        ServerLost,
        StreamExpired,
        StreamGap,
    )
    from inferq.protocol.keys import Lane
    from inferq.protocol.messages import (
        ChatMessage,
        FinishReason,
        Timings,
        TokenLogprob,
        Usage,
    )
    from inferq.protocol.params import SamplingParams
    from inferq.protocol.replies import JobStatus, QueueLength
    from inferq.protocol.structured import StructuredOutputs
    from inferq.protocol.trace_context import TraceContext
    from inferq.protocol.webhooks import Webhook, WebhookEvent
    from inferq.worker.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncJobHandle",
    "ChatMessage",
    "Client",
    "DecodeError",
    "ErrorCode",
    "ErrorInfo",
    "FinishReason",
    "IdempotencyConflict",
    "InferqError",
    "InvalidRequestError",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobHandle",
    "JobNotFound",
    "JobOutput",
    "JobResult",
    "JobStatus",
    "JobStream",
    "Lane",
    "MissingExtraError",
    "ModelError",
    "PromptOptions",
    "ProtocolVersionError",
    "QueueAdmin",
    "QueueFull",
    "QueueLength",
    "ResultTimeout",
    "SamplingParams",
    "ServerLost",
    "StreamEvent",
    "StreamExpired",
    "StreamGap",
    "StructuredOutputs",
    "Timings",
    "TokenLogprob",
    "TokenStream",
    "TokenizedPrompt",
    "TraceContext",
    "Usage",
    "Webhook",
    "WebhookEvent",
    "WorkerInfo",
    "__version__",
]

_PRODUCER: Final = "inferq.producer"
_ERRORS: Final = "inferq.protocol.errors"
_MESSAGES: Final = "inferq.protocol.messages"
_REPLIES: Final = "inferq.protocol.replies"
_WEBHOOKS: Final = "inferq.protocol.webhooks"
#: Where each name that is no error lives.
_HOMES: Final = MappingProxyType(
    {
        "AsyncClient": _PRODUCER,
        "AsyncJobHandle": _PRODUCER,
        "ChatMessage": _MESSAGES,
        "Client": _PRODUCER,
        "FinishReason": _MESSAGES,
        "JobHandle": _PRODUCER,
        "JobOutput": _PRODUCER,
        "JobResult": _PRODUCER,
        "JobStatus": _REPLIES,
        "JobStream": _PRODUCER,
        "LLM": "inferq.worker.llm",
        "Lane": "inferq.protocol.keys",
        "PromptOptions": _PRODUCER,
        "QueueAdmin": _PRODUCER,
        "QueueLength": _REPLIES,
        "SamplingParams": "inferq.protocol.params",
        "StreamEvent": _PRODUCER,
        "StructuredOutputs": "inferq.protocol.structured",
        "Timings": _MESSAGES,
        "TokenLogprob": _MESSAGES,
        "TokenStream": _PRODUCER,
        "TokenizedPrompt": _PRODUCER,
        "TraceContext": "inferq.protocol.trace_context",
        "Usage": _MESSAGES,
        "Webhook": _WEBHOOKS,
        "WebhookEvent": _WEBHOOKS,
        "WorkerInfo": _PRODUCER,
    }
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, _ERRORS)
    value = getattr(_load(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(home: str) -> Any:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not home.startswith("inferq.worker") or missing.split(".")[0] == "inferq":
            raise
        from inferq.protocol.errors import MissingExtraError

        raise MissingExtraError("worker", missing) from error
