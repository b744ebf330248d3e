"""Adapters of one worker, asked for as models through the queue, and offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from inferq import LLM, JobFailed, SamplingParams
from inferq.protocol.keys import QueueKeys

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

QUEUE = "adapters"
PROMPT = "The weather today"
SHORT = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = dataclasses.replace(SHORT, max_tokens=120)


@pytest.fixture(scope="module")
def adapters(
    smollm2: Path, write_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "first": str(write_adapter(folder / "1", smollm2, ("q_proj", "v_proj"), rank=4, seed=1)),
        "second": str(write_adapter(folder / "2", smollm2, ("o_proj", "up_proj"), rank=8, seed=2)),
    }


@pytest.fixture
def start(
    start_worker: Callable[..., Any], valkey_url: str, adapters: dict[str, str]
) -> Callable[[], Any]:
    """Start a worker that serves them."""
    given = ",".join(f"{name}={folder}" for name, folder in adapters.items())
    return lambda: start_worker(
        valkey_url, QUEUE, lora_adapters=given, served_model_name="base", max_model_len=256
    )


@pytest.fixture(scope="module")
def offline(smollm2: Path, adapters: dict[str, str]) -> dict[str | None, list[int]]:
    """What each model says offline, all in one batch."""
    llm = LLM(str(smollm2), num_kv_blocks=64, max_model_len=256, lora_adapters=adapters)
    names = [None, *adapters]
    outputs = llm.generate([PROMPT] * 3, [SHORT, SHORT, LONG], use_tqdm=False, adapter=names)
    return dict(zip(names, (o.outputs[0].token_ids for o in outputs), strict=True))


def test_adapters_are_models_of_the_queue_and_stay_with_jobs_that_others_take_over(
    start: Callable[[], Any],
    connect: Callable[..., Any],
    valkey_url: str,
    offline: dict[str | None, list[int]],
) -> None:
    workers = {(worker := start()).name: worker}
    client = connect(valkey_url, QUEUE)
    (info,) = client.workers()
    assert (info.model, info.adapters) == ("base", ("first", "second"))
    names = [None, "base", "first", "second"]
    jobs = [client.submit(PROMPT, SHORT, model=name) for name in names]
    found = [list(job.result(timeout_s=60).token_ids) for job in jobs]
    assert found == [tokens[:16] for tokens in (offline[None], *offline.values())]
    assert len({tuple(tokens) for tokens in found}) == 3
    with pytest.raises(JobFailed, match=r"'third' is not served.*'base', 'first', 'second' are"):
        client.submit(PROMPT, SHORT, model="third").result(timeout_s=60)
    workers[(worker := start()).name] = worker
    job = client.submit(PROMPT, LONG, model="second")
    tokens: list[int] = []
    for event in job.stream(timeout_s=60):
        tokens += event.token_ids
        if tokens and len(workers) == 2:
            with redis.Redis.from_url(valkey_url) as raw:
                owner = raw.hget(QueueKeys(QUEUE).job(job.id), "owner")
            workers.pop(owner.decode()).kill()
    assert tokens == offline["second"]
    assert job.result(timeout_s=5).attempts == 2
