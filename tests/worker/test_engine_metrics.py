"""What an engine process does, as its worker's metrics tell it: the real scheduler, no model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferq.protocol.params import SamplingParams
from inferq.runtime.metrics import MetricsPage
from inferq.worker.insight.books import WorkerBooks
from inferq.worker.insight.metrics import WorkerMetrics
from inferq.worker.insight.probes import WorkerProbes
from inferq.worker.pipe.engine_client import EngineClient
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.queue.running import RunningJobs

PROMPT, OUTPUT, BLOCK_SIZE, NUM_BLOCKS = 4, 20, 4, 8


class Watched:
    """An engine process and the metrics of a worker that has nothing else."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        script = Path(__file__).parent / "counting_engine.py"
        self.engine = EngineClient([sys.executable, str(script)])
        self.engine.on_outputs = self._take
        self.tokens: dict[str, int] = {}
        self._parse = parse
        self._ended: set[str] = set()
        self._changed = asyncio.Event()
        probes = WorkerProbes(self.engine, asyncio.Event(), step_timeout_s=60)
        self._metrics = WorkerMetrics(
            self.engine, probes, WorkerBooks(), queue="chat", model_name="counting"
        )
        self._page = MetricsPage("1", self._metrics.collect)

    async def start(self, **options: Any) -> None:
        given = {
            "model": "counting",
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": NUM_BLOCKS,
            "max_num_seqs": 8,
            "log_level": "info",
            **options,
        }
        info = await self.engine.start(given)
        self._metrics.loaded(RunningJobs(info.pool_tokens, info.block_size, 8))

    async def generate(self, names: Sequence[str], **params: Any) -> None:
        """Run requests to their end."""
        for name in names:
            self.tokens[name] = 0
            asked = SamplingParams(seed=0, temperature=0, max_tokens=OUTPUT, **params)
            self.engine.add(name, range(PROMPT), asked)
        async with asyncio.timeout(60):
            while not self._ended >= set(names):
                self._changed.clear()
                await self._changed.wait()

    async def scrape(self) -> Any:
        _, text = await self._page.answer("")
        return self._parse(text.decode())

    async def scrape_when(self, holds: Callable[[Any], bool]) -> Any:
        """What the last frames tell may come after the tokens."""
        async with asyncio.timeout(60):
            while not holds(scrape := await self.scrape()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return scrape

    def _take(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            self.tokens[output.request_id] += len(output.token_ids)
            if output.request_finished:
                self._ended.add(output.request_id)
        self._changed.set()


@pytest.fixture
async def watched(metrics_text: Any) -> AsyncIterator[Watched]:
    made = Watched(metrics_text.Scrape)
    yield made
    await made.engine.stop()


async def test_steps_and_blocks_are_told_exactly(watched: Watched, metrics_text: Any) -> None:
    await watched.start()
    before = await watched.scrape()
    assert before.value("inferq_kv_cache_blocks", state="free") == NUM_BLOCKS
    assert before.value("inferq_kv_cache_usage_perc") == 0
    await watched.generate(["a"])
    scrape = await watched.scrape_when(lambda s: s.value("inferq_num_requests_running") == 0)
    assert watched.tokens == {"a": OUTPUT}
    # the last token is never computed
    assert scrape.value("inferq_step_tokens_sum") == PROMPT + OUTPUT - 1
    assert scrape.value("inferq_step_tokens_count") == OUTPUT
    assert scrape.value("inferq_step_sequences_sum") == OUTPUT
    assert scrape.value("inferq_step_duration_seconds_count") == OUTPUT
    assert scrape.value("inferq_prefix_cache_queries_total") == PROMPT
    states = {
        dict(labels)["state"]: n for labels, n in scrape.values("inferq_kv_cache_blocks").items()
    }
    assert sum(states.values()) == NUM_BLOCKS
    assert states["used"] == 0
    assert states["cached"] == (PROMPT + OUTPUT - 1) // BLOCK_SIZE
    metrics_text.check_against_page(scrape, more=metrics_text.WORKER_LABELS)


@pytest.mark.parametrize(
    ("options", "recomputed", "swapped"),
    [
        ({"preemption_mode": "recompute"}, 1, 0),
        ({"preemption_mode": "swap", "num_swap_blocks": NUM_BLOCKS}, 0, 1),
    ],
)
async def test_preemptions_are_told_by_their_kind(
    watched: Watched,
    options: dict[str, Any],
    recomputed: int,
    swapped: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # two requests of 6 blocks in 8: the second gives way once, and waits for the first one's end
    monkeypatch.setenv("COUNTING_ENGINE_REQUESTS", "2")
    await watched.start(enable_prefix_caching=False, **options)
    await watched.generate(["a", "b"])
    scrape = await watched.scrape_when(lambda s: s.value("inferq_num_requests_running") == 0)
    assert watched.tokens == {"a": OUTPUT, "b": OUTPUT}
    assert scrape.value("inferq_num_preemptions_total", kind="recompute") == recomputed
    assert scrape.value("inferq_num_preemptions_total", kind="swap") == swapped
    once = 2 * (PROMPT + OUTPUT - 1)
    if recomputed:  # of its four blocks the first took two, and the others are found again
        assert scrape.value("inferq_step_tokens_sum") == once + 2 * BLOCK_SIZE
    else:
        assert scrape.value("inferq_step_tokens_sum") == once
        assert scrape.value("inferq_swap_blocks", state="free") == NUM_BLOCKS
    assert scrape.value("inferq_swap_blocks", state="used") == 0


async def test_an_engine_that_has_ended_leaves_counts_and_no_state(watched: Watched) -> None:
    await watched.start()
    await watched.generate(["a"])
    await watched.scrape_when(lambda s: s.value("inferq_step_tokens_count") == OUTPUT)
    watched.engine.kill()
    await watched.engine.wait_dead(timeout_s=60)
    scrape = await watched.scrape()
    assert scrape.value("inferq_worker_ready") == 0
    assert scrape.value("inferq_step_tokens_count") == OUTPUT
    for name in ("inferq_num_requests_running", "inferq_kv_cache_blocks", "inferq_swap_blocks"):
        assert not scrape.values(name), name
