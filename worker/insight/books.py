"""What a worker's engine and jobs came to, in numbers; kept by the I/O side, for `metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from inferq.protocol.messages import FinishReason
from inferq.runtime.histogram import Histogram
from inferq.worker.queue.books import PublishBooks
from inferq.worker.queue.running import RunningJob

#: Bounds of what a job waits for, in seconds: jobs of batches wait for hours.
WAITS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0),
)
#: Bounds of what passes between two tokens, and of a step, in seconds.
STEPS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
STEP_TOKENS: Final = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SEQUENCES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_SERVED: Final = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class StepBooks:
    """The engine's steps by their duration, tokens and sequences."""

    duration_s: Histogram = field(default_factory=lambda: Histogram(STEPS_S))
    tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    sequences: Histogram = field(default_factory=lambda: Histogram(STEP_SEQUENCES))

    def took(self, steps: Iterable[tuple[float, int, int]]) -> None:
        """Count steps, each with its seconds, tokens and sequences."""
        for duration_s, tokens, sequences in steps:
            self.duration_s.observe(duration_s)
            self.tokens.observe(tokens)
            self.sequences.observe(sequences)


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


@dataclass(frozen=True, slots=True)
class WorkerBooks:
    """All books of a worker but the engine's."""

    jobs: JobBooks = field(default_factory=JobBooks)
    publishing: PublishBooks = field(default_factory=PublishBooks)
