"""The producer's side: submit jobs to a queue and follow their tokens.

Imports the standard library, redis and `inferq.protocol` only.

- `async_client`  `AsyncClient`, the one implementation
- `client`        `Client`, the same for plain code, on a loop of its own (`loop_thread`)
- `prompt`        what may be given as a prompt
- `request`       arguments to a checked job, its cost bound
- `stream`        the events of a job, each token once; `result` puts them together
- `reader`        one connection reads for some hundred streams; `probe` looks after silent ones
- `workers`       the workers' reports; `admin` what operators do with a queue
- `queue_metrics` a queue's figures as gateways and tasks tell them; not part of the SDK
- `partitions`    how many parts a queue has, and which one a job goes to
- `tracing`       the trace that the program is in
- `server`        connections, time-outs, retries, errors translated
"""

from inferq.producer.admin import QueueAdmin
from inferq.producer.async_client import AsyncClient, AsyncJobHandle
from inferq.producer.client import Client, JobHandle, JobStream
from inferq.producer.prompt import PromptInput, PromptOptions
from inferq.producer.result import JobOutput, JobResult, TokenizedPrompt
from inferq.producer.stream import StreamEvent, TokenStream
from inferq.producer.workers import WorkerInfo
from inferq.protocol.prompt_inputs import ChatInput

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "ChatInput",
    "Client",
    "JobHandle",
    "JobOutput",
    "JobResult",
    "JobStream",
    "PromptInput",
    "PromptOptions",
    "QueueAdmin",
    "StreamEvent",
    "TokenStream",
    "TokenizedPrompt",
    "WorkerInfo",
]
