"""Runs an engine's plans on a loaded model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from inferq.kernels.attention import attention_ops
from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.plan import SampledToken, SequenceResult, StepPlan
from inferq.worker.engine.runner_errors import NonFiniteLogitsError
from inferq.worker.engine.sampler import Sampler
from inferq.worker.model.config import ModelConfig
from inferq.worker.model.hub import find_model_folder
from inferq.worker.model.kv_cache import KVCacheShape, cpu_budget, pool_size
from inferq.worker.model.loader import load_weights
from inferq.worker.model.profiling import cuda_budget
from inferq.worker.model.step_inputs import StepInputBuilder
from inferq.worker.model.transformer import Decoder
from inferq.worker.model.vocabulary import tokenizer_vocab_size

_log = logging.getLogger(__name__)


class DecoderRunner:
    """A decoder, its KV cache and its sampler, on one device; for one thread."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: Tensor,
        config: EngineConfig,
        *,
        folder: Path,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.config = decoder.config
        #: Where the model was read from; its tokenizer lies there too.
        self.folder = folder
        self.num_blocks = kv_cache.shape[0]
        self.max_model_len = max_model_len
        #: Tokens that exist: rows of the head beyond the tokenizer's ids are padding.
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(i for i in decoder.config.eos_token_ids if i < vocab_size)
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._sampler = Sampler(vocab_size)
        self._inputs = StepInputBuilder(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_model_len=max_model_len,
            block_size=config.block_size,
            eos_token_ids=self.eos_token_ids,
            device=kv_cache.device,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        """Compute the plan's tokens and sample; raise `NonFiniteLogitsError` for broken rows."""
        step = self._inputs.build(plan)
        logits = self._decoder.forward(
            step.token_ids, step.positions, step.batch, self._kv_cache, step.rows
        )
        if not step.sampled:
            return [SequenceResult() for _ in plan.scheduled]
        samples = self._sampler.sample(logits, step.sampling)
        if samples.non_finite_rows:
            failed = (step.sampled[row].request_id for row in samples.non_finite_rows)
            raise NonFiniteLogitsError(tuple(dict.fromkeys(failed)))
        sampled = map(SampledToken, samples.token_ids, samples.logprobs)
        return [
            SequenceResult((next(sampled),)) if item.samples else SequenceResult()
            for item in plan.scheduled
        ]


def load_runner(config: EngineConfig) -> DecoderRunner:
    """Load `config.model` and size its KV cache; raise `ModelError` for what cannot be served."""
    folder = find_model_folder(config.model)
    model = ModelConfig.read(folder)
    max_model_len = _max_model_len(config, model)
    device = _device(config.device)
    dtype = _dtype(config.dtype, model, device)
    decoder = _load_decoder(folder, model, max_model_len, dtype, device)
    shape = KVCacheShape.of(model, config.block_size, dtype)
    if device.type == "cpu":
        budget = cpu_budget(config, shape, max_model_len)
    else:
        budget = cuda_budget(config, decoder, shape)
    num_blocks = pool_size(config, shape, max_model_len, budget)
    return DecoderRunner(
        decoder,
        shape.allocate(num_blocks, device),
        config,
        folder=folder,
        max_model_len=max_model_len,
        vocab_size=min(model.vocab_size, tokenizer_vocab_size(folder) or model.vocab_size),
    )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ModelError(
            f"{config.max_model_len} is more than the model's {limit} positions",
            field="max_model_len",
        )
    return config.max_model_len or limit


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"{name} was asked for, but torch finds no CUDA device", field="device")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"{name} was asked for, but there are {torch.cuda.device_count()}", field="device"
        )
    return device


def _dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Choose what to compute in: by default the checkpoint's dtype, on the CPU float32.

    CPUs compute in 16 bits only with special instructions, and slowly without.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype or "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ModelError(
            f"{name!r} is not supported; supported: {', '.join(dtypes)}", field="dtype"
        )
    return dtypes[name]


def _load_decoder(
    folder: Path,
    model: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    attention = attention_ops(device)
    with torch.inference_mode():
        decoder = Decoder(
            model, max_positions=max_model_len, dtype=dtype, device=device, attention=attention
        )
        load_weights(folder, decoder.targets(), is_ignored=decoder.is_ignored)
        decoder.pack()
    _log.info(
        "%s from %s: %s on %s, attention %s",
        model.architecture,
        folder,
        str(dtype).removeprefix("torch."),
        device,
        attention.describe(),
    )
    return decoder
