"""Queues, workers and blocks as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inferq.producer.gateway.status.history import History
from inferq.producer.workers import WorkerInfo
from inferq.protocol.replies import QueueOverview
from inferq.protocol.snapshots import BLOCK_STATES, BlockSnapshot


def queue_shown(
    queue: str, overview: QueueOverview | None, history: History, workers: Sequence[WorkerInfo]
) -> dict[str, Any]:
    """Return one queue; without an overview its server is out of reach."""
    return {
        "queue": queue,
        "is_reached": overview is not None,
        "now": None if overview is None else _now(overview),
        "history": history.columns(),
        "workers": [_worker_shown(worker) for worker in workers],
    }


def _now(overview: QueueOverview) -> dict[str, Any]:
    waits = [each.oldest_ms for each in overview.lanes.values() if each.oldest_ms is not None]
    load = overview.load
    return {
        "time": overview.time_ms / 1000,
        "lanes": {
            lane.value: {
                "waiting": each.waiting,
                "taken": each.taken,
                "oldest_s": _seconds(each.oldest_ms),
            }
            for lane, each in overview.lanes.items()
        },
        "queued": load.queued,
        "running": load.running,
        "delayed": load.delayed,
        "left_behind": overview.left_behind,
        "oldest_s": _seconds(max(waits, default=None)),
        "prompt_tokens_outstanding": load.prompt_tokens,
        "budget_tokens_outstanding": load.budget_tokens,
        "dead_letters": overview.dead_letters,
    }


def _worker_shown(worker: WorkerInfo) -> dict[str, Any]:
    return {
        "name": worker.name,
        "partition": worker.partition,
        "state": worker.state,
        "age_s": worker.age_s,
        "model": worker.model,
        "adapters": list(worker.adapters),
        "version": worker.version,
        "running": worker.running,
        "waiting": worker.waiting,
        "swapped": worker.swapped,
        "preemptions": worker.preemptions,
        "blocks": worker.total_blocks,
        "free_blocks": worker.free_blocks,
        "cached_blocks": worker.cached_blocks,
        "peak_blocks": worker.peak_blocks,
        "swap_blocks": worker.swap_blocks,
        "used_swap_blocks": worker.used_swap_blocks,
        "block_size": worker.block_size,
        "max_model_len": worker.max_model_len,
        "prompt_tokens": worker.prompt_tokens,
        "generated_tokens": worker.generated_tokens,
        "prompt_rate": worker.prompt_rate if worker.is_reporting else 0.0,
        "generated_rate": worker.generated_rate if worker.is_reporting else 0.0,
    }


def blocks_shown(snapshot: BlockSnapshot) -> dict[str, Any]:
    """Return a worker's blocks: how many are what, and runs of equal ones."""
    return {
        "states": list(BLOCK_STATES),
        "counts": snapshot.counts(),
        "blocks": snapshot.num_blocks,
        "host_blocks": snapshot.num_host_blocks,
        "runs": snapshot.runs,
        "sequences": [
            {"job": each.job, "index": each.index, "tokens": each.num_tokens}
            for each in snapshot.sequences
        ],
    }


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
