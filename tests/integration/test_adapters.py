"""Adapters of one worker, asked for as models through the queue, and offline."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
import transformers

from inferq import LLM, JobFailed, SamplingParams
from inferq.protocol.keys import QueueKeys

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

QUEUE = "adapters"
PROMPT = "The weather today"
SHORT = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
#: Long enough to kill a worker in the middle.
LONG = dataclasses.replace(SHORT, max_tokens=600)


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a real tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in smollm2.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def adapters(
    model: Path, write_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "first": str(write_adapter(folder / "1", model, ("q_proj", "v_proj"), rank=4, seed=1)),
        "second": str(write_adapter(folder / "2", model, ("o_proj", "up_proj"), rank=8, seed=2)),
    }


@pytest.fixture
def start(
    start_worker: Callable[..., Any], valkey_url: str, model: Path, adapters: dict[str, str]
) -> Callable[[], Any]:
    """Start a worker that serves them."""
    given = ",".join(f"{name}={folder}" for name, folder in adapters.items())
    return lambda: start_worker(
        valkey_url, QUEUE, model=model, lora_adapters=given, served_model_name="base"
    )


@pytest.fixture(scope="module")
def offline(model: Path, adapters: dict[str, str]) -> dict[str | None, list[int]]:
    """What each model says offline, all in one batch."""
    llm = LLM(str(model), num_kv_blocks=64, lora_adapters=adapters)
    names = [None, *adapters]
    outputs = llm.generate([PROMPT] * 3, [SHORT, SHORT, LONG], use_tqdm=False, adapter=names)
    return dict(zip(names, (o.outputs[0].token_ids for o in outputs), strict=True))


def test_adapters_are_models_of_the_queue_and_stay_with_jobs_that_others_take_over(
    start: Callable[[], Any],
    connect: Callable[..., Any],
    valkey_url: str,
    offline: dict[str | None, list[int]],
) -> None:
    first = start()
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
    workers = {worker.name: worker for worker in (first, start())}
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
