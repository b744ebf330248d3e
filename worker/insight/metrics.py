"""A worker's metrics: its books and its engine's, under the names of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric

from inferq.protocol.keys import Lane
from inferq.protocol.messages import FinishReason
from inferq.runtime.metrics import Families
from inferq.worker.insight.books import WorkerBooks
from inferq.worker.insight.probes import WorkerProbes
from inferq.worker.pipe.books import StepBooks
from inferq.worker.pipe.engine_client import EngineClient
from inferq.worker.queue.running import RunningJobs

_FENCED: Final = ("publish", "heartbeat")
_CALLS: Final = ("ok", "failed")


class WorkerMetrics:
    """Tells whether the worker is ready, and once its model is loaded, all that it counts."""

    def __init__(
        self,
        engine: EngineClient,
        probes: WorkerProbes,
        books: WorkerBooks,
        *,
        queue: str,
        model_name: str,
    ) -> None:
        self._engine = engine
        self._probes = probes
        self._books = books
        self._families = Families({"queue": queue, "model_name": model_name})
        self._jobs: RunningJobs | None = None

    def loaded(self, jobs: RunningJobs) -> None:
        """Tell that the model is loaded; `jobs` are those that the worker holds."""
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this moment; of an engine that has ended, none of its state."""
        is_ready = self._probes.ready() is None
        yield self._families.gauge(
            "inferq_worker_ready", "Whether the worker takes jobs", float(is_ready)
        )
        if self._jobs is None:
            return
        if not self._engine.is_dead:
            yield from self._engine_state(self._engine.stats, self._jobs)
        yield from self._engine_counts(self._engine.stats)
        yield from self._steps(self._engine.step_books)
        yield from self._latencies()
        yield from self._job_counts(self._jobs)
        yield from self._publishing()

    def _engine_state(self, stats: Mapping[str, int], jobs: RunningJobs) -> Iterator[Metric]:
        make = self._families
        for name, text in (
            ("running", "Sequences in the running batch"),
            ("waiting", "Sequences that wait in the engine"),
            ("swapped", "Sequences whose blocks are in host memory"),
        ):
            yield make.gauge(f"inferq_num_requests_{name}", text, stats.get(name, 0))
        total = jobs.capacity_tokens // jobs.block_size
        free, cached = stats.get("free", total), stats.get("cached", 0)
        yield make.gauge(
            "inferq_kv_cache_usage_perc",
            "Share of the KV blocks that sequences hold, 0 to 1",
            (total - free) / total,
        )
        yield make.gauges(
            "inferq_kv_cache_blocks",
            "KV blocks; cached ones are free and still hold a prefix",
            ("state",),
            {("free",): free - cached, ("cached",): cached, ("used",): total - free},
        )
        swap, used = stats.get("swap_blocks", 0), stats.get("swap_blocks_used", 0)
        yield make.gauges(
            "inferq_swap_blocks",
            "Blocks of the host's pool",
            ("state",),
            {("free",): swap - used, ("used",): used},
        )

    def _engine_counts(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        make = self._families
        yield make.counter(
            "inferq_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            stats.get("prefix_queries", 0),
        )
        yield make.counter(
            "inferq_prefix_cache_hits",
            "Prompt tokens found in the prefix cache",
            stats.get("prefix_hits", 0),
        )
        swaps = stats.get("swaps", 0)
        yield make.counters(
            "inferq_num_preemptions",
            "Sequences that gave way because blocks ran out",
            ("kind",),
            {("recompute",): stats.get("preemptions", 0) - swaps, ("swap",): swaps},
        )

    def _steps(self, steps: StepBooks) -> Iterator[Metric]:
        make = self._families
        yield make.histogram(
            "inferq_step_duration_seconds", "One step of the engine", steps.duration_s
        )
        yield make.histogram("inferq_step_tokens", "Tokens computed in one step", steps.tokens)
        yield make.histogram("inferq_step_sequences", "Sequences in one step", steps.sequences)

    def _latencies(self) -> Iterator[Metric]:
        jobs, make = self._books.jobs, self._families
        yield make.histogram(
            "inferq_request_queue_time_seconds",
            "From when a job might start to its first claim",
            jobs.queue_s,
        )
        yield make.histogram(
            "inferq_time_to_first_token_seconds",
            "From when a job might start to its first token",
            jobs.first_token_s,
        )
        yield make.histogram(
            "inferq_inter_token_latency_seconds",
            "Between tokens of one output",
            jobs.between_tokens_s,
        )
        yield make.histogram(
            "inferq_e2e_request_latency_seconds",
            "From when a job might start until its end was published",
            jobs.whole_s,
        )

    def _job_counts(self, held: RunningJobs) -> Iterator[Metric]:
        jobs, make = self._books.jobs, self._families
        for name, text, count in (
            ("prompt_tokens", "Tokens of prompts whose first token came", jobs.prompt_tokens),
            ("generation_tokens", "Tokens generated for outputs", jobs.generation_tokens),
            ("job_takeovers", "Deliveries of jobs delivered before", jobs.takeovers),
            ("jobs_handed_back", "Jobs given back to the queue", jobs.handed_back),
            ("jobs_lost", "Jobs dropped, whose lease ended or was taken over", jobs.lost),
            ("jobs_rejected", "Jobs that could not be decoded", jobs.rejected),
        ):
            yield make.counter(f"inferq_{name}", text, count)
        yield make.counters(
            "inferq_job_deliveries",
            "Claims of jobs",
            ("lane",),
            {(lane.value,): jobs.deliveries[lane.value] for lane in Lane},
        )
        yield make.counters(
            "inferq_jobs_ended",
            "Jobs whose end this worker published",
            ("finish_reason",),
            {(reason.value,): jobs.ended[reason.value] for reason in FinishReason},
        )
        yield make.gauge("inferq_jobs_held", "Jobs claimed and not ended", len(held))
        yield make.gauge(
            "inferq_kv_tokens_reserved",
            "KV tokens that the jobs held may come to need",
            held.capacity_tokens - held.free_tokens,
        )

    def _publishing(self) -> Iterator[Metric]:
        books, make = self._books.publishing, self._families
        yield make.counters(
            "inferq_fenced_writes",
            "Writes refused since the job has another owner or epoch",
            ("operation",),
            {(name,): books.fenced[name] for name in _FENCED},
        )
        yield make.counters(
            "inferq_publish_calls",
            "Calls that publish",
            ("outcome",),
            {(name,): books.calls[name] for name in _CALLS},
        )
        yield make.histogram(
            "inferq_published_event_tokens", "Tokens of each published event", books.event_tokens
        )
        yield make.histogram(
            "inferq_publish_delay_seconds",
            "From when tokens were there until the server had them",
            books.delay_s,
        )
