"""The log lines about single jobs: each has the job's id, and its trace's where it is in one.

A job that goes its normal way has one line at level info, when it is done.
"""

from __future__ import annotations

from typing import Final

import structlog

from inferq.protocol.errors import DecodeError
from inferq.protocol.messages import Job
from inferq.protocol.prompts import ChatPrompt, TextPrompt, TokenPrompt
from inferq.worker.queue.running import RunningJob

logger = structlog.get_logger("inferq.jobs")

#: Characters or ids of a prompt, and characters of each text, that `--log-prompts` shows.
MAX_SHOWN: Final = 1000


class JobLines:
    """Says what becomes of jobs; what they ask and get only with `log_prompts`."""

    def __init__(self, *, log_prompts: bool = False) -> None:
        self._log_prompts = log_prompts

    def claimed(self, job: RunningJob) -> None:
        """Say that a job was taken; its payload is not read yet."""
        logger.debug("← claimed", job_id=job.id, attempt=job.attempts, resumed_at=job.inherited)

    def read(self, job: RunningJob, message: Job) -> None:
        """Say what a job asks, if that is wanted."""
        if not self._log_prompts:
            return
        match message.prompt:
            case TextPrompt(text):
                pass
            case ChatPrompt(messages):
                text = "\n".join(f"{each.role}: {each.content or ''}" for each in messages)
            case TokenPrompt(ids):
                shown = list(ids[:MAX_SHOWN])
                logger.info("prompt", **job.names, token_ids=shown, tokens=len(ids))
                return
        logger.info("prompt", **job.names, prompt=text[:MAX_SHOWN], characters=len(text))

    def done(self, job: RunningJob, seconds: float) -> None:
        """Say that the server has a job's end."""
        assert job.terminal is not None
        end, timings = job.terminal, job.terminal.timings
        failure = {} if end.error is None else {"code": end.error.code}
        logger.info(
            "● done",
            **job.names,
            ms=round(seconds * 1000),
            reason=end.finish_reason.value,
            **failure,
            attempt=job.attempts,
            tokens=job.log.total,
            prompt_tokens=end.usage.prompt_tokens,
            cached_tokens=end.usage.cached_tokens,
            queued_ms=timings.queued_ms,
            prefill_ms=timings.prefill_ms,
            decode_ms=timings.decode_ms,
        )
        if self._log_prompts:
            texts = [output.text[:MAX_SHOWN] for output in job.log.outputs]
            logger.info("answer", **job.names, texts=texts)

    def handed_back(self, job: RunningJob) -> None:
        """Say that the queue has a job again, on purpose."""
        logger.info("→ handed back", **job.names, offset=job.acknowledged)

    def lost(self, job: RunningJob, why: str) -> None:
        """Say that a job is no longer ours."""
        logger.warning("↻ lost", **job.names, why=why)

    def rejected(self, job: RunningJob, error: DecodeError) -> None:
        """Say that a job was none."""
        logger.warning("⊘ dead letter", **job.names, why=str(error))

    def not_corrected(self, job: RunningJob, error: Exception) -> None:
        """Say that the queue's books still have a job's bound."""
        logger.warning("counters not corrected", **job.names, error=str(error))

    def failed(self, what: str, job: RunningJob, error: BaseException) -> None:
        """Say that a fault of ours ended a job."""
        logger.error(what, **job.names, fault=error)
