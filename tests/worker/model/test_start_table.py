"""The block of the log that says what a model takes and what fits beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferq.runtime.logs import configure_logging
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.running.runner import load_runner

Make = Callable[..., Path]
#: Of the tiny Llama in float32: three layers, embedding and head.
WEIGHT_BYTES = 4 * (3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 2 * 97 * 64)


def load(folder: Path, **options: Any) -> None:
    load_runner(EngineConfig(model=str(folder), device="cpu", num_kv_blocks=20, **options))


def test_for_people_it_is_one_block_of_lines(
    make_model: Make,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_model(tie_word_embeddings=False)
    configure_logging("info", "pretty")
    load(folder, num_swap_blocks=10)
    lines = capsys.readouterr().err.splitlines()
    [first] = [
        i for i, line in enumerate(lines) if f"LlamaForCausalLM (native) from {folder}" in line
    ]
    block = dict(line[2:].split(maxsplit=1) for line in lines[first + 1 : first + 8])
    assert lines[first + 1].startswith("  weights     ")
    number, unit = block["weights"].split()
    # packed for the products of this machine, rows may be filled up
    assert WEIGHT_BYTES / 1024 - 0.1 < float(number) < 1.05 * WEIGHT_BYTES / 1024
    assert unit == "KiB"
    assert block["computed"] == "in float32 on cpu"
    assert block["KV"] == "pool     20 blocks of 16 tokens (240.0 KiB) in float32"
    assert block["swap"] == "space  10 blocks of 16 tokens (120.0 KiB) of host memory"
    assert block["room"] == "for    2.5 requests of max_model_len 128"
    assert block["attention"].startswith(("torch (SDPA", "native (C++"))
    assert block["products"].endswith("Weight")


def test_as_json_it_is_one_line_of_fields(
    make_model: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model()
    configure_logging("info", "json")
    load(folder, quantization="int8", dtype="bfloat16", max_model_len=64)
    lines = capsys.readouterr().err.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    [row] = [row for row in rows if row["event"] == "the model is loaded"]
    expected = {
        "level": "info",
        "architecture": "LlamaForCausalLM",
        "path": "native",
        "folder": str(folder),
        "quantization": "int8",
        "dtype": "bfloat16",
        "device": "cpu",
        "ranks": 1,
        "kv_blocks": 20,
        "block_size": 16,
        "kv_bytes": 122880,
        "kv_dtype": "bfloat16",
        "swap_blocks": 0,
        "swap_bytes": 0,
        "max_model_len": 64,
        "requests_that_fit": 5.0,
    }
    assert row.items() >= expected.items()
    assert row["weight_bytes"] < WEIGHT_BYTES / 3
    assert len(row["products"]) == 1


def test_a_model_that_transformers_computes_says_so(
    make_model: Make, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model("StableLm")
    with caplog.at_level(logging.INFO):
        load(folder)
    [text] = [
        m for m in caplog.messages if m.startswith("StableLmForCausalLM (transformers) from ")
    ]
    rows = dict(line[2:].split(maxsplit=1) for line in text.splitlines()[1:])
    assert rows["products"] == "transformers' own"
    assert rows["weights"].endswith("KiB")
    assert rows["swap"] == "space  none"
