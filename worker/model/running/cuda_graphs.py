"""Decode steps that are captured once for each size, and replayed with one call.

All that changes between two replays lies in buffers that stay where they are. What a step sends is
one small array, `DecodeInputs.columns`; the rest of its inputs is worked out on the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch
from inferq.kernels.sampling import sample_tokens
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.sampling.host_copy import HostCopy
from inferq.worker.engine.sampling.packed_copy import PackedCopy
from inferq.worker.engine.sampling.sampler import Sampling
from inferq.worker.model.architecture.causal_model import CausalModel, StepTensors
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.running.device_rows import NUM_COLUMNS, DeviceRows
from inferq.worker.model.running.step_inputs import DecodeInputs
from inferq.worker.model.sizing.memory import format_bytes

_log = logging.getLogger(__name__)

_SMALL_SIZES: Final = (1, 2, 4)
_STRIDE: Final = 8


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that are captured: 1, 2, 4, 8, then by 8; the last holds all."""
    steps = range(_STRIDE, max_num_seqs + _STRIDE, _STRIDE)
    return [size for size in _SMALL_SIZES if size < max_num_seqs + 1] + list(steps)


@dataclass(frozen=True, slots=True)
class Captured:
    """Recorded work: `replay` repeats it on the same memory, and so writes `output` again."""

    replay: Callable[[], object]
    output: Tensor


def uses_graphs(config: EngineConfig, decoder: CausalModel) -> bool:
    """Whether decodes are captured: not what transformers' code does on the host in a step."""
    is_ours = isinstance(decoder, Decoder)
    return decoder.device.type == "cuda" and is_ours and not config.enforce_eager


class GraphBackend(Protocol):
    """Whoever records work on the device."""

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Run `work` a few times and record it."""


class CudaGraphs:
    """CUDA graphs that share their memory: what one leaves there is gone when another runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """See `GraphBackend`. The first runs compile kernels and allocate work space."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(2):
                work()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        return Captured(graph.replay, output)


class UnrecordedGraphs:
    """Runs the work once more instead of replaying it: the memory that it takes can be measured."""

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """See `GraphBackend`."""
        output = work()
        return Captured(lambda: output.copy_(work()), output)


class DecodeGraphs:
    """Captured steps in which every sequence computes one token and samples the next.

    `sampled` holds what the step before sampled, then what this one does; it is as long as the
    largest of the `sizes`, which are sorted.
    """

    def __init__(
        self,
        decoder: CausalModel,
        kv_cache: Tensor,
        rows: DeviceRows,
        sampled: Tensor,
        backend: GraphBackend,
        *,
        sizes: list[int],
        max_model_len: int,
        vocab_size: int,
        has_adapters: bool = False,
    ) -> None:
        self.sizes = sizes
        self._has_adapters = has_adapters
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._rows = rows
        self._sampled = sampled
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        device, most = kv_cache.device, self.sizes[-1]
        self._copy = PackedCopy(device)
        self._columns = torch.zeros(NUM_COLUMNS * most, dtype=torch.int64, device=device)
        self._found = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self._counting = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._indexes = torch.arange(most, device=device)
        #: By size, and by whether rows may have adapters; the outputs are the logits
        #: [size, vocabulary].
        self._captured: dict[tuple[int, bool], Captured] = {}
        self._capture_all(backend)

    def size_for(self, num_sequences: int) -> int | None:
        """Return the smallest size that holds so many sequences, if there is one."""
        return next((size for size in self.sizes if size >= num_sequences), None)

    def run(self, inputs: DecodeInputs) -> tuple[Sampling, Tensor]:
        """Compute a step; return what it samples where nothing special is asked, and the logits.

        The logits [S, vocabulary] are there until the next run, and may be overwritten.
        """
        size, count = inputs.columns.shape[1], len(inputs.sampled)
        captured = self._captured[size, inputs.has_adapters]
        updates = () if inputs.updates is None else inputs.updates.arrays
        columns, *updated = self._copy.send((inputs.columns, *updates))
        if updated:
            rows, block_tables, floats, integers = updated
            self._rows.update(rows, block_tables, floats, integers)
        self._columns[: NUM_COLUMNS * size].view_as(columns).copy_(columns)
        captured.replay()
        sampling = Sampling(
            tokens=self._sampled[:count],
            found=HostCopy(self._found[: size + count]),
            finite_from=size,
            logprobs=[None] * count,
            candidates=[],
        )
        return sampling, captured.output[:count]

    def _capture_all(self, backend: GraphBackend) -> None:
        start, before = time.perf_counter(), _used(self._kv_cache.device)
        # The largest first: the others find the memory that they need.
        for size in reversed(self.sizes):
            for with_adapters in (True, False) if self._has_adapters else (False,):
                self._captured[size, with_adapters] = self._capture(size, with_adapters, backend)
        if not isinstance(backend, UnrecordedGraphs):
            _log.info(
                "CUDA graphs of %d decode steps for up to %d sequences: %.1f s, %s",
                len(self._captured),
                self.sizes[-1],
                time.perf_counter() - start,
                format_bytes(_used(self._kv_cache.device) - before),
            )

    @torch.inference_mode()
    def _capture(self, size: int, with_adapters: bool, backend: GraphBackend) -> Captured:
        # Padding rows only, so that nothing is written to the cache.
        columns = self._columns[: NUM_COLUMNS * size].view(NUM_COLUMNS, size)
        columns.copy_(torch.tensor(self._rows.padding_columns)[:, None].expand_as(columns))
        return backend.capture(lambda: self._step(columns, with_adapters))

    def _step(self, columns: Tensor, with_adapters: bool) -> Tensor:
        """Compute, and sample; returns the logits."""
        rows, contexts, tokens, sources, blocks = columns
        size = rows.numel()
        block_size = self._kv_cache.shape[3]
        positions = contexts.clamp(min=0)
        offsets = positions % block_size
        self._rows.block_tables[rows, positions // block_size] = blocks.int()
        batch = AttentionBatch(
            query_starts=self._counting[: size + 1],
            seq_lens=(contexts + 1).int(),
            block_tables=self._rows.block_tables[rows],
            slot_mapping=(blocks * block_size + offsets).masked_fill(contexts < 0, -1),
            num_decodes=size,
            query_lens=(1,) * size,
            context_lens=(0,) * size,
            block_size=block_size,
            max_seq_len=self._max_model_len,
        )
        token_ids = torch.where(tokens < 0, self._sampled[sources], tokens)
        adapters = self._rows.adapters(rows) if with_adapters else None
        step = StepTensors(token_ids, positions, batch, self._indexes[:size], adapters)
        hidden = self._decoder.hidden(step, self._kv_cache)
        logits = self._decoder.logits(hidden)[:, : self._vocab_size].float()
        samples = sample_tokens(
            logits, *self._rows.parameters(rows), contexts + 1, self._vocab_size
        )
        found = self._found[: 2 * size].view(2, size)
        found[0] = samples.token_ids
        found[1] = samples.highest.isfinite()
        self._sampled[:size] = samples.token_ids
        return logits


def _used(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
