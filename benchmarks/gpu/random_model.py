"""Models of known shapes with made-up weights, and engines over them."""

from __future__ import annotations

import gc
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gpu.section import Settings
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.factory import load_engine
from inferq.worker.model.loading.loader import WeightGroup, WeightLoader

#: Of every weight that is no norm's.
_DEVIATION: Final = 0.02
#: Of the memory that is free before the weights are made.
_KV_SHARE: Final = 0.6

LLAMA_8B: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3_06B: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_TINY: Final = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


class RandomWeights:
    """Makes weights up, straight on the device, and counts what a decode step reads of them."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def __call__(
        self,
        folder: Path,  # noqa: ARG002 - a WeightLoader's
        groups: Sequence[WeightGroup],
        *,
        rename: Callable[[str], str | None],  # noqa: ARG002
    ) -> None:
        """Fill the targets: norms with ones, all else with small normal values."""
        names = {name for group in groups for name in group.targets()}
        for group in groups:
            for name, target in group.targets().items():
                if "norm" in name:
                    target.fill_(1.0)
                else:
                    target.normal_(std=_DEVIATION)
                if not ("lm_head.weight" in names and "embed_tokens" in name):
                    self.bytes_read += target.numel() * target.element_size()
            group.finish()


class GivenWeights:
    """Takes weights from a state dict of transformers'."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def __call__(
        self,
        folder: Path,  # noqa: ARG002 - a WeightLoader's
        groups: Sequence[WeightGroup],
        *,
        rename: Callable[[str], str | None],
    ) -> None:
        """Fill the targets from the tensors of their names."""
        targets = {name: target for group in groups for name, target in group.targets().items()}
        for stored, values in self._state.items():
            name = rename(stored)
            if name is not None:
                targets.pop(name).copy_(values)
        if targets:
            raise RuntimeError(f"the state lacks {sorted(targets)[:3]}")
        for group in groups:
            group.finish()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, and what a token of its cache weighs."""

    engine: Engine
    config: Mapping[str, Any]
    kv_token_bytes: int


def shape(full: Mapping[str, Any], settings: Settings, **changes: Any) -> Mapping[str, Any]:
    """Return a model's configuration: the full one, or in a smoke run a tiny one."""
    changed = {**full, **changes}
    return {**changed, **_TINY, "dtype": "float32"} if settings.smoke else changed


@contextmanager
def engine_of(
    config: Mapping[str, Any], weights: WeightLoader, settings: Settings, **options: Any
) -> Iterator[LoadedEngine]:
    """Give an engine over a model; its memory is free again afterwards."""
    dtype = options.pop("dtype", config["dtype"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        engine_config = EngineConfig(
            model=folder,
            dtype=dtype,
            device=str(settings.device),
            preemption_mode="recompute",
            **options,
        )
        engine = load_engine(engine_config, weights)
    try:
        yield LoadedEngine(engine, config, _kv_token_bytes(config))
    finally:
        for sequence in engine.live_sequences():
            engine.abort(sequence.request_id)
        del engine
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def fitting_blocks(config: Mapping[str, Any], wanted: int, settings: Settings) -> int:
    """Return the number of KV blocks of 16 tokens: those wanted, as far as they fit well."""
    if settings.device.type == "cpu":
        return wanted
    free, _ = torch.cuda.mem_get_info(settings.device)
    return min(wanted, int(_KV_SHARE * free) // (16 * _kv_token_bytes(config)))


def _kv_token_bytes(config: Mapping[str, Any]) -> int:
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width
    return int(values * getattr(torch, config["dtype"]).itemsize)


def request(
    name: str, prompt: list[int], output_len: int, *, temperature: float = 0.6, seed: int = 0
) -> EngineRequest:
    """Make a request for exactly `output_len` tokens."""
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(
            temperature=temperature, max_tokens=output_len, ignore_eos=True, seed=seed
        ),
    )


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Return token ids that mean nothing."""
    return [rng.randrange(vocab_size) for _ in range(length)]


def run_to_end(engine: Engine, settings: Settings) -> dict[str, list[int]]:
    """Step until nothing is left or the time is up; return each request's tokens."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work() and settings.seconds_left > 0:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens
