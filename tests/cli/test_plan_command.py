"""`inferq plan`: numbers for people, for programs, and for the chart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferq.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["plan", "--model", str(tmp_path), "--weights-gib", "15", "--gpu", "l40s"]


def test_it_says_blocks_jobs_and_the_charts_value(command: list[str], capsys) -> None:
    assert main([*command, "--worker-tokens-per-second", "2500"]) == 0
    text = capsys.readouterr().out
    assert "weights        15.0 GiB on each GPU" in text
    assert "blocks of 16 tokens (2.00 MiB)" in text
    assert "one server     16 workers" in text
    assert "worker.autoscaling.keda.jobsPerReplica: " in text


def test_programs_get_the_same_numbers(command: list[str], capsys) -> None:
    assert main([*command, "--json", "--tokens-per-job", "4096"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_tokens"] == plan["num_blocks"] * 16
    assert plan["full_jobs"] == plan["num_blocks"] // 512
    assert plan["jobs"] == min(256, plan["num_blocks"] // 256)
    assert plan["workers_per_server"] is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--tensor-parallel-size", "0"),
        ("--gpu-memory-utilization", "1.5"),
        ("--tokens-per-job", "0"),
        ("--weights-gib", "nan"),
        ("--worker-tokens-per-second", "0"),
    ],
)
def test_a_number_that_cannot_be_is_named(command: list[str], flag, value, capsys) -> None:
    assert main([*command, flag, value]) == 2
    assert flag[2:].replace("-", "_") in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(capsys) -> None:
    assert main(["plan", "--model", "/no/such/folder", "--gpu", "h100"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err


def test_what_a_worker_refuses_is_not_planned(command: list[str], capsys) -> None:
    assert main([*command, "--max-model-len", "99999"]) == 2
    said = capsys.readouterr()
    assert "max_model_len: 99999 is more than the model's 8192 positions" in said.err
    assert not said.out
    assert main([*command, "--tensor-parallel-size", "5"]) == 2
    assert "32 attention heads cannot be divided among 5 ranks" in capsys.readouterr().err


def test_jobs_are_no_longer_and_no_more_than_a_worker_takes(command: list[str], capsys) -> None:
    short = [*command, "--max-model-len", "512"]
    assert main([*short, "--tokens-per-job", "513"]) == 2
    assert "tokens_per_job: 513 is more than the longest job has (512)" in capsys.readouterr().err
    assert main([*short, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_blocks"] // 32 > 256
    assert plan["jobs"] == plan["full_jobs"] == 256
