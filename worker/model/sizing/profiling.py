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
from inferq.worker.engine.sampling.sampler import Sampler, SamplingBatch
from inferq.worker.model.architecture.causal_model import CausalModel, StepTensors
from inferq.worker.model.running.cuda_graphs import (
    DecodeGraphs,
    UnrecordedGraphs,
    graph_sizes,
    uses_graphs,
)
from inferq.worker.model.running.device_rows import DeviceRows
from inferq.worker.model.running.kv_cache import KVCacheShape
from inferq.worker.model.sizing.memory import format_bytes

_log = logging.getLogger(__name__)

#: Tokens of the prompt by which the speed of prefill is measured.
_CUDA_PROMPT: Final = 2048
_CPU_PROMPT: Final = 256
#: What the driver keeps for one captured graph, beside the memory of its tensors. Not measured yet.
_GRAPH_BYTES: Final = 4 * 2**20


def cuda_budget(config: EngineConfig, decoder: CausalModel, shape: KVCacheShape) -> int:
    """Return the bytes left for the cache: `kv_cache_memory`, or measured by a full-size step.

    The step's activations are part of what `gpu_memory_utilization` may take, as are the CUDA
    graphs and whatever else runs on the GPU.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    meter = MemoryMeter(decoder.device)
    _profile(config, decoder, shape)
    meter.end_step()
    graphs = _graphs_bytes(config, decoder, shape) if uses_graphs(config, decoder) else 0
    return meter.budget(config, graphs)


class MemoryMeter:
    """Measures what a full-size step takes of a GPU that holds nothing but the weights yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._weights = torch.cuda.memory_allocated(device)
        self._activations = 0

    def end_step(self) -> None:
        """Say that the step has been given to the device."""
        self._activations = torch.cuda.max_memory_allocated(self._device) - self._weights

    def budget(self, config: EngineConfig, graphs: int) -> int:
        """Return the bytes left for the cache beside the step and CUDA graphs of that size."""
        if config.kv_cache_memory is not None:
            return config.kv_cache_memory
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * config.gpu_memory_utilization) - (total - free)
        _log.info(
            "%s: %s of %s free, weights %s, activations at most %s, CUDA graphs at most %s",
            self._device,
            format_bytes(free),
            format_bytes(total),
            format_bytes(self._weights),
            format_bytes(self._activations),
            format_bytes(graphs),
        )
        return max(0, allowed - self._activations - graphs)


@torch.inference_mode()
def prefill_speed(
    decoder: CausalModel, kv_cache: Tensor, block_size: int, max_num_tokens: int
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
    step = StepTensors(tokens, positions, batch, positions[-1:])
    elapsed = 0.0
    for _ in range(2):  # the first run compiles and touches what it needs
        start = time.perf_counter()
        # Reading a value back waits for the device.
        decoder.logits(decoder.hidden(step, kv_cache)).sum().item()
        elapsed = time.perf_counter() - start
    return count / elapsed


@torch.inference_mode()
def _profile(config: EngineConfig, decoder: CausalModel, shape: KVCacheShape) -> None:
    """Run one step as large as a plan may be: unwritten prompts that all sample."""
    device = decoder.device
    count, seqs = config.max_num_batched_tokens, config.max_num_seqs
    lens = [count // seqs + (index < count % seqs) for index in range(seqs)]
    lens.sort()
    batch = _unwritten_prompts(lens, shape.block_size, device)
    tokens = torch.zeros(count, dtype=torch.int64, device=device)
    rows = torch.tensor(lens).cumsum(0).to(device) - 1
    adapters = torch.ones_like(tokens) if config.lora_adapters else None
    step = StepTensors(tokens, tokens, batch, rows, adapters)
    logits = decoder.logits(decoder.hidden(step, shape.allocate(1, device)))
    Sampler(decoder.config.vocab_size).sample(logits, _plain_sampling(seqs))


def _graphs_bytes(config: EngineConfig, decoder: CausalModel, shape: KVCacheShape) -> int:
    """Measure what the largest captured step takes: all graphs share its memory."""
    device = decoder.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    sizes = graph_sizes(config.max_num_seqs)
    max_blocks = shape.blocks_for(decoder.max_positions)
    DecodeGraphs(
        decoder,
        shape.allocate(1, device),
        DeviceRows(config.max_num_seqs, max_blocks, device),
        torch.zeros(sizes[-1], dtype=torch.int64, device=device),
        UnrecordedGraphs(),
        sizes=sizes[-1:],
        max_model_len=decoder.max_positions,
        vocab_size=decoder.config.vocab_size,
        has_adapters=bool(config.lora_adapters),
    )
    peak = torch.cuda.max_memory_allocated(device) - before
    return peak + _GRAPH_BYTES * len(sizes) * (2 if config.lora_adapters else 1)


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
