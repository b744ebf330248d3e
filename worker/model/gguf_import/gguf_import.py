"""Turn a GGUF file into a Hugging Face folder: configuration, weights, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from inferq.protocol.errors import ModelError
from inferq.worker.model.gguf_import.gguf_file import open_gguf
from inferq.worker.model.gguf_import.gguf_tokenizer import build_tokenizer, eos_token_ids
from inferq.worker.model.gguf_import.gguf_weights import plan_weights, read_weights
from inferq.worker.model.loading.safetensors_stream import write_float32_safetensors


def convert_gguf(file: Path, folder: Path, *, progress: bool) -> None:
    """Write `file` as a Hugging Face folder into `folder`, which exists and is empty.

    The weights are dequantized to float32 one tensor at a time. Raises `ModelError` for a file
    that is damaged or not supported; what was written by then stays.
    """
    gguf = open_gguf(file)
    plan = plan_weights(gguf)
    tokenizer, tokenizer_config = build_tokenizer(gguf)
    if tokenizer.get_vocab_size() > plan.config["vocab_size"]:
        raise ModelError(
            f"{file}: {tokenizer.get_vocab_size()} tokens do not fit the embedding of "
            f"{plan.config['vocab_size']}"
        )
    end_ids = eos_token_ids(gguf)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", plan.config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": plan.config["bos_token_id"], "eos_token_id": end_ids},
    )
    with tqdm(
        total=plan.num_values,
        desc=f"dequantizing {file.name}",
        unit="",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        tensors = _counted(read_weights(gguf, plan), bar)
        write_float32_safetensors(folder / "model.safetensors", plan.shapes, tensors)


def _counted(
    tensors: Iterable[tuple[str, np.ndarray]], bar: Any
) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors:
        yield name, values
        bar.update(values.size)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
