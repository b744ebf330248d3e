"""From a job's message to what the engine takes: adapter, tokens, and what was published before."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from redis.asyncio import Redis

from inferq.protocol.errors import ErrorCode, InvalidRequestError
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import Job
from inferq.protocol.output_log import JobLog
from inferq.worker.engine.requests.request import PreparedRequest, prepare_request
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.jobs.event_size import check_event_size
from inferq.worker.jobs.generation import describe_tokens, num_streams
from inferq.worker.jobs.tokenization import tokenized_log
from inferq.worker.pipe.engine_client import EngineInfo
from inferq.worker.queue.replay import read_published
from inferq.worker.queue.running import RunningJob


class Preparer:
    """Prepares jobs for one model and its adapters; the same job comes out alike everywhere."""

    def __init__(
        self,
        redis_client: Redis,
        keys: QueueKeys,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        model_name: str,
        adapters: Sequence[str],
    ) -> None:
        self._redis = redis_client
        self._keys = keys
        self._tokenizer = tokenizer
        self._info = info
        #: The adapter of each model name that jobs may give; the base model's is empty.
        self._adapter_of = {model_name: "", **{name: name for name in adapters}}

    def adapter_of(self, model: str | None) -> str:
        """Return the adapter that a job's model name means; raise for a name that is not served."""
        if model is None:
            return ""
        if (adapter := self._adapter_of.get(model)) is None:
            served = ", ".join(map(repr, self._adapter_of))
            verb = "is" if len(self._adapter_of) == 1 else "are"
            raise InvalidRequestError(
                f"{model!r} is not served on this queue; {served} {verb}",
                field="model",
                code=ErrorCode.MODEL_NOT_FOUND,
            )
        return adapter

    def prepare(self, message: Job) -> PreparedRequest:
        """Tokenize and check; takes its time, so not on the event loop."""
        prepared = prepare_request(
            message.prompt,
            message.params,
            self._tokenizer,
            max_model_len=self._info.max_model_len,
            vocab_size=self._info.vocab_size,
            now=_submitted_at(message),
        )
        check_event_size(prepared, self._tokenizer, self._info.vocab_size)
        return prepared

    def tokenize(self, message: Job) -> JobLog:
        """Return the log of a job that asks for its prompt's tokens; not on the event loop."""
        return tokenized_log(
            message.prompt,
            self._tokenizer,
            vocab_size=self._info.vocab_size,
            now=_submitted_at(message),
        )

    async def published(self, job: RunningJob, prepared: PreparedRequest, message: Job) -> JobLog:
        """Return what was published of a job by others; what publishes at its end starts again."""
        outputs = num_streams(prepared.params)
        if not job.inherited or prepared.params.publishes_at_end:
            log = JobLog(outputs)
        else:
            log = await read_published(
                self._redis, self._keys, job.id, total=job.inherited, num_outputs=outputs
            )
        describe_tokens(log, prepared, message, self._tokenizer)
        return log


def _submitted_at(message: Job) -> datetime:
    return datetime.fromtimestamp(message.created_ms / 1000, UTC)
