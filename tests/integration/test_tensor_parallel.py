"""The small real model, divided: its tokens, and a worker that loses a rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from inferq import LLM, SamplingParams
from inferq.protocol.errors import ModelError

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]


def descendants_of(pid: int) -> list[int]:
    """Process ids of a process's children and of theirs."""
    lists = (Path("/proc") / str(pid) / "task").glob("*/children")
    children = [int(child) for each in lists for child in each.read_text().split()]
    return children + [pid for child in children for pid in descendants_of(child)]


def test_three_ranks_give_the_reference_tokens_and_take_a_third_each(
    smollm2: Path, greedy_cases, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inferq")
    llm = LLM(
        str(smollm2),
        tensor_parallel_size=3,
        device="cpu",
        num_kv_blocks=128,
        max_model_len=1024,
        max_prefill_delay_ms=0,
    )
    assert "loaded 171." in caplog.text  # MiB, of 513
    assert "128 blocks of 16 tokens (30.0 MiB)" in caplog.text  # of 90
    cases = sorted(greedy_cases, key=lambda case: len(case.prompt_token_ids))[:3]
    outputs = llm.generate(
        [case.prompt_token_ids for case in cases],
        SamplingParams(temperature=0.0, max_tokens=12),
        use_tqdm=False,
    )
    for case, output in zip(cases, outputs, strict=True):
        sure = min(case.sure, 12)
        assert sure > 3
        assert output.outputs[0].token_ids[:sure] == case.token_ids[:sure], case.name


def test_nine_heads_on_two_ranks_are_refused(smollm2: Path) -> None:
    with pytest.raises(
        ModelError, match=r"9 attention heads cannot be divided among 2 ranks; possible: 1, 3$"
    ):
        LLM(str(smollm2), tensor_parallel_size=2, device="cpu")


def test_a_killed_rank_ends_the_worker_and_its_job_goes_on_elsewhere_at_once(
    start_worker, connect, valkey_url: str, queue: str
) -> None:
    divided = start_worker(valkey_url, queue, lease_s=120, tensor_parallel_size=3)
    client = connect(valkey_url, queue)
    job = client.submit(
        "Once upon a time", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    )
    stream = job.stream(timeout_s=60)
    seen = [next(stream)]
    pids = descendants_of(divided.process.pid)
    ranks = [p for p in pids if b"rank_process" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    started = time.monotonic()
    assert divided.process.wait(20) == 1
    assert time.monotonic() - started < 10
    log = divided.log.read_text()
    assert "ended with status -9" in log
    assert "the engine process ended with status" in log
    other = start_worker(valkey_url, queue, lease_s=120)
    seen.extend(stream)  # which waits no lease
    offsets = [o for e in seen for o in range(e.offset, e.offset + len(e.token_ids))]
    assert offsets == list(range(40))
    assert job.status().crashes == 1
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert other.stop() == 0
