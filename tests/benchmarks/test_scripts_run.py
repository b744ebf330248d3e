"""The scripts themselves, on a tiny model or on none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from raw_commands import RawCommands, jobs_of
from stand_in import write_tokenizer

from inferq.protocol.keys import QueueKeys

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_throughput_prints_the_peers_keys_on_both_paths(tiny_model: Path, tmp_path: Path) -> None:
    works = {
        "W1": {"requests": [{"prompt": [3, 4, 5 + i], "output_len": 6} for i in range(4)]},
        "W2": {"requests": [{"prompt": list(range(20, 40)), "output_len": 8}]},
        "W3w": {
            "warm": {"prompt": [*range(20, 52), 9], "output_len": 1},
            "requests": [{"prompt": [*range(20, 52), i], "output_len": 4} for i in range(3)],
        },
        "warmup": {"requests": [{"prompt": [5, 6], "output_len": 2}]},
    }
    file = tmp_path / "workloads.json"
    file.write_text(json.dumps(works))
    lines = run(
        "throughput.py",
        *("--model", tiny_model, "--workloads", file, "--work", "W1,W2,W3w", "--reps", 1),
        *("--kv-cache-memory", 2**22, "--dtype", "float32", "--max-model-len", 128),
        *("--through-queue", "--profile"),
    )
    runs = [line for line in lines if "rep" in line]
    assert [(r["workload"], r["path"], r["out_tokens"]) for r in runs] == [
        (name, path, tokens)
        for name, tokens in (("W1", 24), ("W2", 8), ("W3w", 12))
        for path in ("offline", "queue")
    ]
    keys = {"seconds", "output_tps", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"}
    keys |= {"foreign_cores", "steal_cores", "own_cores", "load1"}
    assert all(keys <= set(r) for r in runs)
    assert {"ttft_ms", "decode_tps"} <= set(runs[2])
    assert set(runs[1]["cpu_s"]) == {"server", "worker_io", "engine", "client"}
    ratios = [line for line in lines if "output_tps_ratio" in line]
    assert [line["workload"] for line in ratios] == ["W1", "W2", "W3w"]
    profiles = [line for line in lines if "shares" in line]
    assert all(sum(line["shares"].values()) == pytest.approx(1, abs=0.01) for line in profiles)


def test_the_cost_of_the_queue_is_measured_without_a_model() -> None:
    lines = run("queue_cost.py", "--quick", "--only", "workers,latency,memory")
    by_name = {line["measurement"]: line for line in lines}
    assert by_name["workers"]["tokens_per_s"] > 0
    assert by_name["workers"]["saturated"] in ("server", "client", "neither")
    assert by_name["latency"]["added_ttft_p50_ms"] > 0
    assert by_name["latency"]["itl_p50_ms"] >= 0.9 * by_name["latency"]["step_ms"]
    assert 200 < by_name["memory"]["queued_bytes"] < by_name["memory"]["finished_bytes"]


def test_recorded_calls_do_what_the_clients_do(valkey_url: str, queue: str) -> None:
    import redis

    keys = QueueKeys(queue)
    jobs = jobs_of(3)
    with RawCommands(valkey_url, keys) as raw, redis.Redis.from_url(valkey_url) as client:
        raw.send(raw.enqueue(*job) for job in jobs)
        assert client.hget(keys.load, "queued") == b"3"
        raw.send([raw.claim("w", 2)])
        assert client.hget(keys.load, "running") == b"2"
        raw.send([raw.publish_tokens("w", [jobs[0][0], jobs[1][0]], n) for n in range(5)])
        assert client.xlen(keys.out(jobs[1][0])) == 5
        assert raw.send([raw.read([jobs[0][0]], 3)]) > raw.send([raw.read([jobs[0][0]], 5)])
        with pytest.raises(RuntimeError, match="refuses"):
            raw.send([b"NOSUCH\r\n"])
