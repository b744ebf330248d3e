"""How much of a GPU's memory is left for the KV cache, measured by a full-size step."""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np
import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.sampler import Sampler, SamplingBatch
from inferq.worker.model.kv_cache import KVCacheShape
from inferq.worker.model.memory import format_bytes
from inferq.worker.model.transformer import Decoder

_log = logging.getLogger(__name__)

#: Tokens of the prompt by which the speed of prefill is measured.
_CUDA_PROMPT: Final = 2048
_CPU_PROMPT: Final = 256


def cuda_budget(config: EngineConfig, decoder: Decoder, shape: KVCacheShape) -> int:
    """Return the bytes left for the cache: `kv_cache_memory`, or measured by a full-size step.

    The step's activations are part of what `gpu_memory_utilization` may take, as is whatever else
    runs on the GPU.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    device = decoder.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    _profile(config, decoder, shape)
    activations = torch.cuda.max_memory_allocated(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * config.gpu_memory_utilization) - (total - free)
    _log.info(
        "%s: %s of %s free, weights %s, activations at most %s",
        device,
        format_bytes(free),
        format_bytes(total),
        format_bytes(weights),
        format_bytes(activations),
    )
    return max(0, allowed - activations)


@torch.inference_mode()
def prefill_speed(
    decoder: Decoder, kv_cache: Tensor, block_size: int, max_num_tokens: int
) -> float:
    """Measure tokens per second of a prompt that is computed in one step; takes about a second.

    Nothing is written to the cache, whose first block is read.
    """
    device = decoder.device
    most = _CUDA_PROMPT if device.type == "cuda" else _CPU_PROMPT
    count = min(most, max_num_tokens, decoder.max_positions)
    batch = _unwritten_prompts([count], block_size, device)
    tokens = torch.zeros(count, dtype=torch.int64, device=device)
    positions = torch.arange(count, device=device)
    elapsed = 0.0
    for _ in range(2):  # the first run compiles and touches what it needs
        start = time.perf_counter()
        # Reading a value back waits for the device.
        decoder.forward(tokens, positions, batch, kv_cache, positions[-1:]).sum().item()
        elapsed = time.perf_counter() - start
    return count / elapsed


@torch.inference_mode()
def _profile(config: EngineConfig, decoder: Decoder, shape: KVCacheShape) -> None:
    """Run one step as large as a plan may be: unwritten prompts that all sample."""
    device = decoder.device
    count, seqs = config.max_num_batched_tokens, config.max_num_seqs
    lens = [count // seqs + (index < count % seqs) for index in range(seqs)]
    lens.sort()
    batch = _unwritten_prompts(lens, shape.block_size, device)
    tokens = torch.zeros(count, dtype=torch.int64, device=device)
    rows = torch.tensor(lens).cumsum(0).to(device) - 1
    logits = decoder.forward(tokens, tokens, batch, shape.allocate(1, device), rows)
    Sampler(decoder.config.vocab_size).sample(logits, _plain_sampling(seqs))


def _unwritten_prompts(lens: list[int], block_size: int, device: torch.device) -> AttentionBatch:
    length = torch.tensor(lens, dtype=torch.int32)
    return AttentionBatch(
        query_starts=torch.cat((torch.zeros(1), length.cumsum(0))).to(device, torch.int32),
        seq_lens=length.to(device),
        block_tables=torch.zeros(
            len(lens), -(-max(lens) // block_size), dtype=torch.int32, device=device
        ),
        slot_mapping=torch.full((sum(lens),), -1, dtype=torch.int64, device=device),
        num_decodes=lens.count(1),
        query_lens=tuple(lens),
        context_lens=(0,) * len(lens),
        block_size=block_size,
    )


def _plain_sampling(rows: int) -> SamplingBatch:
    ones, zeros = np.ones(rows, dtype=np.float32), np.zeros(rows, dtype=np.int64)
    return SamplingBatch(
        temperature=ones,
        top_k=zeros,
        top_p=ones,
        min_p=0 * ones,
        seed=zeros,
        child=zeros,
        position=zeros,
        num_logprobs=zeros,
        is_ranked=zeros.astype(np.bool_),
    )
