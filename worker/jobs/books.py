"""What a worker's jobs came to, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from inferq.protocol.messages import FinishReason
from inferq.runtime.histogram import Histogram
from inferq.worker.pipe.books import STEPS_S
from inferq.worker.queue.running import RunningJob

#: Bounds of what a job waits for, in seconds: jobs of batches wait for hours.
WAITS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0),
)

_SERVED: Final = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class JobBooks:
    """The jobs that came, their tokens and latencies, and how they left.

    A latency counts from when the job might start: its server told how long it was queued at its
    first claim, so that a job's latencies are told on its first delivery only, and of no errand.
    """

    deliveries: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    takeovers: int = 0
    handed_back: int = 0
    lost: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    queue_s: Histogram = field(default_factory=lambda: Histogram(WAITS_S))
    first_token_s: Histogram = field(default_factory=lambda: Histogram(WAITS_S))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(STEPS_S))
    whole_s: Histogram = field(default_factory=lambda: Histogram(WAITS_S))

    def took(self, job: RunningJob) -> None:
        """Count a claim."""
        self.deliveries[job.lane.value] += 1
        if job.attempts > 1:
            self.takeovers += 1
        elif not job.is_errand:
            self.queue_s.observe(job.queued_ms / 1000)

    def began(self, job: RunningJob, prompt_tokens: int, now: float) -> None:
        """Count the prompt of a job whose first token has come."""
        self.prompt_tokens += prompt_tokens
        if job.attempts == 1:
            self.first_token_s.observe(job.queued_ms / 1000 + now - job.claimed_at)

    def grew(self, tokens: int, since: float | None, now: float) -> None:
        """Count tokens of one output; `since` is when those before came, None if none did."""
        self.generation_tokens += tokens
        if since is not None:
            self.between_tokens_s.observe((now - since) / tokens, tokens)

    def published(self, job: RunningJob, reason: FinishReason, now: float) -> None:
        """Count a job whose end the server has."""
        self.ended[reason.value] += 1
        if reason in _SERVED and job.attempts == 1 and not job.is_errand:
            self.whole_s.observe(job.queued_ms / 1000 + now - job.claimed_at)
